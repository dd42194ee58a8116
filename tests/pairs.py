"""Covering arrays: few rows of a product in which everything that has to meet meets."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")


def covering(rows: Sequence[Row], meets: Callable[[Row], Collection[Hashable]]) -> list[Row]:
    """Few of the rows in which all meets that is in any: of those that add most the first, until nothing is left.

    `meets` says of a row what is in it, such as pairs of its entries.
    """
    of_row = [frozenset(meets(row)) for row in rows]
    left = set[Hashable]().union(*of_row)
    heap = [(-len(own), n) for n, own in enumerate(of_row)]  # what a row adds at most
    heapify(heap)
    chosen = list[int]()
    while left:
        most, n = heappop(heap)
        adds = -len(of_row[n] & left)
        if adds == most:
            chosen.append(n)
            left -= of_row[n]
        elif adds:
            heappush(heap, (adds, n))
    return [rows[n] for n in sorted(chosen)]


def by_day(rows: Sequence[Any], meets: Callable[[Any], Collection[Hashable]] = enumerate) -> list[Any]:
    """For parametrize: rows, of which those of `covering` are run by day, and the others are `slow`."""
    always = {*covering(rows, lambda row: {*meets(row)})}
    return [pytest.param(*row, marks=() if row in always else (pytest.mark.slow,)) for row in rows]


def in_pairs(*axes: Iterable[Any], meet: int = 2) -> list[Any]:
    """Rows for parametrize: the product of the axes. Rows in which every two entries of two axes meet are run by
    day, or in which each entry is met: of two axes, or if one is to `meet`. The others, which repeat what those
    say, are `slow`."""
    tables = [list(axis) for axis in axes]
    every = [*product(*(range(len(table)) for table in tables))]
    # In turn: where an entry may have any of the last axis, it has the next.
    in_turn = sorted(every, key=lambda at: (sum(at[:-1]) - at[-1]) % len(tables[-1]))
    always = {*covering(in_turn, lambda at: {*combinations(enumerate(at), min(meet, len(at) - 1))})}
    rows = [[table[i] for table, i in zip(tables, at, strict=True)] for at in every]
    marks = [() if at in always else (pytest.mark.slow,) for at in every]
    return [pytest.param(*row, marks=own) for row, own in zip(rows, marks, strict=True)]
