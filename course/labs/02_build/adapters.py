"""Lab 2: build a plan. Copy this file, fill the functions, and grade it:

    python -m course.grade 2 --adapters PATH

Operations are those of lab 1: verb, index, kind, reads, writes. Return plans as a `Plan` of this file. What you
write works in examples/00_zfunc_in_200_lines.py, whose functions of these names it can replace.
"""

from collections import namedtuple

Plan = namedtuple("Plan", "ops lanes waits")
"""`lanes`: a dict of lists of numbers of operations; `waits`: a list with a set of such numbers for each."""


def build(ops, lanes) -> Plan:
    """The plan of these lanes that has the fewest waits.

    Conflicting operations run in serial order, in any timing. A wait that the order of a lane or other waits imply
    is left out. Raises ValueError for lanes whose order deadlocks: an operation would have to wait for one that
    comes later on its own lane, directly or by way of others.
    """
    raise NotImplementedError


def overlapped(ops) -> Plan:
    """A lane for each kind of operation, named like it; on each lane the operations in serial order."""
    raise NotImplementedError
