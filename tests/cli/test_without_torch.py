"""What plans and draws a GPT needs NumPy and attrs alone, and prints what it prints beside torch."""

import subprocess
import sys

import pytest

from zfunc.cli.main import main

WITHOUT = ("torch", "functorch", "rich", "json5", "shtab", "zfunc._cpu_adam")
LINES = (
    "plan",
    "plan --hardware rtx4090 --world 2 --batch-size 8 --precision bf16 --optimizer lion --json",
    "draw --hardware v100-32gb --params-on host --activations-on host --recompute min-cut",
)
BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {WITHOUT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from zfunc.cli.main import main
"""


def blocked(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True)


def test_a_gpt_is_planned_and_drawn_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    printed = blocked(f"for line in {LINES}: main(line.split())")
    for line in LINES:
        assert main(line.split()) in (0, 1)
    assert (printed.stdout, printed.stderr) == tuple(capsys.readouterr())
    assert "layers" in printed.stdout


def test_a_training_without_torch_says_in_a_line_what_to_install() -> None:
    done = blocked("sys.exit(main(['train']))")
    assert done.returncode == 2
    assert done.stderr == "zfunc train: error: package 'torch' is not installed: pip install torch\n"
