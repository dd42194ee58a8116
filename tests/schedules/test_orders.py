"""The orders of several devices: published makespans, what any order promises, and what is refused."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from table import TIED, chain, spec
from zfunc.schedules import (
    ORDERS,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    OneFOneB,
    Overlapped,
    make_order,
)

from zfunc.core.graph import Graph, Op
from zfunc.core.hardware import ROUND
from zfunc.core.pipeline import Order
from zfunc.core.recipes import zero_offload
from zfunc.core.simulator import simulate
from zfunc.core.spec import SegmentCost, StepSpec
from zfunc.core.timeline import Timeline
from zfunc.errors import PlanError


def timeline(of: StepSpec, flops: float, hop: float = 0.0) -> Timeline:
    """A step whose passes take their FLOPs at this rate, what another device sends `hop`, and all else nothing."""
    graph = Graph(tuple(zero_offload(of)))

    def seconds(op: Op) -> float:
        if op.verb in ("forward", "backward"):
            return op.flops / flops
        return hop if op.verb in ("recv_act", "recv_grad_act") else 0.0

    return simulate(Overlapped()(graph), evolve(ROUND, handoff=0.0, shared={}), [*map(seconds, graph)])


def pipeline(
    order: Order, devices: int, costs: Sequence[SegmentCost], micro_batches: int, **more: Any
) -> StepSpec:
    more = {"devices": devices, "order": order, "micro_batches": micro_batches, "barrier": True, **more}
    return evolve(spec(chain(*[(8, 8)] * len(costs)), **more), costs=costs)


LAYER = SegmentCost(1_850_370_313, 32_000, backward_flops=5_971_029_688)  # of Llama 3 8B, in 10 picoseconds
HEAD = SegmentCost(3_722_550_000, 32_000, backward_flops=7_450_100_000)
PUBLISHED = {  # milliseconds, of 8 devices, 16 micro-batches and hops of 3.2
    GPipe((*[4] * 7, 5)): 9028.112,
    OneFOneB((*[4] * 7, 5)): 9028.112,
    Interleaved1F1B(4, (*[1] * 31, 2)): 7539.218,
    LoopedBFS(4, (*[1] * 31, 2)): 7385.618,
}


@pytest.mark.parametrize("order", PUBLISHED, ids=lambda x: type(x).__name__)
def test_published_makespans(order: Order) -> None:
    """Those of RoundPipe's simulator (github.com/ITcarrot/RoundPipe-artifact, pp-simulate/log)."""
    of = pipeline(order, 8, [LAYER] * 32 + [HEAD], 16)
    assert round(timeline(of, 1e11, 3.2e-3).seconds * 1e3, 3) == PUBLISHED[order]


@given(st.data(), st.sampled_from(list(ORDERS)), st.integers(2, 4), st.integers(1, 7))
def test_any_order_has_every_pass_once_after_those_it_needs(
    data: st.DataObject, name: str, devices: int, micro_batches: int
) -> None:
    """On however many segments and micro-batches: `StepSpec` checks the passes, `build` the order of operations."""
    least = devices * (2 if name in ("Interleaved1F1B", "LoopedBFS") else 1)
    count = data.draw(st.integers(least, 3 * devices))
    more = {"params_on": "host", "activations_on": "host"}
    of = pipeline(make_order(name), devices, [LAYER] * count, micro_batches, **more)
    assert len(of.passes) == 2 * 2 * count * micro_batches
    Overlapped()(Graph(tuple(zero_offload(of))))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 9])
def test_the_bubble_of_plain_pipelines_is_the_textbooks(devices: int, micro_batches: int) -> None:
    """(devices - 1) / (micro-batches + devices - 1) of equal stages; 1F1B keeps no more inputs than stages."""
    cost, inputs = SegmentCost(10**9, 64, backward_flops=3 * 10**9), list[int]()
    for order in (GPipe(), OneFOneB()):
        of = pipeline(order, devices, [cost] * devices, micro_batches)
        seconds = timeline(of, 1e9).seconds
        assert seconds == pytest.approx((micro_batches + devices - 1) * 4)
        held, most = 0, 0
        for x in (x for x in of.passes if x.s == x.device == 0 and x.ended):
            held += 1 if x.way == "F" else -1
            most = max(most, held)
        inputs.append(most)
    assert inputs == [micro_batches, min(micro_batches, devices)]


def backwards_descend(devices: int, segments: int, micro_batches: int) -> Any:
    order = GPipe()(devices, segments, micro_batches)
    return [[*own[: len(own) // 2], *reversed(own[len(own) // 2 :])] for own in order]


def crossed(devices: int, segments: int, micro_batches: int) -> Any:
    first, second = OneFOneB()(2, 2, 1)
    return [first[::-1], second]


def each_way_apart(devices: int, segments: int, micro_batches: int) -> Any:
    passes = [(m, s) for m in range(micro_batches) for s in range(segments)]
    return [[("F", m, s) for m, s in passes], [("B", m, segments - 1 - s) for m, s in passes]]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (lambda *_: [[]], "got passes for 1 devices, expected 2"),
        (lambda *n: [own[1:] for own in GPipe()(*n)], "got F[0,0] 0 times, expected it once"),
        (lambda *n: [own + own[:1] for own in GPipe()(*n)], "got F[0,0] 2 times, expected it once"),
        (
            lambda *n: [[*own, ("F", 0, 9)] for own in GPipe()(*n)],
            "got F[0,9] 2 times, expected it not at all",
        ),
        (backwards_descend, "device 1 has B[1,1] next, which follows B[0,1]"),
        (crossed, "device 0 has B[0,0] next, which follows F[0,0]"),
        (GPipe((2, 1)), "got stages of 2, 1 segments, expected 2 of 1 or more with 2 in all"),
        (LoopedBFS(), "got 4 stages for 2 segments, expected at most 2"),
        (each_way_apart, "got B[0,1] on device 1 and its forward on device 0"),
    ],
)
def test_an_order_that_is_none_is_refused(order: Order, says: str) -> None:
    micro_batches = 1 if order is crossed else 2
    with pytest.raises(PlanError, match=re.escape(says)):
        pipeline(order, 2, [LAYER] * 2, micro_batches)


def test_a_weight_of_two_devices_is_refused_where_it_lives_on_one() -> None:
    tied = spec(TIED, devices=2, params_on="host", order=GPipe())
    assert tied.home(0) == 0
    with pytest.raises(
        PlanError, match=re.escape("weights embed on the devices [0, 1], expected one: pass params_on")
    ):
        spec(TIED, devices=2, order=GPipe())
