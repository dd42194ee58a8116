"""Grade a lab: `python -m course.grade 3 --adapters PATH`; a class: `... --all FOLDER --csv FILE`.

Ends within a minute. Prints which laws are broken, each with the smallest counterexample found and its picture, and
writes `results.json` as Gradescope's autograder reads it. Exits with 0 if all laws hold, 1 if one is broken, 2 for
wrong arguments and where results cannot be written.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from course.commands import answer, check_adapters
from course.grading import Report, grade
from course.lab import Lab, load_lab
from course.report import make_folder, remark, write, write_csv
from zfunc.checkpoint.durable_files import replace_text
from zfunc.errors import refuse
from zfunc.options import file_to_write

AT_ONCE = 2  # students


def parser() -> argparse.ArgumentParser:
    """The argument parser of the command `python -m course.grade`."""
    made = argparse.ArgumentParser(prog="python -m course.grade", description="Grade a lab by its laws.")
    made.add_argument("lab", type=int, help="the number of the lab")
    of = made.add_mutually_exclusive_group(required=True)
    of.add_argument("--adapters", type=Path, metavar="PATH", help="the file that you filled")
    of.add_argument(
        "--all", type=Path, metavar="FOLDER", help="a class: NAME.py or NAME/adapters.py for each student"
    )
    made.add_argument("--csv", type=Path, metavar="FILE", help="with --all, a line for each student")
    where = "where results.json and pictures go; by default here"
    made.add_argument("--out", type=Path, metavar="FOLDER", help=where)
    made.add_argument("--seed", help="of the random cases; by default COURSE_SEED of the environment, or 0")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Grade the files that the arguments name; returns the exit code."""
    arguments = parser().parse_args(argv)
    return answer("course.grade", lambda: _grade(arguments))


def _grade(arguments: argparse.Namespace) -> int:
    lab = load_lab(arguments.lab)
    seed = os.environ.get("COURSE_SEED", "0") if arguments.seed is None else arguments.seed
    if arguments.csv and not arguments.all:
        refuse("--csv", "it without --all", "both", "results.json has the points of one student")
    if arguments.adapters:
        check_adapters(arguments.adapters)
    if arguments.all and not arguments.all.is_dir():
        refuse("--all", f"{arguments.all}, which is no folder", "one with NAME.py or NAME/adapters.py")
    if arguments.csv:  # before what takes a minute
        file_to_write()("--csv", arguments.csv)
    out = arguments.out or Path()
    make_folder(out)
    file_to_write()("--out", out / "results.json")
    if arguments.all:
        return grade_class(lab, arguments.all, arguments.csv, arguments.out, seed)
    report = grade(lab, arguments.adapters, seed)
    print(write(report, out))
    return int(report.score < lab.points)


def grade_class(lab: Lab, folder: Path, csv: Path | None, out: Path | None, seed: str) -> int:
    """Grade every student of `folder`, two at a time; returns 0 if each was graded, whatever their points."""
    files = submissions(folder)

    def one(name: str) -> Report | None:
        return grade(lab, files[name], seed) if files[name].is_file() else None

    rows: list[tuple[str, Report | None]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, report in zip(files, pool.map(one, files), strict=True):
            rows.append((name, report))
            if report and out:
                replace_text(out / name / "report.txt", write(report, out / name) + "\n")
            score, broken = (report.score, report.broken) if report else (0, [])
            said = remark(report) or f"broken: {', '.join(broken) or 'none'}"
            print(f"{name:<24} {score:>3}/{lab.points}  {said}", flush=True)
    if csv:
        write_csv(lab, rows, csv)
    return 0


def submissions(folder: Path) -> dict[str, Path]:
    """The path of each student's adapters file in `folder`, by name of student; the file may be missing."""
    entries = [x for x in sorted(folder.iterdir()) if not x.name.startswith((".", "_"))]
    files = {x.stem: x for x in entries if x.suffix == ".py"}
    files |= {x.name: x / "adapters.py" for x in entries if x.is_dir()}
    return dict(sorted(files.items()))


if __name__ == "__main__":
    sys.exit(main())
