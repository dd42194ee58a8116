"""A wait is dropped to save time, so puzzle 1 has a race; and puzzle 6 takes room for five weights.

Breaks: puzzle_1, puzzle_6
"""

from attrs import evolve

from passes import puzzle_2, puzzle_3, puzzle_4, puzzle_5  # noqa: F401
import passes


def puzzle_1(graph):
    plan = passes.puzzle_1(graph)
    first = next(i for i, some in enumerate(plan.waits) if some)
    return evolve(plan, waits=[() if i == first else some for i, some in enumerate(plan.waits)])


def puzzle_6(graph):
    return passes.limited(graph, range(8), 5)
