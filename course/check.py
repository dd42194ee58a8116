"""Every grader on the solutions of its lab: `python -m course.check [LAB ...]`, which `make course` runs.

`solutions/passes.py` has to keep every law. Each `solutions/wrong_*.py` has to break the laws that the
last line of its docstring names, "Breaks: LAW, LAW", and no other. A line "Says: TEXT" before it is a text that a
message has to have.
"""

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from course.grading import grade
from course.lab import load_lab, numbers
from course.report import explained


def solutions(number: int) -> list[Path]:
    """The solutions of a lab: the one that passes, then the wrong ones."""
    return sorted((load_lab(number).folder / "solutions").glob("*.py"))


def expected(solution: Path) -> list[str]:
    """The names of the laws that a solution's docstring says it breaks; [] for the solution that passes."""
    return re.findall(r"\w+", "".join(stated("Breaks", solution)))


def stated(word: str, solution: Path) -> list[str]:
    """The texts behind "`word`: " in the lines of a solution's docstring."""
    docstring = ast.get_docstring(ast.parse(solution.read_text(encoding="utf-8"))) or ""
    return re.findall(rf"^{word}: (.+)$", docstring, re.MULTILINE)


def check(number: int, solution: Path) -> str:
    """Text on how the grader of lab `number` misjudges a solution; "" if it finds the named laws broken."""
    report = grade(load_lab(number), solution)
    messages = "".join(f"\n  {x.law.name}: {explained(x, {})}" for x in report.results if not x.score)
    unsaid = [text for text in stated("Says", solution) if not _in(text, messages)]
    if report.broken == expected(solution) and not unsaid:
        return ""
    return (
        f"lab {number}, {solution.name}: got broken {report.broken}, expected {expected(solution)} and messages "
        f"with {unsaid or 'anything'}{messages}"
    )


def _in(text: str, messages: str) -> bool:
    """Whether `messages` contain `text`, with any white space between words."""
    return " ".join(text.split()) in " ".join(messages.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Check the graders of the labs in `argv`, or all, on their solutions; returns 1 if a grader errs."""
    parser = argparse.ArgumentParser(
        prog="python -m course.check", description="Every grader on its solutions."
    )
    parser.add_argument("lab", type=int, nargs="*", help="the number of a lab; by default all")
    labs = parser.parse_args(argv).lab or numbers()
    if unknown := {*labs} - {*numbers()}:
        parser.error(f"got lab {min(unknown)}, expected one of {', '.join(map(str, numbers()))}")
    pairs = [(n, solution) for n in labs for solution in solutions(n)]
    with ThreadPoolExecutor(2) as pool:
        wrong = [said for said in pool.map(check, *zip(*pairs, strict=True)) if said]
    print("\n".join(wrong) or f"{len(pairs)} solutions graded as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
