"""An update in NumPy float32: the definition of what kernel and device compute, operation by operation.

It is unpack, a rule, pack: `rules` has the arithmetic, `formats` the formats of the state.
"""

import math
from collections.abc import Mapping

import numpy as np

from zfunc.core.dtypes import Dtype
from zfunc.core.regions import SUM_PARTS
from zfunc.optim.formats import (
    NUMPY,
    Array,
    pack_moments,
    pack_weights,
    round_to,
    to_float32,
    unpack_moments,
    unpack_weights,
)
from zfunc.optim.rules import Decay, Factors, Rule, step


def reference_update(
    state: Mapping[str, Array],
    grad: Array,
    *,
    rule: Rule,
    state_format: str,
    factors: Factors,
    number: int,
    decay: Decay,
    out: Dtype | None = None,
) -> tuple[dict[str, Array], Array | None]:
    """Update `number` over the buffers of `state_format`, by name; they are not changed. bfloat16 is in uint16.

    `grad`: [n] float32, float16 or bfloat16. Returns the new state, and with `out` the new weights rounded to that
    dtype, or the result of a rule without weights. The arguments are those of `Elementwise.arguments`.

    >>> from zfunc.core.decision import StepDecision
    >>> from zfunc.optim.adamw import AdamW
    >>> adam, zero = AdamW(0.25, eps=0.25, weight_decay=0.0), np.zeros(2, np.float32)
    >>> state = {"master": np.ones(2, np.float32), "exp_avg": zero, "exp_avg_sq": zero}
    >>> how = adam.arguments(StepDecision(False, 1.0, 1, adam.factors(1)), 0)
    >>> reference_update(state, np.float32([0.5, 0.0]), **how)[0]["master"]
    array([0.8333333, 1.       ], dtype=float32)
    """
    with np.errstate(all="ignore"):  # inf and NaN propagate
        k = Factors._make(np.float32(x) for x in factors)
        p = unpack_weights(state) if rule.weights else None
        moments = unpack_moments(state, state_format)
        p, *new = step(NUMPY, rule, k, decay, to_float32(grad), p, *moments)
        copy = None if out is None else round_to(p, out)
        result = pack_moments(new[: len(moments)], state_format, number)
        if rule.weights:
            result = pack_weights(p, state_format, result) | result
        return result, copy


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
