"""What Adafactor keeps of a parameter, and the scalars of a step: no torch."""

from math import prod
from typing import NamedTuple

PIECE = 1 << 20  # elements whose temporaries are there at a time, on a device
SUMMED = 64  # elements whose squares have a sum in a fixed order


class Matrices(NamedTuple):
    """A parameter as Adafactor sees it: `count` matrices of its last two dimensions; a vector is one row."""

    count: int
    rows: int
    columns: int
    factored: bool  # a vector is not

    @property
    def num_lines(self) -> int:
        """The rows and the columns of all matrices."""
        return self.count * (self.rows + self.columns)

    @property
    def kept(self) -> tuple[int, int]:
        """The numbers of row and of column means that are kept.

        Of a single row, or column, they would be as many as its elements and one more: that one is their mean.
        """
        if not self.count * self.rows * self.columns:
            return 0, 0
        rows = self.count * self.rows if self.factored and self.rows > 1 else 0
        return rows, self.count * self.columns if self.columns > 1 or not rows else 0


def matrices_of(shape: tuple[int, ...]) -> Matrices:
    """The matrices of a parameter, as `torch.optim.Adafactor` takes them.

    >>> matrices_of((8, 4, 3, 3)), matrices_of((8,)).kept, matrices_of((8, 4)).kept
    (Matrices(count=32, rows=3, columns=3, factored=True), (0, 8), (8, 4))
    """
    if len(shape) < 2:
        return Matrices(1, 1, prod(shape), False)
    return Matrices(prod(shape[:-2]), *shape[-2:], True)


class AdafactorFactors(NamedTuple):
    """The scalars of one step, in double; each is rounded once to float32 where it is used."""

    grad_scale: float
    grad_floor: float
    keep: float  # variance = keep * variance + add * mean of squares
    add: float
    least_mean: float  # of the rows' means, where they divide
    limit: float  # of what a gradient is multiplied by
    rate: float  # relative to the weights' size
    least_size: float
    threshold: float  # of the update's size
    decay: float
