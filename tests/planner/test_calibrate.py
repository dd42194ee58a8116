"""A machine measured by training on it: the times of operations add up to steps, rates follow, files say how."""

import json
import logging
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS
from table import hardware, plan_of

import zfunc
from zfunc import schedules
from zfunc.cli.commands.calibrate import CalibrateSettings, measure_machine
from zfunc.cli.main import main
from zfunc.core.graph import KINDS
from zfunc.core.hardware import ROUND, Hardware, Measured
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Timeline
from zfunc.engine.program.program import Program, rescheduled
from zfunc.engine.program.specialize import specialize
from zfunc.planner.calibrate import (
    Machine,
    MeasuredStep,
    calibrate,
    fit_line,
    handoff,
    issue_seconds,
    make_profile,
    measure_arithmetic,
    measure_disk,
    measure_launch,
    measured,
    middle_half,
    operation_costs,
    traced_steps,
)
from zfunc.planner.profile import NONE_SENT, Profile, parse_profile, profile_text
from zfunc.runtime import direct_io

MODEL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "batch_size": 4}
SMALL: dict[str, Any] = {**MODEL, "bucket_size": 4096, "turns": 4, "device": "cpu"}
OPERATIONS = tuple(
    Measured(*x)
    for x in (
        ("compute", 10**9, 0, 1e-2),
        ("compute", 0, 10**7, 1e-3),
        ("host", 0, 10**7, 2e-3),
        ("host", 0, 0, 1e-4),
        ("d2h", 0, 10**6, 1e-3),
        ("h2d", 0, 10**6, 5e-4),
        ("network", 0, 10**6, 4e-3),
        ("network", 0, 10**3, 2e-3),
    )
)
FIGURES: dict[str, dict[str, float]] = {
    "count": {"devices": 2, "cores": 8},
    "bytes": {"device": 1e9, "host": 1e10, "disk": 1e11},
    "flops_per_s": {"fp32": 1e11},
    "bytes_per_s": {"read": 2e9, "write": 1e9},
    "seconds": {"read": 1e-4, "write": 1e-3},
    "reached": {"fp32": 1.0, "attention": 0.4},
}
MACHINE = Machine("made up", "fp32", {table: measured("made up", of) for table, of in FIGURES.items()})


def made(operations: tuple[Measured, ...] = OPERATIONS, handoff: float = 0.0, **more: Any) -> Profile:
    return make_profile(evolve(MACHINE, **more), operations, handoff, "in a test")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MEASURED", 2 << 20)
    monkeypatch.setattr(direct_io, "CHUNK", 1 << 20)


def steps_of(on: Hardware, *factors: float) -> list[MeasuredStep]:
    """Serial steps of a GPT-like graph as they would be measured on `on`, each slower by a factor."""
    plan = plan_of("zero_offload", "tied", "Serial")
    timeline = simulate(plan, on)

    def slower(k: float) -> Timeline:
        events = (
            evolve(e, start=e.start * k, end=e.start * k + e.seconds * k * 0.9) for e in timeline.events
        )
        return Timeline([*events], "measured")

    return [MeasuredStep(plan, slower(k), timeline.seconds * k) for k in factors]


# ---- from steps to figures -------------------------------------------------------------------------


@given(hardware())
def test_a_serial_step_is_predicted_to_take_what_it_took(on: Hardware) -> None:
    """In which what operations took adds up to the step."""
    steps = steps_of(evolve(on, latency=max(on.latency, 1e-6)), 1.0, 1.0)
    again = evolve(on, measured=operation_costs(steps))
    assert simulate(steps[0].plan, again).seconds == pytest.approx(steps[0].seconds, rel=1e-5)


def test_the_half_in_the_middle_counts() -> None:
    steps = steps_of(Hardware("one", 1.0, dict.fromkeys(KINDS, 1.0)), 9.0, 1.0, 2.0, 1.5, 0.1, 1.2, 3.0, 1.1)
    kept = [step.seconds / steps[1].seconds for step in middle_half(steps)]
    assert kept == pytest.approx([1.1, 1.2, 1.5, 2.0])
    assert len(middle_half(steps[:1])) == 1


def test_operations_beside_each_other_tell_nothing() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    step = MeasuredStep(plan, simulate(plan), 1.0)
    with pytest.raises(
        ValueError, match="got a plan on the lanes .*h2d.*, expected one, .*: measure steps under S"
    ):
        operation_costs([step])
    with pytest.raises(ValueError, match="got no operation of any step, expected some"):
        operation_costs([])


@given(st.floats(0, 1e-2), st.floats(1e6, 1e13), st.sets(st.integers(1, 10**12), min_size=2, max_size=6))
def test_a_line_is_found_where_there_is_one(latency: float, rate: float, sizes: set[int]) -> None:
    points = [(n, latency + n / rate) for n in sorted(sizes)]
    start, speed = fit_line(points)
    for n, seconds in points:
        assert start + n / speed == pytest.approx(seconds, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-7, 1e3)), min_size=1, max_size=6))
def test_whatever_was_measured_gives_rates_one_can_compute_with(points: list[tuple[int, float]]) -> None:
    start, speed = fit_line(points)
    assert start >= 0
    assert 0 < speed < float("inf")


def test_what_a_handoff_takes_is_found() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = simulate(plan, evolve(ROUND, latency=1e-3, handoff=2e-4))
    assert handoff([MeasuredStep(plan, timeline, timeline.seconds)]) == pytest.approx(2e-4)
    assert handoff(steps_of(ROUND, 1.0)) is None


def test_what_python_takes_to_issue_an_operation_is_found() -> None:
    """Of copies and kernels the median; of updates what a line leaves for none, as they sweep in that time."""
    ops = [op for op in plan_of("zero_offload", "tied", "Serial").graph if op.nbytes and not op.flops]
    of_host = [
        (evolve(op, nbytes=n), 3e-4 + n / 1e11) for op in ops if op.kind == "host" for n in (10**6, 10**8)
    ]
    others = [(op, 1e-4 if op.kind == "h2d" else 2e-5) for op in ops if op.kind in ("compute", "d2h", "h2d")]
    found = issue_seconds([*of_host, *others, (others[0][0], 1.0)])
    assert found == {
        "issue_compute": 2e-5,
        "issue_host": pytest.approx(3e-4, rel=1e-3),
        "issue_d2h": 2e-5,
        "issue_h2d": 1e-4,
    }
    assert issue_seconds([]) == {}
    profile = make_profile(MACHINE, OPERATIONS, 1.0, "in a test", [*of_host, *others])
    on = parse_profile(profile_text(profile), "calibrated").hardware("fp32")
    assert on.issue == {
        "compute": 2e-5,
        "host": profile.value("seconds", "issue_host"),
        "d2h": 2e-5,
        "h2d": 1e-4,
    }
    assert on.handoff < 0.01, "of lanes that do nothing, not that of steps"
    assert made().hardware("fp32").issue == {}


# ---- a profile of them -----------------------------------------------------------------------------


def test_figures_are_what_was_reached() -> None:
    """Rates of bytes are those of operations that only move some."""
    profile = made(handoff=3e-4)
    on = profile.hardware("fp32")
    assert (on.flops, on.attention, on.handoff, on.launch) == (1e11, 4e10, 3e-4, 0)
    expected = {"compute": 1e10, "host": 5e9, "d2h": 1e9, "h2d": 2e9, "read": 2e9, "write": 1e9}
    assert on.rates == {**expected, "network": NONE_SENT}
    assert (on.latencies["read"], on.latencies["write"]) == (1e-4, 1e-3)
    assert on.memory == {"device": 10**9, "host": 10**10, "disk": 10**11}
    assert on.shared["host memory"] == {"host": 1.0, "d2h": 0.2, "h2d": 0.4, "read": 0.4, "write": 0.2}
    assert on.measured == OPERATIONS
    assert all(f.measured for of in profile.figures.values() for f in of.values())
    assert parse_profile(profile_text(profile), "calibrated") == profile


def test_ranks_share_a_host_that_is_the_nodes() -> None:
    profile = made(world=2, local_ranks=2)
    assert profile.value("bytes_per_s", "host_memory") == 1e10
    assert profile.hardware("fp32", 2).rates["host"] == 5e9
    assert "network_in_node" in profile.figures["bytes_per_s"]
    assert profile.hardware("fp32", 2).latencies["network"] == pytest.approx(2e-3, rel=1e-2)
    far = made(world=8, local_ranks=2)
    assert far.value("seconds", "network_between_nodes") == pytest.approx(2e-3 / 7, rel=1e-2)


def test_launches_are_timed_where_there_are_any() -> None:
    assert measure_launch(torch.device("cpu")) is None
    assert made().hardware("fp32").launch == 0


@pytest.mark.parametrize("kind", ["compute", "host", "d2h", "h2d"])
def test_a_step_without_a_kind_of_work_tells_nothing_of_it(kind: str) -> None:
    left = tuple(x for x in OPERATIONS if not (x.kind == kind and x.nbytes))
    with pytest.raises(ValueError, match=f"got no operation of kind '{kind}' that moves bytes"):
        made(operations=left)


def test_arithmetic_is_measured_where_it_runs() -> None:
    products, attention = measure_arithmetic(torch.device("cpu"), torch.float32)
    a = torch.ones(768, 768)
    seconds = min(timeit.repeat(lambda: a @ a, number=1, repeat=9))
    assert products < 2 * 2 * 768**3 / seconds
    assert 0 < attention < 4 * products


# ---- this machine ----------------------------------------------------------------------------------


def compiled(schedule: str = "Serial", **more: Any) -> tuple[Program, Any]:
    segments, batch = MODELS["tied GPT"]()
    options: dict[str, Any] = {"clip_norm": 1.0, "bucket_size": 3000, "precision": "fp32", **more}
    return zfunc.compile(segments, schedule=schedule, device="cpu", **options), batch(0)


def check(profile: Profile, program: Program, batch: Any) -> Hardware:
    on = profile.hardware(program.settings.precision)
    plan = specialize(program, batch).plan
    works = {(op.kind, op.flops, op.nbytes, op.attention_flops) for op in plan.graph}
    assert {(m.kind, m.flops, m.nbytes, m.attention_flops) for m in on.measured} == works
    assert simulate(plan, on).seconds == pytest.approx(sum(map(on.seconds, plan.graph)))
    assert on.unified == (program.device.type == "cpu")
    assert 0 < on.handoff < 1
    assert parse_profile(profile_text(profile), profile.name) == profile
    assert not on.lacking({"host": 10**6})
    return on


FP16 = pytest.param({"precision": "fp16"}, marks=pytest.mark.slow)


@pytest.mark.parametrize("more", [{}, FP16, {"micro_batches": 2, "moments": "8bit"}])
def test_a_program_is_measured(tmp_path: Path, more: dict[str, Any]) -> None:
    moments = zfunc.AdamW(lr=1e-4, moments=more.pop("moments", "fp32"))
    program, batch = compiled(optimizer=moments, **more)
    profile = calibrate(program, batch, turns=5, folder=tmp_path)
    on = check(profile, program, batch)
    assert profile.precisions == (program.settings.precision,)
    assert set(profile.figures["shared.cores"]) == set(KINDS)
    assert 0 < on.shared["cores"]["compute"] <= 1
    assert list(tmp_path.iterdir()) == []


def test_so_it_is_under_the_flags_of_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zfunc"):
        profile = measure_machine(CalibrateSettings(**SMALL, folder=tmp_path))
    assert "measured by the middle half of 4 steps of 3 segments" in caplog.text
    assert "the network is not in the profile: a single rank sends nothing" in caplog.text
    assert profile.title.endswith("cores")
    with pytest.raises(ValueError, match="got precision 'bf16', expected one it has: use fp32"):
        profile.hardware("bf16")


def test_the_command_writes_a_file_that_plans_are_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [word for k, n in MODEL.items() for word in (f"--{k.replace('_', '-')}", str(n))]
    out, more = tmp_path / "here.toml", ["--bucket-size", "4096"]
    where = ["--folder", str(tmp_path), "--out", str(out), "--turns", "3", "--device", "cpu"]
    assert main(["calibrate", *model, *more, *where]) == 0
    printed = capsys.readouterr().out
    assert f"written: {out}" in printed
    assert f"zfunc plan --hardware {out}" in printed
    on = ["--hardware", str(out), "--vocab-size", "256", "--precision", "fp32", "--json"]
    assert main(["plan", *model, *more, *on]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"]
    assert answer["step_seconds"] > 0


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected one, where operations run alone: measure steps under Serial"
    ):
        calibrate(*compiled("Overlapped"), turns=1, folder=tmp_path)


def test_steps_that_an_overflow_cuts_short_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    program, batch = compiled()
    real, seen = zfunc.train_step, []

    def skipping(*args: Any, **more: Any) -> Any:
        state, metrics = real(*args, **more)
        seen.append(evolve(metrics, skipped=len(seen) in (8, 9)))
        return state, seen[-1]

    monkeypatch.setattr("zfunc.planner.calibrate.train_step", skipping)
    alone, beside = traced_steps((program, rescheduled(program, schedules.Overlapped())), batch, 3)
    assert len(alone) == len(beside) == 3
    assert len(seen) == 2 * (3 + 1 + 3)  # warm-up, two overflows in one turn, what counts
    assert [len(steps[0].plan.lanes) for steps in (alone, beside)] == [1, 4]


def test_overflows_without_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program, batch = compiled()
    real = zfunc.train_step

    def skipping(*args: Any, **more: Any) -> Any:
        state, metrics = real(*args, **more)
        return state, evolve(metrics, skipped=True)

    monkeypatch.setattr("zfunc.planner.calibrate.train_step", skipping)
    with pytest.raises(ValueError, match="got 61 overflows in a row, expected steps that count: use bf16"):
        traced_steps((program,), batch, 1)


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    lines = measure_disk(tmp_path)
    assert all(rate > 1e6 and 0 < latency < 1 for latency, rate in (lines["read"], lines["write"]))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        measure_disk(tmp_path / "none")


def test_the_training_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Program] = []
    monkeypatch.setattr("zfunc.planner.calibrate.calibrate", lambda program, *_, **__: given.append(program))
    measure_machine(CalibrateSettings(**SMALL))
    settings = given[0].settings
    assert (settings.schedule, settings.bucket_size) == ("Serial", 4096)
    assert given[0].segments[0].parameters[0].shape == (256, 32)


# ---- a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_gpu_is_measured(tmp_path: Path, precision: str) -> None:
    segments, batch = MODELS["tied GPT"]()
    program = zfunc.compile(segments, schedule="Serial", device="cuda", precision=precision, clip_norm=1.0)
    profile = calibrate(program, batch(0), turns=5, folder=tmp_path)
    check(profile, program, batch(0))
    on = profile.hardware(precision)
    assert not on.unified
    assert set(on.shared) == {"host memory", "disk"}
    assert on.memory["device"] <= torch.cuda.mem_get_info()[1]
    assert profile.value("count", "devices") == torch.cuda.device_count()
