"""Adam in NumPy float32: the definition of what the kernel computes, operation by operation.

The kernel agrees with `reference_update` to the bit (but for the payload of a NaN), because both do the same
operations in the same order and round each one once. `coefficients` computes in double what depends on the step
alone, for both; it is rounded once to float32.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.regions import SUM_PARTS

Array = NDArray[Any]

# A subnormal operand costs the CPU a microcode assist, and moments without gradients decay into that range and
# stay there. These floors keep every product of the steady state normal: g * g is at least 2^-112, (1 - beta2) *
# g * g and beta * moment stay above 2^-126, sqrt(v) is at least 2^-60. Beside eps = 1e-8 (2^-26.6) what they drop
# changes no weight. NaN is below no floor.
GRAD_FLOOR, EXP_AVG_FLOOR, EXP_AVG_SQ_FLOOR = 2.0**-56, 2.0**-100, 2.0**-120
SMALLEST_NORMAL = 2.0**-126


class Coefficients(NamedTuple):
    """The scalars of one step, in double; each is rounded once to float32 where it is used."""

    grad_scale: float
    grad_floor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    inv_sqrt_bias2: float
    eps: float
    decay: float


class Updated(NamedTuple):
    """The result of a reference step; `out` is None without a copy."""

    master: Array  # [n] fp32
    exp_avg: Array  # [n] fp32
    exp_avg_sq: Array  # [n] fp32
    out: Array | None  # [n] fp32, fp16, or uint16 holding bf16


def coefficients(
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float,
) -> Coefficients:
    """The coefficients of one step, bias corrections included (Kingma & Ba 2015, section 3)."""
    beta1, beta2 = betas
    return Coefficients(
        grad_scale,
        grad_floor_of(grad_scale),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr * weight_decay if decoupled else weight_decay,
    )


def grad_floor_of(grad_scale: float) -> float:
    """The floor of a gradient that is to be scaled. So the product of a denormal is never computed."""
    floor = GRAD_FLOOR / abs(grad_scale) if grad_scale else math.inf
    return max(floor, SMALLEST_NORMAL)


def reference_update(
    master: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    *,
    out: Dtype | None = None,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> Updated:
    """One Adam step (Kingma & Ba 2015), or AdamW when decoupled (Loshchilov & Hutter 2019), in float32.

    `master`, `exp_avg`, `exp_avg_sq`: [n] float32. `grad`: [n] float32, float16, or uint16 holding bf16. `out` is
    the dtype of a rounded copy of the new weights ("fp32", "bf16", "fp16"), or None. The inputs are not changed.

    The order of operations, each rounded once to float32, lower case being float32 values:

        g = grad * grad_scale                     0 where |grad * grad_scale| < 2^-56
        g = g + weight_decay * p                  only with weight decay that is not decoupled; floored again
        m = beta1 * m + (1 - beta1) * g           0 where |m| < 2^-100
        v = beta2 * v + (1 - beta2) * (g * g)     0 where |v| < 2^-120
        c = step_size * (m / (sqrt(v) * inv_sqrt_bias2 + eps))
        c = c + (lr * weight_decay) * p           only with decoupled weight decay
        p = p - c                                 the one rounding at the magnitude of the weight

    >>> p, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> reference_update(p, zero, zero, np.float32([0.5, 0.0]), step=1, lr=0.25, eps=0.25).master
    array([0.8333333, 1.       ], dtype=float32)
    """
    with np.errstate(all="ignore"):  # inf and NaN propagate, as they do in the kernel
        k = Coefficients._make(
            np.float32(value)
            for value in coefficients(step, lr, betas, eps, weight_decay, decoupled, grad_scale)
        )
        g = flush_small(to_float32(grad), k.grad_floor) * k.grad_scale
        if weight_decay and not decoupled:
            g = flush_small(g + k.decay * master, GRAD_FLOOR)
        m = flush_small(k.beta1 * exp_avg + k.one_minus_beta1 * g, EXP_AVG_FLOOR)
        v = flush_small(k.beta2 * exp_avg_sq + k.one_minus_beta2 * (g * g), EXP_AVG_SQ_FLOOR)
        change = k.step_size * (m / (np.sqrt(v) * k.inv_sqrt_bias2 + k.eps))
        if weight_decay and decoupled:
            change = change + k.decay * master
        p = master - change
        return Updated(p, m, v, None if out is None else round_to(p, out))


def flush_small(x: Array, floor: float) -> Array:
    """x, and 0 where its size is below the floor."""
    return np.where(np.abs(x) < np.float32(floor), np.float32(0), x)


def to_float32(x: Array) -> Array:
    """Convert float16, or bf16 in uint16, to float32, exactly; float32 stays."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32)


def round_to(x: Array, kind: Dtype) -> Array:
    """Round float32 to "fp32", "fp16" or "bf16" (in uint16): to nearest, ties to even; NaN stays NaN."""
    if kind != "bf16":
        return x.astype(DTYPES[kind].numpy)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(x), bits | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(np.uint16)


def reference_square_sum(x: Array) -> Array:
    """The sum of squares of x [n] as the kernel's [SUM_PARTS] doubles, which `math.fsum` adds up.

    Of each 64 elements the squares are added in double: element i to lane i % 16, then lanes in pairs. These sums
    are added without rounding. Part i of the result has 32 bits, from 2^(32 i - 352) on.

    >>> parts = reference_square_sum(np.float32([3.0, 4.0]))
    >>> float(parts[11]), math.fsum(parts)
    (25.0, 25.0)
    """
    with np.errstate(all="ignore"):
        square = to_float32(x).astype(np.float64) ** 2
        lanes = np.pad(square, (0, -x.size % 64)).reshape(-1, 4, 16).cumsum(1)[:, -1]  # sum would pair
        while lanes.shape[1] > 1:
            lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    finite = np.isfinite(lanes)
    total = sum(int(math.ldexp(x, 352)) for x in lanes[finite].tolist())
    rest = [total >> 32 * i for i in range(SUM_PARTS)]
    parts = [math.ldexp(r % 2**32, 32 * i - 352) for i, r in enumerate(rest)]
    return np.array([parts[0] if finite.all() else lanes[~finite].sum(), *parts[1:]])
