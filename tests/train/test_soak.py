"""The quick part of `make soak`: a few kills, in one process and in two, in memory and on the disk."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # one kill of each kind: test_train_command, test_checkpoints, test_resume, test_tracking
def test_a_few_kills_lose_nothing() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "soak.py"), "--kills", "6", "--seconds", "400"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kills, resumed, _, finished = (int(x) for x in re.findall(r"^(\d+) ", ran.stdout, re.M)[:4])
    assert kills >= 6
    assert resumed >= 1
    assert finished >= 4
