"""The quick part of `make soak`: a few kills, in one process and in two, each followed by a resume."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # one kill of each kind: test_train_command, test_checkpoints, test_resume, test_tracking
def test_a_few_kills_lose_nothing() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "soak.py"), "--kills", "6", "--seconds", "150"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kills, resumed, _, finished = (int(x) for x in re.findall(r"^(\d+) ", ran.stdout, re.M)[:4])
    assert kills >= 6
    assert resumed >= 1
    assert finished >= 2
