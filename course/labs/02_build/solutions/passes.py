"""Lab 2, solved: operations in an order that lanes and conflicts allow, each with what has surely ended before."""

from collections import namedtuple
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

Plan = namedtuple("Plan", "ops lanes waits")


def direct_conflicts(ops):
    """For each operation: the last writer of each region it touches; of regions it writes, later readers."""
    writer, readers = {}, {}
    for j, op in enumerate(ops):
        before = {writer[r] for r in op.reads | op.writes if r in writer}
        before |= {i for r in op.writes for i in readers.get(r, ())}
        for r in op.reads:
            readers.setdefault(r, []).append(j)
        for r in op.writes:
            writer[r], readers[r] = j, []
        yield before - {j}


def build(ops, lanes):
    lane_of = {i: name for name, lane in lanes.items() for i in lane}
    needs = [*direct_conflicts(ops)]
    behind = {j: i for lane in lanes.values() for i, j in pairwise(lane)}
    graph = {j: needs[j] | ({behind[j]} if j in behind else set()) for j in range(len(ops))}
    ended = {}  # for each operation, all that have ended when it ends, as the bits of a number
    waits = [set() for _ in ops]
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise ValueError(f"deadlock: {error.args[1]}") from None
    place = {j: n for n, j in enumerate(order)}
    for j in order:
        known = ended[behind[j]] if j in behind else 0
        for i in sorted(needs[j], key=place.__getitem__, reverse=True):  # the last first: it implies most
            if not known >> i & 1:
                known |= ended[i]
                if lane_of[i] != lane_of[j]:
                    waits[j].add(i)
        ended[j] = known | 1 << j
    return Plan(ops, lanes, waits)


def overlapped(ops):
    lanes = {}
    for i, op in enumerate(ops):
        lanes.setdefault(op.kind, []).append(i)
    return build(ops, lanes)
