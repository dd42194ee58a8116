"""The plain orders: each operation on a lane by its kind and device, in the order of the graph or of readiness."""

from collections.abc import Callable

from attrs import evolve, frozen

from zfunc.core.graph import Graph, Kind, Op
from zfunc.core.plan import Lane, Plan, build

WAITING: tuple[Kind, ...] = ("network", "read", "write")


def _by(lane: Callable[[Op], str], graph: Graph) -> dict[str, list[int]]:
    """By lane, the positions of the operations of `graph`, in its order; `lane(op)` is the lane of `op`."""
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(graph):
        lanes.setdefault(lane(op), []).append(i)
    return lanes


@frozen
class Serial:
    """A schedule with one lane: all operations in the graph's order. The reference for the others."""

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with all operations on the lane "serial"."""
        return build(graph, {"serial": range(len(graph))})


@frozen
class Overlapped:
    """A schedule with one lane for each kind of operation (compute, copies each way, host, ...) on each
    device, in the graph's order.

    Backward, copies to the host, Adam and copies to the device run concurrently, as far as dependencies
    allow.
    """

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with each operation on the lane of its kind and device."""
        return build(graph, _by(lambda op: op.resource, graph))


@frozen
class TwoThreads:
    """A schedule with the lanes of `schedule`, but fewer threads: the thread of the host lane also issues
    copies to the device, and the thread of the compute lane copies to the host.

    For steps so short that Python's overhead dominates: threads wake each other less often. But a copy to the
    device cannot be issued before the update ahead of it. A pipeline over ranks keeps one thread for each
    lane.
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
    """A schedule for a CPU, where it is the default: compute, copies and optimizer on one lane; network, disk
    reads and disk writes on lanes of their own.

    Compute, copies and optimizer share the cores: separate lanes would not be faster, as each has a team of
    OpenMP threads, and teams would wait for each other's cores at every barrier. Operations that wait for
    other ranks or for drives leave the cores free.
    """

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph` with a lane each for network, reads and writes, and one for all other operations."""

        def lane(op: Op) -> str:
            _, at, stage = op.resource.partition("@")  # another rank has other cores
            return (op.kind if op.kind in WAITING else "cores") + at + stage

        return build(graph, _by(lane, graph))


@frozen
class Interleaved:
    """A schedule with a lane for each kind of operation and device: compute in the graph's order, all other
    lanes sorted by depth, the length of the longest chain of dependencies that leads to an operation (host
    operations count twice).

    In the graph's order, the all_gather of one bucket, which waits for its Adam, would block the
    reduce_scatter of the next, which is ready. Sorted by depth, reduces and copies to the host come first.
    Depth grows along every dependency, so this order cannot deadlock.
    """

    def __call__(self, graph: Graph) -> Plan:
        """The plan of `graph`: a lane for each kind of operation and device; compute in the graph's order,
        other lanes by the length of the longest chain of operations that leads to each operation."""
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
