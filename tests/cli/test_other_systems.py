"""Without the calls, modules and files that Linux has and macOS or Windows lack, zfunc does the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from zfunc.cli.main import main

ROOT = Path(__file__).parents[2]
GPT = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --batch-size 2"
SLOW = pytest.mark.slow


def elsewhere(*command: object, cwd: Path = ROOT) -> str:
    """What a command prints on such a system."""
    line = [sys.executable, str(ROOT / "tests" / "fewer_calls.py"), *map(str, command)]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=cwd, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "command",
    [
        "plan --hardware rtx4090 --num-layers 24 --hidden-size 1024 --num-attention-heads 16",
        "draw --schedule Overlapped --compare Serial",
    ],
)
def test_commands_without_torch_print_the_same(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert elsewhere("zfunc", *command.split(), cwd=tmp_path) == capsys.readouterr().out


@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=SLOW) for number in (2, 3, 4))])
def test_labs_are_graded(number: int, tmp_path: Path) -> None:
    (lab,) = (ROOT / "course" / "labs").glob(f"{number:02}_*")
    elsewhere("course.grade", number, "--adapters", lab / "solutions" / "passes.py", "--out", tmp_path)


@pytest.mark.parametrize(
    ("place", "ends"),
    [("host", [2]), *(pytest.param(place, [2, 4], marks=SLOW) for place in ("host", "disk"))],
)
def test_a_training_and_its_resumption_have_the_same_bits(
    place: str, ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)

    def command(run: str, *, steps: int) -> list[str]:
        Path(f"swap-{run}").mkdir(exist_ok=True)
        saves = f"--swap swap-{run} --commit-every 2" if place == "disk" else "--save-every 2"
        job = f"train --data text.txt {GPT} --steps {steps} --state-on {place} {saves} --out {run} --resume auto"
        return job.split()

    def weights(run: str) -> bytes:
        saved, out = f"swap-{run}" if place == "disk" else run, f"{run}.safetensors"
        assert main(["export", saved, "--out", out]) == 0
        return Path(out).read_bytes()

    for steps in ends:
        assert main(command("here", steps=steps)) == 0
        elsewhere("zfunc", *command("there", steps=steps), cwd=tmp_path)
    assert weights("here") == weights("there")
