"""Operations are shuffled in the hope of a better order: lanes deadlock; and a plan of another graph is returned.

Breaks: puzzle_2, puzzle_3, puzzle_5
"""

from passes import puzzle_1, puzzle_4, puzzle_6  # noqa: F401
import passes

from zfunc.core.plan import build


def puzzle_2(graph):
    return build(graph, {"all": reversed(range(len(graph)))})


def puzzle_3(graph):
    return passes.puzzle_3(graph).graph


def puzzle_5(graph):
    return passes.puzzle_4(graph.__class__(graph.ops[:10]))
