"""Blocks of output in README.md and docs/: each is what is printed, or stands in the code, and a test runs it."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch
from small_trainings import TINY

from zfunc.cli.main import main

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import make_blocks  # noqa: E402
import one_bucket  # noqa: E402
from make_tutorial import form  # noqa: E402

PAGES = {x.name: x.read_text() for x in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")}
INDEX = (ROOT / "docs" / "README.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
RUN = ("python", "sh", "bash")  # by test_pages.py, or by what is named here
PRINTED = {  # the test beside this one that runs the page, and what it holds of each block
    "README.md": "test_pages.py",
    "quickstart.md": "test_the_lines_of_the_quickstart_are_those_of_a_training",
    "one_hour.md": "test_an_hour_prints_what_stands_on_its_page",
    "design.md": "test_the_setting_of_the_design_stands_in_the_code",
    "one_bucket.md": "test_one_bucket.py",
    "tutorial.md": "test_tutorial.py",
    "proof.md": "test_proof.py",
}


def outputs(page: str) -> list[tuple[str, str]]:
    """The language and text of each block of a page that is no code to run."""
    return [(language, text) for language, text in FENCED.findall(page) if language not in RUN]


def block(name: str, beginning: str) -> list[str]:
    """The lines of the one block of a page that begins so."""
    (text,) = (text for _, text in outputs(PAGES[name]) if text.startswith(beginning))
    return text.splitlines()


def in_order(lines: list[str], printed: list[str]) -> list[str]:
    """The lines that are not among those printed after the line before. "..." stands for any."""
    rest, lost = iter(printed), list[str]()
    for line in (x for x in lines if x.strip() != "..."):
        lost += [] if line in rest else [line]
    return lost


def test_every_page_with_an_output_is_run_by_a_test() -> None:
    """A new block comes with what holds it. test_tutorial.py and test_proof.py look at each of their pages'."""
    assert {name for name, page in PAGES.items() if outputs(page)} == set(PRINTED)
    assert not outputs(INDEX)
    for name, test in PRINTED.items():
        assert test in globals() or (ROOT / "tests" / "docs" / test).exists(), f"{name}: no {test}"
    # Packages of design.md are held by test_pages.py; of one_bucket.md the refusal, and two blocks below Python.
    held = {"README.md": 1, "quickstart.md": 1, "one_hour.md": 5, "design.md": 2, "one_bucket.md": 3}
    assert {name: len(outputs(PAGES[name])) for name in held} == held
    below = {name: make_blocks.PYTHON.findall(PAGES[name]) for name in ("one_hour.md", "one_bucket.md")}
    assert {name: sum(bool(printed) for _, printed in x) for name, x in below.items()} == {
        "one_hour.md": 5,
        "one_bucket.md": 2,
    }
    assert one_bucket.refusal() in PAGES["one_bucket.md"]


def test_an_hour_prints_what_stands_on_its_page() -> None:
    assert make_blocks.filled() == make_blocks.PAGE.read_text(), "run python docs/make_blocks.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page has the lines of a CPU")
def test_the_lines_of_the_quickstart_are_those_of_a_training(own_folder: Path) -> None:
    """But for their numbers; how many threads Adam has depends on the machine, and is said once by a process."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main(["train", "--steps", "4", *TINY, "--num-layers", "2"]) == 0
    printed.seek(0)
    lines = [x for x in block("quickstart.md", "device: ") if not x.startswith("host Adam uses")]
    assert in_order([*map(form, lines)], [*map(form, printed)]) == []


def test_the_setting_of_the_design_stands_in_the_code() -> None:
    code = (ROOT / "zfunc" / "core" / "settings.py").read_text()
    (setting,) = (text for language, text in outputs(PAGES["design.md"]) if language == "py")
    assert setting in code


def test_a_line_out_of_order_is_found() -> None:
    assert in_order(["a", "...", "c"], ["a", "b", "c"]) == []
    assert in_order(["c", "a"], ["a", "b", "c"]) == ["a"]
