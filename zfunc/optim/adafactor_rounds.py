"""Adafactor's update of a part of a parameter, in rounds: after each, the ranks join what they have measured.

A rank without the whole parameter measures its part, and the ranks take the largest of each number in even rounds,
and the sum in odd ones:

    0   the largest gradient of every row and column, and the variances, which lie in the slices of the ranks
    1   the sums of squares of every row and column
    2   the largest sum of squares of 64 elements, of the direction and of the weights
    3   the sums of these

The sums have the same bits in any order (`adafactor_reference`), so those of one rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.core.optimizer_state import StateBuffer, measuring_room
from zfunc.optim.adafactor_reference import SUMMED, Matrices, lines_of, matrices_of
from zfunc.optim.base import ParameterPart

NUM_ROUNDS = 4


class Rectangle(NamedTuple):
    """Whole matrices, whole rows of one, or a part of a row, from element `start` of a part on."""

    start: int
    matrices: Matrices
    rows: slice  # among those of all matrices
    columns: slice

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.matrices[:3])


def rectangles(matrices: Matrices, start: int, stop: int) -> Iterator[Rectangle]:
    """Elements `start` to `stop` of a parameter: at most five.

    >>> [x.matrices[:3] for x in rectangles(Matrices(3, 2, 4, True), 2, 23)]
    [(1, 1, 2), (1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 1, 3)]
    """
    _, rows, columns, factored = matrices
    at = start
    while at < stop:
        row, column = divmod(at, columns)
        matrix, left = row // rows, stop - at
        if column or left < columns:
            shape = 1, 1, min(left, columns - column)
        elif row % rows or left < rows * columns:
            shape = 1, min(left // columns, rows - row % rows), columns
        else:
            shape = left // (rows * columns), rows, columns
        first = matrix * columns + column
        yield Rectangle(
            at - start,
            Matrices(*shape, factored),
            slice(row, row + shape[0] * shape[1]),
            slice(first, first + shape[0] * shape[2]),
        )
        at += shape[0] * shape[1] * shape[2]


class AdafactorRounds(ABC):
    """An update of a part under way. Every number that is measured is 0 or more, and 0 where the part has none."""

    def __init__(self, part: ParameterPart, kind: StateBuffer, device: torch.device) -> None:
        whole, n = matrices_of(part.shape), part.stop - part.start
        # Of a vector, the variances of a part are there with it.
        self.matrices = whole if whole.factored else Matrices(1, 1, n, factored=False)
        self.first, self.last = (part.start, part.stop) if whole.factored else (0, n)
        self.numel, self.num_lines = prod(part.shape), sum(lines_of(self.matrices))
        self.measures = [*part.measures]
        edges = (min(kind.numel(x), sum(self.matrices.kept)) for x in (self.first, self.last))
        self.kept = slice(*edges)  # of the variances, which its buffer begins with
        room, fp64 = part.room, torch.float64
        self.blocks = (
            torch.empty(measuring_room(0, n).stop, dtype=fp64, device=device) if room is None else room
        )

    @property
    def num_blocks(self) -> int:
        """Of SUMMED elements, in the whole parameter."""
        return -(-self.numel // SUMMED)

    @cached_property
    def largest(self) -> Tensor:
        """The largest gradient of every row, then of every column, and the old variances: fp64."""
        return self.measures[0] if self.matrices.factored else self._lines()

    @cached_property
    def sums(self) -> Tensor:
        """The sums of squares of every row, then of every column: fp64."""
        return self.measures[1] if self.matrices.factored else self._line_sums()

    @abstractmethod
    def _lines(self) -> Tensor:
        """What the part has of `largest`."""

    @abstractmethod
    def _line_sums(self) -> Tensor:
        """What it has of `sums`."""

    @abstractmethod
    def _largest_blocks(self) -> Tensor:
        """The largest of the sums of squares of its blocks, of the direction and of the weights; these are left in
        `blocks`."""

    @abstractmethod
    def _block_sums(self) -> Tensor:
        """Their sums."""

    @abstractmethod
    def _move(self) -> None:
        """Write the variances, and move the weights."""

    def rectangles_of(self, x: Any) -> Iterator[tuple[Rectangle, tuple[Any, Any]]]:
        """The rectangles of the part, and the rows and columns of each in `x`, which has an element for each."""
        rows, _ = lines_of(self.matrices)
        for at in rectangles(self.matrices, self.first, self.last):
            yield at, (x[at.rows], x[rows + at.columns.start : rows + at.columns.stop])

    def measure(self) -> Tensor:
        """What the part has of the next round: [of `round_sizes`] fp64."""
        measured = len(self.measures)
        if measured < 2 and not self.matrices.factored:
            return self.blocks[:0]
        return (self._lines, self._line_sums, self._largest_blocks, self._block_sums)[measured]()

    def finish(self) -> None:
        """The rounds that are left, as if the part were the whole, and the update."""
        while len(self.measures) < NUM_ROUNDS:
            self.measures.append(self.measure())
        self._move()
