"""SharedCores: one lane for all that keeps the cores busy, in graph order. The default on a CPU."""

from attrs import frozen

from zfunc.core.graph import Graph, Kind
from zfunc.core.plan import Plan, build

WAITING: tuple[Kind, ...] = ("network", "read", "write")


@frozen
class SharedCores:
    """Compute, copies and the optimizer one after the other; the network, reads and writes on lanes of their own.

    On a CPU these share the cores: lanes of their own would not make them faster, each brings a team of OpenMP
    threads, and every barrier of a team waits for a thread whose core another has. What waits for other ranks or
    for drives leaves the cores free meanwhile.
    """

    def __call__(self, graph: Graph) -> Plan:
        """Put what waits on the lane of its kind, and everything else on one."""
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lanes.setdefault(op.kind if op.kind in WAITING else "cores", []).append(i)
        return build(graph, lanes)
