"""The orders of several devices: published makespans, what any order promises, and what is refused."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import plain
import pytest
import torch.distributed.pipelining.schedules as of_torch
import trained
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from small_models import SHORTER
from table import TIED, chain, spec
from zfunc.schedules import (
    ORDERS,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    OneFOneB,
    Overlapped,
    RoundPipe,
    ZeroBubble,
    make_order,
)
from zfunc.schedules.csv_file import FromCSV

import zfunc
from zfunc.core.graph import Graph, Op
from zfunc.core.hardware import ROUND
from zfunc.core.pipeline import WAYS, B, F, I, Order, R, W
from zfunc.core.plan import build
from zfunc.core.recipes import zero_offload
from zfunc.core.simulator import simulate
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.core.timeline import Timeline
from zfunc.errors import PlanError


def timeline(of: StepSpec, flops: float, hop: float = 0.0) -> Timeline:
    """A step whose passes take their FLOPs at this rate, what another device sends `hop`, and all else nothing.

    Copies of one verb wait for no others: the published simulator has no lanes for them.
    """
    graph, lanes = Graph(tuple(zero_offload(of))), dict[str, list[int]]()
    for i, op in enumerate(graph):
        lane = op.kind if op.kind == "compute" else op.verb
        lanes.setdefault(f"{lane}:{op.device}", []).append(i)

    def seconds(op: Op) -> float:
        if op.verb in WAYS:
            return op.flops / flops
        return hop if op.verb in ("recv_act", "recv_grad_act") else 0.0

    return simulate(build(graph, lanes), evolve(ROUND, handoff=0.0, shared={}), [*map(seconds, graph)])


def pipeline(
    order: Order, devices: int, costs: Sequence[SegmentCost], micro_batches: int, **more: Any
) -> StepSpec:
    more = {"devices": devices, "order": order, "micro_batches": micro_batches, "barrier": True, **more}
    return evolve(spec(chain(*[(8, 8)] * len(costs)), **more), costs=costs)


LAYER, HEAD = (  # of Llama 3 8B, in 10 picoseconds
    SegmentCost(PassCost(forward), PassCost(backward), input_bytes=32_000)
    for forward, backward in ((1_850_370_313, 5_971_029_688), (3_722_550_000, 7_450_100_000))
)
AHEAD = evolve(LAYER, backward=PassCost(4_120_659_375), recompute=PassCost(1_850_370_313))
PUBLISHED = {  # milliseconds, of 8 devices, 16 micro-batches and hops of 3.2
    GPipe((*[4] * 7, 5)): 9028.112,
    OneFOneB((*[4] * 7, 5)): 9028.112,
    Interleaved1F1B(4, (*[1] * 31, 2)): 7539.218,
    LoopedBFS(4, (*[1] * 31, 2)): 7385.618,
    RoundPipe((5, 5, 5, 5, 6, 6), (*[2] * 16, 1)): 6100.545,
}


@pytest.mark.parametrize("order", PUBLISHED, ids=lambda x: type(x).__name__)
def test_published_makespans(order: Order) -> None:
    """Those of RoundPipe's simulator (github.com/ITcarrot/RoundPipe-artifact, pp-simulate/log)."""
    dealt = isinstance(order, RoundPipe)
    places = {"params_on": "host", "activations_on": "host"} if dealt else {}
    of = pipeline(order, 8, [AHEAD if dealt else LAYER] * 32 + [HEAD], 16, **places)
    assert round(timeline(of, 1e11, 3.2e-3).seconds * 1e3, 3) == PUBLISHED[order]
    if dealt:  # and where backward recomputes
        of = pipeline(order, 8, [LAYER] * 32 + [HEAD], 16, recompute=[False] * 33, **places)
        assert round(timeline(of, 1e11, 3.2e-3).seconds * 1e3, 3) == 6315.592


@pytest.mark.parametrize("order", [GPipe(), OneFOneB(), LoopedBFS(3)], ids=lambda x: type(x).__name__)
def test_one_device_is_an_order_like_any_other(order: Order) -> None:
    """1F1B of one device passes its micro-batches one by one; an order of its own is planned as it is given."""
    of = spec(TIED, micro_batches=3)
    planned = evolve(of, order=order)
    ended = [x for x in planned.passes if x.ended]
    (listed,) = order(1, 3, 3)
    assert [(x.way, x.m, x.s) for x in ended] == [*listed]
    assert ([*zero_offload(planned)] == [*zero_offload(of)]) == isinstance(order, OneFOneB)


@given(st.data(), st.sampled_from(list(ORDERS)), st.integers(2, 4), st.integers(1, 7))
def test_any_order_has_every_pass_once_after_those_it_needs(
    data: st.DataObject, name: str, devices: int, micro_batches: int
) -> None:
    """On however many segments and micro-batches: `StepSpec` checks the passes, `build` the order of operations."""
    least = devices * (2 if name in ("Interleaved1F1B", "LoopedBFS", "DualPipeV") else 1)
    count = data.draw(st.integers(least, 3 * devices))
    more = {"params_on": "host", "activations_on": "host"}
    of = pipeline(make_order(name), devices, [LAYER] * count, micro_batches, **more)
    made = Counter(x.way for x in of.passes if x.ended)
    assert made[F] == made[B] + made[I] == made[B] + made[W] == count * micro_batches
    assert made[R] == (name == "RoundPipe") * (count - 1) * micro_batches
    Overlapped()(Graph(tuple(zero_offload(of))))


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 9])
def test_the_bubble_of_plain_pipelines_is_the_textbooks(devices: int, micro_batches: int) -> None:
    """(devices - 1) / (micro-batches + devices - 1) of equal stages; 1F1B keeps no more inputs than stages."""
    cost, inputs = SegmentCost(PassCost(10**9), PassCost(3 * 10**9), input_bytes=64), list[int]()
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


def passes_of_torch(
    kind: type, devices: int, stages: int, micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """The passes of each rank of a schedule of torch's; a forward and a backward that it overlaps in this order."""
    ways = {of_torch.FORWARD: F, of_torch.FULL_BACKWARD: B}
    ways |= {of_torch.BACKWARD_INPUT: I, of_torch.BACKWARD_WEIGHT: W}
    own = object.__new__(kind)  # its list needs no stages of real modules
    own.pp_group_size, own.n_local_stages, own._n_microbatches = devices, stages, micro_batches
    own._num_stages = own.num_stages = stages * devices
    own.microbatches_per_round = micro_batches // max(1, micro_batches // devices)
    ranks = ([x for x in own._calculate_single_rank_operations(d) if x is not None] for d in range(devices))
    flat = ([y for x in rank for y in (x.sub_actions or (x,))] for rank in ranks)
    return [[(ways[x.computation_type], x.microbatch_index, x.stage_index) for x in rank] for rank in flat]


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_split_orders_are_those_of_torch(devices: int) -> None:
    """Interleaved or not. Where torch refuses micro-batches that its rounds or stages do not divide, ours go on."""
    for n in (1, devices, 2 * devices, 2 * devices + 1, 5 * devices):
        for stages in (1, 2, 3):
            if n % max(1, n // devices) == 0:
                theirs = passes_of_torch(of_torch.ScheduleInterleavedZeroBubble, devices, stages, n)
                assert ZeroBubble(stages)(devices, stages * devices, n) == theirs
        if n >= 2 * devices:
            assert DualPipeV()(devices, 2 * devices, n) == passes_of_torch(
                of_torch.ScheduleDualPipeV, devices, 2, n
            )


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_bubbles_that_gradients_of_weights_fill(devices: int) -> None:
    """Where forward and both halves of backward take a second each: 1F1B waits (devices - 1)(F + B), ZB-H1
    (devices - 1)(F + I - W), as its paper says, and DualPipeV, which overlaps nothing here, half of that."""
    micro_batches = 4 * devices

    def bubble(order: Order, stages: int) -> float:
        """Of so many stages on each device, which take a second together."""
        flops = 12 // stages
        cost = SegmentCost(*(PassCost(x) for x in (flops, 2 * flops, flops, flops)))
        of = pipeline(order, devices, [cost] * devices * stages, micro_batches)
        return timeline(of, 12).seconds - 3 * micro_batches

    assert bubble(OneFOneB(), 1) == pytest.approx(3 * (devices - 1))
    assert bubble(ZeroBubble(), 1) == pytest.approx(devices - 1)
    assert bubble(DualPipeV(), 2) == pytest.approx((devices - 1) / 2)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_under_any_order_are_those_of_autograd(order: str) -> None:
    """Of segments that edit copies through views, and of such whose tensors are one."""
    for name in ("edits", "aliases"):
        program, batch = trained.compiled(
            SHORTER[name](),
            **{"precision": "fp32", "micro_batches": 6, "devices": 2, "order": order, "recompute": "all"},
            **({"params_on": "host", "activations_on": "host"} if order == "RoundPipe" else {}),
        )
        program = evolve(program, optimizer=plain.remembering(program.optimizer))
        parts = [plain.Part.of(x) for x in program.segments]
        plain.follow(program, zfunc.init(program, seed=1), parts, batch, steps=1, tolerance=3e-6)


def backwards_descend(devices: int, segments: int, micro_batches: int) -> Any:
    order = GPipe()(devices, segments, micro_batches)
    return [[*own[: len(own) // 2], *reversed(own[len(own) // 2 :])] for own in order]


def crossed(devices: int, segments: int, micro_batches: int) -> Any:
    first, second = OneFOneB()(2, 2, 1)
    return [first[::-1], second]


def split(*own: str) -> Order:
    """Two segments on the first device, whose micro-batches pass the second so backward."""
    passes = [
        (F, 0, 0),
        (F, 1, 0),
        (F, 0, 1),
        (F, 1, 1),
        *((x[0], int(x[1]), 1) for x in own),
        (B, 0, 0),
        (B, 1, 0),
    ]
    return lambda *_: [passes, []]


def first(*own: str) -> Order:
    """Two segments on devices of their own: the passes of the first one."""
    second = [(F, 0, 1), (F, 1, 1), (B, 0, 1), (B, 1, 1)]
    return lambda *_: [[(x[0], int(x[1]), 0) for x in own], second]


def recomputed_elsewhere(devices: int, segments: int, micro_batches: int) -> Any:
    own, other = GPipe()(devices, segments, micro_batches)
    return [own, [(R, m, 0) for m in range(micro_batches)] + [*other]]


def halves_apart(*n: int) -> Any:
    return [split("I0", "B1")(*n)[0], [("W", 0, 1)]]


def each_way_apart(devices: int, segments: int, micro_batches: int) -> Any:
    passes = [(m, s) for m in range(micro_batches) for s in range(segments)]
    return [[("F", m, s) for m, s in passes], [("B", m, segments - 1 - s) for m, s in passes]]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (lambda *_: None, "got None, expected a list for each device of its passes"),
        (lambda *_: [[(F, 0)], []], "got [[('F', 0)], []], expected a list for each device of its passes"),
        (
            lambda devices: [[]],
            "cannot be called with three numbers (too many positional arguments), expected a",
        ),
        (
            FromCSV("nowhere.csv"),
            "got 'nowhere.csv', which cannot be read (No such file or directory), expected a CSV",
        ),
        (FromCSV("/dev"), "got '/dev', which cannot be read (Is a directory), expected a CSV"),
        (lambda *_: [[]], "got passes for 1 devices, expected 2"),
        (lambda *n: [own[1:] for own in GPipe()(*n)], "got F[0,0] 0 times, expected it once"),
        (lambda *n: [own + own[:1] for own in GPipe()(*n)], "got F[0,0] 2 times, expected it once"),
        (
            lambda *n: [[*own, ("F", 0, 9)] for own in GPipe()(*n)],
            "got F[0,9] 2 times, expected it not at all",
        ),
        (
            lambda *n: [[*own, ("R", 0, 9)] for own in GPipe()(*n)],
            "got R[0,9] 2 times, expected it not at all",
        ),
        (lambda *_: [[("F", 0.0, 0)], []], "got [[('F', 0.0, 0)], []], expected a list for each device"),
        (backwards_descend, "device 1 has B[1,1] next, which follows B[0,1]"),
        (crossed, "device 0 has B[0,0] next, which follows F[0,0]"),
        (GPipe((2, 1)), "got stages of 2, 1 segments, expected 2 of 1 or more with 2 in all"),
        (LoopedBFS(), "got 4 stages for 2 segments, expected at most 2"),
        (each_way_apart, "got B[0,1] on device 1 and its forward on device 0"),
        (split("I0", "B1"), "got W[0,1] 0 times, expected it once"),
        (split("B0", "I0", "W0", "B1"), "got B[0,1] 1 times, expected it not at all"),
        (split("W0", "I0", "B1"), "device 0 has W[0,1] next, which follows I[0,1]"),
        (
            halves_apart,
            "got W[0,1] on device 1 and the rest of that backward on device 0, expected one device",
        ),
        (split("I0", "B1", "W0"), "device 0 has B[1,1] next, which follows W[0,1]"),
        (first("F0", "F1", "R0", "B0", "B1"), "got R[1,0] 0 times, expected it once"),
        (first("F0", "F1", "R0", "B0", "B1", "R1"), "device 0 has B[1,0] next, which follows R[1,0]"),
        (first("R0", "F0", "F1", "R1", "B0", "B1"), "device 0 has R[0,0] next, which follows F[0,0]"),
        (recomputed_elsewhere, "got R[0,0] on device 1 and the rest of that backward on device 0"),
    ],
)
def test_an_order_that_is_none_is_refused(order: Order, says: str) -> None:
    micro_batches = 1 if order is crossed else 2
    with pytest.raises(PlanError, match=re.escape(says)):
        pipeline(order, 2, [LAYER] * 2, micro_batches)


def test_a_weight_of_two_devices_is_refused_where_it_lives_on_one() -> None:
    tied = spec(TIED, devices=2, params_on="host", order=GPipe())
    assert tied.places[0].home == 0
    with pytest.raises(
        PlanError, match=re.escape("weights embed on the devices [0, 1], expected one: pass params_on")
    ):
        spec(TIED, devices=2, order=GPipe())


def test_stage_1_adds_gradients_of_a_tied_weight_in_the_order_of_one_device() -> None:
    spec(TIED, devices=2, stage=1, micro_batches=2, order=lambda _, *n: [*GPipe()(1, *n), []])
    with pytest.raises(
        PlanError, match=re.escape("got B[1,2] before B[0,0] with stage=1 and the weights embed")
    ):
        spec(TIED, devices=2, stage=1, micro_batches=2, order=lambda _, *n: [*LoopedBFS(3)(1, *n), []])


@pytest.mark.parametrize("given", [{"tiles": 2}, {"compile_segments": True}])
def test_what_has_no_halves_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"got a backward in two halves with {next(iter(given))}="):
        spec(chain((8, 8), (8, 8)), devices=2, order=ZeroBubble(), **given)
