"""The plain orders: each operation on a lane by its kind and device, in the order of the graph or of readiness."""

from collections.abc import Callable

from attrs import evolve, frozen

from zfunc.core.graph import Graph, Kind, Op
from zfunc.core.plan import Lane, Plan, build

WAITING: tuple[Kind, ...] = ("network", "read", "write")


def _by(lane: Callable[[Op], str], graph: Graph) -> dict[str, list[int]]:
    """Positions of the graph's operations by lane, in the graph's order; `lane` names the lane of an operation."""
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(graph):
        lanes.setdefault(lane(op), []).append(i)
    return lanes


@frozen
class Serial:
    """A schedule: all operations on one lane, in the graph's order, the reference for all other schedules."""

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with all operations on the lane "serial"."""
        return build(graph, {"serial": range(len(graph))})


@frozen
class Overlapped:
    """A schedule: one lane for each kind of operation, of each device, in graph order.

    Backward, copies to the host, Adam and copies to the device run concurrently, as far as dependencies allow.
    """

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with each operation on the lane of its kind and device."""
        return build(graph, _by(lambda op: op.resource, graph))


@frozen
class TwoThreads:
    """A schedule: the lanes of `schedule`; the host's thread issues copies to the device, compute's those back.

    For steps so small that Python bounds them: a thread need not wake another for what it issues itself. But a copy
    to the device is issued behind the update before it. Ranks of a pipeline keep a thread for each lane.
    """

    schedule: Callable[[Graph], Plan] = Overlapped()

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` by `schedule`, with lanes of copies moved to the threads of host and compute."""
        plan = self.schedule(graph)
        if any(r.of_rank for r in graph.regions):
            return plan

        def issued(lane: Lane) -> Lane:
            kind, *device = lane.name.split(":")
            thread = {"h2d": "host", "d2h": ":".join(["compute", *device])}.get(kind, lane.thread)
            return evolve(lane, thread=thread)

        return evolve(plan, lanes=map(issued, plan.lanes))


@frozen
class SharedCores:
    """A schedule: compute, copies and optimizer on one lane; the network, reads and writes on lanes of their own.

    The default on a CPU. There compute, copies and optimizer share the cores: separate lanes would not be faster,
    each brings a team of OpenMP threads, and every barrier of a team waits for a thread whose core another team
    uses. Operations that wait for other ranks or for drives leave the cores free meanwhile.
    """

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with a lane each for network, reads and writes, and one for all other operations."""

        def lane(op: Op) -> str:
            _, at, stage = op.resource.partition("@")  # another rank has other cores
            return (op.kind if op.kind in WAITING else "cores") + at + stage

        return build(graph, _by(lane, graph))


@frozen
class Interleaved:
    """A schedule: a lane for each kind of operation, compute in graph order, other lanes by depth: how long a chain
    of operations comes before each.

    On a FIFO lane in graph order, the all_gather of one bucket, which waits for its Adam, blocks the reduce_scatter
    of the next, which is ready. Depth is the length of the longest such chain of dependencies, host operations
    counted twice. So reduces and copies to the host precede the gathers and copies to the device, which wait for
    the host. Depth grows along every dependency, so no order by depth can deadlock.
    """

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with a lane for each kind of operation, all lanes but compute sorted by depth."""
        depth: list[int] = []
        computed: dict[int, int] = {}  # the last operation of compute of each device
        for i, op in enumerate(graph):
            # Compute keeps its order: otherwise the forwards of all micro-batches would come first and fill the
            # device.
            before = [*graph.predecessors[i]]
            if op.kind == "compute":
                before += [computed[op.device]] if op.device in computed else []
                computed[op.device] = i
            # The host is slow: what waits for it is farther away than what waits for other lanes.
            depth.append((2 if op.kind == "host" else 1) + max((depth[n] for n in before), default=0))
        lanes = _by(lambda op: op.resource, graph)
        return build(graph, {name: sorted(lane, key=lambda i: depth[i]) for name, lane in lanes.items()})
