"""Leaderboards of labs: `python -m course.leaderboard --lab 4 --adapters PATH --name NAME` adds what a file has.

A line of lab 4 has a whole plan, one of another lab the whole file, so anybody can score it again, and a test does.
Seconds are those of the machine of puzzles.py. Without a file, prints the table.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import evolve

from course.commands import answer, check_adapters
from course.grading import grade
from course.lab import LABS, Lab, load, load_lab
from course.law import Broken
from course.runner import importing
from zfunc.checkpoint.durable_files import replace_text
from zfunc.core.plan import Plan, build
from zfunc.errors import refuse
from zfunc.options import file_to_write
from zfunc.units import format_seconds

FILE = LABS / "04_schedules" / "leaderboard.jsonl"
Line = dict[str, Any]


def laws() -> Any:
    """The module with the laws of lab 4, loaded."""
    return load(LABS / "04_schedules" / "laws.py", "course_lab_4")


def line_of(name: str, number: int, plan: Plan) -> Line:
    """A leaderboard line of a plan: lanes, waits that `build` would not add by itself, and its seconds."""
    lanes = {lane.name: [*lane.ops] for lane in plan.lanes}
    derived = build(plan.graph, lanes).waits
    pairs = zip(plan.waits, derived, strict=True)
    more = [[i, sorted({*some} - {*own})] for i, (some, own) in enumerate(pairs) if {*some} - {*own}]
    line = {"name": name, "puzzle": number, "lanes": lanes, "waits": more}
    return line | {"seconds": score(line)}


def plan_of(line: Line) -> Plan:
    """The plan that a leaderboard line describes. Raises what `build` raises."""
    plan = build(laws().PUZZLES.puzzles()[line["puzzle"]].graph, line["lanes"])
    more = dict(line["waits"])
    return evolve(plan, waits=[(*some, *more.get(i, ())) for i, some in enumerate(plan.waits)])


def score(line: Line) -> float:
    """The seconds of the plan of `line`. Raises Broken if the plan is wrong, too large or too slow."""
    return round(laws().judged(line["puzzle"], plan_of(line), Random(0)).measure, 9)


def lines(path: Path = FILE) -> list[Line]:
    """The lines of the leaderboard file `path`. Raises SettingError for one that is no JSON."""
    found = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in found]
    except ValueError as error:
        refuse("--file", f"{path}, a line of which is no JSON ({error})", "a leaderboard", "remove that line")


def table(board: list[Line]) -> str:
    """A text table of the fastest plan of each name, for each puzzle, the fastest name first."""
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


def measures(lab: Lab, code: str) -> dict[str, float]:
    """What the laws of `lab` measure of adapters file text `code`, by law. Raises Broken if a law is
    broken."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapters.py"
        path.write_text(code, encoding="utf-8")
        report = grade(lab, path)
    if report.broken:
        raise Broken(
            f"got a file that breaks {', '.join(report.broken)}, expected one that passes: grade it first"
        )
    return {x.law.name: x.measure for x in report.results if x.measure is not None}


def table_of_files(board: list[Line]) -> str:
    """A text table of the adapters files on a leaderboard, by each measured number, the best first."""
    rows: list[str] = []
    for name in board[0]["measures"] if board else ():
        found = sorted((line["measures"][name], line["name"]) for line in board)
        rows += [name, *(f"  {measure:>8.4g}  {who}" for measure, who in found)]
    return "\n".join(rows) or "no lines yet"


def add_plans(board: list[Line], path: Path, name: str) -> int:
    """Add the plans of a file for lab 4 to `board` under `name`; returns 1 if one did not pass, else 0."""
    student, left_out = importing(path, load_lab(4)), 0
    if isinstance(student, str):
        refuse("--adapters", f"{path} ({student})", "a file that passes", "grade it first")
    for number, puzzle in laws().PUZZLES.puzzles().items():
        try:
            plan = laws().right_plan(number, getattr(student, f"puzzle_{number}")(puzzle.graph))
            board.append(line_of(name, number, plan))
        except Broken as broken:
            left_out = _refuse(broken)
    return left_out


def add_file(board: list[Line], path: Path, name: str, lab: Lab) -> int:
    """Add a whole adapters file to `board` under `name`; returns 1 if it did not pass, else 0."""
    code = path.read_text(encoding="utf-8")
    try:
        board.append({"name": name, "measures": measures(lab, code), "code": code})
    except Broken as broken:
        return _refuse(broken)
    return 0


def _refuse(broken: Broken) -> int:
    print(broken.message.splitlines()[0], file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Add files that pass to the leaderboard, and print its table; returns 1 if a file did not pass, 2
    for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m course.leaderboard", description="Leaderboards of labs.")
    parser.add_argument("--lab", type=int, default=4, help="by default 4")
    parser.add_argument(
        "--adapters", type=Path, metavar="PATH", help="the file that you filled, to add what it has"
    )
    parser.add_argument("--name", default="you", help="the name in the table")
    parser.add_argument("--file", type=Path, help="the leaderboard; by default leaderboard.jsonl of the lab")
    arguments = parser.parse_args(argv)
    return answer("course.leaderboard", lambda: _add(arguments))


def _add(arguments: argparse.Namespace) -> int:
    lab, left_out = load_lab(arguments.lab), 0
    file = arguments.file or lab.folder / FILE.name
    board = lines(file)
    if arguments.adapters:
        check_adapters(arguments.adapters)
        file_to_write()("--file", file)
        if lab.number == 4:
            left_out = add_plans(board, arguments.adapters, arguments.name)
        else:
            left_out = add_file(board, arguments.adapters, arguments.name, lab)
        replace_text(file, "".join(json.dumps(line) + "\n" for line in board))
    print(table(board) if lab.number == 4 else table_of_files(board))
    return left_out


if __name__ == "__main__":
    sys.exit(main())
