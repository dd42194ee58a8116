"""Serial: one lane in graph order. The reference for all other schedules."""

from attrs import frozen

from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build


@frozen
class Serial:
    """Every operation after the one before it."""

    def __call__(self, graph: Graph) -> Plan:
        """Put the whole graph on one lane."""
        return build(graph, {"serial": range(len(graph))})
