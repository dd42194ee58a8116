"""The leaderboard of lab 4: `python -m course.leaderboard --adapters PATH --name NAME` adds the plans of a file.

A line of the leaderboard has a whole plan, so anybody can score it again, and a test does. Seconds are those of the
machine of puzzles.py. Without arguments, prints the table.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import evolve

from course.lab import LABS, load, load_lab, load_student
from course.law import Broken
from zfunc.core.plan import Plan, build
from zfunc.units import format_seconds

FILE = LABS / "04_schedules" / "leaderboard.jsonl"
Line = dict[str, Any]


def laws() -> Any:
    """The module of the laws of lab 4."""
    return load(LABS / "04_schedules" / "laws.py", "course_lab_4")


def line_of(name: str, number: int, plan: Plan) -> Line:
    """A plan of puzzle `number` as a line: lanes, and the waits beside those that `build` derives of them."""
    lanes = {lane.name: [*lane.ops] for lane in plan.lanes}
    derived = build(plan.graph, lanes).waits
    pairs = zip(plan.waits, derived, strict=True)
    more = [[i, sorted({*some} - {*own})] for i, (some, own) in enumerate(pairs) if {*some} - {*own}]
    line = {"name": name, "puzzle": number, "lanes": lanes, "waits": more}
    return line | {"seconds": score(line)}


def plan_of(line: Line) -> Plan:
    """The plan of a line. Raises what `build` raises."""
    plan = build(laws().PUZZLES.puzzles()[line["puzzle"]].graph, line["lanes"])
    more = dict(line["waits"])
    return evolve(plan, waits=[(*some, *more.get(i, ())) for i, some in enumerate(plan.waits)])


def score(line: Line) -> float:
    """The seconds of the plan of a line. Raises Broken if it is wrong, too large or too slow."""
    return round(laws().judged(line["puzzle"], plan_of(line), Random(0)).measure, 9)


def lines(path: Path = FILE) -> list[Line]:
    """The lines of a leaderboard."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def table(board: list[Line]) -> str:
    """The fastest plan of each name, puzzle by puzzle, the fastest name first."""
    rows: list[str] = []
    for number, puzzle in laws().PUZZLES.puzzles().items():
        best: dict[str, float] = {}
        for line in (x for x in board if x["puzzle"] == number):
            best[line["name"]] = min(line["seconds"], best.get(line["name"], line["seconds"]))
        rows.append(f"puzzle {number}, {puzzle.title}")
        for name, seconds in sorted([*best.items()], key=lambda item: item[1]):
            rows.append(f"  {format_seconds(seconds):>8}  {name}")
        rows.append(
            f"  {format_seconds(puzzle.before.simulate(laws().PUZZLES.MACHINE).seconds):>8}  (before)"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Add what passes, and print the table; 1 if a puzzle did not."""
    parser = argparse.ArgumentParser(
        prog="python -m course.leaderboard", description="The leaderboard of lab 4."
    )
    parser.add_argument(
        "--adapters", type=Path, metavar="PATH", help="the file that you filled, to add its plans"
    )
    parser.add_argument("--name", default="you", help="the name in the table")
    parser.add_argument("--file", type=Path, default=FILE, help="the leaderboard, a plan a line")
    arguments = parser.parse_args(argv)
    board, left_out = lines(arguments.file), 0
    if arguments.adapters:
        student = load_student(arguments.adapters, load_lab(4))
        for number, puzzle in laws().PUZZLES.puzzles().items():
            try:
                plan = laws().right_plan(number, getattr(student, f"puzzle_{number}")(puzzle.graph))
                board.append(line_of(arguments.name, number, plan))
            except Broken as broken:
                print(broken.message.splitlines()[0], file=sys.stderr)
                left_out = 1
        text = "".join(json.dumps(line) + "\n" for line in board)
        arguments.file.write_text(text, encoding="utf-8")
    print(table(board))
    return left_out


if __name__ == "__main__":
    sys.exit(main())
