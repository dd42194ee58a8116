"""`--log-style deepspeed`: what programs that read DeepSpeed's log look for is found, and says what happened."""

import json
import re
from pathlib import Path

import pytest
from small_trainings import rows, train

from zfunc.cli.deepspeed_lines import DeepSpeedLines, overflow_line, time_line
from zfunc.cli.train_lines import PlainOutput
from zfunc.core.timeline import Event, Timeline
from zfunc.optim.loss_scale import LossScale
from zfunc.train.events import Overflowed, Stepped, Timed
from zfunc.train.run_folder import create_run

Out = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("own_folder")

# As those who plot such logs write them.
STEP = re.compile(r"step=(\d+), skipped=(\d+), lr=\[([^\]]*)\], mom=\[\(([^)]*)\)\]")
SPEED = re.compile(
    r"epoch=(\d+)/micro_step=(\d+)/global_step=(\d+), RunningAvgSamplesPerSec=([\d.e+-]+), "
    r"CurrSamplesPerSec=([\d.e+-]+), MemAllocated=([\d.]+)GB, MaxMemAllocated=([\d.]+)GB"
)
TIME = re.compile(
    r"time \(ms\) \| fwd: ([\d.]+) \| bwd: ([\d.]+) \| bwd_allreduce: ([\d.]+) \| step: ([\d.]+)"
)


STYLE = ("--log-style", "deepspeed")


def stepped(step: int, *, skipped: bool = False, seconds: float = 0.5, device_bytes: int = 0) -> Stepped:
    return Stepped(
        step=step,
        total=None,
        loss=1.0,
        lr=1e-3 * step,
        grad_norm=1.0,
        skipped=skipped,
        loss_scale=1.0,
        tokens_per_second=1.0,
        seconds=seconds,
        host_seconds=0.1,
        device_bytes=device_bytes,
        host_bytes=1 << 30,
        seconds_left=None,
        held_out=None,
    )


def test_a_training_prints_them(capsys: Out) -> None:
    assert train("--steps", 21, "--eval-every", 15, "--micro-batches", 2, *STYLE, "--out", "run") == 0
    out, row = capsys.readouterr().out, rows("run")
    lines = STEP.findall(out)
    assert [(int(s), int(n), float(lr)) for s, n, lr, _ in lines] == [(s, 0, row[s]["lr"]) for s in (10, 20)]
    assert {mom for *_, mom in lines} == {"0.9, 0.95"}
    assert [m[:3] for m in SPEED.findall(out)] == [("0", "20", "10"), ("0", "40", "20")]
    assert [float(m[4]) for m in SPEED.findall(out)] == [4 / row[s]["seconds"] for s in (10, 20)]
    times = [[float(x) for x in m] for m in TIME.findall(out)]
    assert len(times) == 2
    for s, (fwd, bwd, _, step) in zip((10, 20), times, strict=True):
        assert min(fwd, bwd, step) > 0
        assert fwd + bwd + step <= 1e3 * row[s]["seconds"] + 0.05
    assert "loss 1" not in out
    assert "held out" in out
    assert "all steps done" in out


def test_a_training_that_overflows_says_so(capsys: Out) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 2}
    Path("ds.json").write_text(json.dumps({"fp16": fp16, "steps_per_print": 1}))
    assert train("--steps", 3, "--config", "ds.json", *STYLE, "--out", "run") == 0
    out = capsys.readouterr().out
    lead = f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2**32}"
    assert f"{lead}, but hysteresis is 2. Reducing hysteresis to 1\n" in out
    assert f"{lead}, reducing to {2**31}\n" in out
    assert [m[:2] for m in STEP.findall(out)] == [("1", "1"), ("2", "2"), ("3", "3")]
    assert len(TIME.findall(out)) == 3


def test_overflows_tell_the_scale_before_and_after() -> None:
    scale = LossScale(scale=65536.0, hysteresis=2)
    after = scale.update(overflow=True)
    lead = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536"
    assert overflow_line(scale, after) == f"{lead}, but hysteresis is 2. Reducing hysteresis to 1"
    assert overflow_line(after, after.update(overflow=True)) == f"{lead}, reducing to 32768"
    fixed = LossScale(scale=8.0, window=0)
    line = "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated."
    assert overflow_line(fixed, fixed.update(overflow=True)) == line


def test_skipped_steps_are_counted_and_speed_leaves_out_the_first_two(capsys: Out) -> None:
    run = create_run(Path("run"))
    screen = DeepSpeedLines(PlainOutput(run, "byte"), every=2, samples=6)
    scale = LossScale(hysteresis=1)
    screen.show(Overflowed(1, scale, scale.update(overflow=True)))
    for n, (skipped, seconds) in enumerate([(True, 90.0), (False, 90.0), (False, 1.0), (False, 2.0)], 1):
        screen.show(stepped(n, skipped=skipped, seconds=seconds, device_bytes=(5 - n) << 30))
    out = capsys.readouterr().out
    run.close()
    assert "reducing to 32768" in out
    assert [m[:2] for m in STEP.findall(out)] == [("2", "1"), ("4", "1")]
    assert [m[3:] for m in SPEED.findall(out)][1] == ("4.0", "3.0", "1.00", "4.00")


def test_what_was_skipped_before_counts_where_a_run_goes_on(capsys: Out) -> None:
    overflows = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}, "steps_per_print": 1}
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 20}
    scheduler = {"scheduler": {"type": "OneCycle", "params": cycle}, "train_batch_size": 4}
    Path("ds.json").write_text(json.dumps({**overflows, **scheduler}))
    last = []
    for run, lives in (("once", (20,)), ("parts", (16, 20))):
        for steps in lives:
            given = ("--steps", steps, "--resume", "auto", "--out", run)
            assert train("--config", "ds.json", *STYLE, *given) == 0
        last.append([x for x in capsys.readouterr().out.splitlines() if "step=20, skipped=" in x])
    assert last[0] == last[1]
    assert "skipped=0" not in last[0][0]


def test_times_are_those_of_the_operations() -> None:
    events = (
        Event("gpu", "forward[0]", "compute", 0.0, 0.010),
        Event("gpu", "forward[1]", "compute", 0.010, 0.015),
        Event("gpu", "backward[1]", "compute", 0.020, 0.050),
        Event("net", "reduce[1]", "network", 0.040, 0.047),
        Event("cpu", "adam[1]", "host", 0.050, 0.061),
    )
    timeline = Timeline(events, "measured")
    assert time_line(timeline) == (
        "[Rank 0] time (ms) | fwd: 15.00 | bwd: 30.00 | bwd_allreduce: 7.00 | step: 11.00"
    )
    assert time_line(Timeline((), "measured")).endswith("step: 0.00")
    assert Timed(1, timeline).step == 1
