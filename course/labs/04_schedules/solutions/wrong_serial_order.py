"""A lane for each kind in serial order, for every puzzle: no order on a lane is changed, no memory limited.

Breaks: puzzle_2, puzzle_3, puzzle_4, puzzle_5, puzzle_6
"""

from zfunc.core.plan import build


def by_kind(graph):
    lanes = {}
    for i, op in enumerate(graph):
        lanes.setdefault(op.kind, []).append(i)
    return build(graph, lanes)


puzzle_1 = puzzle_2 = puzzle_3 = puzzle_4 = puzzle_5 = puzzle_6 = by_kind
