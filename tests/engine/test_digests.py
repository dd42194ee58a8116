"""Trainings of before, kept as digests, end with the same losses, weights and moments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from digests import ONE_KERNEL

TOOL = Path(__file__).parents[1] / "digests.py"


@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.slow)])
def test_a_change_of_the_code_changes_no_bit(every: int) -> None:
    command = [sys.executable, TOOL, "--every", str(every)]
    done = subprocess.run(command, env={**os.environ, **ONE_KERNEL}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
