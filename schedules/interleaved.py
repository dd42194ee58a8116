"""Interleaved: compute in graph order, all other operations in the order in which they become ready.

On a FIFO lane in graph order, the all_gather of one bucket, which waits for its Adam, blocks the reduce_scatter of
the next, which is ready. Here the other lanes are sorted by depth, the length of the longest chain of dependencies
before an operation. Depth grows along every dependency, so no order by depth can deadlock.
"""

from attrs import frozen

from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build


@frozen
class Interleaved:
    """One lane for each kind; all but compute sorted by depth.

    The depth of an operation is the length of the longest chain of dependencies before it, in which one of the host
    counts twice. So reduces and copies to
    the host precede the gathers and copies to the device, which wait for the host.
    """

    def __call__(self, graph: Graph) -> Plan:
        """Put each operation on the lane of its kind, then sort all lanes but compute by depth."""
        depth: list[int] = []
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lane = lanes.setdefault(op.kind, [])
            # Compute keeps its order: otherwise the forwards of all micro-batches would come first and fill the
            # device.
            before = (*graph.predecessors[i], *(lane[-1:] if op.kind == "compute" else ()))
            # The host is slow: what waits for it is farther away than what waits for other lanes.
            depth.append((2 if op.kind == "host" else 1) + max((depth[n] for n in before), default=0))
            lane.append(i)
        return build(graph, {kind: sorted(lane, key=lambda i: depth[i]) for kind, lane in lanes.items()})
