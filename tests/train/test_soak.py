"""The quick part of `make soak`: a few kills, in one process and in two, in memory and on the disk."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def soak(kills: int, seconds: float) -> str:
    command = [sys.executable, str(Path(__file__).parents[1] / "soak.py")]
    command += ["--kills", str(kills), "--seconds", str(seconds)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow  # one kill of each kind: test_train_command, test_checkpoints, test_resume, test_tracking
def test_a_few_kills_lose_nothing() -> None:
    said = soak(kills=6, seconds=400)
    kills, resumed, _, finished = (int(x) for x in re.findall(r"^(\d+) ", said, re.M)[:4])
    if "slow: " in said:
        pytest.skip(said)
    assert kills >= 6
    assert resumed >= 1
    assert finished >= 4


@pytest.mark.slow  # it imports torch in a process of its own
def test_a_machine_that_is_slow_breaks_no_law() -> None:
    assert "slow: in 1 s 0 of 9 SIGKILLs, 0 of 4 kinds of training ended" in soak(kills=9, seconds=1)
