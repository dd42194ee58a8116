"""Adafactor in NumPy float32: the definition of what kernel and device compute, operation by operation.

Three results need a whole parameter: the means of the squared gradients of each row and column, the size (root
mean square) of the update, and that of the weights. Sums of float64 depend on their order where they round, and
here none does: every term is first rounded to a multiple of one unit, so small that the largest keeps 52 bits less
those of the number of terms (Demmel & Nguyen, "Fast Reproducible Floating-Point Summation", 2013). So threads,
vector units and devices may add in any order.
"""

from math import prod
from typing import NamedTuple

import numpy as np

from zfunc.core.dtypes import Dtype
from zfunc.optim.adam_reference import (
    EXP_AVG_SQ_FLOOR,
    Array,
    flush_small,
    grad_floor_of,
    round_to,
    to_float32,
)
from zfunc.optim.compact_reference import join, split
from zfunc.values import FLOAT32_MAX

SUMMED = 64  # elements whose squares have a sum in a fixed order


class Matrices(NamedTuple):
    """A parameter as Adafactor sees it: `count` matrices of its last two dimensions; a vector is one row."""

    count: int
    rows: int
    columns: int
    factored: bool  # a vector is not

    @property
    def kept(self) -> tuple[int, int]:
        """The numbers of row and of column means that are kept.

        Of a single row, or column, they would be as many as its elements and one more: that one is their mean.
        """
        if not self.count * self.rows * self.columns:
            return 0, 0
        rows = self.count * self.rows if self.factored and self.rows > 1 else 0
        columns = self.count * self.columns if self.columns > 1 or not rows else 0
        return rows, columns


def matrices_of(shape: tuple[int, ...]) -> Matrices:
    """The matrices of a parameter, as `torch.optim.Adafactor` takes them.

    >>> matrices_of((8, 4, 3, 3)), matrices_of((8,)).kept, matrices_of((8, 4)).kept
    (Matrices(count=32, rows=3, columns=3, factored=True), (0, 8), (8, 4))
    """
    if len(shape) < 2:
        return Matrices(1, 1, prod(shape), False)
    return Matrices(prod(shape[:-2]), *shape[-2:], True)


def round_sizes(matrices: Matrices) -> tuple[int, int, int, int]:
    """How many numbers of a parameter each round of `adafactor_rounds` has. A vector has no rows and columns.

    >>> round_sizes(matrices_of((8, 4))), round_sizes(matrices_of((8,)))
    ((24, 12, 2, 2), (0, 0, 2, 2))
    """
    if not matrices.factored:
        return 0, 0, 2, 2
    lines = sum(lines_of(matrices))
    return lines + sum(matrices.kept), lines, 2, 2


def lines_of(matrices: Matrices) -> tuple[int, int]:
    """The number of rows and of columns of all matrices."""
    return matrices.count * matrices.rows, matrices.count * matrices.columns


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


def adafactor_factors(
    *,
    step: int,
    lr: float,
    beta2_decay: float,
    eps: tuple[float, float],
    d: float,
    weight_decay: float,
    grad_scale: float,
) -> AdafactorFactors:
    """The factors of a step, counted from 1, from the settings of `torch.optim.Adafactor`."""
    add = step**beta2_decay
    return AdafactorFactors(
        grad_scale,
        grad_floor_of(grad_scale),
        1.0 - add,
        add,
        max(eps[0], EXP_AVG_SQ_FLOOR),
        1.0 / max(eps[0], 1.0 / FLOAT32_MAX),
        min(lr, 1.0 / step**0.5),
        eps[1],
        d,
        lr * weight_decay,
    )


class AdafactorUpdate(NamedTuple):
    """The result of a reference step; `out` is None without a copy."""

    weights: tuple[Array, ...]  # as they were given
    variance: Array  # [kept] fp32: of rows, then of columns
    out: Array | None  # [n] fp32, fp16, or uint16 holding bf16


def reference_adafactor_update(
    weights: tuple[Array, ...],
    variance: Array,
    grad: Array,
    matrices: Matrices,
    factors: AdafactorFactors,
    *,
    out: Dtype | None = None,
) -> AdafactorUpdate:
    """One step of a parameter: `weights` [n], fp32 or the two halves of a split master, and the variances [kept].

    The inputs are not changed. The order of operations, each rounded once to float32, but for sums:

        g = grad * grad_scale                     0 where |grad * grad_scale| < 2^-56
        r, c = keep * r + add * mean(g * g)       of rows and columns; 0 where they are below 2^-120
        f = 1 / sqrt(r / max(mean(r), least_mean)) * (1 / sqrt(c))          at most `limit`
        u = g * f
        size = max(least_size, root mean square of p)
        rate = rate * size / max(1, root mean square of u / threshold)
        c = rate * u
        c = c + decay * p                         only with weight decay
        p = p - c

    A vector has no r, its c has every element, and f is 1 / sqrt(c).
    """
    if not grad.size:
        return AdafactorUpdate(weights, variance, None if out is None else round_to(to_float32(grad), out))
    with np.errstate(all="ignore"):  # inf and NaN propagate
        k = AdafactorFactors._make(np.float32(x) for x in factors)
        shape = matrices[:3]
        p = weights[0] if len(weights) == 1 else join(*weights)
        g = (flush_small(to_float32(grad), k.grad_floor) * k.grad_scale).reshape(shape)
        squares = g.astype(np.float64) ** 2
        sums = [exact_sum(squares, axis).reshape(-1) for axis in (2, 1)]
        variance = new_variance(variance, *sums, matrices, k)
        left, right = roots(variance, matrices, k)
        u = (g * np.minimum(left[..., None] * right[:, None], k.limit)).reshape(-1)
        rate = rate_of(exact_sum(square_sums(u), 0), exact_sum(square_sums(p), 0), p.size, k)
        change = rate * u
        p = p - (change + k.decay * p if factors.decay else change)
        new = (p,) if len(weights) == 1 else split(p)
        return AdafactorUpdate(tuple(new), variance, None if out is None else round_to(p, out))


# ---- what is small, for the kernel too ------------------------------------------------------------------


def unit_of(largest: Array, count: int) -> Array:
    """What a term of an exact sum of `count` is added to and freed of again, the `largest` being such.

    >>> unit = unit_of(np.float64(1.0), 3)
    >>> float(unit), float((0.1 + unit) - unit)
    (8.0, 0.09999999999999964)
    """
    return np.ldexp(1.0, np.frexp(largest)[1] + count.bit_length())


def exact_sum(terms: Array, axis: int) -> Array:
    """Sums of float64 along an axis, from 0 up, which no order changes."""
    unit = unit_of(terms.max(axis, keepdims=True), terms.shape[axis])
    return ((terms + unit) - unit).sum(axis)


def square_sums(x: Array) -> Array:
    """The sums of squares of every 64 elements of x [n], in the order of `reference_square_sum`: [ceil(n / 64)]."""
    square = to_float32(x).astype(np.float64) ** 2
    lanes = np.pad(square, (0, -x.size % SUMMED)).reshape(-1, SUMMED // 16, 16).cumsum(1)[:, -1]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]


def new_variance(
    variance: Array, row_sums: Array, column_sums: Array, matrices: Matrices, k: AdafactorFactors
) -> Array:
    """The variances after a step, from the sums of squares of all rows and columns."""
    rows, columns = matrices.kept
    means = [
        *([(row_sums / matrices.columns)] if rows else []),
        *([(column_sums / matrices.rows)] if columns else []),
    ]
    mean = np.concatenate(means).astype(np.float32)
    return flush_small(k.keep * variance + k.add * mean, EXP_AVG_SQ_FLOOR)


def roots(variance: Array, matrices: Matrices, k: AdafactorFactors) -> tuple[Array, Array]:
    """What a gradient is multiplied by for its row [count, rows] and for its column [count, columns]."""
    count, rows, columns, factored = matrices
    kept, _ = matrices.kept
    if not factored:
        return np.ones((1, 1), np.float32), _inverse_root(variance.reshape(1, -1))
    row, column = variance[:kept].reshape(count, -1), variance[kept:].reshape(count, -1)
    row = row if row.size else _mean(column, columns)
    column = column if column.size else _mean(row, rows)
    return _inverse_root(row / np.maximum(_mean(row, rows), k.least_mean)), _inverse_root(column)


def rate_of(update: float, weights: float, numel: int, k: AdafactorFactors) -> np.float32:
    """The rate of an update, from the sum of squares of it and that of the weights."""
    of_update, of_weights = (np.sqrt(np.float32(x / numel)) for x in (update, weights))
    size = np.maximum(k.least_size, of_weights)
    return np.float32(k.rate * size / np.maximum(np.float32(1), of_update / k.threshold))


def _mean(x: Array, count: int) -> Array:
    """Of each row of x [matrices, count] fp32: [matrices, 1]."""
    return (exact_sum(x.astype(np.float64), 1) / count).astype(np.float32)[:, None]


def _inverse_root(x: Array) -> Array:
    return np.float32(1) / np.sqrt(x)
