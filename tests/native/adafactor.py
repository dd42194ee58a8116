"""One step of Adafactor in NumPy float32, operation by operation: the bits of kernel and torch."""

from collections.abc import Sequence

import numpy as np
from numpy_reference import NUMPY, Array, join, round_to, split, square_sums, to_float32

from zfunc.core.dtypes import Dtype
from zfunc.optim.adafactor import AdafactorFactors, Matrices
from zfunc.optim.rules import EXP_AVG_SQ_FLOOR


def reference_adafactor_update(
    weights: Sequence[Array],
    variance: Array,
    grad: Array,
    matrices: Matrices,
    factors: AdafactorFactors,
    *,
    out: Dtype | None = None,
) -> tuple[Array | None, ...]:
    """`weights` [n], fp32 or the halves of a split master, the variances [kept], and the rounded copy, if any."""
    if not grad.size:
        return *weights, variance, None if out is None else round_to(to_float32(grad), out)
    with np.errstate(all="ignore"):  # inf and NaN propagate
        k = AdafactorFactors._make(np.float32(x) for x in factors)
        p = weights[0] if len(weights) == 1 else join(*weights)
        g = (NUMPY.flush(to_float32(grad), k.grad_floor) * k.grad_scale).reshape(matrices[:3])
        squares = g.astype(np.float64) ** 2
        sums = [exact_sum(squares, axis).reshape(-1) for axis in (2, 1)]
        means = [x / n for x, n in zip(sums, (matrices.columns, matrices.rows), strict=True)]
        mean = np.concatenate(means).astype(np.float32)[matrices.kept]
        variance = NUMPY.flush(k.keep * variance + k.add * mean, EXP_AVG_SQ_FLOOR)
        left, right = roots(variance, matrices, k)
        u = (g * np.minimum(left[..., None] * right[:, None], k.limit)).reshape(-1)
        of_update, of_weights = (np.sqrt(np.float32(exact_sum(square_sums(x), 0) / p.size)) for x in (u, p))
        size = np.maximum(k.least_size, of_weights)
        change = k.rate * size / np.maximum(np.float32(1), of_update / k.threshold) * u
        p = p - (change + k.decay * p if factors.decay else change)
        return *((p,) if len(weights) == 1 else split(p)), variance, None if out is None else round_to(p, out)


def unit_of(largest: Array, count: int) -> Array:
    """What a term of an exact sum of `count` is added to and freed of again, the `largest` being such."""
    return np.ldexp(1.0, np.frexp(largest)[1] + count.bit_length())


def exact_sum(terms: Array, axis: int) -> Array:
    """Sums of float64 along an axis, from 0 up, which no order changes."""
    unit = unit_of(terms.max(axis, keepdims=True), terms.shape[axis])
    return ((terms + unit) - unit).sum(axis)


def roots(variance: Array, matrices: Matrices, k: AdafactorFactors) -> tuple[Array, Array]:
    """What a gradient is multiplied by for its row [count, rows] and for its column [count, columns]."""
    count, rows, columns, factored = matrices
    kept = max(0, matrices.num_rows - matrices.kept.start)
    if not factored:
        return np.ones((1, 1), np.float32), _inverse_root(variance.reshape(1, -1))
    row, column = variance[:kept].reshape(count, -1), variance[kept:].reshape(count, -1)
    row = row if row.size else _mean(column, columns)
    column = column if column.size else _mean(row, rows)
    return _inverse_root(row / np.maximum(_mean(row, rows), k.least_mean)), _inverse_root(column)


def _mean(x: Array, count: int) -> Array:
    return (exact_sum(x.astype(np.float64), 1) / count).astype(np.float32)[:, None]


def _inverse_root(x: Array) -> Array:
    return np.float32(1) / np.sqrt(x)
