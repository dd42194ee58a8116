"""Overlapped: one lane for each kind of operation, in graph order."""

from attrs import frozen

from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build


@frozen
class Overlapped:
    """One lane for each kind of operation, in graph order.

    Backward, copies to the host, Adam and copies to the device run concurrently, as far as dependencies allow.
    """

    def __call__(self, graph: Graph) -> Plan:
        """Put each operation on the lane of its kind."""
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lanes.setdefault(op.kind, []).append(i)
        return build(graph, lanes)
