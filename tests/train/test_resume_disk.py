"""A run with its state on the disk: its swap space is its checkpoint."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_trainings
from small_trainings import config, fail, files, losses, measured, rows, summary

from zfunc.cli.main import main

JOB = ("--steps", "8", "--eval-every", "4", "--no-sample")
DISK = ("--state-on", "disk", "--swap", "one", "--swap", "two")
SETTINGS = {
    "each step": (),
    "every third, everything": ("--params-on", "disk", "--grads-on", "disk", "--commit-every", 3),
    "deferred": ("--defer", "--state-on", "host:0.5,disk", "--commit-every", 2),
}

pytestmark = pytest.mark.usefixtures("own_folder")


def train(*more: object) -> int:
    for folder in ("one", "two"):
        Path(folder).mkdir(exist_ok=True)
    return small_trainings.train(*JOB, *more)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of JOB with its state in memory."""
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        small_trainings.move_into(folder, patch)
        assert train("--out", "run") == 0
    return folder / "run"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_failed_run_resumes_from_its_last_commit_to_the_bit(
    name: str, at_step: Any, in_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*DISK, *SETTINGS[name], "--out", "run")
    at_step(5, made=True, happen=fail)
    assert train(*more) == 1
    assert train(*more, "--resume", "auto") == 0
    at = {"each step": 5, "every third, everything": 3, "deferred": 4}[name]
    out = capsys.readouterr().out
    assert f"goes on after step {at}" in out
    assert ("lines are missing" in out) == (name == "each step"), "step 5 was not recorded yet"
    assert [x for x in measured("run") if x["step"] != 5] == [
        x for x in measured(in_memory) if x["step"] != 5
    ]
    ends = [summary(x) for x in ("run", in_memory)]
    assert all(ends[0][k] == ends[1][k] for k in ("steps", "held_out_bits_per_byte"))
    assert (ends[0]["loss"] == ends[1]["loss"]) == (name != "each step"), (
        "the mean of the lines that are there"
    )
    assert not Path("run/checkpoints").exists()
    before = files(".")
    assert train(*more, "--resume", "auto") == 0
    assert "it ended at step 8: nothing is left to train" in capsys.readouterr().out
    assert files(".") == before


def test_a_signal_commits_the_step_it_ended(at_step: Any, in_memory: Path, capsys: Any) -> None:
    more = (*DISK, "--commit-every", 100, "--state-on", "host:0.5,disk", "--out", "run")
    at_step(3, made=True, happen=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(*more) == 0
    assert "  saved one\n" in capsys.readouterr().out
    assert (rows("run")[-1]["saved"], summary("run")["checkpoint"]) == ("one", "one")
    assert train(*more, "--resume", "auto") == 0
    assert measured("run") == measured(in_memory)


def test_a_run_moves_between_the_disk_and_memory(at_step: Any, in_memory: Path, capsys: Any) -> None:
    """The run's config names its swap space; another run may start from either."""
    at_step(3, made=True, happen=fail)
    assert train(*DISK, "--commit-every", 3, "--out", "run") == 1
    assert train("--resume", "run", "--out", "new") == 0
    assert losses("new") == losses(in_memory)[3:]
    elsewhere = ("--state-on", "disk", "--swap", "third", "--save-every", 0)
    Path("third").mkdir()
    at_step(5, made=True, happen=fail)
    assert train(*elsewhere, "--out", "run", "--resume", "auto") == 1
    assert Path(config("run")["resumed_from"]).name == "one"
    assert train("--out", "run", "--resume", "auto") == 0
    assert Path(config("run")["resumed_from"]).name == "third"
    assert losses("run")[-3:] == losses(in_memory)[5:]
    assert main(["export", "third", "--out", "model.safetensors"]) == 0


def test_a_damaged_checkpoint_is_said_once_where_the_swap_space_is_ahead_of_those_that_are_whole(
    at_step: Any, in_memory: Path, capsys: Any
) -> None:
    """In memory to step 2, on the disk to step 3, in memory to step 4: this was damaged."""
    run, memory = ("--out", "run", "--resume", "auto"), ("--save-every", 2)
    for at, where in ((3, memory), (4, (*DISK, "--commit-every", 3)), (5, memory)):
        at_step(at, made=True, happen=fail)
        assert train(*run, *where) == 1
    shard = next(Path("run/checkpoints/step-00000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    capsys.readouterr()
    assert train(*run, *DISK) == 0
    out = capsys.readouterr().out
    assert "goes on after step 3" in out
    assert out.count("step-00000002 is the newest complete one") == 1
    assert losses("run")[-3:] == losses(in_memory)[-3:]


def test_bad_swap_spaces_are_one_line(capsys: pytest.CaptureFixture[str], in_memory: Path) -> None:
    assert train(*DISK, "--out", "first", "--steps", 2) == 0
    before = files("one")
    Path("file").touch()
    Path("free").mkdir()
    cases = {
        ("--swap", "free"): "--state-on host, expected",
        ("--state-on", "disk"): "--swap: got no folder",
        ("--state-on", "disk", "--swap", "nowhere"): "nowhere: got none, expected a folder",
        ("--state-on", "disk", "--swap", "file"): "file: got something else, expected a folder",
        ("--state-on", "disk", "--swap", "/dev/shm"): "got a folder in memory (tmpfs)",
        ("--state-on", "disk", "--swap", "/proc"): "/proc",
        ("--state-on", "disk", "--swap", "free", "--swap", "free"): "twice",
        DISK: "got the swap space of another run",
        (*DISK, "--resume", "auto"): "got the swap space of the run ",
        (*DISK, "--save-every", 5): "--save-every: got 5 with --state-on disk",
    }
    for settings, message in cases.items():
        capsys.readouterr()
        assert train(*settings, "--out", "run") == 2, settings
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert files("one") == before


FAILURES = {  # the call, its error, whose, and from which number on
    "no room at the beginning": ("posix_fallocate", errno.ENOSPC, 1, 2),
    "EIO in a step": ("pwritev", errno.EIO, 1, 60),
    "EIO in a commit": ("fdatasync", errno.EIO, 0, 14),
}


def torchrun(*more: object, fails: tuple[object, ...] = ("pwritev", 5, 9, 1)) -> tuple[int, str, list[str]]:
    """The exit code of a training on two ranks, what it printed, and the line of each rank that it ended with."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    failing_drive = Path(__file__).parents[1] / "failing_drive.py"
    words = (failing_drive, *fails, "train", *small_trainings.ON_DATA, *JOB, "--stage", 3, *more)
    command = [sys.executable, *map(str, (*launch, *words))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    ends = sorted(re.findall(r"^zfunc train: (rank \d: error: .*)", done.stderr, re.M))
    return done.returncode, done.stdout, ends


@pytest.mark.slow  # of threads and of processes: test_disk_faults, soak
def test_torchrun_ends_with_a_line_of_each_rank_and_resumes_after_a_drive_failed() -> None:
    names = [f"{kind}-{n}" for n in range(len(FAILURES) + 1) for kind in ("one", "two")]
    for name in names:
        Path(name).mkdir()
    given = ("--state-on", "disk", "--params-on", "disk", "--grads-on", "disk", "--resume", "auto")

    def job(n: int) -> tuple[object, ...]:
        return (*given, "--out", f"run-{n}", "--swap", f"one-{n}", "--swap", f"two-{n}")

    assert torchrun(*job(0))[::2] == (0, [])
    for n, failure in enumerate(FAILURES.values(), 1):
        code, _, ends = torchrun(*job(n), fails=failure)
        assert (code, [x[:14] for x in ends]) == (1, ["rank 0: error:", "rank 1: error:"]), ends
        for said in ends:
            assert re.search(rf"(one|two)-{n}/.*: got '{os.strerror(failure[1])}' while ", said), said
            assert "use another" in said or "free some space" in said
        code, out, ends = torchrun(*job(n))
        assert (code, ends) == (0, []), ends
        assert ("goes on after step" in out) == (failure[0] != "posix_fallocate")
        assert losses(f"run-{n}")[-1] == losses("run-0")[-1]
        assert summary(f"run-{n}")["held_out_bits_per_byte"] == summary("run-0")["held_out_bits_per_byte"]
