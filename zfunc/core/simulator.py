"""How long a plan takes on given hardware: each lane in order, each operation when its waits are over.

Operations that run at the same time slow each other down where they use the same resource (`Hardware.shared`).
Each takes a share of it, at most all; where the shares of those that run add up to more than 1, each runs at 1 over
their sum. One that uses several resources runs at the speed of the scarcest. Besides, every kind of operation is a
resource of its own: two lanes of one kind get no more done than one. That an operation it waits for has ended on
another lane, an operation learns `Hardware.handoff` later.

The invariant: the result lies between the critical path (no lane is ever busy) and the serial sum (one lane), plus
what hand-offs take. Not below: no operation runs faster than alone. Not above: while anything runs, the speeds add
up to at least 1. For let the scarcest resource be shared to a sum S > 1. No speed is below 1 / S, and no operation
takes more than all of it, so at least S operations run. If no resource is overdrawn, all speeds are 1. And while
nothing runs, the end of some operation is being told, each once.
"""

import math
from collections import deque
from collections.abc import Mapping

from attrs import define, field

from zfunc.core.graph import KINDS, Graph, Kind
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Plan, topological_order
from zfunc.core.timeline import Event, Timeline


def simulate(plan: Plan, hardware: Hardware = ROUND) -> Timeline:
    """The timeline of `plan` on `hardware`, in seconds. Raises PlanError if the plan deadlocks.

    Linear in operations times lanes.

    >>> from zfunc.core.graph import Op
    >>> from zfunc.core.plan import build
    >>> plan = build(Graph((Op("use", (), "compute", flops=2 * 10**12),)), {"gpu": [0]})
    >>> round(simulate(plan).seconds, 6)  # 2e12 FLOPs at 200e12 a second, begun in 10 microseconds
    0.01001
    """
    run = _Run(plan, hardware, Speeds(hardware))
    for lane in range(len(plan.lanes)):
        run.begin(lane, 0.0)
    run.share(0.0)
    while run.running or run.handed:
        run.advance()
    if len(run.ended) < len(plan.place):
        list(topological_order(plan, plan.waits))  # says which operations wait for each other
    events = (
        Event(lane.name, plan.graph.ops[i].name, plan.graph.ops[i].kind, run.started[i], run.ended[i])
        for lane in plan.lanes
        for i in lane.ops
    )
    return Timeline(tuple(events), "simulated")


def lower_bound(graph: Graph, hardware: Hardware = ROUND) -> float:
    """Seconds of the longest chain of dependencies: no schedule is faster."""
    end: list[float] = []
    for op, before in zip(graph, graph.predecessors, strict=True):
        end.append(max((end[n] for n in before), default=0.0) + hardware.seconds(op))
    return max(end, default=0.0)


class Speeds:
    """How fast operations run beside each other: for how many of each kind there are, the speed of each kind."""

    def __init__(self, hardware: Hardware) -> None:
        own: dict[str, Mapping[Kind, float]] = {f"kind {kind}": {kind: 1.0} for kind in KINDS}
        shared = {f"shared {name}": of for name, of in hardware.shared.items()}
        self._resources = list({**own, **shared}.values())
        self._found: dict[tuple[int, ...], dict[Kind, float]] = {}

    def of(self, counts: Mapping[Kind, int]) -> dict[Kind, float]:
        """The speed of each kind that runs, above 0 and at most 1, where alone would be 1.

        >>> on = Hardware("cpu", flops=1.0, rates=ROUND.rates, shared={"cores": {"compute": 1.0, "host": 0.5}})
        >>> Speeds(on).of({"compute": 1, "host": 1})["compute"]
        0.6666666666666666
        """
        key = tuple(counts.get(kind, 0) for kind in KINDS)
        if key not in self._found:
            self._found[key] = self._speeds({kind: n for kind, n in zip(KINDS, key, strict=True) if n})
        return self._found[key]

    def _speeds(self, counts: Mapping[Kind, int]) -> dict[Kind, float]:
        speeds: dict[Kind, float] = dict.fromkeys(counts, 1.0)
        for shares in self._resources:
            wanted = math.fsum(shares.get(kind, 0.0) * n for kind, n in counts.items())
            for kind in counts.keys() & shares.keys() if wanted > 1 else ():
                speeds[kind] = min(speeds[kind], 1 / wanted)
        return speeds


@define
class _Running:
    """An operation under way. At `since` it had `left` seconds to go, alone; at `speed` it ends at `end`."""

    op: int
    lane: int
    since: float
    left: float
    speed: float
    end: float


@define
class _Run:
    """What changes during a simulation. `end` of an operation stays as it is while its speed does, to the bit."""

    plan: Plan
    hardware: Hardware
    speeds: Speeds
    running: list[_Running] = field(factory=list[_Running])
    counts: dict[Kind, int] = field(factory=lambda: dict.fromkeys(KINDS, 0))
    at: list[int] = field(init=False)  # for each lane the position of its next operation
    idle: list[bool] = field(init=False)
    pending: dict[int, int] = field(init=False)  # for each operation how many waits are not over
    unlocks: dict[int, list[int]] = field(factory=dict[int, list[int]])
    handed: deque[tuple[float, list[int]]] = field(factory=deque[tuple[float, list[int]]])  # in order of time
    started: dict[int, float] = field(factory=dict[int, float])
    ended: dict[int, float] = field(factory=dict[int, float])

    def __attrs_post_init__(self) -> None:
        place = self.plan.place
        self.at, self.idle = [0] * len(self.plan.lanes), [True] * len(self.plan.lanes)
        self.pending = dict.fromkeys(place, 0)
        for op in place:
            for n in self.plan.waits[op]:
                if n in place:
                    self.pending[op] += 1
                    self.unlocks.setdefault(n, []).append(op)

    def begin(self, lane: int, now: float) -> None:
        """Start the next operation of `lane`, if the lane is idle and the operation's waits are over."""
        ops, at = self.plan.lanes[lane].ops, self.at[lane]
        if not self.idle[lane] or at == len(ops) or self.pending[ops[at]]:
            return
        op = self.plan.graph.ops[ops[at]]
        seconds = self.hardware.seconds(op)
        self.running.append(_Running(ops[at], lane, now, seconds, 1.0, now + seconds))
        self.counts[op.kind] += 1
        self.idle[lane] = False
        self.at[lane] += 1
        self.started[ops[at]] = now

    def advance(self) -> None:
        """On to what comes next, an end or a hand-off: start what was waiting, share the resources anew."""
        ends = [r.end for r in self.running]
        now = min(min(ends, default=math.inf), self.handed[0][0] if self.handed else math.inf)
        done = [r for r in self.running if r.end == now]
        self.running = [r for r in self.running if r.end != now]
        for r in done:
            self.ended[r.op] = now
            self.counts[self.plan.graph.ops[r.op].kind] -= 1
            self.idle[r.lane] = True
            if r.op in self.unlocks:
                self.handed.append((now + self.hardware.handoff, self.unlocks[r.op]))
        lanes = [r.lane for r in done]
        while self.handed and self.handed[0][0] <= now:
            for n in self.handed.popleft()[1]:
                self.pending[n] -= 1
                lanes.append(self.plan.place[n][0])
        for lane in lanes:
            self.begin(lane, now)
        self.share(now)

    def share(self, now: float) -> None:
        """Give every operation under way the speed it has beside the others."""
        speeds = self.speeds.of(self.counts)
        for r in self.running:
            speed = speeds[self.plan.graph.ops[r.op].kind]
            if speed != r.speed:
                r.left = max(0.0, r.left - (now - r.since) * r.speed)
                r.since, r.speed, r.end = now, speed, now + r.left / speed
