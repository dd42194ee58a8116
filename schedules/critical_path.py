"""CriticalPath: list scheduling. Of what could run, each lane runs first what the most work still depends on.

Every operation is given its upward rank: the seconds of the longest chain of dependencies that begins with it, at
the speed of given hardware. Then the step is played through: whenever a lane is free it takes, of its operations
whose dependencies are over, the one of highest rank (Graham 1969; Topcuoglu, Hariri and Wu 2002). An operation ends
after all it depends on has, so no such order can deadlock, and all ranks that are given one graph find the same.

Of compute, operations that touch anything that comes and goes keep their order in the graph, or every micro-batch's
forward would come first and fill the device. Only those between regions that are there anyway are free.

A greedy order can lose to a plain one. What is guaranteed: on the hardware given, as `zfunc.core.simulator` has it,
the plan is as fast as those of `Overlapped` and `Interleaved`, and on no tier does it need more memory than both.
Where the order found does not keep that, the faster of theirs is returned.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import pairwise

from attrs import define, field, frozen

from zfunc.core.graph import Graph, Kind
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan, build
from zfunc.core.simulator import simulate

from .interleaved import Interleaved
from .overlapped import Overlapped


@frozen
class CriticalPath:
    """One lane for each kind, in the order of a simulated step on `hardware` that runs the longest chains first.

    List scheduling by upward rank (Graham 1969; Topcuoglu, Hariri and Wu 2002). On `hardware` the plan is as fast
    as those of `Overlapped` and `Interleaved`, and on no tier does it need more memory than both.
    """

    hardware: Hardware = ROUND

    def __call__(self, graph: Graph) -> Plan:
        """Play the step through, and keep the order unless a plain one is better."""
        greedy = build(graph, _Played(graph, self.hardware).lanes())
        plain = [Overlapped()(graph), Interleaved()(graph)]
        plans = [greedy, *plain] if _no_larger(greedy, plain) else plain
        return min(plans, key=lambda plan: simulate(plan, self.hardware).seconds)  # of equals the first


def _no_larger(plan: Plan, others: list[Plan]) -> bool:
    """Whether `plan` needs no more memory on any tier than the largest of `others`."""
    peaks = [peak_memory(other) for other in others]
    return all(
        peak.nbytes <= max(other[tier].nbytes for other in peaks) for tier, peak in peak_memory(plan).items()
    )


def upward_ranks(graph: Graph, seconds: list[float], handoff: float = 0.0) -> list[float]:
    """For each operation the seconds of the longest chain of dependencies that begins with it.

    `handoff` is what it takes an operation to learn that one of another kind has ended.
    """
    ranks, kinds = list(seconds), [op.kind for op in graph]
    for i in reversed(range(len(graph))):
        for n in graph.predecessors[i]:
            told = 0.0 if kinds[n] == kinds[i] else handoff
            ranks[n] = max(ranks[n], seconds[n] + told + ranks[i])
    return ranks


def _chain(graph: Graph) -> Iterator[int]:
    """The operations of compute that keep their order, because memory comes and goes with them."""
    for i, op in enumerate(graph):
        if op.kind == "compute" and not all(r.kept for r in op.regions):
            yield i


@define
class _Played:
    """A step under way: what is ready on each lane, and what will end, or be told, when."""

    graph: Graph
    hardware: Hardware
    ready: dict[Kind, list[tuple[float, int]]] = field(factory=dict[Kind, list[tuple[float, int]]])
    events: list[tuple[float, int, bool]] = field(factory=list[tuple[float, int, bool]])  # True: it ends
    busy: set[Kind] = field(factory=set[Kind])
    seconds: list[float] = field(init=False)
    ranks: list[float] = field(init=False)
    pending: list[int] = field(init=False)  # for each operation how many it still has to wait for
    unlocks: list[list[int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.seconds = [self.hardware.seconds(op) for op in self.graph]
        self.ranks = upward_ranks(self.graph, self.seconds, self.hardware.handoff)
        before = [set(needed) for needed in self.graph.predecessors]
        for previous, op in pairwise(_chain(self.graph)):
            before[op].add(previous)
        self.pending = list(map(len, before))
        self.unlocks = [[] for _ in before]
        for i, needed in enumerate(before):
            for n in needed:
                self.unlocks[n].append(i)

    def lanes(self) -> dict[str, list[int]]:
        """The order in which each lane ran its operations."""
        lanes: dict[str, list[int]] = {op.kind: [] for op in self.graph}
        for i, left in enumerate(self.pending):
            if not left:
                self._ready(i)
        now = 0.0
        while True:
            for kind, waiting in self.ready.items():
                if waiting and kind not in self.busy:
                    _, i = heappop(waiting)
                    lanes[kind].append(i)
                    self.busy.add(kind)
                    heappush(self.events, (now + self.seconds[i], i, True))
            if not self.events:
                return lanes
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, i, ends = heappop(self.events)
                self._ended(i, now) if ends else self._told(i)

    def _ended(self, done: int, now: float) -> None:
        kind = self.graph.ops[done].kind
        self.busy.discard(kind)
        for i in self.unlocks[done]:
            if self.graph.ops[i].kind == kind or not self.hardware.handoff:
                self._told(i)
            else:
                heappush(self.events, (now + self.hardware.handoff, i, False))

    def _told(self, i: int) -> None:
        """One operation less for `i` to wait for."""
        self.pending[i] -= 1
        if not self.pending[i]:
            self._ready(i)

    def _ready(self, i: int) -> None:
        heappush(self.ready.setdefault(self.graph.ops[i].kind, []), (-self.ranks[i], i))
