"""Compact optimizer state: the definition of its formats, on NumPy's arrays and on tensors of any device.

A compact update is unpack, a rule, pack (`reference.reference_update`). All arithmetic is float32; only the state
between two steps is rounded, and without bias. Rounding to nearest would freeze a moment that changes by less than
half a unit a step (0.1 % at beta2 = 0.999; bf16's half unit is 0.2 to 0.4 %).

Four formats:

- the split master: the bfloat16 of the weight, which is the device's copy, and the remaining 16 bits; exact.
- fp32 moments beside it: the bits of an update of fp32 state and of its bfloat16 copy, whose ties go to even.
- bfloat16 moments.
- 8-bit moments, in blocks of 64 consecutive elements counted from the start of the buffer.
  exp_avg_sq has codes and a scale for each block. Codes 1 to 254 are unsigned floats with as many mantissa bits as
  let the codes reach from the largest value of the block down to its smallest: 5 bits over 8 binades, 4 over 16,
  3 over 32 or 2 over 64. Code 0 is zero and 255 infinity. A value below all 64 binades gets code 1.
  exp_avg is a signed float of 3 exponent and 4 mantissa bits with subnormals, in units of the power of two at or
  below the root of the element's own exp_avg_sq. So it needs no scale, and its precision depends on no other
  element. It holds up to 31 units; larger values are cut to that. With beta1^2 < beta2, exp_avg is at most
  (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) roots: 7.3 with the default betas.

Rounding adds a dither below the last bit kept and truncates. The dither of element i of a block in step t is
frac(i / golden ratio + h(t)): evenly spread over a block, and hashed from step to step, because a regular sequence
could correlate with a gradient or a decay that is regular too. So rounding is unbiased, needs no state and no
generator, and depends on i and t alone: not on threads, chunks, buckets or ranks.

Everything is exact int32 arithmetic that wraps or stays in range, or one float32 operation rounded once; values
are brought into range before they are converted to fewer bits. int32, because not every device computes with
uint32: where the sign is masked off, an arithmetic right shift equals a logical one. The kernel has the same in C
(`csrc/_number_formats.h`), and equals this to the bit.

Sources: split master, in the spirit of Zamirai et al., "Revisiting BFloat16 Training" (2020); block-wise 8-bit
moments over seven decades, Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); a shared scale
for a block, the OCP Microscaling formats (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers, weight_buffers

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
BLOCK = 64  # elements that share a scale, and the period of the dither
SPREAD = 0x9E3779B9  # between the dithers of neighbours: 2^32 / golden ratio
EXP_AVG, EXP_AVG_SQ = 0, 1  # which moment: each has its own dithers

# exp_avg_sq, as bits of a float32: a code counts units of 2^shift, the shift being MIN_SHIFT plus 0 to 3.
MIN_SHIFT, NUM_SHIFTS = 18, 4
SCALE_BITS = 0x7FF80000  # of a scale: the value of code 0; the lower bits select the shift
HIGHEST_CODE, INFINITE = 254, 255
LIMIT = 0x7F600000  # 1.75 * 2^127: larger values count as infinite

# exp_avg, in its units: 2^-6 below 2^-2, then 4 mantissa bits up to 31.
CUT = 19  # bits of a float32 below those mantissa bits
SMALLEST_NORMAL, LARGEST = 125 << 23, 0x41F80000  # bits of 2^-2 and of 31
ROOT, EXPONENT = 0x1FC00000, 0x7F800000  # half the bits of x, and this, are near those of its root

NAN, SIZE, BINADE = 0x7FC00000, 0x7FFFFFFF, 1 << 23  # bits of a float32: the one NaN, all but the sign


class Numpy:
    """`rules.Operations` on float32 arrays, and what codecs need: views of bits, blocks, conversions."""

    where, minimum, maximum = map(staticmethod, (np.where, np.minimum, np.maximum))

    def flush(self, x: Array, floor: float, /) -> Array:
        """x, and 0 where its size is below the floor."""
        return np.where(np.abs(x) < np.float32(floor), np.float32(0), x)

    def sqrt(self, x: Array, /) -> Array:
        """The nearest float32."""
        return np.sqrt(x)

    def signed(self, x: Array, size: float, /) -> Array:
        """`size` with the sign of x; 0 where x is 0, NaN where it is NaN."""
        return np.where(np.isnan(x), x, np.where(x == 0, np.float32(0), np.copysign(size, x)))

    def bits(self, x: Array) -> Array:
        """Those of float32, as int32."""
        return x.view(np.int32)

    def floats(self, bits: Array) -> Array:
        """And back."""
        return bits.view(np.float32)

    def ints(self, x: Array) -> Array:
        """Stored 8 or 16 bits, of bfloat16 too, or truth as int32."""
        return (x.view(np.int16) if x.dtype == np.uint16 else x).astype(np.int32)

    def stored(self, x: Array, dtype: Dtype) -> Array:
        """int32 that fit as such a dtype; bf16 by its bits."""
        return x.astype(DTYPES[dtype].numpy)

    def blocks(self, x: Array) -> Array:
        """Blocks of 64, the last one filled up with zeros."""
        return np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)

    def largest(self, x: Array) -> Array:
        """Of every block: [blocks, 1]."""
        return x.max(1, keepdims=True)

    def smallest(self, x: Array) -> Array:
        """Of every block: [blocks, 1]."""
        return x.min(1, keepdims=True)

    def places(self, like: Array) -> Array:
        """0 to 63, int64."""
        del like
        return np.arange(BLOCK)


NUMPY = Numpy()


def operations(x: Any) -> Any:
    """Those of an array, or of a tensor."""
    if isinstance(x, np.ndarray):
        return NUMPY
    from zfunc.optim.tensors import TORCH

    return TORCH


# ---- the split master ----------------------------------------------------------------------------------


def split(x: Any) -> tuple[Any, Any]:
    """The bfloat16 nearest to x (ties away from zero), and the int16 with which `join` restores x.

    >>> high, low = split(np.float32([1.0, -3.1415927]))
    >>> join(high, low)
    array([ 1.       , -3.1415927], dtype=float32)
    """
    o = operations(x)
    bits = o.where(x != x, NAN, o.bits(x))  # other NaNs could round over to a zero
    return o.stored(bits + 0x8000 >> 16, "bf16"), o.stored(bits << 16 >> 16, "int16")


def split_to_even(x: Any, exp_avg_sq: Any) -> tuple[Any, Any, Any]:
    """As `split`, but ties to even, as a copy is rounded; and exp_avg_sq with a sign where one was rounded down.

    An even bfloat16 is the nearest to 65,537 values then, one more than an int16 can tell apart: the ties on both
    sides of it have the same lower bits. exp_avg_sq is never negative, so its sign is free to say which side it is.

    >>> high, low, v = split_to_even(np.float32([1 + 2**-8, 1 + 3 * 2**-8]), np.float32([0.5, 0.5]))
    >>> [hex(x) for x in high], low, v
    (['0x3f80', '0x3f82'], array([-32768, -32768], dtype=int16), array([-0.5,  0.5], dtype=float32))
    >>> join(high, low, v)
    array([1.0039062, 1.0117188], dtype=float32)
    """
    o = operations(x)
    bits = o.where(x != x, NAN, o.bits(x))
    down = o.ints((bits & 0x1FFFF) == 0x8000)
    signs = o.floats(o.bits(exp_avg_sq) & SIZE | down << 31)
    return o.stored(bits + 0x8000 - down >> 16, "bf16"), o.stored(bits << 16 >> 16, "int16"), signs


def join(high: Any, low: Any, exp_avg_sq: Any = None) -> Any:
    """The float32 whose halves these are; for those of `split_to_even` with exp_avg_sq."""
    o = operations(high)
    bits = (o.ints(high) << 16) + o.ints(low)
    if exp_avg_sq is not None:
        bits = bits - (o.bits(exp_avg_sq) >> 31 << 16)  # a sign adds 1 << 16
    return o.floats(bits)


# ---- rounding of moments -------------------------------------------------------------------------------


def first_dither(step: int, moment: int) -> int:
    """The dither of a block's first element, in 2^-32: MurmurHash3's finalizer (Appleby) over step and moment."""
    x = (2 * step + moment) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def dither(step: int, moment: int, like: Any) -> Any:
    """The dithers of one step for a block: [64] int32, fractions of 2^31, where `like` is."""
    o = operations(like)
    return o.ints((o.places(like) * SPREAD + first_dither(step, moment) & 0xFFFFFFFF) >> 1)


def pack_bf16(x: Any, dither: Any) -> Any:
    """Round float32 to bfloat16: up with the probability the dither gives; NaN stays NaN."""
    o = operations(x)
    rounded = o.blocks(o.bits(x)) + (dither >> 15)
    bits = o.where(o.blocks(x) != o.blocks(x), NAN, rounded)
    return o.stored(bits >> 16, "bf16").reshape(-1)[: len(x)]


def pack_floats(x: Any, dither: Any, *, signed: bool) -> tuple[Any, Any]:
    """Round float32 x [n] to codes [n] uint8 and the scales [ceil(n / 64)] int16 of their blocks.

    Of a moment with a sign the highest bit of a code is that, and 7 are left for the size.
    """
    o = operations(x)
    infinite, min_shift = INFINITE >> signed, MIN_SHIFT + signed
    coarsest = 1 << min_shift + NUM_SHIFTS - 1
    limit = LIMIT & -coarsest
    bits = o.blocks(o.bits(x))
    size = bits & SIZE
    finite = size * (size <= limit)  # infinite values count as 0
    top = o.largest(finite) + (coarsest - 1) & -coarsest  # the value of the highest code
    below = o.smallest(finite - 1 & SIZE)  # the smallest less 1, where 0 wraps to the largest
    del finite
    reach = [infinite - 2 << min_shift + k for k in range(NUM_SHIFTS - 1)]  # down to code 1
    choice = sum(o.ints(top - below - 1 > y) for y in reach)
    shift = choice + min_shift
    base = o.maximum(top - (infinite - 1 << shift), 0 * top)
    codes = (dither >> 31 - shift) + size - base >> shift
    codes = o.where(
        size == 0, 0, o.maximum(codes, 1 + 0 * top)
    )  # positive stays positive: it may be a divisor
    codes = o.where(size > limit, infinite, codes)
    if signed:  # of a NaN, no CPU's sign
        codes = codes | o.where(size > EXPONENT, 0, bits >> 24 & 128)
    return o.stored(codes, "uint8").reshape(-1)[: len(x)], o.stored(base >> 16 | choice, "int16")[:, 0]


def unpack_floats(codes: Any, scale: Any, *, signed: bool) -> Any:
    """The float32 values of codes [n] that `pack_floats` made, given the scales of their blocks; exact."""
    o, infinite = operations(codes), INFINITE >> signed
    given = o.blocks(o.ints(codes))
    size = given & infinite
    bits = o.where(size == infinite, EXPONENT, _plain_bits(size, scale, MIN_SHIFT + signed))
    bits = o.where(size == 0, 0, bits) | (given & 255 - infinite) << 24
    return o.floats(bits).reshape(-1)[: len(codes)]


# A code of exp_avg is subnormal (linear) or normal (logarithmic). Both readings are computed, and comparing them
# selects one: below the smallest normal value the linear result is the larger one when packing, the smaller one
# when unpacking.


def pack_exp_avg(x: Any, dither: Any, codes: Any, scale: Any) -> Any:
    """Round float32 x [n] to codes [n] uint8, in units of the packed exp_avg_sq: `codes` and `scale`."""
    o = operations(x)
    bits = o.bits(o.blocks(x) * o.floats((254 << 23) - _unit_bits(codes, scale)))
    bits = o.where((bits & SIZE) > EXPONENT, NAN, bits)  # without a sign
    log = o.where((bits & SIZE) > LARGEST, LARGEST, bits & SIZE)
    rounded = o.maximum(o.bits(o.floats(log) + 0.25), log + BINADE)
    del log  # a device has no room for more
    rounded = rounded - SMALLEST_NORMAL + (dither >> 31 - CUT)
    return o.stored(rounded >> CUT | bits >> 24 & 128, "uint8").reshape(-1)[: len(x)]


def unpack_exp_avg(x: Any, codes: Any, scale: Any) -> Any:
    """The float32 values of exp_avg's codes x [n], given the packed exp_avg_sq; exact."""
    o = operations(x)
    given = o.blocks(o.ints(x))
    log = ((given & 127) << CUT) + SMALLEST_NORMAL
    linear = o.bits(o.floats(log) - 0.25)
    units = o.minimum(log - BINADE, linear) | (given & 128) << 24
    return (o.floats(units) * o.floats(_unit_bits(codes, scale))).reshape(-1)[: len(x)]


def _plain_bits(codes: Any, scale: Any, min_shift: int) -> Any:
    """The bits of the values of blocks of codes, as if none were special (0 or infinity)."""
    given = operations(scale).ints(scale)[:, None]
    return (codes << (given & NUM_SHIFTS - 1) + min_shift) + ((given & SCALE_BITS >> 16) << 16)


def _unit_bits(codes: Any, scale: Any) -> Any:
    """The bits of exp_avg's unit, by blocks: the power of two at or below the root of exp_avg_sq."""
    o = operations(codes)
    plain = _plain_bits(o.blocks(o.ints(codes)), scale, MIN_SHIFT)
    return (plain >> 1 & SIZE) + ROOT & EXPONENT


def unpack_first_codes(
    exp_avg: Array, exp_avg_sq: Array, exp_avg_exponent: Array, exp_avg_sq_exponent: Array
) -> tuple[Array, Array]:
    """The float32 exp_avg and exp_avg_sq [n] of the first 8-bit format, which old checkpoints hold.

    Their codes [n] are floats of 4 mantissa bits below an exponent [ceil(n / 64)] for each block, which counts from
    the lowest there is. 3 exponent bits and a sign for exp_avg, 4 for exp_avg_sq; a block of exponent 255 is NaN.

    >>> m, v = unpack_first_codes(*np.uint8([[0x70, 0xF0], [0xF0, 1]]), *np.uint8([[89], [101]]))
    >>> m, v == [1.0, 2.0**-18]
    (array([ 1., -1.], dtype=float32), array([ True,  True]))
    """

    def unpacked(codes: Array, stored: Array, exponent_bits: int, lowest: int) -> Array:
        size = codes & np.uint8((16 << exponent_bits) - 1)
        binade = np.maximum(size >> 4, 1).astype(np.int32)
        units = np.where(size < 16, size, size % 16 + 16).astype(np.float64)
        exponent = stored.astype(np.int32).repeat(BLOCK)[: codes.size] + lowest
        values = np.ldexp(units, binade + exponent - (127 + 3 + (1 << exponent_bits)))
        return np.where(exponent < 255, values, np.nan).astype(np.float32)

    m = unpacked(exp_avg, exp_avg_exponent, 3, 38)
    return np.where(exp_avg < 128, m, -m), unpacked(exp_avg_sq, exp_avg_sq_exponent, 4, 26)


# ---- whole states --------------------------------------------------------------------------------------


def unpack_weights(state: Mapping[str, Any]) -> Any:
    """The float32 weights of a state of any format, by the names of its buffers; exact, maybe its own memory."""
    if "master" in state:
        return state["master"]
    return join(state[HIGH_HALF], state["master_low"], state["exp_avg_sq"] if _has_signs(state) else None)


def pack_weights(p: Any, state_format: str, moments: dict[str, Any]) -> dict[str, Any]:
    """Float32 weights as the buffers of a format. Of "fp32-split" exp_avg_sq, in `moments`, gets its signs."""
    names = weight_buffers(state_format)
    if len(names) == 3:
        *halves, moments["exp_avg_sq"] = split_to_even(p, moments["exp_avg_sq"])
        return dict(zip(names, halves, strict=False))
    return dict(zip(names, [p] if len(names) == 1 else split(p), strict=True))


def master_weights(state: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """The fp32 weights `start` to `stop` of a state in any format, on the host; read only: maybe a view."""
    names = [x for x in ("master", HIGH_HALF, "master_low", "exp_avg_sq") if x in state]
    return unpack_weights(
        {x: state[x][start:stop].cpu() for x in names if x != "exp_avg_sq" or _has_signs(state)}
    )


def initial_state(weights: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp32 weights [n] as the buffers that hold them in such a state before the first step, on the host."""
    if "master" in state:
        return {"master": weights}
    even = _has_signs(state)
    halves = split_to_even(weights, weights.new_zeros(len(weights))) if even else split(weights)
    return dict(zip((HIGH_HALF, "master_low", "exp_avg_sq"), halves, strict=False))


def _has_signs(state: Mapping[str, Any]) -> bool:
    """Whether the sign of exp_avg_sq belongs to the halves: beside fp32 moments."""
    return "master" not in state and "exp_avg_sq" in state and state["exp_avg_sq"].itemsize == 4


def unpack_moments(state: Mapping[str, Any], state_format: str) -> list[Any]:
    """The float32 moments of a state of any format, also a former one; exact, maybe its own memory."""
    kinds = moment_buffers(state_format)
    own = [state[x.name] for x in kinds]
    if state_format == "8bit-1":
        found = unpack_first_codes(*(np.asarray(x) for x in own))
        return [*found] if isinstance(own[0], np.ndarray) else [operations(own[0]).of_array(x) for x in found]
    if state_format == "8bit":
        return [unpack_exp_avg(*own), unpack_floats(*own[1:], signed=False)]
    if any(x.dtype == "uint8" for x in kinds):
        pairs = zip(kinds[::2], own[::2], own[1::2], strict=True)
        return [unpack_floats(codes, scale, signed=x.signed) for x, codes, scale in pairs]
    return [abs(x) if state_format == "fp32-split" and x is own[1] else to_float32(x) for x in own]


def pack_moments(moments: Sequence[Any], state_format: str, step: int) -> dict[str, Any]:
    """Float32 moments as the buffers of a format, rounded as step `step` does."""
    kinds = moment_buffers(state_format)
    spread = [dither(step, i, x) for i, x in enumerate(moments)]
    if state_format == "8bit":
        codes = pack_floats(moments[1], spread[1], signed=False)
        packed = [pack_exp_avg(moments[0], spread[0], *codes), *codes]
    elif any(x.dtype == "uint8" for x in kinds):
        each = zip(kinds[::2], moments, spread, strict=True)
        packed = [y for kind, x, d in each for y in pack_floats(x, d, signed=kind.signed)]
    else:
        each = zip(kinds, moments, spread, strict=True)
        packed = [pack_bf16(x, d) if kind.dtype == "bf16" else x for kind, x, d in each]
    return {kind.name: x for kind, x in zip(kinds, packed, strict=True)}


def kernel_layout(name: str, room: int = 2, *, weights: bool = True) -> tuple[list[str], list[str]]:
    """A format as the compiled kernel takes it, which has room for some moments.

    The names of its weights, their low half, moments and scales, "" where it has none; then how weights and moments
    are kept, in the kernel's words.

    >>> kernel_layout("lion-8bit")
    (['master_high', 'master_low', 'exp_avg', '', 'exp_avg_scale', ''], ['HALVES', 'SIGNED', 'KEPT_NONE'])
    """
    masters, known = weight_buffers(name), {x.name: x for x in moment_buffers(name)}
    moments = [x for x in known.values() if x.shared == 1]
    kept = [
        ("UNSIGNED", "SIGNED")[x.signed] if x.dtype == "uint8" else f"KEPT_{x.dtype.upper()}" for x in moments
    ]
    if name == "8bit":
        kept[0] = "BESIDE"
    how = ("MASTER", "HALVES", "HALVES_TO_EVEN")[len(masters) - 1] if weights else "NO_WEIGHTS"
    scales = [f"{x.name}_scale" if f"{x.name}_scale" in known else "" for x in moments]
    each = (masters[:2] if weights else (), 2), ([x.name for x in moments], room), (scales, room)
    return [x for names, n in each for x in [*names, *[""] * n][:n]], [how, *kept, *["KEPT_NONE"] * room][
        : room + 1
    ]


def to_float32(x: Any) -> Any:
    """Convert float16, or bf16 (of an array in uint16), to float32, exactly; a tensor of float32 is itself."""
    if not isinstance(x, np.ndarray):
        return x.float()
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
