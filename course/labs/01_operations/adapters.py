"""Lab 1: operations, conflicts, waits. Copy this file, fill the four functions, and grade it:

    python -m course.grade 1 --adapters PATH

An operation has the fields

    verb, index   its name, such as "to_host" and (1, 0)
    kind          the resource that it uses, such as "compute"
    reads         the set of regions that it reads
    writes        the set of regions that it writes; a region is anything that a set can hold

and a plan the fields

    ops     its operations, in serial order; everything else names them by their numbers, 0, 1, ...
    lanes   a dict: for each lane by name, the numbers of its operations, in the order in which the lane runs them
    waits   a list with a set for each operation: the numbers of operations on other lanes that it waits for

The numbers in a lane ascend, and an operation waits for smaller numbers alone. There is no field `name`: print
f"{op.verb}{list(op.index)}".
"""


def declare() -> dict[str, tuple[set[str], set[str]]]:
    """For each function of step.py by its name, the regions that it reads and the regions that it writes.

    >>> declare()["forward_0"]
    ({'params0', 'batch'}, {'act1'})
    """
    raise NotImplementedError


def conflicts(ops) -> set[tuple[int, int]]:
    """The pairs (i, j), i < j, of operations that touch the same region, where at least one of them writes it."""
    raise NotImplementedError


def waits(ops, lanes) -> list[set[int]]:
    """For each operation, which operations of other lanes it has to wait for.

    The order of a lane needs no wait. Conflicting operations have to run in serial order; others may run in any.
    You need not find the fewest waits: that is lab 2.
    """
    raise NotImplementedError


def races(plan) -> set[tuple[int, int]]:
    """The conflicting pairs (i, j), i < j, of which the plan lets j begin before i has ended.

    j surely comes after i if i is earlier on its lane, or if j waits for i, or if j surely comes after another
    operation that surely comes after i.
    """
    raise NotImplementedError
