"""What was found, for people and for machines: text, Gradescope's results.json, and a class as CSV."""

import csv
import json
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from course.grading import Report, Result
from course.lab import Lab
from zfunc.checkpoint.durable_files import replace_text
from zfunc.errors import DiskError, explain_os_errors


def text(report: Report, drawn: dict[str, Path]) -> str:
    """The report as text for a terminal; `drawn` has the file of each picture, by law."""
    lab = report.lab
    lines = [f"Lab {lab.number}: {lab.title}"]
    if report.unusable:
        lines.append(fill(report.unusable, 100))
    for result in report.results:
        verdict = "ok    " if result.score else "BROKEN"
        lines.append(
            f"  {verdict} {result.score:>3}/{result.law.points:<3} {result.law.name}: {result.law.says}"
        )
        if not result.score and not report.unusable:
            lines.append(indent(explained(result, drawn), " " * 9))
        elif result.law.name in drawn:
            lines.append(f"         drawn: {drawn[result.law.name]}")
    if report.printed:
        lines += ["Your functions printed:", indent(report.printed.rstrip(), "  | ")]
    lines.append(f"{report.score} of {lab.points} points, {report.seconds:.1f} s")
    return "\n".join(lines)


def explained(result: Result, drawn: dict[str, Path]) -> str:
    """Text on why a law is broken, with the path of its picture."""
    first, *others = result.message.splitlines() or [""]
    parts = [fill(first, 100), *others]
    if result.picture:
        parts += ["", result.picture.text]
    if result.law.name in drawn:
        parts.append(f"drawn: {drawn[result.law.name]}")
    return "\n".join(parts)


def draw(report: Report, folder: Path) -> dict[str, Path]:
    """Write each picture of the report to `folder` as SVG; returns the files' paths, by law."""
    drawn: dict[str, Path] = {}
    for result in report.results:
        if result.picture:
            drawn[result.law.name] = folder / f"lab{report.lab.number}-{result.law.name}.svg"
            replace_text(drawn[result.law.name], result.picture.svg)
    return drawn


def gradescope(report: Report) -> dict[str, Any]:
    """The report in the format that Gradescope's autograder reads from results.json."""
    board = [
        {"name": f"{result.law.name}, {result.unit}", "value": result.measure, "order": "asc"}
        for result in report.results
        if result.measure is not None
    ]
    return {
        "score": report.score,
        "execution_time": round(report.seconds, 2),
        "output": f"Lab {report.lab.number}: {report.lab.title}\n{report.unusable}".rstrip(),
        "output_format": "text",
        "visibility": "visible",
        **({"leaderboard": board} if board else {}),
        "tests": [
            {
                "name": f"{result.law.name}: {result.law.says}",
                "number": f"{report.lab.number}.{n}",
                "score": result.score,
                "max_score": result.law.points,
                "status": "passed" if result.score else "failed",
                "output": "" if result.score or report.unusable else explained(result, {}),
                "output_format": "text",
                "visibility": "visible",
            }
            for n, result in enumerate(report.results, start=1)
        ],
    }


def make_folder(folder: Path) -> None:
    """Make `folder`, if there is none, for what is written to it. Raises DiskError."""
    with explain_os_errors(DiskError, folder, "making it", {}):
        folder.mkdir(parents=True, exist_ok=True)


def write(report: Report, folder: Path) -> str:
    """Write results.json and the pictures to `folder`; returns the report as text."""
    make_folder(folder)
    drawn = draw(report, folder)
    results = json.dumps(gradescope(report), indent=2, ensure_ascii=False)
    replace_text(folder / "results.json", results + "\n")
    return text(report, drawn)


def remark(report: Report | None) -> str:
    """Text on why nothing of a student could be judged; "" if something was."""
    return report.unusable if report else "no adapters.py in the folder"


def write_csv(lab: Lab, rows: Iterable[tuple[str, Report | None]], path: Path) -> None:
    """Write a CSV line for each student: the points of each law; without a report 0 points. The last cell is
    the remark."""
    csv.writer(file := StringIO()).writerows(_lines(lab, rows))
    replace_text(path, file.getvalue())


def _lines(lab: Lab, rows: Iterable[tuple[str, Report | None]]) -> Iterator[list[Any]]:
    yield ["student", "score", "max_score", *(law.name for law in lab.laws), "remark"]
    for student, report in rows:
        scores = [x.score for x in report.results] if report else [0] * len(lab.laws)
        yield [student, sum(scores), lab.points, *scores, remark(report)]
