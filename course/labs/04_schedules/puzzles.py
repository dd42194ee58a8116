"""The six puzzles of lab 4: a graph, the plan before, the time to beat, and the memory that there is.

All sizes are given as milliseconds on MACHINE, which is not the machine that you are graded on.
"""

from collections.abc import Iterator

from attrs import frozen

from zfunc import step_graph
from zfunc.core.graph import Graph, Kind, Op, Region
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Plan, build

MACHINE: Hardware = ROUND
"""The machine to try on: 200 TFLOP/s, 20 GB/s over the bus each way and over the network, 100 GB/s host memory."""
MB = 10**6


@frozen
class Puzzle:
    """A puzzle of lab 4: a graph; `before`, the plan to beat; `ratio`, the most time a solution may take, as
    a share of its time; and `limit`, the bytes of device memory (None: unlimited)."""

    title: str
    graph: Graph
    before: Plan
    ratio: float
    limit: int | None = None


def puzzles() -> dict[int, Puzzle]:
    """All puzzles of lab 4, by number."""
    one, four, five = _step(1), _step(2), _step(4, clip=False)
    two, three, six = Graph(johnson()), Graph(three_at_a_time()), Graph(four_stages())
    return {
        1: Puzzle("first lanes", one, serial(one), 0.8),
        2: Puzzle("in which order?", two, by_kind(two), 0.74),
        3: Puzzle("three at a time", three, serial(three), 0.68, limit=3 * 100 * MB),
        4: Puzzle("the norm is waited for", four, by_kind(four), 0.94),
        5: Puzzle("there and back", five, by_kind(five), 0.74),
        6: Puzzle("all at once", six, by_kind(six), 0.85, limit=4 * 100 * MB),
    }


def serial(graph: Graph) -> Plan:
    """Everything on one lane, in serial order."""
    return build(graph, {"all": range(len(graph))})


def by_kind(graph: Graph) -> Plan:
    """A lane for each kind of operation, in serial order: the schedule of lab 2."""
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(graph):
        lanes.setdefault(op.kind, []).append(i)
    return build(graph, lanes)


def work(verb: str, n: int, kind: Kind, milliseconds: float, reads: str = "", writes: str = "") -> Op:
    """Operation `verb[n]` of a puzzle, this long on MACHINE, on regions of item `n`; a weight has 100 MB."""

    def regions(names: str) -> tuple[Region, ...]:
        sizes = {"weight": 100 * MB}
        return tuple(Region(name, (n,), nbytes=sizes.get(name, 0), tier="device") for name in names.split())

    seconds = milliseconds * 1e-3 - MACHINE.latency
    flops, nbytes = round(seconds * MACHINE.flops), round(seconds * MACHINE.rates[kind])
    of_kind = (flops, 0) if kind == "compute" else (0, nbytes)
    return Op(verb, (n,), kind, regions(reads), regions(writes), *of_kind)


def johnson() -> Iterator[Op]:
    """Puzzle 2: eight weights are fetched, and each is used when it is there."""
    for n, (fetch, use) in enumerate([(9, 1), (8, 3), (7, 2), (6, 1), (2, 8), (1, 6), (3, 9), (2, 6)]):
        yield work("fetch", n, "h2d", fetch, writes="weight")
        yield work("use", n, "compute", use, reads="weight", writes="out")


def three_at_a_time() -> Iterator[Op]:
    """Puzzle 3: eight weights are fetched and used; the device has room for three."""
    for n in range(8):
        yield work("fetch", n, "h2d", 4, writes="weight")
        yield work("use", n, "compute", 5, reads="weight", writes="out")


def four_stages() -> Iterator[Op]:
    """Puzzle 6: eight weights are fetched, used, sent and updated on the host; the device has room for four."""
    early = [(3, 4, 2, 1), (4, 6, 3, 3), (2, 5, 6, 2), (5, 3, 2, 5)]
    late = [(1, 3, 5, 9), (6, 5, 1, 1), (2, 2, 4, 8), (3, 6, 5, 6)]
    for n, (fetch, use, send, update) in enumerate(early + late):
        yield work("fetch", n, "h2d", fetch, writes="weight")
        yield work("use", n, "compute", use, reads="weight", writes="grad")
        yield work("send", n, "d2h", send, reads="weight grad", writes="sent")
        yield work("update", n, "host", update, reads="sent", writes="done")


def _step(world: int, *, clip: bool = True) -> Graph:
    return step_graph(segments=6, world=world, clip_norm=1.0 if clip else None)
