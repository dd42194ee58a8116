"""The labs: their graders tell right solutions from wrong ones, and their texts are short, true and illustrated."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pairs import by_day

from course import leaderboard
from course.check import check, expected, solutions
from course.lab import LABS, load_lab, numbers
from course.leaderboard import lines, main, score
from course.make_pictures import pictures

ROOT = LABS.parents[1]
TORCH_FREE = (1, 2, 3, 4, 7, 8)
HIDDEN = ("torch", "numpy", "fcntl", "resource")  # not there, or not on every system
PAIRS = [(n, path) for n in numbers() for path in solutions(n)]
# By day each law of a lab is broken by a wrong solution, and kept by its right one: without torch, the last test.
BY_DAY = by_day(PAIRS, lambda x: {(x[0], law) for law in expected(x[1]) or [""] * (x[0] not in TORCH_FREE)})


@pytest.mark.parametrize(("number", "solution"), BY_DAY, ids=[f"{n}-{path.stem}" for n, path in PAIRS])
def test_a_grader_finds_what_is_wrong_with_a_solution_and_nothing_else(number: int, solution: Path) -> None:
    assert not check(number, solution)
    assert bool(expected(solution)) == solution.stem.startswith("wrong_")


@pytest.mark.parametrize("number", numbers())
def test_a_lab_is_whole(number: int) -> None:
    lab = load_lab(number)
    assert lab.points == 100
    wrong = [path for path in solutions(number) if path.stem.startswith("wrong_")]
    assert len(wrong) >= 3
    broken = {name for path in wrong for name in expected(path)}
    assert broken == {law.name for law in lab.laws}, (
        "a law that no wrong solution breaks may be unable to fail"
    )
    page = (lab.folder / "README.md").read_text()
    assert len(page.split()) < 1_100, "two pages"
    assert len(re.findall(r"!\[", page)) == 1
    assert all(f"| `{law.name}` | {law.points} |" in page for law in lab.laws)
    assert f"python -m course.grade {number} --adapters PATH" in page
    names = {path.name for path in lab.folder.iterdir()} - {"__pycache__"}
    assert {"README.md", "adapters.py", "laws.py", "solutions"} <= names
    assert f"labs/{lab.folder.name}/README.md" in (ROOT / "course" / "README.md").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "course").rglob("*.md")), ids=lambda path: path.parent.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page} links to {target}"


def test_pictures_are_those_of_the_code() -> None:
    for path, text in pictures():
        assert path.read_text() == text, "run python -m course.make_pictures"


def test_every_line_of_the_leaderboard_scores_as_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "laws", cache(leaderboard.laws))  # loading them builds all puzzles
    board = lines()
    assert {line["puzzle"] for line in board} == {1, 2, 3, 4, 5, 6}
    for line in board:
        assert score(line) == line["seconds"], line["name"]
    path = tmp_path / "board.jsonl"
    wrong = LABS / "04_schedules" / "solutions" / "wrong_no_waits.py"
    assert main(["--adapters", str(wrong), "--name", "ada", "--file", str(path)]) == 1
    assert [line["puzzle"] for line in lines(path)] == [2, 3, 4, 5]
    said = capsys.readouterr()
    assert re.search(r"puzzle 2, in which order\?\n +39 ms  ada\n +61 ms  \(before\)", said.out)
    assert "puzzle_1: race on act[0,0]" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lab 77", "lab: got 77, expected one of 1"),
        ("--adapters no.py", "--adapters: got no.py, which is no file: pass your copy"),
        ("--adapters cut.py --file new", "got cut.py (cut.py cannot be imported: SyntaxError in line 1 of"),
        ("--file cut.py", "--file: got cut.py, a line of which is no JSON (Expect"),
        ("--adapters cut.py --file no/new", "--file: got no/new, expected a file in a folder that exists"),
    ],
)
def test_what_the_leaderboard_cannot_use_is_told(
    words: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.py").write_text("def (")
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("course.leaderboard: ")
    assert message in err
    assert [*Path().iterdir()] == [Path("cut.py")]


def test_the_first_labs_need_no_torch_nor_what_only_linux_has(tmp_path: Path) -> None:
    for name in HIDDEN:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    code = "import sys; from course.grade import main; sys.exit(any([main(x.split()) for x in sys.argv[1:]]))"
    passes = {n: load_lab(n).folder / "solutions" / "passes.py" for n in {*TORCH_FREE} & {*numbers()}}
    lines = [f"{n} --out {n} --adapters {path}" for n, path in passes.items()]
    done = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    results = json.loads((tmp_path / "4" / "results.json").read_text())
    board = [(x["name"], x["order"]) for x in results["leaderboard"]]
    assert board == [(f"puzzle_{n}, seconds", "asc") for n in range(1, 7)]
    assert (tmp_path / "4" / "lab4-puzzle_3.svg").exists()
