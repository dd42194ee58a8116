"""Many micro-batches planned from a few: what the full simulation says, on every recipe and schedule."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from attrs import evolve
from zfunc.schedules import make_order

from zfunc.core.critical_path import bound_seconds, critical_path_of
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.memory_model import persistent_bytes
from zfunc.core.settings import StepSettings
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.planner.candidate import CLOSE, FEW, PlannedStep, step_of
from zfunc.planner.candidate import MANY as TIMES

MANY = FEW[0] * TIMES
ON = evolve(
    ROUND, handoff=1e-5, memory={"device": 1 << 22}, shared={"host memory": {"host": 1.0, "d2h": 0.3}}
)
BUSES = evolve(ON, shared={"host memory": {"host": 1.0, "d2h": 0.3, "h2d": 0.3, "compute": 0.2}})
SLOW_COPIES = evolve(ON, rates={**ON.rates, "d2h": 1e8})
CLIPPED = {"clip_norm": 1.0}
FOUR = {**CLIPPED, "segments": 4}
LARGE_INPUTS = {**CLIPPED, "input_bytes": 1 << 24}  # to copy one takes longer than forward, not than backward
VERTICAL = {"order": "vertical", "micro_batches": 2 * MANY}
TWO = {"devices": 2, "micro_batches": 2 * MANY}
LONGER = {**VERTICAL, "micro_batches": 4 * MANY}
CHAINS = {**TWO, "micro_batches": 2 * MANY + 1, "schedule": "CriticalPath", "params_on": "host"}
BEHIND = {"schedule": "Interleaved", "activations_on": "host", "micro_batches": 40}
ON_HOST = {"params_on": "host", "activations_on": "host"}
ON_DISK = {"params_on": "host", "activations_on": "disk"}

# Settings, others or fields of the spec, and whether a few micro-batches are enough.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Hardware, bool]] = {
    "as it is": ({}, {}, ON, True),
    "clipped": ({}, CLIPPED, ON, True),
    "serial": ({"schedule": "Serial"}, CLIPPED, ON, False),
    "interleaved, ranks": ({"schedule": "Interleaved"}, {"world": 2, **CLIPPED}, ON, True),
    "two threads": ({"schedule": "TwoThreads"}, CLIPPED, ON, False),
    "critical path": ({"schedule": "CriticalPath"}, CLIPPED, ON, True),
    "slots": ({"slots": 3}, CLIPPED, ON, True),
    "half on the device": ({"state_on": "device:0.5,host"}, CLIPPED, ON, True),
    "deferred": ({"defer": True}, CLIPPED, ON, True),
    "stage 1": ({"stage": 1}, CLIPPED, ON, True),
    "saving": ({}, {"save": True, **CLIPPED}, ON, True),
    "residuals": ({"recompute": "min-cut"}, {}, ON, True),
    "in groups": ({"order": 2, "micro_batches": MANY * 2}, CLIPPED, ON, True),
    "streamed in groups": ({"order": 2, "micro_batches": MANY * 2, **ON_DISK}, CLIPPED, ON, False),
    "vertical": (VERTICAL, {}, ON, False),
    "vertical, params": ({**VERTICAL, "params_on": "host"}, CLIPPED, ON, False),
    "vertical, activations": ({**VERTICAL, "activations_on": "disk,host"}, CLIPPED, ON, False),
    "vertical, streamed": ({**LONGER, **ON_HOST, "defer": True}, CLIPPED, ON, False),
    "vertical, on ranks": ({**VERTICAL, **ON_HOST, "stage": 3}, {"world": 2, **CLIPPED}, ON, False),
    "vertical, half on the device": ({**VERTICAL, "state_on": "device:0.5,host"}, CLIPPED, ON, False),
    "vertical, forward waits for copies": ({**VERTICAL, **ON_HOST}, LARGE_INPUTS, ON, False),
    "vertical, slow gradients": ({**VERTICAL, "params_on": "host"}, CLIPPED, SLOW_COPIES, False),
    "two devices": ({**TWO, "order": "OneFOneB:2,1"}, {}, ON, False),
    "two devices, all forwards first": ({**TWO, "order": "GPipe:2,1"}, CLIPPED, ON, False),
    "two devices, several stages": ({**TWO, "order": "Interleaved1F1B:1,1,1,1"}, FOUR, ON, False),
    "two devices, stages in turn": ({**TWO, **ON_HOST, "order": "RoundPipe"}, CLIPPED, ON, False),
    "two devices, inputs wait": ({**CHAINS, "order": "OneFOneB:2,2"}, FOUR, ON, True),
    "inputs on a shared bus": ({"micro_batches": 2 * MANY}, {"target_bytes": 10**6}, BUSES, True),
    "activations behind all inputs": (BEHIND, {"input_bytes": 1 << 22}, ON, False),
    "an order that changes with their number": ({**BEHIND, "schedule": "CriticalPath"}, CLIPPED, ON, False),
}


MEASURES = (  # what `zfunc plan` says of a step
    lambda step: dict(Counter(op.kind for op in step.plan.graph)),
    lambda step: step.timeline.busy_seconds,
    lambda step: bound_seconds(critical_path_of(step.plan, step.timeline)),
)


def many(settings: StepSettings, **fields: Any) -> StepSpec:
    """Three layers whose arithmetic takes milliseconds, beside latencies of microseconds."""
    parameters = [
        [Parameter(f"{s}.up", (512, 512)), Parameter(f"{s}.down", (512, 512))]
        for s in range(fields.pop("segments", 3))
    ]
    input_bytes = fields.pop("input_bytes", 1 << 16)
    cost = SegmentCost(
        PassCost(10**11, workspace=1 << 14),
        PassCost(3 * 10**11, workspace=1 << 15),
        input_bytes=input_bytes,
        residual_bytes=1 << 18,
    )
    layout = make_layout(parameters, bucket_size=1 << 18, world=fields.get("world", 1))
    order = make_order(settings.order) if settings.devices > 1 else None
    return StepSpec(
        layout, [cost] * len(parameters), settings, order=order, **{"target_bytes": 512, **fields}
    )


def in_full(spec: StepSpec, settings: StepSettings, on: Hardware) -> PlannedStep:
    step = step_of(spec, settings, on)
    vars(step)["_from_few"] = None, 0.0
    return step


@pytest.mark.parametrize("name", CASES)
def test_a_few_micro_batches_say_what_all_do(name: str) -> None:
    given, fields, on, settles = CASES[name]
    fields = {**fields}
    given = {"micro_batches": MANY, **given, "clip_norm": fields.pop("clip_norm", None)}
    settings = StepSettings(bucket_size=1 << 18, **given)
    if settings.order != "vertical":
        settings = evolve(settings, micro_batches=settings.micro_batches + 3)
    spec = many(settings, **fields)
    few, full = step_of(spec, settings, on), in_full(spec, settings, on)
    assert few.seconds == pytest.approx(full.seconds, rel=1e-9)
    assert few.peaks == full.peaks
    assert few.held == full.held
    for measure in MEASURES:
        assert few.total(measure) == pytest.approx(full.total(measure), rel=1e-6, abs=1e-12)
    graph = full.plan.graph
    assert {tier: peak.kept for tier, peak in few.peaks.items()} == few.kept == persistent_bytes(graph)
    for kind, seconds in few.work.items():
        of_each = Counter({op.device: 0.0 for op in graph})
        for op in graph:
            of_each[op.device] += on.seconds(op) if op.kind == kind else 0.0
        assert seconds == pytest.approx(max(of_each.values()), rel=1e-9)
    assert (few.lacking, few.plan) == (full.lacking, full.plan)
    assert (few.repetition is not None) == settles
    again = step_of(spec, settings, on).without_operations()
    assert (again.seconds, again.peaks) == (few.seconds, few.peaks)


WAITING = evolve(ON, handoff=3e-5)
# Where what one group more adds says too little: groups alternate, a lane falls behind that does not bound the step
# yet, all inputs are copied before activations, or the order changes with the number.
DRAWN = (2, 13, 20, 25, 32)


@pytest.mark.parametrize(
    "seed", [*DRAWN, *(pytest.param(x, marks=pytest.mark.slow) for x in range(60) if x not in DRAWN)]
)
def test_jobs_at_random_are_extrapolated_right_or_not_at_all(seed: int) -> None:
    draw = Random(seed)
    group = draw.choice([1, 1, 2, 3, 4])
    settings = StepSettings(
        bucket_size=draw.choice([1 << 14, 1 << 16, 1 << 18]),
        order=group,
        micro_batches=group * draw.randint(9, 60) + group // 2,
        schedule=draw.choice(["Overlapped", "Interleaved", "CriticalPath"]),
        params_on=draw.choice(["device", "host"]),
        activations_on=draw.choice(["device", "host", "disk"]),
        slots=draw.choice([1, 2, 3]),
        clip_norm=draw.choice([None, 1.0]),
    )
    rates = {**ON.rates, **{bus: 10 ** draw.uniform(8, 10.5) for bus in ("d2h", "h2d")}}
    spec = many(settings, segments=draw.randint(2, 5), input_bytes=int(2 ** draw.uniform(12, 24)))
    costs = [evolve(x, forward=PassCost(int(10 ** draw.uniform(9.5, 11.3)), 1 << 14)) for x in spec.costs]
    spec, on = evolve(spec, costs=costs), evolve(WAITING, rates=rates)
    few, full = step_of(spec, settings, on), in_full(spec, settings, on)
    assert few.seconds == pytest.approx(full.seconds, rel=10 * CLOSE)
    assert few.peaks == full.peaks
