"""Interleaved: compute in graph order, everything else in the order it becomes possible.

On a FIFO lane in graph order, the all_gather of one bucket, which waits for its Adam, holds up the
reduce_scatter of the next, which could go at once. Here each operation gets a depth, the length of the
longest chain of dependencies before it, and the other lanes run by depth: reduces and copies out before the
gathers and copies back that wait for the host. Depth grows along every dependency, so no order by depth can
deadlock.
"""

from attrs import frozen

from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build


@frozen
class Interleaved:
    """One lane for each kind; all but compute ordered by depth.

    The depth of an operation is the length of the longest chain of dependencies before it. So reduces and copies
    out go before the gathers and copies back that wait for the host.
    """

    def __call__(self, graph: Graph) -> Plan:
        """Deal the operations out by kind, then order the lanes beside compute by depth."""
        depth: list[int] = []
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lane = lanes.setdefault(op.kind, [])
            # Compute keeps its order, or every micro-batch's forward would come first and fill the device.
            before = (*graph.predecessors[i], *(lane[-1:] if op.kind == "compute" else ()))
            depth.append(1 + max((depth[n] for n in before), default=0))
            lane.append(i)
        return build(graph, {kind: sorted(lane, key=lambda i: depth[i]) for kind, lane in lanes.items()})
