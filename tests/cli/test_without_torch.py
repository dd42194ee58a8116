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


REFUSED = {
    "train": "package 'torch' is not installed: pip install torch\n",
    "train --data nowhere": "--data: got nowhere, which does not exist, expected what is to be",
    "train --hf nowhere": "--hf: nowhere: got no config.json in it, expected a local folder",
    "train --resume nowhere": "--resume: got nowhere, which does not exist",
    "train --state-on disk --swap /dev/shm": "/dev/shm: got a folder in memory (tmpfs)",
    "plan --hf-config nowhere.json": "--hf-config: nowhere.json: got no such file, expected the config",
    "draw --hf nowhere": "--hf: nowhere: got no config.json in it, expected a local folder",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_without_torch_is_said_in_a_line(line: str) -> None:
    done = blocked(f"sys.exit(main({line.split()}))")
    assert done.returncode == 2
    assert done.stderr.startswith(f"zfunc {line.split()[0]}: error: {REFUSED[line]}")
    assert done.stderr.count("\n") == 1
