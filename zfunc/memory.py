"""How many bytes a plan needs on each tier, and at which operation that is.

The invariant: an upper bound for every timing the plan allows. A kept region counts always. Any other counts
at an operation unless it is certain to be gone before (all its accesses finished) or to come later (none
began). An operation's workspace counts where it may run beside the others.
"""

from collections.abc import Mapping
from itertools import accumulate

from attrs import frozen

from zfunc.graph import TIERS, Region, Tier
from zfunc.plan import Clock, Plan, happens_before


@frozen
class Peak:
    """Bytes on one tier: `kept` all the time, `transient` more at `op`, where the peak is ("" if nowhere)."""

    tier: Tier
    kept: int
    transient: int
    op: str

    @property
    def nbytes(self) -> int:
        """The peak in bytes."""
        return self.kept + self.transient


def memory(plan: Plan) -> dict[Tier, Peak]:
    """The peak of every tier.

    >>> from zfunc.graph import Graph, Op
    >>> from zfunc.plan import build
    >>> x, y = Region("x", nbytes=8), Region("y", nbytes=4)
    >>> ops = Op("make", (), "compute", (), (x,)), Op("use", (), "compute", (x,), (y,), workspace=100)
    >>> memory(build(Graph(ops), {"gpu": [0, 1]}))["device"]
    Peak(tier='device', kept=0, transient=112, op='use')
    """
    clocks = happens_before(plan)
    kept: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for r in plan.graph.regions:
        kept[r.tier] += r.nbytes if r.kept else 0
    transient = _transient(plan, clocks)
    return {tier: Peak(tier, kept[tier], *transient.get(tier, (0, ""))) for tier in TIERS}


def _transient(plan: Plan, clocks: Mapping[int, Clock]) -> dict[Tier, tuple[int, str]]:
    """The largest sum of what may be alive together.

    Every moment lies between the starts of two neighbours on any one lane, before the first or after the last,
    so the maximum over these of one lane is a bound. All lanes bound the same thing; the tightest counts.
    """
    changes: dict[Tier, list[list[int]]] = {}
    for tier, nbytes, accesses in _lifetimes(plan):
        lanes = changes.setdefault(tier, [[0] * (len(lane.ops) + 2) for lane in plan.lanes])
        for n, deltas in enumerate(lanes):
            deltas[clocks[accesses[0]][n] + 1] += nbytes  # 0 is before the lane's first operation starts
            deltas[_first_after(plan, clocks, n, accesses) + 1] -= nbytes
    return {
        tier: min(_highest(plan, n, deltas) for n, deltas in enumerate(lanes) if plan.lanes[n].ops)
        for tier, lanes in changes.items()
    }


def _highest(plan: Plan, lane: int, deltas: list[int]) -> tuple[int, str]:
    ops = plan.lanes[lane].ops
    alive = list(accumulate(deltas))
    highest = max(alive)
    return highest, plan.graph.ops[ops[max(0, alive.index(highest) - 1)]].name


def _lifetimes(plan: Plan) -> list[tuple[Tier, int, list[int]]]:
    """Tier, size and accesses (the first is the one that allocates) of all that comes and goes."""
    accesses: dict[Region, list[int]] = {}
    found: list[tuple[Tier, int, list[int]]] = []
    for i, op in enumerate(plan.graph):
        for r in op.regions:
            if not r.kept:
                accesses.setdefault(r, []).append(i)
        if op.workspace:
            found.append(("device", op.workspace, [i]))
    return found + [(r.tier, r.nbytes, ops) for r, ops in accesses.items()]


def _first_after(plan: Plan, clocks: Mapping[int, Clock], lane: int, accesses: list[int]) -> int:
    """The first position on `lane` whose operation starts after every access has finished."""
    last: dict[int, int] = {}
    for a in accesses:
        there, p = plan.place[a]
        last[there] = max(p, last.get(there, -1))
    ops = plan.lanes[lane].ops
    low, high = last.get(lane, -1) + 1, len(ops)
    while low < high:  # what an operation knows to be finished only grows along its lane
        middle = (low + high) // 2
        known = clocks[ops[middle]]
        if all(there == lane or known[there] >= p for there, p in last.items()):
            high = middle
        else:
            low = middle + 1
    return low
