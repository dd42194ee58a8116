"""The frame of the course: what misbehaves is told in a sentence, and results have the formats that others read."""

import csv
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from course import grading
from course.check import main as check_main
from course.grade import main
from course.grading import Report, grade
from course.lab import load_lab
from course.law import every
from course.report import gradescope, text, write
from course.small_plans import Plan, orders, random_plan, smaller, swapped_conflicts

LAB = load_lab(1)
RIGHT = (LAB.folder / "solutions" / "passes.py").read_text()
HANGS = "this law took longer than 2 s: does a loop never end?"


def graded(folder: Path, code: str) -> Report:
    path = folder / "adapters.py"
    path.write_text(code)
    report = grade(LAB, path)
    assert len(report.results) == len(LAB.laws)
    assert "Traceback" not in text(report, {})
    return report


# Four functions of a file each: the body of each, and what is said of the law that calls it.
MISTAKES = {
    "ends": [
        ("return 1 / 0", "declare raised ZeroDivisionError: division by zero (line 2 of adapters.py: "),
        ("import time; time.sleep(99)", HANGS),
        ("raise SystemExit(0)", "waits raised SystemExit: 0 (line 10 of adapters.py: raise SystemExit(0))"),
        ("import os; os._exit(3)", "this law ended the grader's process (exit code 3)"),
    ],
    "system": [
        ("return bytearray(1 << 45)", "declare raised MemoryError"),
        ("return conflicts(*args)", "conflicts raised RecursionError: maximum recursion depth exceeded"),
        (
            "import os; os.system('sleep 60 &'); import sys; sys.stdout.close()",
            "waits: got None, expected a list of ",
        ),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
            "races: got None, ",
        ),
    ],
    "types": [
        (
            "return {'forward_0': ({}, {}, {})}",
            "declare: got ({}, {}, {}) for forward_0, expected a pair of sets",
        ),
        ("return [(0, 1, 2)]", "conflicts: got [(0, 1, 2)], expected a set of pairs (i, j)"),
        ("return [{99} for _ in args[0]]", "waits: got {99} for operation 0, expected a list of "),
        ("return {('a', 'b')}", "races: got the pair ('a', 'b'), expected a set of pairs"),
    ],
    "prints": [
        ("print('seen' * 9)", "declare: got None, expected a dict"),
        ("raise NotImplementedError", "conflicts is not written yet"),
        ("return {}", "waits: got 0 sets, expected a list of "),
        ("import time\n    while True: print('x' * 999); time.sleep(0.001)", HANGS),
    ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other laws are judged."""
    monkeypatch.setattr(grading, "MOST", 2.0)
    functions = zip(("declare", "conflicts", "waits", "races"), MISTAKES[name], strict=True)
    report = graded(tmp_path, "\n\n".join(f"def {f}(*args):\n    {body}\n" for f, (body, _) in functions))
    for law, (_, message) in zip(
        ("declared", "conflicting", "enough", "racing"), MISTAKES[name], strict=True
    ):
        found = next(x.message for x in report.results if x.law.name == law)
        assert message in found, (law, found)
    assert report.printed.startswith("seen" * 9) if name == "prints" else not report.printed
    assert len(report.printed) <= grading.SHOWN


def test_a_function_may_change_what_it_is_given(tmp_path: Path) -> None:
    changes = "found = right(plan); plan.lanes.clear(); plan.waits.clear(); return found"
    assert graded(tmp_path, f"{RIGHT}\n\nright = races\ndef races(plan): {changes}\n").score == 100


def test_a_function_that_is_missing_or_takes_other_arguments_breaks_its_laws_alone(tmp_path: Path) -> None:
    report = graded(tmp_path, f"{RIGHT}\n\ndeclare = 3\ndef waits(ops): pass\n")
    assert report.broken == ["declared", "enough", "needed"]
    assert report.results[0].message == (
        "adapters.py has no function declare: take its signature from the lab's adapters.py"
    )
    assert "waits raised TypeError: waits() takes 1 positional argument but 2" in report.results[2].message


IMPORTS = {
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module' (line 1 of adapters.py",
    "def waits(:": "cannot be imported: SyntaxError in line 1 of adapters.py: ",
    "\0": "cannot be imported: SyntaxError",
    "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E()": "cannot be imported: E (line 3 of ",
    "import time; time.sleep(99)": "importing it took longer than 2 s",
    "import os; os._exit(0)": "importing it told nothing",
    "from zfunc.core import plan": "ImportError: line 1 imports zfunc.core.plan: in this lab you write what it has",
    "def f():\n    import zfunc as z": "ImportError: line 2 imports zfunc: in this lab",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_a_file_that_cannot_be_imported_breaks_each_law_for_the_reason(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "MOST", 2.0)
    report = graded(tmp_path, f"{code}\n")
    assert report.score == 0
    assert all(IMPORTS[code] in x.message for x in report.results), report.results[0].message
    said = gradescope(report)
    assert IMPORTS[code] in said["output"]  # and nowhere else: once
    assert not any(test["output"] for test in said["tests"])
    assert text(report, {}).count("adapters.py") == said["output"].count("adapters.py")


def test_results_have_the_format_of_gradescope(tmp_path: Path) -> None:
    """https://gradescope-autograders.readthedocs.io/en/latest/specs: types, and no key that it does not have."""
    report = grade(LAB, LAB.folder / "solutions" / "wrong_transitive.py")
    said = write(report, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    kinds = {
        "score": (int, float),
        "execution_time": (int, float),
        "output": str,
        "visibility": str,
        "tests": list,
    }
    assert {*results} <= {*kinds, "output_format", "stdout_visibility", "extra_data", "leaderboard"}
    assert all(isinstance(results[key], kind) for key, kind in kinds.items())
    of_test = {"score", "max_score", "status", "name", "number", "output", "output_format", "visibility"}
    assert all({*test} == of_test for test in results["tests"])
    assert {test["status"] for test in results["tests"]} == {"passed", "failed"}
    assert results["score"] == sum(test["score"] for test in results["tests"]) == 60
    assert sum(test["max_score"] for test in results["tests"]) == 100
    racing = results["tests"][4]
    assert (racing["number"], racing["score"], racing["max_score"]) == ("1.5", 0, 25)
    assert "lane middle: 0 1" in racing["output"]  # the smallest counterexample has three operations
    assert "3 operations on 2 lanes" in racing["output"]
    drawn = tmp_path / "lab1-racing.svg"
    assert f"drawn: {drawn}" in said
    assert len([x for x in ElementTree.parse(drawn).iter() if x.tag.endswith("title")]) == 3  # bars


def test_a_class_is_a_line_for_each_student(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "class"
    for name in ("ada", "empty", ".git"):
        (folder / name).mkdir(parents=True)
    (folder / "ada" / "rest.py").write_text(RIGHT)
    (folder / "ada" / "adapters.py").write_text("from rest import *\n")
    (folder / "bob.py").write_text("def declare(): raise NotImplementedError\n")
    (folder / "carl.py").write_text("import nothing\n")
    files = ["--csv", str(tmp_path / "grades.csv"), "--out", str(tmp_path / "reports")]
    assert main(["1", "--all", str(folder), *files]) == 0
    rows = [*csv.DictReader((tmp_path / "grades.csv").read_text().splitlines())]
    assert [(x["student"], x["score"], x["max_score"]) for x in rows] == [
        *(("ada", "100", "100"), ("bob", "0", "100"), ("carl", "0", "100"), ("empty", "0", "100"))
    ]
    assert [*rows[0]] == ["student", "score", "max_score", *(law.name for law in LAB.laws), "remark"]
    assert [x["remark"][:24] for x in rows] == [
        "",
        "",
        "carl.py cannot be import",
        "no adapters.py in the fo",
    ]
    assert sorted(x.name for x in (tmp_path / "reports").iterdir()) == ["ada", "bob", "carl"]
    assert "declare is not written yet" in (tmp_path / "reports" / "bob" / "report.txt").read_text()
    out = capsys.readouterr().out
    assert re.search(r"^ada +100/100  broken: none$", out, re.MULTILINE)
    assert re.search(r"^carl +0/100  carl.py cannot be imported: ModuleNotFoundError", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("77 --adapters x.py", "course.grade: lab: got 77, expected one of 1"),
        ("1 --adapters no.py", "got no.py, which is no file: pass your copy"),
        ("1 --all no", "got no, which is no folder"),
        ("1 --adapters x.py --csv y.csv", "--csv: got it without --all"),
        (
            f"1 --adapters {__file__} --out {__file__}",
            "test_grading.py: got 'File exists' while making it: name another",
        ),
        (
            f"1 --all {Path(__file__).parent} --csv no/y.csv",
            "--csv: got no/y.csv, expected a file in a folder that exists: name another",
        ),
        (
            f"1 --adapters {__file__} --out /proc/sys",
            "--out: got /proc/sys/results.json, whose folder cannot",
        ),
        ("1 --all no --csv y.csv --out results", "got no, which is no folder"),
    ],
)
def test_wrong_arguments_are_told_and_leave_nothing(
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_told_with_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(["1", "--adapters", str(LAB.folder / "adapters.py"), "--out", str(tmp_path)]) == 2
    told = "results.json: got 'No space left on device' while writing it: free some space\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(
    ("word", "code", "said"), [("--help", 0, "by default all"), ("77", 2, "got lab 77, ")]
)
def test_the_check_of_graders_tells_its_arguments(
    word: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check_main([word])
    assert ended.value.code == code
    assert said in "".join(capsys.readouterr())


def test_the_command_exits_with_what_it_found_and_takes_other_cases_by_a_seed(tmp_path: Path) -> None:
    wrong = LAB.folder / "solutions" / "wrong_transitive.py"
    drafts = [(LAB.folder / "adapters.py", "utf-8", "is not written yet", 6), (wrong, "ascii", "???", 1)]
    for adapters, encoding, said, times in drafts:  # pictures have letters that not every terminal has
        command = [sys.executable, "-m", "course.grade", "1", "--adapters", adapters, "--out", tmp_path]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.count(said) >= times
    messages = {grade(LAB, wrong, seed).results[5].message for seed in ("0", "1", "2")}
    assert len(messages) > 1


def test_counterexamples_are_the_smallest() -> None:
    """Of random plans that have a race: two operations on two lanes that touch a region, without a wait."""
    found: list[Plan] = []

    def check(plan: Plan) -> None:
        from course.law import Broken

        if swapped_conflicts(plan):
            found.append(plan)
            raise Broken("a race")

    with pytest.raises(Exception, match="a race"):
        every((random_plan(Random(n)) for n in range(20)), check, smaller)
    (lanes, waits), ops = (found[-1].lanes, found[-1].waits), found[-1].ops
    assert (len(ops), len(lanes), waits) == (2, 2, [set(), set()])
    assert sorted(len(op.reads | op.writes) for op in ops) == [1, 1]
    assert [*orders(found[-1])] == [(0, 1), (1, 0)] or [*orders(found[-1])] == [(1, 0), (0, 1)]
