"""Law 8's witness: an update in NumPy float32, operation by operation, and `zfunc.optim.formats` on arrays.

NumPy has no bfloat16: uint16 holds its bits.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.region_table import SUM_PARTS
from zfunc.optim import formats
from zfunc.optim.rules import Factors, RuleStep, apply_step

Array = NDArray[Any]


def join(high: Array, low: Array, exp_avg_sq: Array | None = None) -> Array:
    """The fp32 weights whose halves these are."""
    bits = (high.astype(np.int32) << 16) + low
    signs = 0 if exp_avg_sq is None else np.signbit(exp_avg_sq).astype(np.int32) << 16
    return (bits + signs).view(np.float32)


def to_float32(x: Array) -> Array:
    """Convert fp16 or bf16 to fp32, exactly."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def round_to(x: Array, dtype: Dtype) -> Array:
    """Round fp32 to "fp32", "fp16" or "bf16": to nearest, ties to even; NaN stays NaN."""
    if dtype != "bf16":
        return x.astype(DTYPES[dtype].numpy)
    bits = x.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (np.where(np.isnan(x), bits | 0x400000, rounded) >> 16).astype(np.uint16)


# ---- arrays and tensors ------------------------------------------------------------------------------


def array(x: torch.Tensor) -> Array:
    """The tensor's memory as NumPy."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def tensor(x: Array) -> torch.Tensor:
    """The array's memory as torch."""
    bf16 = x.dtype == np.uint16
    own = torch.from_numpy(np.require(x.view(np.int16) if bf16 else x, requirements="CW"))
    return own.view(torch.bfloat16) if bf16 else own


def _each(x: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(x, Mapping):
        return {name: _each(y, kind, change) for name, y in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_each(y, kind, change) for y in x)
    return change(x) if isinstance(x, kind) else x


def _on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **given: Any) -> Any:
        args, given = _each(args, np.ndarray, tensor), _each(given, np.ndarray, tensor)
        return _each(function(*args, **given), torch.Tensor, array)

    return call


split, dither = map(_on_arrays, (formats.split, formats.dither))
pack_bf16, pack_exp_avg, unpack_exp_avg = map(
    _on_arrays, (formats.pack_bf16, formats.pack_exp_avg, formats.unpack_exp_avg)
)
pack_floats, unpack_floats = map(_on_arrays, (formats.pack_floats, formats.unpack_floats))
pack, unpack_weights, unpack_moments = map(
    _on_arrays, (formats.pack, formats.unpack_weights, formats.unpack_moments)
)


# ---- updates -----------------------------------------------------------------------------------------


class Numpy:
    """`rules.Operations` on float32 arrays."""

    def flush(self, x: Array, floor: float, /) -> Array:
        return np.where(np.abs(x) < np.float32(floor), np.float32(0), x)

    def sqrt(self, x: Array, /) -> Array:
        return np.sqrt(x)

    def signed(self, x: Array, size: float, /) -> Array:
        return np.where(np.isnan(x), x, np.where(x == 0, np.float32(0), np.copysign(size, x)))


NUMPY = Numpy()


def reference_update(
    step: RuleStep, state: Mapping[str, Array], grad: Array, *, out: Dtype | None = None
) -> tuple[dict[str, Array], Array | None]:
    """A step over the buffers of its format, by name; they are not changed.

    Returns the new state, and with `out` the new weights rounded to that dtype, or the result of a rule without
    weights.
    """
    rule, state_format = step.rule, step.state_format
    with np.errstate(all="ignore"):  # inf and NaN propagate
        step = step._replace(factors=Factors._make(np.float32(x) for x in step.factors))
        p = unpack_weights(state) if rule.weights else None
        moments = unpack_moments(state, state_format)
        p, *new = apply_step(NUMPY, step, to_float32(grad), p, *moments)
        copy = None if out is None else round_to(p, out)
        return pack(p if rule.weights else None, new[: len(moments)], state_format, step.number), copy


def reference_square_sum(x: Array) -> Array:
    """The sum of squares of x [n] as the kernel's [SUM_PARTS] doubles, which `math.fsum` adds up.

    Of each 64 elements the squares are added in double: element i to lane i % 16, then lanes in pairs. These sums
    are added without rounding. Part i of the result has 32 bits, from 2^(32 i - 352) on.
    """
    with np.errstate(all="ignore"):
        lanes = square_sums(x)
    finite = np.isfinite(lanes)
    total = sum(int(math.ldexp(x, 352)) for x in lanes[finite].tolist())
    rest = [total >> 32 * i for i in range(SUM_PARTS)]
    parts = [math.ldexp(r % 2**32, 32 * i - 352) for i, r in enumerate(rest)]
    return np.array([parts[0] if finite.all() else lanes[~finite].sum(), *parts[1:]])


def square_sums(x: Array) -> Array:
    """The sums of squares of every 64 elements of x [n], in that order: [ceil(n / 64)]."""
    square = to_float32(x).astype(np.float64) ** 2
    lanes = np.pad(square, (0, -x.size % 64)).reshape(-1, 4, 16).cumsum(1)[:, -1]  # sum would pair
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes[:, 0]
