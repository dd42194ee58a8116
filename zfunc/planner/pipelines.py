"""Orders of the passes on several devices to plan, with stages cut by what their passes take.

Arithmetic alone: the time of the passes and of the hops between devices tells which orders are worth a simulation.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from attrs import asdict, evolve

from zfunc.core.graph import Op
from zfunc.core.pipeline import B, F, R, passes_on_several
from zfunc.errors import PlanError
from zfunc.planner.candidate import PlannedStep, operations_of
from zfunc.schedules import make_order
from zfunc.schedules.stages import cut_by_cost

ROUND_PIPE, SEVERAL = "RoundPipe", ("Interleaved1F1B", "LoopedBFS")
OF_STAGES = ("GPipe", "OneFOneB", *SEVERAL)  # those with halves of a backward are not tried
STAGES = (2, 3, 4)  # on each device, of orders with several
CUTS = 12  # of the stages of RoundPipe
UNIT = 1e-9  # seconds
Work = tuple[dict[str, int], ...]  # of a pass through each segment, by its way, in units


def work_of(step: PlannedStep) -> Work:
    """The time of a pass through each segment, which no order changes. Backward has what it recomputes, which takes
    about as long as forward."""
    few = evolve(step.spec, settings=evolve(step.settings, devices=1, micro_batches=1), order=None)
    ways = {"forward": F, "backward": B}
    work: list[dict[str, int]] = [{F: 0, B: 0} for _ in range(step.spec.num_segments)]
    for op in operations_of(few):
        if op.verb in ways:
            work[op.index[1]][ways[op.verb]] = round(step.hardware.seconds(op) / UNIT)
    for _, s in (x for x in step.spec.parts if x[0] == R):
        again = Op("recompute", (0, s), "compute", (), (), **asdict(step.spec.costs[s].recompute))
        work[s][B] += round(step.hardware.seconds(again) / UNIT)
    return tuple(x | {R: min(x.values())} for x in work)


def best_orders(step: PlannedStep, micro_batches: Sequence[int] = ()) -> list[tuple[str, int]]:
    """Orders as text, with numbers of micro-batches, of which one may be the fastest: those whose passes take least
    time of each kind, and with each number of micro-batches."""
    now = step.settings.micro_batches
    work, counts = work_of(step), [*dict.fromkeys((now, *micro_batches))]
    found = sorted((_makespan(step, x, m, work), x, m) for x in _orders(step, work) for m in counts)
    of_kind: dict[tuple[str, int], tuple[str, int]] = {}  # those of equal cuts apart
    for _, order, m in (x for x in found if x[0] < math.inf):
        of_kind.setdefault(("", m), (order, m))
        if m == now:
            of_kind.setdefault((order.partition(":")[0], ":" in order), (order, m))
    return list(dict.fromkeys(of_kind.values()))


def shifted(step: PlannedStep) -> list[str]:
    """The order with one segment in the stage beside its own: from the device that lacks memory; where none does,
    the two whose passes take least time."""
    name, _, cut = str(step.settings.order).partition(":")
    if not cut or "/" in cut:
        return []
    stages, devices, work = [*map(int, cut.split(","))], step.settings.devices, work_of(step)
    short = {int(place.partition(":")[2] or 0) for place in step.lacking if place.startswith("device")}
    found: list[tuple[float, str]] = []
    for k, n in (x for a, b in pairwise(range(len(stages))) for x in ((a, b), (b, a))):
        if stages[k] > 1 and (not short or k % devices in short):
            lengths = [x - (i == k) + (i == n) for i, x in enumerate(stages)]
            order = f"{name}:{','.join(map(str, lengths))}"
            found.append((_makespan(step, order, step.settings.micro_batches, work), order))
    return [order for seconds, order in sorted(found)[:2] if seconds < math.inf]


def _orders(step: PlannedStep, work: Work) -> Iterator[str]:
    """Published orders with stages that are cut by cost; and by number, where copies take longer than compute."""
    devices, costs = step.settings.devices, [x[F] + x[B] for x in work]
    if step.work["compute"] < max(step.work.values()):
        yield from OF_STAGES
    yield ROUND_PIPE
    for name in OF_STAGES:
        each = STAGES if name in SEVERAL else (1,)
        for count in (n * devices for n in each if n * devices <= len(costs)):
            yield f"{name}:{_text(cut_by_cost(costs, count))}"
    forward, backward = [x[F] for x in work[:-1]], [x[B] for x in work[:-1]] + costs[-1:]
    ways_there = [cut_by_cost(forward, n + 1) for n in range(len(forward))]
    for count in {max(1, round(len(costs) * n / CUTS)) for n in range(1, CUTS + 1)}:
        back = cut_by_cost(backward, count)
        most = _largest(backward, back)  # of forward as few stages as take no longer than one of backward
        there = next((cut for cut in ways_there if _largest(forward, cut) <= most), ways_there[-1])
        yield f"{ROUND_PIPE}:{_text(there)}/{_text(back)}"


def _text(cut: Sequence[int]) -> str:
    return ",".join(map(str, cut))


def _largest(costs: Sequence[float], cut: Sequence[int]) -> float:
    ends = [0, *accumulate(cut)]
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


def _makespan(step: PlannedStep, order: str, micro_batches: int, work: Work) -> float:
    """The time of the passes of that order, in units; infinite where places exclude it.

    Those of more micro-batches are as much shorter: nothing is known of what each takes beside its rows.
    """
    settings, spec = step.settings, step.spec
    with suppress(PlanError):
        evolve(spec, order=make_order(order), settings=evolve(settings, micro_batches=micro_batches))
        parts = settings.micro_batches / micro_batches
        one = [{way: round(x * parts) for way, x in ways.items()} for ways in work]
        hops = [round(2 * parts * x.input_bytes / step.hardware.rates["d2h"] / UNIT) for x in spec.costs]
        trained = [x for x in range(spec.num_segments) if spec.layout.buckets_of(x)]
        given = settings.devices, micro_batches, trained, one, hops, spec.repeated
        passes = (x for x in passes_on_several(make_order(order), *given) if not x.ended)
        free, ends = [0] * settings.devices, dict[tuple[str, int, int], tuple[int, int]]()
        for way, m, s, d, *_ in passes:
            before = [(F, m, s - 1)] if way == F else [(F, m, s), (B, m, s + 1)][: 1 + (way == B)]
            came = (ends[x][0] + hops[max(x[2], s)] * (ends[x][1] != d) for x in before if x in ends)
            made = one[s][R] if way == B and (R, m, s) in ends else 0
            free[d] = max(free[d], *came, 0) + one[s][way] - made
            ends[way, m, s] = free[d], d
        return max(free)
    return math.inf
