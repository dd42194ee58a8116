"""The commands as a user meets them: what they print, what they leave behind, how they end."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from html_pages import Elements, shown_data
from small_trainings import TEXT, checkpoints, config, losses, rows, start, summary, train, wait_for_rows
from zfunc.schedules import CriticalPath, Serial, make_schedule

from zfunc.cli.main import main
from zfunc.cli.terminal import interrupts, printable
from zfunc.cli.train_lines import TrainingOutput, progress
from zfunc.planner.profile import load_profile
from zfunc.train.events import INTERRUPT, TERMINATED, Sampled, Stepped, Working
from zfunc.train.run_history import read_recorded_step

pytestmark = pytest.mark.usefixtures("own_folder")


SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --batch-size 4"
LARGE = "--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size 50257"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # all but line feeds
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
Out = pytest.CaptureFixture[str]


# --- a run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("set_by_hand", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "9"}, "9"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["default", "spin count", "policy"],
)
def test_threads_of_openmp_spin_shortly_unless_told_otherwise(
    set_by_hand: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_hand.items():
        monkeypatch.setenv(name, value)
    assert main(["--version"]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_a_run_prints_lines_and_leaves_a_folder(capsys: Out) -> None:
    assert train("--steps", 12, "--eval-every", 5, "--out", "run") == 0
    out, err = capsys.readouterr()
    assert not CONTROL.search(out)
    assert err == ""
    for words in ("device: cpu, because", "precision: fp32\n", "held out", "12/12", "sample"):
        assert words in out

    steps = rows("run")
    assert [row["step"] for row in steps] == list(range(13))
    assert [row["step"] for row in steps if "held_out_bits_per_byte" in row] == [0, 5, 10, 12]
    needed = {"step", "loss", "lr", "grad_norm", "skipped", "loss_scale", "tokens_per_second", "seconds"}
    assert all(needed | {"host_seconds", "device_bytes", "host_bytes"} <= row.keys() for row in steps[1:])
    assert steps[-1]["held_out_bits_per_byte"] < steps[0]["held_out_bits_per_byte"]

    assert (config("run")["settings"]["precision"], config("run")["settings"]["device"]) == ("fp32", "cpu")
    assert config("run")["parameters"] == (256 + 16) * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
    assert re.fullmatch("[0-9a-f]{16}", config("run")["plan"]["digest"])

    trace = json.loads(Path("run/timeline.json").read_text())["traceEvents"]
    assert {e["name"].partition("[")[0] for e in trace} >= {"forward", "backward", "update", "to_device"}
    assert "measured" in Path("run/timeline.svg").read_text()

    end = summary("run")
    assert (end["ended"], end["steps"]) == ("steps", 12)
    assert end["held_out_bits_per_byte"] == steps[-1]["held_out_bits_per_byte"]
    assert 1 < len(end["sample"]) <= 5
    assert [end["checkpoint"]] == [steps[-1]["saved"]] == checkpoints("run") == ["step-00000012"]
    assert end["planned_bytes"]["device"] > 0


def test_equal_settings_give_equal_losses_and_samples() -> None:
    for out, more in (("a", ()), ("b", ("--schedule", "Serial")), ("c", ("--seed", 1))):
        assert train("--steps", 6, "--dropout", 0.1, "--out", out, *more) == 0
    assert losses("a") == losses("b") != losses("c")
    assert summary("a")["sample"] == summary("b")["sample"]


def test_without_out_each_run_has_its_own_folder(capsys: Out) -> None:
    for _ in range(2):
        assert train("--steps", 1, "--precision", "fp32") == 0
    assert len([*Path("runs").iterdir()]) == 2
    assert capsys.readouterr().out.count("precision: fp32\n") == 2, "no reason for what was not chosen"


def test_a_pipeline_goes_on_on_another_number_of_devices(capsys: Out) -> None:
    """As one device does; too few micro-batches are said, with the bubble."""
    host = ["--params-on", "host", "--activations-on", "host", "--micro-batches", "4"]
    train(
        *host,
        "--devices",
        3,
        "--order",
        "RoundPipe",
        "--steps",
        2,
        "--out",
        "run",
        "--schedule",
        "Overlapped",
    )
    assert "device:2" in capsys.readouterr().out
    assert main(["report", "run"]) == 0
    train(*host, "--devices", 2, "--steps", 4, "--resume", "run", "--out", "on")
    train(*host, "--steps", 2, "--out", "one")
    train(*host, "--steps", 4, "--resume", "one", "--out", "one-on")
    assert losses("run") + losses("on") == losses("one") + losses("one-on")
    assert "compute:2" in Path("run", "timeline.svg").read_text()
    capsys.readouterr()
    train("--params-on", "host", "--devices", 2, "--steps", 1, "--out", "few")
    said = "".join(capsys.readouterr())
    assert "--devices: 2 for --micro-batches 1: each idles for 50% of a step" in said


def test_tokens_of_a_bin(capsys: Out) -> None:
    (np.arange(4000) ** 2 % 500).astype("<u2").tofile("train.bin")
    assert train("--data", "train.bin", "--vocab-size", 500, "--steps", 3, "--out", "run") == 0
    assert "bits per token" in capsys.readouterr().out
    assert rows("run")[-1]["held_out_bits_per_token"] > 0
    assert "held_out_bits_per_byte" not in rows("run")[-1]
    assert summary("run")["sample"].split()[0].isdecimal()


@pytest.mark.parametrize("stream", [[], ["--stream", "--eval-every", 0]], ids=["packed", "streamed"])
def test_the_current_folder_is_data_and_its_runs_are_not(stream: list[Any], capsys: Out) -> None:
    """A run leaves files of records there."""
    text = Path("data.txt").read_text()
    if stream:
        lines = [json.dumps({"text": text[n : n + 200]}) for n in range(0, len(text), 200)]
        Path("texts.jsonl").write_text("\n".join(lines))
    for n in (1, 2):
        assert train("--data", ".", "--steps", 3, "--no-sample", "--out", f"runs/{n}", *stream) == 0
        said = capsys.readouterr().out
        assert ("left out: runs/1/checkpoints/" in said) == (n == 2 and not stream)
    assert losses("runs/1") == losses("runs/2")


# --- how it ends -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_after_the_step_with_summary_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 320)
    running = start("--steps", 10**7, "--out", "run")
    wait_for_rows("run", 13, running)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert not CONTROL.search(out), "a pipe gets lines only"
    assert "stopping after this step" in err
    assert "stopped as asked" in out
    assert "sample: 320 bytes" in out
    assert "to go on      the same command with --resume auto --out run" in out
    last = rows("run")[-1]
    assert (summary("run")["ended"], summary("run")["steps"]) == ("interrupt", last["step"])
    assert "held_out_bits_per_byte" in last
    assert Path("run/timeline.svg").exists()


def test_a_kill_leaves_every_step_readable_and_a_run_that_goes_on() -> None:
    running = start("--steps", 10**7, "--save-every", 5, "--out", "run", stdout=subprocess.DEVNULL)
    wait_for_rows("run", 13, running)
    running.kill()
    running.communicate()
    *complete, last = Path("run/metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in complete] == list(range(len(complete)))
    assert last == "" or not last.endswith("}")
    assert config("run")["unit"] == "byte"
    assert not Path("run/summary.json").exists()

    assert train("--steps", len(complete) + 1, "--out", "run", "--resume", "auto") == 0
    assert [row["step"] for row in rows("run")] == list(range(len(complete) + 2))
    kept = complete[: (len(complete) - 2) // 5 * 5]  # up to a checkpoint that was complete
    assert Path("run/metrics.jsonl").read_text().startswith("\n".join(kept))


def test_on_a_terminal_there_is_a_bar_below_the_lines() -> None:
    ours, theirs = pty.openpty()
    running = start("--steps", 60, "--out", "run", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b"".join(_read(ours)).decode()
    assert running.wait(timeout=60) == 0
    for words in ("━", "held out", "all steps done", "sample: "):
        assert words in shown
    assert re.search(r"step 60/60  loss .*tokens/s.*0:00 left", shown, re.DOTALL), (
        "the last step stays, as a line"
    )
    assert "Traceback" not in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("columns", [66, 110])
def test_the_bar_leaves_room_for_two_ctrl_c_and_the_terminal_as_it_was(
    columns: int, failure: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal echoes ^C behind the last line; one that wraps would leave a piece of the bar behind."""
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": str(columns), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    run: Any = None
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    figures = dict.fromkeys(("lr", "grad_norm", "loss_scale", "seconds", "host_seconds"), 4.0)
    metrics: Any = SimpleNamespace(loss=2.5, skipped=True, aux={}, **figures)
    sizes = {"device_bytes": 1 << 34, "host_bytes": 1 << 35, "tokens_per_second": 1e6}
    step = Stepped(7, metrics, seconds_left=4.0, held_out=None, **sizes)
    output = TrainingOutput(run, "byte", stopping=lambda: INTERRUPT)
    output.total = 100_000
    with pytest.raises(failure) if failure else nullcontext(), progress(output):
        for event in (step, Working("evaluation"), Sampled((), "a \x1b[2J line")):
            output.show(event)
            time.sleep(0.25)  # it is drawn 5 times a second
        if failure:
            raise failure
    text = screen.getvalue()
    drawn = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", text)]
    assert any("evaluation; Ctrl-C again: at once" in line for line in drawn)
    for words in ("loss 2.5000", "1,000,000 tokens/s", "device 16.0 GiB", "skipped: overflow", "0:04 left"):
        assert words in " ".join(" ".join(drawn).split())
    bars = [line for line in drawn if "━" in line]
    assert bars
    assert max(map(len, bars)) <= columns - 5
    assert "a \\x1b[2J line" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(terminal, 65536)
        except OSError:  # the other side is closed
            return


SIGNALS = {  # what comes in turn, the request after each (None: KeyboardInterrupt), and how often who is told what
    "INT INT": ([INTERRUPT, None], {"stopping after this step; once more stops at once\n": 1}),
    "TERM TERM TERM INT INT": ([TERMINATED] * 4 + [None], {"terminated: stopping after this step\n": 1}),
    "HUP HUP HUP INT INT": ([TERMINATED] * 4 + [None], {"terminated: stopping after this step\n": 1}),
    "INT TERM TERM INT": (
        [INTERRUPT, TERMINATED, TERMINATED, None],
        {"terminated: stopping after this step\n": 1},
    ),
    "INT HUP INT": ([INTERRUPT, TERMINATED, None], {"terminated: stopping after this step\n": 1}),
    "ignored HUP HUP": (["", ""], {"stopping": 0}),
}


@pytest.mark.parametrize("row", SIGNALS)
def test_a_signal_requests_a_stop_and_only_the_second_ctrl_c_stops_at_once(
    row: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM is the stronger, also after a Ctrl-C; under nohup a hang-up stays ignored; handlers come back."""
    requests, told = SIGNALS[row]
    numbers = [getattr(signal, f"SIG{name}") for name in row.removeprefix("ignored ").split()]
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN if "ignored" in row else signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with interrupts(tell=True) as stop:
            assert stop() == ""
            for number, request in zip(numbers, requests, strict=True):
                with pytest.raises(KeyboardInterrupt) if request is None else nullcontext():
                    os.kill(os.getpid(), number)
                assert request is None or stop() == request
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        signal.signal(signal.SIGHUP, hup)
    err = capfd.readouterr().err
    assert {text: err.count(text) for text in told} == told


HUNG_UP = """
import signal, time
from zfunc.cli.terminal import interrupts
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
with interrupts(tell=True) as stop:
    print("begun", flush=True)
    while not stop():
        time.sleep(0.01)
    print("nobody reads this", flush=True)
    open("ended", "w").write(stop())
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


def test_stopped_at_once_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("zfunc.train.loop.train_step", _raises(KeyboardInterrupt()))
    assert train("--steps", 3, "--out", "run") == 130
    assert capsys.readouterr().err == "zfunc train: stopped before the first step\n"
    assert not Path("run").exists(), "no step was taken: the next run may have the name"


def test_stopped_at_once_says_where_the_run_is(at_step: Any, capsys: Out) -> None:
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT) or os.kill(os.getpid(), signal.SIGINT))
    assert train("--steps", 9, "--out", "run") == 130
    *_, stopped, kept = capsys.readouterr().err.splitlines()
    assert stopped == "zfunc train: stopped at once, in the middle of a step"
    assert kept == "The run up to here is in run"
    assert summary("run")["ended"] == "stopped at once"


def test_stopped_while_the_sample_is_made_is_no_step_in_its_middle(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("zfunc.train.loop.sample", _raises(KeyboardInterrupt()))
    assert train("--steps", 2, "--out", "run") == 130
    *_, stopped, kept = capsys.readouterr().err.splitlines()
    assert (stopped, kept[-3:]) == ("zfunc train: stopped at once, after the last step", "run")
    assert summary("run")["ended"] == "steps"


def test_a_failure_while_training_is_1_and_keeps_what_there_is(capsys: Out) -> None:
    assert train("--steps", 20, "--lr", "1e30", "--warmup", 0, "--out", "run") == 1
    err = capsys.readouterr().err
    assert "expected finite numbers" in err
    assert "The run up to here is in run" in err
    assert "Traceback" not in err
    assert "expected finite" in summary("run")["error"]
    assert rows("run")[-1]["step"] >= 1


def _raises(error: BaseException) -> Callable[..., Any]:
    def function(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return function


def test_a_sample_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\u202e\rb") == "a\\x1b[2J\\x07\\u202e\\rb"


# --- draw ------------------------------------------------------------------------------------------------


def test_draw_prints_text(capsys: Out) -> None:
    assert main(["draw", *SMALL.split(), "--schedule", "all", "--micro-batches", "2"]) == 0
    out, err = capsys.readouterr()
    for words in ("Serial: one step", "Overlapped: one step", "Interleaved: one step", "round numbers"):
        assert words in out
    assert "f forward" in out
    assert err == ""


@pytest.mark.parametrize(
    ("flags", "starts"),
    {
        "--out step.svg": {"step.svg": "<svg"},
        "--out link.svg": {"target.svg": "<svg"},
        "--out step.html --hardware rtx4090": {"step.html": "<!doctype html>"},
        "--live --num-layers 1": {"live.html": "<!doctype html>"},
        "--out step.json --schedule all": {
            f"step-{name}.json": '{"' for name in ("serial", "overlapped", "interleaved")
        },
        "--out /dev/null": {},
    }.items(),
)
def test_draw_writes_what_the_suffix_says(flags: str, starts: dict[str, str]) -> None:
    """Through links, and to what is no regular file."""
    Path("link.svg").symlink_to("target.svg")
    assert main(["draw", *SMALL.split(), *flags.split()]) == 0
    assert all(Path(file).read_text().startswith(text) for file, text in starts.items())
    assert Path("link.svg").is_symlink()
    assert Path("/dev/null").is_char_device()


def test_draw_takes_no_memory_for_parameters(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setattr("zfunc.engine.trace.segment._real_module", _raises(AssertionError("allocated")))
    assert main(["draw", *LARGE.split()]) == 0
    assert "10,279,047,168 parameters" in capsys.readouterr().out


# --- draw --compare ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that measured a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        Path("data.txt").write_text(TEXT)
        assert train("--steps", 11, "--save-every", 0, "--schedule", "Serial", "--out", "run") == 0
        return Path("run").absolute()


def test_a_run_leaves_the_plan_it_measured_and_a_page(run: Path) -> None:
    read = read_recorded_step(run)
    assert read.plan.digest == json.loads((run / "config.json").read_text())["plan"]["digest"]
    assert read.timeline.source == "measured"
    assert (read.schedule, read.precision, read.world) == ("Serial", "fp32", 1)
    shown = shown_data((run / "timeline.html").read_text())
    assert [t["source"] for t in shown["timelines"]] == ["measured"]
    assert len(shown["ops"]["verb"]) == len(read.plan.graph)


def test_compare_writes_a_page_of_both_and_prints_the_sums(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "--compare", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "TFLOP/s" in out
    assert out.count("ratio") == 3
    assert f"written: {run / 'compare.html'}" in out
    read = read_recorded_step(run)
    page = (run / "compare.html").read_text()
    assert [t["source"] for t in shown_data(page)["timelines"]] == ["simulated", "measured"]
    ((_, title),) = Elements(page).all("title")
    assert str(run) in title
    assert "Serial in fp32" in title
    for op in read.plan.graph:
        assert re.search(rf"^{op.verb} ", out, re.M)


@pytest.mark.parametrize(
    ("flags", "file", "starts"),
    [
        ("", "compare.html", "<!doctype html>"),
        ("--out x.svg", "x.svg", "<svg"),
        ("--out x.json", "x.json", "{"),
        ("--out x.html", "x.html", "<!doctype html>"),
        ("--out x.txt --hardware h100", "x.txt", "A step of"),
    ],
)
def test_compare_writes_what_is_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, file: str, starts: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "--compare", str(run), *flags.split()]) == 0
    page = ((tmp_path if "--out" in flags else run) / file).read_text()
    assert page.startswith(starts)
    assert "measured" in page
    assert "simulated" in page
    if file == "x.txt":
        assert re.search(r"^\w+ measured +\d+% \|", page, re.M)
        assert "H100" in page


def test_of_a_pipeline_over_ranks_pictures_say_whose_step_it_is(run: Path, tmp_path: Path) -> None:
    """That of the first rank, which writes the run."""
    shutil.copytree(run, there := tmp_path / "run")
    config = (there / "config.json").read_text()
    (there / "config.json").write_text(config.replace('"pp": 1', '"pp": 3'))
    assert main(["draw", "--compare", str(there)]) == main(["report", str(there)]) == 0
    for page in ("compare.html", "report.html"):
        assert "the first of 3 stages" in (there / page).read_text()


def test_compare_needs_no_torch(run: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy')))\n"
    code += "from zfunc.cli.main import main; main()"
    asked = ["draw", "--compare", str(run), "--out", str(tmp_path / "x.html")]
    done = subprocess.run(
        [sys.executable, "-c", code, *asked], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.html").exists()
    assert done.stderr == ""


def test_draw_gives_a_schedule_the_hardware_it_asks_for() -> None:
    on = load_profile("h100").hardware("bf16")
    assert make_schedule("CriticalPath", on) == CriticalPath(on) != CriticalPath()
    assert make_schedule("Serial", on) == Serial()


BROKEN: dict[str, tuple[str, Callable[[str], str], str]] = {
    "plan cut short": ("plan.txt", lambda t: t[: len(t) // 2], "plan.txt"),
    "plan of nothing": ("plan.txt", lambda t: "", "plan.txt: got '' as the first line"),
    "trace cut short": ("timeline.json", lambda t: t[: len(t) // 2], "timeline.json: got '"),
    "trace of another plan": ("timeline.json", lambda t: t.replace('"decide"', '"decode"'), "with decode"),
    "no schedule": (
        "config.json",
        lambda t: t.replace('"schedule"', '"timetable"'),
        "got no 'schedule', expected",
    ),
    "no ranks": (
        "config.json",
        lambda t: t.replace('"ranks": 1', '"ranks": 0'),
        "config.json: 'world' must be >= 1: 0",
    ),
    "settings that are a list": ("config.json", lambda t: "[]", "config.json: got [], expected an object"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_that_is_not_complete_is_refused(run: Path, tmp_path: Path, capsys: Any, what: str) -> None:
    name, change, reason = BROKEN[what]
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("compare.*"))
    (copy / name).write_text(change((copy / name).read_text()))
    assert main(["draw", "--compare", str(copy)]) == 2
    err = capsys.readouterr().err
    assert str(copy) in err
    assert reason in err
    assert "expected" in err
    assert not (copy / "compare.html").exists()
