"""Lab 4: schedule puzzles. Copy this file, fill the functions, and grade it:

    python -m course.grade 4 --adapters PATH

Each takes the graph of its puzzle (puzzles.py) and returns a plan of it. This lab uses zfunc: `build` puts the
operations, by their position in the graph, on lanes, and derives the waits. More waits than `build` derives:
`attrs.evolve(plan, waits=...)`. What is off limits is zfunc.schedules, which has solutions.
"""

from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build  # noqa: F401


def puzzle_1(graph: Graph) -> Plan:
    """A step of six layers on one GPU. Before: everything on one lane."""
    raise NotImplementedError


def puzzle_2(graph: Graph) -> Plan:
    """Eight weights are fetched and used. Before: a lane for each kind, in serial order."""
    raise NotImplementedError


def puzzle_3(graph: Graph) -> Plan:
    """Eight weights are fetched and used, and the device has room for three. Before: everything on one lane."""
    raise NotImplementedError


def puzzle_4(graph: Graph) -> Plan:
    """A step on two ranks, whose clipping waits for a norm. Before: a lane for each kind, in serial order."""
    raise NotImplementedError


def puzzle_5(graph: Graph) -> Plan:
    """A step on four ranks without clipping. Before: a lane for each kind, in serial order."""
    raise NotImplementedError


def puzzle_6(graph: Graph) -> Plan:
    """Eight weights are fetched, used, sent and updated; room for four. Before: a lane for each kind, no limit."""
    raise NotImplementedError
