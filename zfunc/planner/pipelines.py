"""Orders of the passes on several devices to plan, with stages cut by what their passes take.

Arithmetic alone: the time of the passes and of the hops between devices tells which orders are worth a simulation.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import Any

from attrs import asdict, evolve

from zfunc.core.graph import Op
from zfunc.core.pipeline import B, F, I, Pass, R, W, passes_in, passes_listed
from zfunc.errors import PlanError
from zfunc.planner.candidate import PlannedStep
from zfunc.schedules import make_order
from zfunc.schedules.stages import cuts_by_cost

STAGES = {  # that are tried on each device
    **dict.fromkeys(("GPipe", "OneFOneB"), (1,)),
    **dict.fromkeys(("Interleaved1F1B", "LoopedBFS"), (2, 3, 4)),
    "ZeroBubble": (1, 2, 3, 4),
    "DualPipeV": (2,),
}
ROUND_PIPE = "RoundPipe"
UNIT = 1e-9  # seconds
WORTH = 0.01  # of a step's time: a change that gains less is not made
Work = tuple[dict[str, int], ...]  # of a pass through each segment, by its way, in units


def work_of(step: PlannedStep) -> Work:
    """For each segment of `step`, the ns of each kind of pass on its device. Backward includes recomputation;
    a recomputation, and the weight half of a split backward, are each assumed to take as long as forward."""
    work: list[dict[str, int]] = []
    for s, x in enumerate(step.spec.costs):
        alike = evolve(x.forward, flops=x.forward.flops - x.forward.attention_flops, attention_flops=0)
        made = x.passes
        made |= {} if (W, s) in step.spec.mesh.parts else {W: alike}
        ops = {way: Op("", (), "compute", **asdict(cost)) for way, cost in made.items()}
        own = {way: round(step.hardware.seconds(op) / UNIT) for way, op in ops.items()}
        if (R, s) in step.spec.mesh.parts:
            own[B] += own[R]
        own |= {R: min(own[F], own[B])}
        work.append(own | {I: max(0, own[B] - own[W])})
    return tuple(work)


def best_orders(
    step: PlannedStep, micro_batches: Sequence[int], places: Iterable[Mapping[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield changes of `order` and `micro_batches` that may be the fastest, by the times of passes alone: the
    best order of each kind, and the best for each number of micro-batches; then the same together with each
    of `places`, changes of where parameters and activations are."""
    settings, work = step.settings, work_of(step)
    counts = [*dict.fromkeys((settings.micro_batches, *micro_batches))]
    found = {(x, m): _least_makespan(step, x, m, work) for x in {*_orders(step, work)} for m in counts}
    exact: dict[tuple[str, int], float] = {}
    for there in ({}, *places):
        known: set[Any] = set()
        allowed = cache(partial(_allowed, step, there))
        # Each with the least that its passes may take, until that is the least of all; then with what they do take.
        # What is not faster by what is worth a change is not looked at.
        left = [(seconds, False, *asked) for asked, seconds in found.items()]
        heapify(left)
        while left and left[0][0] < math.inf:
            _, ends, order, m = heappop(left)
            kind = order.partition(":")[0], ":" in order  # those of equal cuts apart
            new = {m, *([kind] if m == settings.micro_batches and not there else [])} - known
            changes = {"order": order, "micro_batches": m, **there}
            if new and ends:
                known |= new
                yield changes
            elif new and allowed(order, min(m, 2 * settings.stages)):
                if (order, m) not in exact:
                    exact[order, m] = _makespan(step, order, m, work)
                heappush(left, (exact[order, m] * (1 - WORTH), True, order, m))


def shifted(step: PlannedStep) -> list[str]:
    """Yield up to two pipeline orders, the fastest first, that differ from the order of `step` in one
    segment, moved to the neighbouring stage; from a device that lacks memory, if there is one."""
    name, _, cut = str(step.settings.order).partition(":")
    if not cut or "/" in cut:
        return []
    stages, devices, work = [*map(int, cut.split(","))], step.settings.devices, work_of(step)
    short = {int(place.partition(":")[2] or 0) for place in step.lacking if place.startswith("device")}
    found: list[tuple[float, str]] = []
    for k, n in (x for a, b in pairwise(range(len(stages))) for x in ((a, b), (b, a))):
        device = min(k, 2 * devices - 1 - k) if name == "DualPipeV" else k % devices
        if stages[k] > 1 and (not short or device in short):
            lengths = [x - (i == k) + (i == n) for i, x in enumerate(stages)]
            order = f"{name}:{_text(lengths)}"
            found.append((_makespan(step, order, step.settings.micro_batches, work), order))
    few = min(step.settings.micro_batches, 2 * devices)
    return [order for _, order in sorted(found) if _allowed(step, {}, order, few)][:2]


def _orders(step: PlannedStep, work: Work) -> Iterator[str]:
    """Names of published pipeline orders, with stages cut by their cost in `work`; if copies take longer than
    compute, also the names without cuts, which mean even stages."""
    devices, costs = step.settings.devices, [x[F] + x[B] for x in work]
    if step.work["compute"] < max(step.work.values()):
        yield from STAGES
    yield ROUND_PIPE
    cuts = [*cuts_by_cost(costs)]
    for name, each in STAGES.items():
        for count in (n * devices for n in each if n * devices <= len(costs)):
            yield f"{name}:{_text(cuts[count - 1])}"
    forward, backward = [x[F] for x in work[:-1]], [x[B] for x in work[:-1]] + costs[-1:]
    ways_there, ways_back = (
        [(_largest(x, cut), cut) for cut in cuts_by_cost(x)] for x in (forward, backward)
    )
    # The stages of a round go evenly on the devices: then each has one to sum its gradients on. Of more stages that
    # are as long the last are shorter, and no device is done sooner.
    known = set[tuple[int, int]]()
    for count in range(devices, len(costs) + len(forward) + 1, devices):
        ways = [
            (there, ways_back[count - n - 1])
            for n, there in enumerate(ways_there, 1)
            if 0 < count - n <= len(costs)
        ]
        # Of forward as few stages as take no longer than one of backward.
        (longest, there), (longest_back, back) = next((x for x in ways if x[0][0] <= x[1][0]), ways[-1])
        if (longest, longest_back) in known:
            continue
        known.add((longest, longest_back))
        yield f"{ROUND_PIPE}:{_text(there)}/{_text(back)}"


def _text(cut: Sequence[int]) -> str:
    return ",".join(map(str, cut))


def _largest(costs: Sequence[float], cut: Sequence[int]) -> float:
    ends = [0, *accumulate(cut)]
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


def _allowed(step: PlannedStep, there: Mapping[str, str], order: str, micro_batches: int) -> bool:
    """Whether `order` is valid with `micro_batches` and the settings of `step` changed as `there` says."""
    with suppress(ValueError):
        settings = evolve(step.settings, **there, order=order, micro_batches=micro_batches)
        evolve(step.spec, order=make_order(settings.order), settings=settings)
        return True
    return False


def _least_makespan(step: PlannedStep, order: str, micro_batches: int, work: Work) -> float:
    """A lower bound, in ns, of the time of `order`: the largest, over the devices, of a device's passes plus the
    passes of one micro-batch before its first pass and after its last; infinite for an invalid order."""
    with suppress(PlanError):
        listed, one, trained, _ = _passes(step, order, micro_batches, work)
        forward = [0, *accumulate(x[F] for x in one)]
        backward = [0, *accumulate(min(x[B], x[I]) * (s > trained[0]) for s, x in enumerate(one))]

        def least(own: list[Pass]) -> int:
            first, last = own[0], own[-1]
            before = forward[first.s if first.way == F else -1]
            after = backward[last.s] if last.way in (B, I) else 0
            return before + sum(one[x.s][x.way] for x in own) + after

        return max(map(least, filter(None, listed)))
    return math.inf


def _makespan(step: PlannedStep, order: str, micro_batches: int, work: Work) -> float:
    """The ns that all passes of `micro_batches` take under `order`; infinite if it is invalid for the segments."""
    with suppress(PlanError):
        listed, one, trained, hops = _passes(step, order, micro_batches, work)
        return passes_in(listed, trained, one, hops)[-1][0]
    return math.inf


def _passes(
    step: PlannedStep, order: str, micro_batches: int, work: Work
) -> tuple[list[list[Pass]], list[dict[str, int]], list[int], list[int]]:
    """The passes by device under `order`; for each segment, ns of a pass by kind, and ns of copying its input
    between stages; and the trained segments between them. Times of a pass are in proportion to rows of a
    micro-batch."""
    settings, spec, count = step.settings, step.spec, step.spec.num_segments
    trained = [x for x in range(count) if spec.layout.buckets_of(x)]
    listed = passes_listed(
        make_order(order), settings.stages, micro_batches, trained, count, spec.mesh.repeated
    )
    parts = settings.micro_batches / micro_batches
    one = [{way: round(x * parts) for way, x in ways.items()} for ways in work]
    for s in {x.s for x in chain(*listed) if x.way == R}:
        one[s] |= {way: one[s][way] - one[s][R] for way in (B, I)}
    copies = 1 if spec.mesh.peers else 2
    hops = [round(copies * parts * x.input_bytes / step.hardware.rates["d2h"] / UNIT) for x in spec.costs]
    return listed, one, trained, hops
