"""The commands as a user meets them: what they print, what they leave behind, how they end."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from zfunc.cli.main import main
from zfunc.cli.terminal import interrupts, printable
from zfunc.train.events import INTERRUPT, TERMINATED
from zfunc.train.pacing import WARM_STEPS, StepBudget
from zfunc.train.settings import TrainSettings


def model(*sizes: int) -> list[str]:
    flags = "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--batch-size"
    return [word for pair in zip(flags, map(str, sizes), strict=True) for word in pair]


TINY = model(1, 16, 2, 16, 4)
SMALL = model(2, 64, 4, 32, 4)
TEN_BILLION = [*model(50, 4096, 32, 1024, 10), "--vocab-size", "50257"]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # all but line feeds


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 20)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(30):
        words = " ".join(f"{k * k % 97} and {k % 7}" for k in range(n, n + 80))
        folder.joinpath(f"{n}.txt").write_text(words + "\n")
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.joinpath("metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads(folder.joinpath("summary.json").read_text())


def train(*more: object) -> int:
    return main(["train", *TINY, *map(str, more)])


def start(*more: object, **given: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "zfunc", "train", *TINY, *map(str, more)]
    return subprocess.Popen(command, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **given)


def wait_for_steps(folder: Path, count: int, running: "subprocess.Popen[str]") -> None:
    path = folder / "metrics.jsonl"
    for _ in range(600):
        if path.exists() and path.read_text().count("\n") > count:
            return
        assert running.poll() is None, "it ended by itself"
        time.sleep(0.1)
    pytest.fail(f"no {count} steps within a minute")


# --- a whole run -----------------------------------------------------------------------------------------


def test_a_run_prints_lines_and_leaves_a_folder(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data", texts, "--steps", 12, "--eval-every", 5, "--out", "run") == 0
    out, err = capsys.readouterr()
    assert not CONTROL.search(out)
    assert err == ""
    for told in (
        "device: cpu, because",
        "precision: fp32, because",
        "30 files",
        "held out",
        "12/12",
        "sample",
    ):
        assert told in out

    run = Path("run")
    steps = rows(run)
    assert [row["step"] for row in steps] == list(range(13))
    evaluated = [row["step"] for row in steps if "held_out_bits_per_byte" in row]
    assert evaluated == [0, 5, 10, 12]
    needed = {"step", "loss", "lr", "grad_norm", "skipped", "loss_scale", "tokens_per_second", "seconds"}
    assert all(needed | {"host_seconds", "device_bytes", "host_bytes"} <= row.keys() for row in steps[1:])
    assert steps[-1]["held_out_bits_per_byte"] < steps[0]["held_out_bits_per_byte"]

    config = json.loads(run.joinpath("config.json").read_text())
    assert config["settings"]["precision"] == "fp32"
    assert config["settings"]["device"] == "cpu"
    assert config["parameters"] == (256 + 16) * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
    assert re.fullmatch("[0-9a-f]{16}", config["plan"]["digest"])

    trace = json.loads(run.joinpath("timeline.json").read_text())["traceEvents"]
    assert {e["name"].partition("[")[0] for e in trace} >= {"forward", "backward", "adam", "to_device"}
    assert "measured" in run.joinpath("timeline.svg").read_text()

    end = summary(run)
    assert (end["ended"], end["steps"]) == ("steps", 12)
    assert end["held_out_bits_per_byte"] == steps[-1]["held_out_bits_per_byte"]
    assert 10 < len(end["sample"]) <= 20
    assert end["checkpoint"] == steps[-1]["saved"] == "step-00000012"
    assert [x.name for x in run.joinpath("checkpoints").iterdir() if x.is_dir()] == ["step-00000012"]
    assert end["planned_bytes"]["device"] > 0


def test_equal_settings_give_equal_losses_and_samples(texts: Path) -> None:
    for out, more in (("a", ()), ("b", ("--schedule", "Serial")), ("c", ("--seed", 1))):
        assert train("--data", texts, "--steps", 6, "--dropout", 0.1, "--out", out, *more) == 0
    a, b, c = ([row.get("loss") for row in rows(Path(out))] for out in "abc")
    assert a == b != c
    assert summary(Path("a"))["sample"] == summary(Path("b"))["sample"]


def test_without_out_each_run_has_its_own_folder(texts: Path) -> None:
    for _ in range(2):
        assert train("--data", texts, "--steps", 1) == 0
    assert len([*Path("runs").iterdir()]) == 2


def test_tokens_of_a_bin(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = (np.arange(4000) ** 2 % 500).astype("<u2")
    tokens.tofile("train.bin")
    assert train("--data", "train.bin", "--vocab-size", 500, "--steps", 3, "--out", "run") == 0
    assert "bits per token" in capsys.readouterr().out
    assert rows(Path("run"))[-1]["held_out_bits_per_token"] > 0
    assert "held_out_bits_per_byte" not in rows(Path("run"))[-1]
    assert summary(Path("run"))["sample"].split()[0].isdecimal()


def test_a_run_in_fp16_with_micro_batches_without_clipping(texts: Path) -> None:
    args = ("--precision", "fp16", "--micro-batches", 2, "--clip", 0, "--recompute", "min-cut")
    assert train("--data", texts, "--steps", 2, "--out", "run", *args) == 0
    assert rows(Path("run"))[1]["loss_scale"] == 65536


# --- how it ends -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_after_the_step_with_summary_and_sample(texts: Path) -> None:
    running = start("--data", texts, "--steps", 10**7, "--out", "run", stdout=-1, stderr=-1)
    wait_for_steps(Path("run"), 12, running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert not CONTROL.search(out), "a pipe gets lines only"
    assert "stopping after this step" in err
    assert "stopped as asked" in out
    assert "sample: 320 bytes" in out
    assert "to go on      the same command with --resume auto --out run" in out
    end = summary(Path("run"))
    assert end["ended"] == "interrupt"
    last = rows(Path("run"))[-1]
    assert last["step"] == end["steps"]
    assert "held_out_bits_per_byte" in last
    assert Path("run/timeline.svg").exists()


def test_a_kill_leaves_every_step_readable_and_a_run_that_goes_on(texts: Path) -> None:
    running = start(
        "--data", texts, "--steps", 10**7, "--save-every", 5, "--out", "run", stdout=subprocess.DEVNULL
    )
    wait_for_steps(Path("run"), 12, running)
    running.kill()
    running.wait()
    *whole, last = Path("run/metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(len(whole)))
    assert last == "" or not last.endswith("}")
    assert json.loads(Path("run/config.json").read_text())["unit"] == "byte"
    assert not Path("run/summary.json").exists()

    assert train("--data", texts, "--steps", len(whole) + 1, "--out", "run", "--resume", "auto") == 0
    assert [row["step"] for row in rows(Path("run"))] == list(range(len(whole) + 2))
    kept = whole[: (len(whole) - 2) // 5 * 5]  # up to a checkpoint that was complete
    assert Path("run/metrics.jsonl").read_text().startswith("\n".join(kept))


def test_on_a_terminal_there_is_a_panel(texts: Path) -> None:
    ours, theirs = pty.openpty()
    given = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    running = start("--data", texts, "--steps", 150, "--out", "run", **given)
    os.close(theirs)
    shown = b"".join(_read(ours)).decode()
    assert running.wait(timeout=60) == 0
    for told in ("╭", "gradient norm", "host Adam", "of a step", "held out", "all steps done", "sample: "):
        assert told in shown
    assert "Traceback" not in shown


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(terminal, 65536)
        except OSError:  # the other side is closed
            return


def test_the_second_ctrl_c_stops_at_once_and_handlers_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts(tell=True) as asked:
        assert asked() == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert asked() == INTERRUPT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == "stopping after this step; once more stops at once\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("interrupted", [False, True])
def test_sigterm_never_stops_at_once(
    interrupted: bool, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """However often it comes; and it is the stronger, also after a Ctrl-C."""
    before = signal.getsignal(number)
    with interrupts(tell=True) as asked:
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert asked() == TERMINATED
        if not interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        assert asked() == TERMINATED
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.count("terminated: stopping after this step\n") == 1


def test_under_nohup_a_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts(tell=True) as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert asked() == ""
    finally:
        signal.signal(signal.SIGHUP, before)


HUNG_UP = """
import time
from zfunc.cli.terminal import interrupts
with interrupts(tell=True) as asked:
    print("begun", flush=True)
    while not asked():
        time.sleep(0.01)
    print("nobody reads this", flush=True)
    open("ended", "w").write(asked())
"""


def test_a_terminal_that_is_closed_ends_a_command_gently() -> None:
    """All that it prints from then on would fail."""
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-c", HUNG_UP]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"begun")
    os.close(ours)
    assert running.wait(timeout=60) == 0
    assert Path("ended").read_text() == TERMINATED


def test_stopped_at_once_is_130(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zfunc.train.loop.train_step", _raises(KeyboardInterrupt()))
    assert train("--data", texts, "--steps", 3, "--out", "run") == 130
    assert capsys.readouterr().err == "zfunc train: stopped at once\n"
    assert summary(Path("run"))["ended"] == "stopped at once"


def test_a_failure_while_training_is_1_and_keeps_what_there_is(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--data", texts, "--steps", 20, "--lr", "1e30", "--warmup", 0, "--out", "run") == 1
    err = capsys.readouterr().err
    assert "expected finite numbers" in err
    assert "What there is up to then: run" in err
    assert "Traceback" not in err
    assert "expected finite" in summary(Path("run"))["error"]
    assert rows(Path("run"))[-1]["step"] >= 1


def _raises(error: BaseException) -> Callable[..., Any]:
    def function(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return function


# --- how long --------------------------------------------------------------------------------------------


def test_the_time_bound_ends_a_run(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data", texts, "--seconds", 1.5, "--out", "run") == 0
    end = summary(Path("run"))
    assert end["ended"] in ("steps", "seconds")
    assert 0.5 < end["seconds"] < 20
    assert "the learning rate comes down by then" in capsys.readouterr().out
    lrs = [row["lr"] for row in rows(Path("run"))[1:]]
    assert max(lrs) > 2 * lrs[-1]


def paced(
    seconds_each: list[float], *, steps: int | None, seconds: float
) -> tuple[int, float, str, StepBudget]:
    """Steps that take so long, the last of them for ever: when it ended, why, and the length."""
    length, elapsed, step, why = StepBudget(TrainSettings(steps=steps, seconds=seconds), steps), 0.0, 0, ""
    while not why:
        elapsed += seconds_each[min(step, len(seconds_each) - 1)]
        step += 1
        length = length.after(step, elapsed)
        why = length.ended(step, elapsed)
    return step, elapsed, why, length


def test_the_length_follows_the_clock_only_where_it_must() -> None:
    assert paced([0.09], steps=1000, seconds=100.0)[::2] == (1000, "steps")
    assert paced([0.25], steps=1000, seconds=100.0)[::2] == (400, "seconds")
    slow = StepBudget(TrainSettings(steps=1000, seconds=100.0), 1000)
    for step in range(1, 100):
        slow = slow.after(step, step * 0.2)
    assert slow.total == 500
    assert slow.ended(499, 99.8) == ""
    assert slow.ended(400, 100.0) == "seconds"
    assert slow.ended(10, 1.0, stopping=INTERRUPT) == "interrupt"
    timed = StepBudget(TrainSettings(steps=None, seconds=100.0), None)
    assert timed.left(1, 1.0) == 99.0
    assert paced([10.0], steps=None, seconds=100.0)[::2] == (10, "seconds")
    assert (
        paced([10.0] * 4, steps=1000, seconds=100.0)[3].total == 10
    )  # one warm step, of a tenth of the time
    endless = StepBudget(TrainSettings(steps=7, seconds=None), 7)
    assert endless.after(1, 1e9).total == 7


def test_the_first_steps_say_nothing_about_the_pace() -> None:
    """Imports and tracing beside two busy loops: 8 s, of 140, for what takes 50 ms from then on."""
    length = StepBudget(TrainSettings(steps=1500, seconds=140.0), 1500)
    for step in range(1, WARM_STEPS + 1):
        length = length.after(step, 8.0 * step)
        assert (length.total, length.left(step, 8.0 * step)) == (1500, 140.0 - 8.0 * step)
    assert paced([8.0] * WARM_STEPS + [0.05], steps=1500, seconds=140.0)[::2] == (1500, "steps")


@hypothesis(max_examples=50)
@given(
    cold=st.lists(st.floats(0.001, 30), min_size=WARM_STEPS, max_size=WARM_STEPS),
    warm=st.lists(st.floats(0.02, 2), min_size=1, max_size=60),
    steps=st.one_of(st.none(), st.integers(1, 400)),
)
def test_no_run_ends_by_the_clock_while_a_step_still_fits(
    cold: list[float], warm: list[float], steps: int | None
) -> None:
    """However uneven the steps are; and a number of steps that was lowered is no end by itself."""
    taken, elapsed, why, length = paced([*cold, *warm], steps=steps, seconds=30.0)
    if taken == steps:
        assert why == "steps"
    else:
        pace = length.seconds_per_step(elapsed)
        assert why == "seconds"
        assert elapsed >= 30.0 or (30.0 - elapsed) / pace < 1


# --- the panel -------------------------------------------------------------------------------------------


def test_a_sample_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\u202e\rb") == "a\\x1b[2J\\x07\\u202e\\rb"


# --- draw ------------------------------------------------------------------------------------------------


def test_draw_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", *SMALL, "--schedule", "all", "--micro-batches", "2"]) == 0
    out, err = capsys.readouterr()
    for told in (
        "Serial: one step",
        "Overlapped: one step",
        "Interleaved: one step",
        "round numbers",
        "f forward",
    ):
        assert told in out
    assert err == ""


def test_compact_moments_take_less_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    host = []
    for moments in ("fp32", "16bit", "8bit"):
        assert main(["draw", *model(4, 2048, 16, 1024, 8), "--moments", moments]) == 0
        host.append(float(re.findall(r"([\d.]+) GB host", capsys.readouterr().out)[0]))
    assert host[0] > 1.6 * host[1]  # of 16 bits the high half of the master is pinned, and not in "host"
    assert host[1] > 1.3 * host[2]


def test_draw_writes_what_the_suffix_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", *SMALL, "--out", "step.svg"]) == 0
    assert Path("step.svg").read_text().startswith("<svg")
    assert "round numbers" in Path("step.svg").read_text()
    assert main(["draw", *SMALL, "--schedule", "all", "--out", "step.json"]) == 0
    for name in ("serial", "overlapped", "interleaved"):
        assert json.loads(Path(f"step-{name}.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert main(["draw", *SMALL, "--format", "chrome", "--compute-tflops", "50"]) == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"]


def test_draw_takes_no_memory_for_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zfunc.engine.segment._real_module", _raises(AssertionError("made real")))
    assert main(["draw", *TEN_BILLION]) == 0
    assert "10,279,047,168 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--schedule", "Seriall"], "did you mean 'Serial'?"),
        (["--format", "png"], "expected one of text, svg, chrome"),
        (["--format", "svg", "--schedule", "all"], "add --out FILE"),
        (["--out", "nowhere/step.svg"], "nowhere"),
        (["--host-gbs", "0"], "--host-gbs: got 0"),
    ],
)
def test_draw_refuses(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", *SMALL, *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("zfunc draw: error: ")
    assert told in err


def test_draw_writes_to_what_is_no_regular_file_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "link.svg").symlink_to(tmp_path / "target.svg")
    assert main(["draw", *SMALL, "--out", str(tmp_path / "link.svg")]) == 0
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "target.svg").read_text().startswith("<svg")
    assert main(["draw", *SMALL, "--out", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("out", "told"), [("x.png", "expected a name that ends"), ("no/x.svg", "cannot be written")]
)
def test_draw_says_where_it_cannot_write(tmp_path: Path, capsys: Any, out: str, told: str) -> None:
    assert main(["draw", *SMALL, "--out", str(tmp_path / out)]) == 2
    assert told in capsys.readouterr().err
