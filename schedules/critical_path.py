"""CriticalPath: list scheduling by upward rank (Graham 1969; Topcuoglu, Hariri and Wu 2002).

The upward rank of an operation is the length in seconds, on given hardware, of the longest chain of dependencies
that begins with it. The step is simulated: a free lane takes the ready operation of highest rank. An operation ends
after all its dependencies, so no such order deadlocks, and equal graphs give equal plans on all ranks.

Compute operations on transient memory keep their order in the graph: otherwise the forwards of all micro-batches
would come first and fill the device. Those on kept regions alone are free.

A greedy order can be slower than a plain one. On the given hardware, as `zfunc.core.simulator` computes it, the
result is at least as fast as `Overlapped` and `Interleaved`, and needs on no tier more memory than the larger of
the two. If the greedy order fails that, the faster of theirs is returned.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from attrs import define, field, frozen

from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan, build
from zfunc.core.simulator import seconds_alone, simulate

from .plain import Interleaved, Overlapped


@frozen
class CriticalPath:
    """A schedule with a lane for each kind of operation and device. Operations that begin the longest chains
    of dependent operations come first on their lane.

    List scheduling by upward rank (Graham 1969; Topcuoglu, Hariri and Wu 2002). By simulation on `hardware`
    the plan is at least as fast as `Overlapped` and `Interleaved`, and needs on no tier more memory than the
    larger of the two.
    """

    hardware: Hardware = ROUND

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with the shortest simulated step: by list scheduling, if that needs no more
        memory, by `Overlapped` or by `Interleaved`."""
        greedy = build(graph, _ListScheduler(graph, self.hardware).lanes())
        plain = [Overlapped()(graph), Interleaved()(graph)]
        plans = [greedy, *plain] if _no_larger(greedy, plain) else plain
        return min(plans, key=lambda plan: simulate(plan, self.hardware).seconds)  # the first of equals


def _no_larger(plan: Plan, others: list[Plan]) -> bool:
    """Whether `plan` needs no more memory on any tier than the largest of `others`."""
    peaks = [peak_memory(other) for other in others]
    return all(
        peak.nbytes <= max(other[tier].nbytes for other in peaks) for tier, peak in peak_memory(plan).items()
    )


def upward_ranks(graph: Graph, seconds: list[float], handoff: float = 0.0) -> list[float]:
    """For each operation, the seconds of the longest chain of dependencies that begins with it.

    `handoff` is the delay in seconds between dependent operations of different lanes.
    """
    ranks, lanes = list(seconds), [op.resource for op in graph]
    for i in reversed(range(len(graph))):
        for n in graph.predecessors[i]:
            delay = 0.0 if lanes[n] == lanes[i] else handoff
            ranks[n] = max(ranks[n], seconds[n] + delay + ranks[i])
    return ranks


def _in_order(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield pairs (earlier, later) of compute operations whose order is kept: they use temporary memory."""
    last: dict[int, int] = {}
    for i, op in enumerate(graph):
        if op.kind == "compute" and not all(r.kept for r in op.regions):
            if op.device in last:
                yield last[op.device], i
            last[op.device] = i


@define
class _ListScheduler:
    """A simulated step in which a free lane takes the ready operation with the longest chain behind it."""

    graph: Graph
    hardware: Hardware
    ready: dict[str, list[tuple[float, int]]] = field(factory=dict[str, list[tuple[float, int]]])
    # (time, operation, whether it ends); else a hand-off to it.
    events: list[tuple[float, int, bool]] = field(factory=list[tuple[float, int, bool]])
    busy: set[str] = field(factory=set[str])
    seconds: list[float] = field(init=False)
    ranks: list[float] = field(init=False)
    pending: list[int] = field(init=False)  # for each operation, the number of unfinished dependencies
    unlocks: list[list[int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.seconds = seconds_alone(self.graph, self.hardware)
        self.ranks = upward_ranks(self.graph, self.seconds, self.hardware.handoff)
        before = [set(needed) for needed in self.graph.predecessors]
        for previous, op in _in_order(self.graph):
            before[op].add(previous)
        self.pending = list(map(len, before))
        self.unlocks = [[] for _ in before]
        for i, needed in enumerate(before):
            for n in needed:
                self.unlocks[n].append(i)

    def lanes(self) -> dict[str, list[int]]:
        """Simulate the step; returns, by lane, its operations' positions in the graph, in order of start."""
        lanes: dict[str, list[int]] = {op.resource: [] for op in self.graph}
        for i, left in enumerate(self.pending):
            if not left:
                self._ready(i)
        now = 0.0
        while True:
            for lane, waiting in self.ready.items():
                if waiting and lane not in self.busy:
                    _, i = heappop(waiting)
                    lanes[lane].append(i)
                    self.busy.add(lane)
                    heappush(self.events, (now + self.seconds[i], i, True))
            if not self.events:
                return lanes
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, i, ends = heappop(self.events)
                self._ended(i, now) if ends else self._unblock(i)

    def _ended(self, done: int, now: float) -> None:
        lane = self.graph.ops[done].resource
        self.busy.discard(lane)
        for i in self.unlocks[done]:
            if self.graph.ops[i].resource == lane or not self.hardware.handoff:
                self._unblock(i)
            else:
                heappush(self.events, (now + self.hardware.handoff, i, False))

    def _unblock(self, i: int) -> None:
        """Record that one dependency of operation `i` has finished; after the last one, `i` is ready."""
        self.pending[i] -= 1
        if not self.pending[i]:
            self._ready(i)

    def _ready(self, i: int) -> None:
        heappush(self.ready.setdefault(self.graph.ops[i].resource, []), (-self.ranks[i], i))
