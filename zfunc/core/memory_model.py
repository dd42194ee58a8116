"""The peak memory of a plan on each tier, and the operation at which it is reached.

An upper bound for every timing the plan allows. A kept region always counts. Any other region counts at an
operation unless all of its accesses have certainly finished, or certainly none has started. A workspace counts
wherever its operation may run.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from attrs import field, frozen

from zfunc.core.graph import TIERS, Graph, Tier
from zfunc.core.layout import round_up
from zfunc.core.plan import Plan
from zfunc.core.regions import Regions
from zfunc.core.spec import ALLOCATION, StepSpec

Moment = tuple[int, int]  # of a lane: its number, and how many of its operations have started


@frozen
class Peak:
    """The peak memory of a tier: `kept` bytes all the time, plus `transient` bytes just after operation `op`
    ("": none) starts. `moment` is that time: (lane, number of its operations that have started)."""

    tier: Tier
    kept: int
    transient: int
    op: str
    moment: Moment = field(default=(0, 0), eq=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The peak memory of the tier in bytes, kept and transient."""
        return self.kept + self.transient


def bytes_by_tier(peaks: Mapping[Tier, Peak]) -> dict[Tier, int]:
    """The peak memory of each tier in bytes, kept and transient together, given `peaks`."""
    return {tier: peak.nbytes for tier, peak in peaks.items()}


def initial_memory(spec: StepSpec) -> dict[Tier, Peak]:
    """Peak memory by tier while `init` fills the State with initial values in fp32, one segment at a time.

    Of a State on the disk, one bucket at a time is in memory. Staging buffers are not included: they are
    allocated afterwards.
    """
    kept = Counter[Tier]()
    for r in Regions(spec).state():
        kept[r.place] += r.nbytes
    values = [4 * sum(p.numel for p in own) for own in spec.layout.parameters]
    largest = max(range(len(values)), key=lambda s: values[s])
    opened = max((x.nbytes for x in spec.swapped.values()), default=0) if spec.swaps else 0
    host = Peak("host", kept["host"], values[largest] + opened, f"the initial values of segment {largest}")
    places = dict.fromkeys((*TIERS, *kept))
    return {place: host if place == "host" else Peak(place, kept[place], 0, "") for place in places}


def peak_memory(plan: Plan) -> dict[Tier, Peak]:
    """Peak memory of `plan` by tier, and by device where there are several: an upper bound for every timing that
    the plan allows.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import build
    >>> x, y = Region("x", nbytes=8), Region("y", nbytes=4)
    >>> ops = Op("make", (), "compute", (), (x,)), Op("use", (), "compute", (x,), (y,), workspace=100)
    >>> peak_memory(build(Graph(ops), {"gpu": [0, 1]}))["device"]
    Peak(tier='device', kept=0, transient=112, op='use')
    """
    always = persistent_bytes(plan.graph)
    at: dict[Tier, tuple[int, str, Moment]] = dict.fromkeys(always, (0, "", (0, 0)))
    at |= {place: _highest(plan, alive) for place, alive in transient_bytes(plan).items()}
    return {place: Peak(place, always.get(place, 0), *highest) for place, highest in at.items()}


def persistent_bytes(graph: Graph) -> dict[Tier, int]:
    """Bytes, by tier, of the regions of `graph` that outlive their operations: no schedule needs less."""
    nbytes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for (place, _), size in _kept_buffers(graph).items():
        nbytes[place] = nbytes.get(place, 0) + size
    return nbytes


def _kept_buffers(graph: Graph) -> Counter[tuple[Tier, str]]:
    """Bytes of the regions of `graph` that outlive their operations, summed by (tier, buffer name). A sum in
    device memory is rounded up to the allocator's 512 bytes."""
    nbytes = Counter[tuple[Tier, str]]()
    for r in graph.regions:
        if r.kept:
            nbytes[r.place, r.buffer] += r.nbytes
    for key in nbytes:
        if key[0].startswith("device"):
            nbytes[key] = round_up(nbytes[key], ALLOCATION)
    return nbytes


def peak_breakdown(plan: Plan, moments: Mapping[Tier, Moment] | None = None) -> dict[Tier, dict[str, int]]:
    """Peak memory of each tier by buffer, the largest first, in bytes; the sum is `Peak.nbytes`.

    `moments` are the tiers' `Peak.moment` from `peak_memory`, which is called if they are not given.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import build
    >>> x, y = Region("x", nbytes=8), Region("y", (0,), nbytes=4, lifetime="value")
    >>> ops = Op("make", (), "compute", (), (x,)), Op("use", (), "compute", (x,), (y,), workspace=100)
    >>> peak_breakdown(build(Graph(ops), {"gpu": [0, 1]}))["device"]
    {'y': 512, 'workspace': 100, 'x': 8}
    """
    if moments is None:
        moments = {tier: peak.moment for tier, peak in peak_memory(plan).items()}
    parts: dict[Tier, Counter[str]] = {tier: Counter() for tier in moments}
    for (tier, buffer), size in _kept_buffers(plan.graph).items():
        parts[tier][buffer] += size
    known = _known(plan)
    for life in _lifetimes(plan):
        lane, moment = moments[life.tier]
        start, stop = _span(plan, known, lane, life)
        if start <= moment < stop:
            parts[life.tier][life.buffer] += life.nbytes
    return {tier: dict(sorted(x.items(), key=lambda item: -item[1])) for tier, x in parts.items()}


def transient_bytes(plan: Plan) -> dict[Tier, list[list[int]]]:
    """For each tier with transient allocations and each lane, bytes that may be alive at each moment of the lane.

    Moment 0 is before the lane's first operation starts, moment n after its n-th has started. Every point in time
    lies in one moment of a lane, so the maximum over the moments of any lane is an upper bound.
    """
    changes: dict[Tier, list[list[int]]] = {}
    known = _known(plan)
    for life in _lifetimes(plan):
        if life.tier not in changes:
            changes[life.tier] = [[0] * (len(lane.ops) + 2) for lane in plan.lanes]
        for n, deltas in enumerate(changes[life.tier]):
            start, stop = _span(plan, known, n, life)
            deltas[start] += life.nbytes
            deltas[stop] -= life.nbytes
    return {tier: [list(accumulate(deltas)) for deltas in lanes] for tier, lanes in changes.items()}


@frozen
class _Lifetime:
    """A temporary allocation of `nbytes` bytes: `first` is the first operation that uses the memory, `last`
    the last one on each lane, as (lane, position on the lane)."""

    buffer: str
    tier: Tier
    nbytes: int
    first: int
    last: tuple[tuple[int, int], ...]


def _lifetimes(plan: Plan) -> list[_Lifetime]:
    place, regions = plan.place, plan.graph.regions
    transient = [not r.kept for r in regions]
    firsts: dict[int, int] = {}
    lasts: dict[int, dict[int, int]] = {}
    workspaces: list[_Lifetime] = []
    for i, (op, (reads, writes)) in enumerate(zip(plan.graph, plan.graph.accesses, strict=True)):
        lane, position = place[i]
        for n in reads + writes:
            if transient[n]:
                if n not in firsts:
                    firsts[n], lasts[n] = i, {}
                lasts[n][lane] = max(position, lasts[n].get(lane, -1))
        if op.workspace:
            there: list[Tier] = [r.place for r in op.regions if r.tier == "device"]
            workspaces.append(_Lifetime("workspace", (there or TIERS)[0], op.workspace, i, (place[i],)))
    return workspaces + [
        _Lifetime(regions[n].buffer, regions[n].place, regions[n].nbytes, first, tuple(lasts[n].items()))
        for n, first in firsts.items()
    ]


def _highest(plan: Plan, alive: list[list[int]]) -> tuple[int, str, Moment]:
    """The least upper bound of a tier's temporary memory, given bytes `alive[lane][moment]`: the smallest of
    the lanes' maxima, as (bytes, operation that starts, (lane, moment))."""
    bounds: list[tuple[int, str, Moment]] = []
    for n, lane in enumerate(plan.lanes):
        if lane.ops:
            nbytes = max(alive[n])
            moment = alive[n].index(nbytes)
            bounds.append((nbytes, plan.graph.ops[lane.ops[max(0, moment - 1)]].name, (n, moment)))
    return min(bounds)


def _known(plan: Plan) -> list[list[list[int]]]:
    """`[lane][other][i]`: the position of the last operation on lane `other` that is sure to have ended when
    operation `i` of `lane` starts."""
    clocks = plan.clocks
    return [
        [[clocks[op][other] for op in lane.ops] for other in range(len(plan.lanes))] for lane in plan.lanes
    ]


def _span(plan: Plan, known: list[list[list[int]]], lane: int, life: _Lifetime) -> tuple[int, int]:
    """The moments of `lane` (numbers of its operations that have started) at which the allocation `life` may
    exist, as (first, first after the last). `known` is `_known(plan)`.

    They end when an operation of `lane` starts that is sure to come after the last access on every lane.
    """
    after = 0
    for other, p in life.last:
        after = max(after, p + 1 if other == lane else bisect_left(known[lane][other], p))
    return plan.clocks[life.first][lane] + 1, after + 1
