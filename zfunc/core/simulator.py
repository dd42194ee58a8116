"""Simulates a plan on given hardware: each lane runs its operations in order, each when its waits are over.

Concurrent operations slow each other down where they share a resource (`Hardware.shared`). Each operation uses a
share of it, at most 1; if the shares of the running operations add up to S > 1, each runs at speed 1 / S. An
operation that uses several resources runs at the lowest of its speeds. Each kind of operation, of each device, is
also a resource of its own, so two lanes of one kind are no faster than one. A wait across lanes ends
`Hardware.handoff` seconds after the operation waited for.

Where `Hardware.issue` is known, an operation begins with the seconds in which Python issues it, a part of those it
takes, and a hand-over is seconds in which Python wakes a lane that slept. All of this needs Python's lock, of which
there is one for all lanes of a process, so one for each rank of a pipeline: one more resource.

A thread that issues several lanes takes no hand-over between them, and comes to an operation only when what Python
waited for before it has ended: updates on the host, reads and writes; on a CPU all that it issued.

The result lies between the critical path and the serial sum plus all hand-offs. Not below: no operation runs faster
than alone. Not above: while any operation runs, the speeds add up to at least 1. If the scarcest resource is shared
to a sum S > 1, no speed is below 1 / S, and at least S operations run, because none uses more than all of it; if no
resource is overcommitted, all speeds are 1. While nothing runs, a hand-off is pending, each once.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import define, field

from zfunc.core.graph import HOST_CODE, KINDS, Graph, Kind, Op
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Plan, check_is_plan, topological_order
from zfunc.core.timeline import Event, Timeline
from zfunc.values import of_type


def simulate(plan: Plan, hardware: Hardware = ROUND, alone: Sequence[float] | None = None) -> Timeline:
    """The timeline of `plan` on `hardware`, in seconds. Raises PlanError if the plan deadlocks.

    `alone[i]` is the time in seconds that operation `i` of the graph takes alone, by default what `hardware`
    computes. Takes time linear in operations times lanes.

    >>> from zfunc.core.graph import Op
    >>> from zfunc.core.plan import build
    >>> plan = build(Graph((Op("use", (), "compute", flops=2 * 10**12),)), {"gpu": [0]})
    >>> round(simulate(plan).seconds, 6)  # 2e12 FLOPs at 200e12 a second, begun in 10 microseconds
    0.01001
    """
    check_is_plan(plan)
    _check_hardware("simulate", hardware)
    alone = seconds_alone(plan.graph, hardware) if alone is None else alone
    issued, locks = _issued(plan.graph, hardware, alone), _locks(plan.graph)
    run = _Run(plan, alone, issued, locks, hardware, Speeds(hardware))
    for lane in range(len(plan.lanes)):
        run.begin(lane, 0.0)
    run.share(0.0)
    while run.running or run.handed:
        run.advance()
    if len(run.ended) < len(plan.place):
        list(topological_order(plan, plan.waits))  # raises, with the operations that wait for each other
    events = (
        Event(lane.name, plan.graph.ops[i].name, plan.graph.ops[i].kind, run.started[i], run.ended[i])
        for lane in plan.lanes
        for i in lane.ops
    )
    return Timeline(tuple(events), "simulated")


def _check_hardware(asked: str, hardware: Any) -> None:
    hint = "pass such as zfunc.planner.profile.load_profile('rtx4090').hardware('bf16', 1)"
    of_type(f"{asked}: hardware", hardware, Hardware, f"a zfunc.Hardware: {hint}")


def seconds_alone(graph: Graph, hardware: Hardware) -> list[float]:
    """For each operation of `graph`, the seconds that it takes on `hardware` when it runs alone."""
    known: dict[tuple[Kind, int, int, int, int, int], float] = {}  # equal work takes equal time

    def seconds(op: Op) -> float:
        work = op.kind, op.flops, op.attention_flops, op.nbytes, op.launches, op.copied_bytes
        found = known.get(work)
        if found is None:
            found = known[work] = hardware.seconds(op)
        return found

    return [seconds(op) for op in graph]


def _issued(graph: Graph, hardware: Hardware, alone: Sequence[float]) -> list[float]:
    """For each operation of `graph`, the seconds for which Python holds its lock to issue it, at most the
    operation's seconds in `alone`."""
    if not hardware.issue:
        return [0.0] * len(graph)
    return [min(seconds, hardware.issue_seconds(op)) for op, seconds in zip(graph, alone, strict=True)]


def _locks(graph: Graph) -> "list[Running]":
    """For each operation, the key ("issue", process) of the lock of Python (GIL) that issuing it takes."""
    over_ranks = any(r.of_rank for r in graph.regions)
    return [("issue", op.device if over_ranks else 0) for op in graph]


def lower_bound(graph: Graph, hardware: Hardware = ROUND) -> float:
    """Seconds of the longest chain of dependencies of `graph` on `hardware`, which no schedule can beat."""
    _check_hardware("lower_bound", hardware)
    end: list[float] = []
    for seconds, before in zip(seconds_alone(graph, hardware), graph.predecessors, strict=True):
        end.append(max((end[n] for n in before), default=0.0) + seconds)
    return max(end, default=0.0)


Running = tuple[
    Kind | Literal["issue"], int
]  # operations of a kind on a device, or those with Python's lock of a rank
WAKING = -1  # in the place of an operation


class Speeds:
    """How fast operations run that share resources of `hardware`, as a fraction of their speed alone."""

    def __init__(self, hardware: Hardware) -> None:
        self._shared: list[tuple[Mapping[Any, float], int | None]] = [
            (of, hardware.neighbours.get(name)) for name, of in hardware.shared.items()
        ]
        self._cache: dict[tuple[tuple[Running, int], ...], dict[Running, float]] = {}

    def of(self, counts: Mapping[Running, int]) -> dict[Running, float]:
        """The speed, as a fraction of the speed alone, of running operations by (kind, device), or ("issue",
        process) for Python code. `counts` is how many of each run.

        >>> on = Hardware("cpu", flops=1.0, rates=ROUND.rates, shared={"cores": {"compute": 1.0, "host": 0.5}})
        >>> Speeds(on).of({("compute", 0): 1, ("host", 0): 1})["compute", 0]
        0.6666666666666666
        """
        key = tuple(counts.items())
        speeds = self._cache.get(key)
        if speeds is None:
            speeds = self._cache[key] = self._speeds({x: n for x, n in key if n})
        return speeds

    def _speeds(self, counts: Mapping[Running, int]) -> dict[Running, float]:
        speeds = {x: 1 / n for x, n in counts.items()}  # its own resource, of as many as run
        for shares, neighbours in self._shared:
            groups: dict[int, list[Running]] = {}
            for kind, device in counts:
                if kind in shares:
                    groups.setdefault(device // neighbours if neighbours else 0, []).append((kind, device))
            for group in groups.values():
                demand = math.fsum(shares[x[0]] * counts[x] for x in group)
                for x in group if demand > 1 else ():
                    speeds[x] = min(speeds[x], 1 / demand)
        return speeds


@define
class _Running:
    """An operation in progress on `lane`. From time `since` on it has `left` seconds of work at full speed,
    and ends at `end` at its present `speed`. `rest`: seconds of work that follow once Python has issued it.
    """

    op: int
    on: Running
    lane: int
    since: float
    left: float
    speed: float
    end: float
    rest: float = 0.0


@define
class _Run:
    """The state of a simulation of one plan; times in seconds. An operation's `end` is computed anew only
    when its speed changes, so no rounding errors add up."""

    plan: Plan
    alone: Sequence[float]
    issued: Sequence[float]  # of each operation, the seconds in which Python issues it, the first of `alone`
    locks: Sequence[Running]  # of each operation, Python's lock with which it is issued
    hardware: Hardware
    speeds: Speeds
    running: list[_Running] = field(factory=list[_Running])
    counts: Counter[Running] = field(factory=Counter[Running])
    at: list[int] = field(init=False)  # for each lane, the position of its next operation
    idle: list[bool] = field(init=False)
    pending: dict[int, int] = field(init=False)  # for each operation, the number of waits that are not over
    unlocks: dict[int, list[int]] = field(factory=dict[int, list[int]])  # by other threads
    beside: dict[int, list[int]] = field(factory=dict[int, list[int]])  # by the same thread
    handed: deque[tuple[float, list[int]]] = field(factory=deque[tuple[float, list[int]]])  # in order of time
    started: dict[int, float] = field(factory=dict[int, float])
    ended: dict[int, float] = field(factory=dict[int, float])

    def __attrs_post_init__(self) -> None:
        place = self.plan.place
        self.at, self.idle = [0] * len(self.plan.lanes), [True] * len(self.plan.lanes)
        self.pending = dict.fromkeys(place, 0)
        behind = self.plan.behind(KINDS if self.hardware.unified else HOST_CODE)
        for op, waits in enumerate(self.plan.waits):
            for n in (*waits, *behind.get(op, ())):
                if n in place:
                    self.pending[op] += 1
                    here = self.plan.thread_of(n) == self.plan.thread_of(op) and place[n][0] != place[op][0]
                    (self.beside if here else self.unlocks).setdefault(n, []).append(op)

    def begin(self, lane: int, now: float) -> None:
        """Start the next operation of `lane`, if the lane is idle and the operation's waits are over."""
        ops, at = self.plan.lanes[lane].ops, self.at[lane]
        if not self.idle[lane] or at == len(ops) or self.pending[ops[at]]:
            return
        i = ops[at]
        if issued := self.issued[i]:
            self.run(i, self.locks[i], lane, now, issued, self.alone[i] - issued)
        else:
            self.run(i, self.kind_of(i), lane, now, self.alone[i])
        self.at[lane] += 1
        self.started[i] = now

    def wake(self, lane: int, now: float) -> None:
        """Start the next operation of `lane`, whose waits another lane has ended. If Python's lock is
        simulated, first let the lane's thread wake up, which needs the lock."""
        ops, at = self.plan.lanes[lane].ops, self.at[lane]
        if not self.hardware.issue:
            self.begin(lane, now)
        elif self.idle[lane] and at < len(ops) and not self.pending[ops[at]]:
            self.run(WAKING, self.locks[ops[at]], lane, now, self.hardware.handoff)

    def kind_of(self, i: int) -> Running:
        op = self.plan.graph.ops[i]
        return op.kind, op.device

    def run(self, i: int, on: Running, lane: int, now: float, seconds: float, rest: float = 0.0) -> None:
        self.running.append(_Running(i, on, lane, now, seconds, 1.0, now + seconds, rest))
        self.counts[on] += 1
        self.idle[lane] = False

    def advance(self) -> None:
        """Advance simulated time to the next end of an operation or hand-off to a lane, start what it
        unblocks, and update all speeds."""
        now = self.handed[0][0] if self.handed else math.inf
        for r in self.running:
            if r.end < now:
                now = r.end
        lanes: list[int] = []
        woken: list[int] = []
        told = now if self.hardware.issue else now + self.hardware.handoff
        before, self.running = self.running, []
        for r in before:
            if r.end != now:
                self.running.append(r)
                continue
            self.counts[r.on] -= 1
            if r.rest > 0:
                self.run(r.op, self.kind_of(r.op), r.lane, now, r.rest)
                continue
            self.idle[r.lane] = True
            lanes.append(r.lane)
            if r.op == WAKING:
                continue
            self.ended[r.op] = now
            for n in self.beside.get(r.op, ()):
                self.pending[n] -= 1
                lanes.append(self.plan.place[n][0])
            if (unlocked := self.unlocks.get(r.op)) is not None:
                self.handed.append((told, unlocked))
        while self.handed and self.handed[0][0] <= now:
            for n in self.handed.popleft()[1]:
                self.pending[n] -= 1
                woken.append(self.plan.place[n][0])
        for lane in lanes:
            self.begin(lane, now)
        for lane in woken:
            self.wake(lane, now)
        self.share(now)

    def share(self, now: float) -> None:
        """Update the speed and the end of every running operation at time `now`."""
        speeds = self.speeds.of(self.counts)
        for r in self.running:
            speed = speeds[r.on]
            if speed != r.speed:
                r.left = max(0.0, r.left - (now - r.since) * r.speed)
                r.since, r.speed, r.end = now, speed, now + r.left / speed
