"""The list of `make gpu`: every command is one that its module takes, and one that fails does not end the rest.

`make gpu-toy` runs them.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import deepspeed, experiments, gpu, step
from zfunc.cli import main as cli
from zfunc.cli.catalogue import COMMANDS

ROOT = Path(__file__).parents[1]
ALL = (*gpu.ITEMS, *gpu.NODE_ITEMS)


class ParsedError(Exception):
    """The arguments were taken."""


def arguments(tmp_path: Path, *, toy: bool) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", toy=toy, results=tmp_path, only=None, gpus=2)


def take(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module parse `words`, and no more."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: Any, *args: Any) -> None:
        parse(self, *args)
        raise ParsedError

    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(ParsedError):
        importlib.import_module(module).main()


@pytest.mark.parametrize("toy", [False, True], ids=["full", "toy"])
@pytest.mark.parametrize("item", ALL, ids=[x.name for x in ALL])
def test_every_command_is_taken(
    item: gpu.Item, toy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert item.limit < 8 * 60
    words = gpu.command(item, arguments(tmp_path, toy=toy))
    words = words[words.index(item.module) + 1 :]
    if item.module == "pytest":
        files = [w.partition("::") for w in words if w.startswith("tests")]
        assert files
        assert all(
            (ROOT / file).exists() and f"def {test.partition('[')[0]}" in (ROOT / file).read_text()
            for file, _, test in files
            if test
        )
    elif item.module == "zfunc":
        args = argparse.Namespace(prog="zfunc", debug=False)
        cli._parse(words, args)
        cli._settings(COMMANDS[words[0]], args)
    else:
        take(item.module, words, monkeypatch)


def test_the_item_of_tests_names_every_file_with_tests_for_a_gpu() -> None:
    """Slow tests are not of that item; `device` of device_fixtures.py has a mark, in tests/device alone."""
    listed = [ROOT / x for x in gpu.GPU_TESTS.split()]
    slow = r"@pytest\.mark\.(slow\b.*\n@pytest\.mark\.gpu|gpu\b.*\n@pytest\.mark\.slow)\b"
    files = {*Path(__file__).parent.rglob("test_*.py")} - {Path(__file__)}
    marked = [x for x in files if "pytest.mark.gpu" in re.sub(slow, "", x.read_text())]
    assert marked
    assert all(any(x.is_relative_to(own) for own in listed) for x in marked)


@pytest.mark.parametrize(("module", "failing"), [(step, "torch"), (deepspeed, "zfunc")])
def test_a_contestant_that_cannot_be_built_is_told_and_the_rest_is_written(
    module: Any,
    failing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where it is the one that all others are measured by."""
    trials = {x: step.Trial([1.0, 2.0], [1.0, 2.0], [3.0, 2.0]) for x in ("torch", "zfunc")}
    trials[failing] = step.Trial(error="ImportError: no such package")
    monkeypatch.setattr(module, "measure", lambda *_: trials)
    monkeypatch.setattr(sys, "argv", [module.__name__, "--json", str(tmp_path), "--device", "cpu"])
    module.main()
    assert re.search(rf"^{failing} +ImportError: no such package$", capsys.readouterr().out, re.MULTILINE)
    (path,) = tmp_path.glob("*.json")
    rows = {x["name"]: x for x in json.loads(path.read_text())["results"]["rows"]}
    assert [x for x in rows if "error" in rows[x]] == [failing]
    assert len(rows) == 2


def test_what_an_experiment_has_measured_before_an_error_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(_: argparse.Namespace) -> Iterator[experiments.Row]:
        """Expected: one row."""
        yield {"sweep": 1.0}
        raise RuntimeError("of a kernel")

    monkeypatch.setattr(experiments, "EXPERIMENTS", {"rates": rates})
    monkeypatch.setattr(sys, "argv", ["experiments", "rates", "--device", "cpu", "--json", str(tmp_path)])
    with pytest.raises(RuntimeError, match="of a kernel"):
        experiments.main()
    (path,) = tmp_path.glob("experiment-rates-*.json")
    assert json.loads(path.read_text())["results"]["rows"] == [{"sweep": 1.0}]


@pytest.mark.usefixtures("interruptible")  # or what hangs is killed after 15 seconds in a background job
def test_what_fails_or_runs_over_is_noted_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [
        gpu.Item("fails", "no_such_module", "", "", "", 60),
        gpu.Item("hangs", "http.server", "0", "", "", 1),
        gpu.Item("works", "this", "", "", "", 60),
    ]
    monkeypatch.setattr(gpu, "ITEMS", items)
    monkeypatch.setattr(sys, "argv", ["gpu", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        gpu.main()
    (path,) = tmp_path.glob("gpu-all-*.json")
    rows = json.loads(path.read_text())["results"]["rows"]
    assert [row["outcome"] for row in rows] == ["exit code 1", "stopped after 1 s", "ok"]
    assert "no_such_module" in rows[0]["output"][-1]
