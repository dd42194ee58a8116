"""Which thread of a sweep runs where, and which of them touches which bytes of a buffer first.

The kernel gives rank r of T threads the units [u * r / T, u * (r + 1) / T) of what it sweeps over. A page is put on
the NUMA node of the thread that touches it first. So the two agree if the same ranks touch the same parts, from the
same nodes.

The invariant: a plan of first touches covers a buffer without gap or overlap, and cuts it at pages only.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import frozen

from zfunc.runtime.cpu_topology import NumaNode

UNIT = 128  # elements the kernel deals in


@frozen
class NumaSlot:
    """Where one thread of a team runs: a node, and the CPUs of it that this process may use."""

    node: int
    cpus: frozenset[int]


@frozen
class FirstTouch:
    """Bytes [start, stop) of a buffer, first touched by the thread of this rank."""

    start: int
    stop: int
    rank: int


def numa_slots(
    nodes: Sequence[NumaNode],
    cpus: frozenset[int],
    *,
    threads: int,
    rank: int = 0,
    ranks: int = 1,
    cores: Callable[[frozenset[int]], int] = len,
) -> tuple[NumaSlot, ...]:
    """A slot for each of this rank's `threads`; () where `cpus` lie on one node, and nothing has to be bound.

    The threads of all local ranks, in order, are spread over the nodes in order, in proportion to their `cores`. So
    the ranks of a process group share as few nodes as can be.

    >>> two = NumaNode(0, frozenset({0, 1})), NumaNode(1, frozenset({2, 3}))
    >>> [slot.node for slot in numa_slots(two, frozenset(range(4)), threads=4)]
    [0, 0, 1, 1]
    >>> [slot.node for slot in numa_slots(two, frozenset(range(4)), threads=2, rank=1, ranks=2)]
    [1, 1]
    """
    usable = [NumaSlot(n.index, n.cpus & cpus) for n in nodes if n.cpus & cpus]
    if len(usable) < 2:
        return ()
    per_core = [slot for slot in usable for _ in range(cores(slot.cpus))]
    first, every = rank % ranks * threads, ranks * threads
    return tuple(per_core[(first + r) * len(per_core) // every] for r in range(threads))


def first_touches(
    numel: int,
    itemsize: int,
    *,
    threads: int,
    page: int,
    sweeps: Sequence[tuple[int, int]] = (),
) -> tuple[FirstTouch, ...]:
    """Who touches what of a buffer [numel] first: a page is the last rank's whose part of a sweep begins on it.

    `sweeps` are the elements (start, stop) that one call of the kernel goes over, ascending; () is one over all.
    What lies between two of them goes to the rank before it.

    >>> first_touches(2048, 4, threads=2, page=4096)
    (FirstTouch(start=0, stop=4096, rank=0), FirstTouch(start=4096, stop=8192, rank=1))
    """
    cuts = {0: 0}  # byte -> rank from there on
    for start, stop in sweeps or [(0, numel)]:
        units = -(-(stop - start) // UNIT)
        for r in range(min(threads, units)):
            begin = start + units * r // min(threads, units) * UNIT
            cuts[begin * itemsize // page * page] = r
    nbytes = numel * itemsize
    edges = [cut for cut in sorted(cuts) if cut < nbytes]
    changes = [cut for n, cut in enumerate(edges) if n == 0 or cuts[cut] != cuts[edges[n - 1]]]
    return tuple(FirstTouch(a, b, cuts[a]) for a, b in pairwise([*changes, nbytes]) if a < b)
