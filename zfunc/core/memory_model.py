"""The peak memory of a plan on each tier, and the operation at which it is reached.

An upper bound for every timing the plan allows. A kept region always counts. Any other region counts at an
operation unless all of its accesses have certainly finished, or certainly none has started. A workspace counts
wherever its operation may run.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from attrs import frozen

from zfunc.core.graph import TIERS, Graph, Region, Tier
from zfunc.core.plan import Clock, Plan, happens_before


@frozen
class Peak:
    """The peak of a tier: `kept` bytes all the time, and `transient` bytes at operation `op` ("" if none)."""

    tier: Tier
    kept: int
    transient: int
    op: str

    @property
    def nbytes(self) -> int:
        """The peak in bytes."""
        return self.kept + self.transient


def peak_memory(plan: Plan) -> dict[Tier, Peak]:
    """The peak of every tier, in bytes: an upper bound for every timing that the plan allows.

    >>> from zfunc.core.graph import Graph, Op
    >>> from zfunc.core.plan import build
    >>> x, y = Region("x", nbytes=8), Region("y", nbytes=4)
    >>> ops = Op("make", (), "compute", (), (x,)), Op("use", (), "compute", (x,), (y,), workspace=100)
    >>> peak_memory(build(Graph(ops), {"gpu": [0, 1]}))["device"]
    Peak(tier='device', kept=0, transient=112, op='use')
    """
    always = persistent_bytes(plan.graph)
    at = _highest(plan, happens_before(plan), _lifetimes(plan))
    transient = {tier: (highest.nbytes, highest.op) for tier, highest in at.items()}
    return {tier: Peak(tier, always[tier], *transient.get(tier, (0, ""))) for tier in TIERS}


def persistent_bytes(graph: Graph) -> dict[Tier, int]:
    """The bytes of the kept regions, by tier: no schedule needs less."""
    nbytes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for r in graph.regions:
        nbytes[r.tier] += r.nbytes if r.kept else 0
    return nbytes


def peak_breakdown(plan: Plan) -> dict[Tier, dict[str, int]]:
    """The peak of every tier by buffer, the largest first, in bytes; the sum is `Peak.nbytes`.

    >>> from zfunc.core.graph import Graph, Op
    >>> from zfunc.core.plan import build
    >>> x, y = Region("x", nbytes=8), Region("y", (0,), nbytes=4, lifetime="value")
    >>> ops = Op("make", (), "compute", (), (x,)), Op("use", (), "compute", (x,), (y,), workspace=100)
    >>> peak_breakdown(build(Graph(ops), {"gpu": [0, 1]}))["device"]
    {'workspace': 100, 'x': 8, 'y': 4}
    """
    parts: dict[Tier, dict[str, int]] = {tier: {} for tier in TIERS}

    def count(tier: Tier, buffer: str, nbytes: int) -> None:
        parts[tier][buffer] = parts[tier].get(buffer, 0) + nbytes

    for r in plan.graph.regions:
        if r.kept:
            count(r.tier, r.buffer, r.nbytes)
    clocks, lifetimes = happens_before(plan), _lifetimes(plan)
    at = _highest(plan, clocks, lifetimes)
    for life in lifetimes:
        start, stop = _span(plan, clocks, at[life.tier].lane, life)
        if start <= at[life.tier].moment < stop:
            count(life.tier, life.buffer, life.nbytes)
    return {tier: dict(sorted(x.items(), key=lambda item: -item[1])) for tier, x in parts.items()}


@frozen
class _Lifetime:
    """A transient allocation, and the operations that access it; the first one allocates it."""

    buffer: str
    tier: Tier
    nbytes: int
    accesses: tuple[int, ...]


@frozen
class _Highest:
    """The largest sum of allocations that may be alive together, at a moment of one lane just before `op` ends."""

    nbytes: int
    lane: int
    moment: int  # 0 is before the lane's first operation starts, n after its n-th has started
    op: str


def _lifetimes(plan: Plan) -> list[_Lifetime]:
    accesses: dict[Region, list[int]] = {}
    workspaces: list[_Lifetime] = []
    for i, op in enumerate(plan.graph):
        for r in op.regions:
            if not r.kept:
                accesses.setdefault(r, []).append(i)
        if op.workspace:
            workspaces.append(_Lifetime("workspace", "device", op.workspace, (i,)))
    return workspaces + [_Lifetime(r.buffer, r.tier, r.nbytes, tuple(ops)) for r, ops in accesses.items()]


def _highest(plan: Plan, clocks: Mapping[int, Clock], lifetimes: Sequence[_Lifetime]) -> dict[Tier, _Highest]:
    """The peak of every tier with transient allocations.

    Every point in time lies in one moment of a lane, so the maximum over the moments of any lane is an upper bound.
    The result is the smallest of these bounds.
    """
    changes: dict[Tier, list[list[int]]] = {}
    for life in lifetimes:
        lanes = changes.setdefault(life.tier, [[0] * (len(lane.ops) + 2) for lane in plan.lanes])
        for n, deltas in enumerate(lanes):
            start, stop = _span(plan, clocks, n, life)
            deltas[start] += life.nbytes
            deltas[stop] -= life.nbytes
    return {
        tier: min(
            (_highest_of(plan, n, deltas) for n, deltas in enumerate(lanes) if plan.lanes[n].ops),
            key=lambda peak: (peak.nbytes, peak.op),
        )
        for tier, lanes in changes.items()
    }


def _highest_of(plan: Plan, lane: int, deltas: list[int]) -> _Highest:
    ops = plan.lanes[lane].ops
    alive = list(accumulate(deltas))
    moment = alive.index(max(alive))
    return _Highest(alive[moment], lane, moment, plan.graph.ops[ops[max(0, moment - 1)]].name)


def _span(plan: Plan, clocks: Mapping[int, Clock], lane: int, life: _Lifetime) -> tuple[int, int]:
    """The first moment of a lane at which an allocation may be alive, and the first after it."""
    return clocks[life.accesses[0]][lane] + 1, _first_after(plan, clocks, lane, life.accesses) + 1


def _first_after(plan: Plan, clocks: Mapping[int, Clock], lane: int, accesses: Sequence[int]) -> int:
    """The first position on `lane` whose operation starts after every access has finished."""
    last: dict[int, int] = {}
    for a in accesses:
        other, p = plan.place[a]
        last[other] = max(p, last.get(other, -1))
    ops = plan.lanes[lane].ops
    low, high = last.get(lane, -1) + 1, len(ops)
    while low < high:  # clocks only grow along a lane
        middle = (low + high) // 2
        known = clocks[ops[middle]]
        if all(other == lane or known[other] >= p for other, p in last.items()):
            high = middle
        else:
            low = middle + 1
    return low
