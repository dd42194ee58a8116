"""Overlapped: each kind of work has its own lane, in graph order.

Backward, the copies to the host, Adam and the copies back run at the same time, as far as they may.
"""

from attrs import frozen

from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build


@frozen
class Overlapped:
    """One lane for each kind of operation in the graph, in graph order.

    Backward, the copies to the host, Adam and the copies back run at the same time, as far as they may.
    """

    def __call__(self, graph: Graph) -> Plan:
        """Deal the operations out by kind."""
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lanes.setdefault(op.kind, []).append(i)
        return build(graph, lanes)
