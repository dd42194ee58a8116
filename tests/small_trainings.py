"""Short trainings by the command line, in the fixture `own_folder`, and what they leave in their run folders."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc
from zfunc.cli.main import main

TINY = ("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16")
TEXT = " ".join(f"{k * k % 97} and {k % 7}" for k in range(600))
ON_DATA = (*TINY, "--batch-size", "4", "--data", "data.txt")  # which own_folder writes


def move_into(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make it the current folder, with a cache and some text to train on; samples are short."""
    patch.chdir(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 5)
    Path("data.txt").write_text(TEXT)


def train(*more: object) -> int:
    """The exit code of a training in this process. Of a flag that is there twice the last counts."""
    return main(["train", *ON_DATA, *map(str, more)])


def start(*more: object, launch: tuple[object, ...] = (), **streams: Any) -> "subprocess.Popen[str]":
    """A training in a process of its own: by a launcher if there is one, else forked from this one, which has
    imported torch."""
    command = [sys.executable, *map(str, launch), "-m", "zfunc", "train", *ON_DATA, *map(str, more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    fork = None if launch else partial(_run, command[3:])
    return subprocess.Popen(command, text=True, preexec_fn=fork, **pipes)


def _run(arguments: list[str]) -> None:
    """In a forked process: the command, with the streams that Popen has put there, instead of another program."""
    code = 1
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # one of them tells Popen that the process has begun
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        torch.set_num_threads(1)
        code = main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def wait_for_rows(run: str, count: int, running: "subprocess.Popen[str]") -> None:
    """Until metrics.jsonl has so many lines."""
    path = Path(run, "metrics.jsonl")
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, running)


def wait_until(happened: Callable[[], Any], running: "subprocess.Popen[str]") -> None:
    for _ in range(6000):
        if happened():
            return
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.01)
    pytest.fail("it did not happen within a minute")


def rows(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def losses(run: str | Path) -> list[float]:
    return [row["loss"] for row in rows(run) if "loss" in row]


def measured(run: str | Path) -> list[dict[str, Any]]:
    """What of a run does not depend on the clock or on where it was saved."""
    names = ("step", "loss", "grad_norm", "lr", "skipped", "loss_scale")
    return [{k: row[k] for k in row if k in names or k.startswith("held_out")} for row in rows(run)]


def summary(run: str | Path) -> dict[str, Any]:
    return json.loads(Path(run, "summary.json").read_text())


def config(run: str | Path) -> dict[str, Any]:
    return json.loads(Path(run, "config.json").read_text())


def checkpoints(run: str | Path) -> list[str]:
    """Their names."""
    return sorted(x.name for x in Path(run, "checkpoints").iterdir() if x.is_dir())


def files(run: str | Path) -> dict[Path, bytes]:
    """All there are below a folder, to compare."""
    return {x: x.read_bytes() for x in Path(run).rglob("*") if x.is_file()}


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let something happen once: when the step with this number is asked for, or made but not recorded yet."""
    train_step = zfunc.train_step

    def at(number: int, happen: Callable[[], Any], *, made: bool = False) -> None:
        def once(batches: int) -> None:
            if batches == number:
                monkeypatch.setattr("zfunc.train.loop.train_step", train_step)
                happen()

        def step(program: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            if not made:
                once(state.batches + 1)
            result = train_step(program, state, *args, **kwargs)
            if made:
                once(result[0].batches)
            return result

        monkeypatch.setattr("zfunc.train.loop.train_step", step)

    return at


def fail() -> None:
    """What may happen there."""
    raise ValueError("got this in the middle")
