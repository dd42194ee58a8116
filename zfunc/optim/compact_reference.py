"""Compact optimizer state in NumPy: the definition of the kernel's formats.

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

Sources: split master, in the spirit of Zamirai et al., "Revisiting BFloat16 Training" (2020); block-wise 8-bit
moments over seven decades, Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); a shared scale
for a block, the OCP Microscaling formats (2023).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers, weight_buffers

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


def split(x: Array) -> tuple[Array, Array]:
    """The bfloat16 nearest to x (ties away from zero) as uint16, and the int16 with which `join` restores x.

    >>> high, low = split(np.float32([1.0, -3.1415927]))
    >>> join(high, low)
    array([ 1.       , -3.1415927], dtype=float32)
    """
    # Other NaNs could round over to a zero.
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    return high.astype(np.uint16), bits.astype(np.uint16).view(np.int16)


def split_to_even(x: Array, exp_avg_sq: Array) -> tuple[Array, Array, Array]:
    """As `split`, but ties to even, as `round_to`; and exp_avg_sq float32 with a sign where one was rounded down.

    An even bfloat16 is the nearest to 65,537 values then, one more than an int16 can tell apart: the ties on both
    sides of it have the same lower bits. exp_avg_sq is never negative, so its sign is free to say which side it is.

    >>> high, low, v = split_to_even(np.float32([1 + 2**-8, 1 + 3 * 2**-8]), np.float32([0.5, 0.5]))
    >>> [hex(x) for x in high], low, v
    (['0x3f80', '0x3f82'], array([-32768, -32768], dtype=int16), array([-0.5,  0.5], dtype=float32))
    >>> join(high, low, v)
    array([1.0039062, 1.0117188], dtype=float32)
    """
    high, low = split(x)
    down = (x.view(np.uint32) & np.uint32(0x1FFFF)) == 0x8000
    down &= ~np.isnan(x)
    return high - down, low, np.copysign(exp_avg_sq, np.where(down, np.float32(-1), np.float32(1)))


def join(high: Array, low: Array, exp_avg_sq: Array | None = None) -> Array:
    """The float32 whose halves these are; for those of `split_to_even` with exp_avg_sq."""
    bits = (high.astype(np.uint32) << np.uint32(16)) + low.astype(np.int32).view(np.uint32)
    if exp_avg_sq is not None:
        bits = bits + (np.signbit(exp_avg_sq).astype(np.uint32) << np.uint32(16))
    return bits.view(np.float32)


def first_dither(step: int, moment: int) -> int:
    """The dither of a block's first element, in 2^-32: MurmurHash3's finalizer (Appleby) over step and moment."""
    x = (2 * step + moment) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def dither(n: int, step: int, moment: int) -> NDArray[np.uint32]:
    """The dithers of one step: [n] fractions of 2^32, with the period of a block."""
    index = np.arange(n, dtype=np.uint32) % np.uint32(BLOCK)
    return index * np.uint32(SPREAD) + np.uint32(first_dither(step, moment))


def pack_bf16(x: Array, dither: Array) -> Array:
    """Round float32 to bfloat16 (in uint16): up with the probability the dither gives; NaN stays NaN."""
    rounded = x.view(np.uint32) + (dither >> np.uint32(16))
    return (np.where(np.isnan(x), np.uint32(0x7FC00000), rounded) >> np.uint32(16)).astype(np.uint16)


def pack_floats(x: Array, dither: Array, *, signed: bool) -> tuple[Array, Array]:
    """Round float32 x [n] to codes [n] uint8 and the scales [ceil(n / 64)] int16 of their blocks.

    Of a moment with a sign the highest bit of a code is that, and 7 are left for the size.
    """
    infinite, min_shift = INFINITE >> signed, MIN_SHIFT + signed
    coarsest = 1 << min_shift + NUM_SHIFTS - 1
    size = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    finite = size <= (LIMIT & -coarsest)
    blocks = np.pad(np.where(finite, size, 0), (0, -x.size % BLOCK)).astype(np.int64).reshape(-1, BLOCK)
    top = -(-blocks.max(axis=1, initial=0) // coarsest) * coarsest  # the value of the highest code
    least = np.where(blocks > 0, blocks, top[:, None]).min(axis=1, initial=EXPONENT)
    reach = [infinite - 2 << min_shift + k for k in range(NUM_SHIFTS - 1)]  # down to code 1
    choice = np.sum([top - least > x for x in reach], axis=0)
    base = np.maximum(top - (infinite - 1 << min_shift + choice), 0)
    scale = (base >> 16 | choice).astype(np.int16)
    shift, base = (y.repeat(BLOCK)[: x.size] for y in (min_shift + choice, base))
    code = size.astype(np.int64) - base + (dither >> (32 - shift).astype(np.uint32)) >> shift
    code = np.where(size == 0, 0, np.maximum(code, 1))
    code = np.where(finite, code, infinite)
    if signed:  # of a NaN, no CPU's sign
        code = code | np.where(np.isnan(x), 0, x.view(np.uint32) >> np.uint32(31) << np.uint32(7))
    return code.astype(np.uint8), scale


def unpack_floats(codes: Array, scale: Array, *, signed: bool) -> Array:
    """The float32 values of codes [n] that `pack_floats` made, given the scales of their blocks; exact."""
    infinite = np.uint8(INFINITE >> signed)
    sizes = codes & infinite
    bits = np.where(sizes == infinite, np.uint32(EXPONENT), _plain_bits(sizes, scale, MIN_SHIFT + signed))
    bits = np.where(sizes == 0, np.uint32(0), bits)
    return (bits | (codes & ~infinite).astype(np.uint32) << np.uint32(24)).view(np.float32)


def pack_exp_avg(x: Array, dither: Array, codes: Array, scale: Array) -> Array:
    """Round float32 x [n] to codes [n] uint8, in units of the packed exp_avg_sq: `codes` and `scale`."""
    with np.errstate(all="ignore"):
        x = x * (np.uint32(254 << 23) - _unit_bits(codes, scale)).view(np.float32)
    x = np.where(np.isnan(x), np.float32(np.nan), x)  # without a sign
    size = np.minimum(x.view(np.uint32) & np.uint32(0x7FFFFFFF), np.uint32(LARGEST))
    # Below the smallest normal value, adding it lets the float adder line the bits up, as those of a subnormal.
    normal = np.uint32(SMALLEST_NORMAL)
    small = (size.view(np.float32) + normal.view(np.float32)).view(np.uint32) - normal
    units = np.where(size < normal, small, size - normal + np.uint32(1 << 23))
    code = (units + (dither >> np.uint32(32 - CUT))) >> np.uint32(CUT)
    return (code | (x.view(np.uint32) >> np.uint32(31) << np.uint32(7))).astype(np.uint8)


def unpack_exp_avg(x: Array, codes: Array, scale: Array) -> Array:
    """The float32 values of exp_avg's codes x [n], given the packed exp_avg_sq; exact."""
    size, normal = (x.astype(np.uint32) & np.uint32(127)) << np.uint32(CUT), np.uint32(SMALLEST_NORMAL)
    small = (size + normal).view(np.float32) - normal.view(np.float32)
    units = np.where(size < 1 << 23, small, (size + normal - np.uint32(1 << 23)).view(np.float32))
    signed = units.view(np.uint32) | x.astype(np.uint32) >> np.uint32(7) << np.uint32(31)
    return signed.view(np.float32) * _unit_bits(codes, scale).view(np.float32)


def _plain_bits(codes: Array, scale: Array, min_shift: int = MIN_SHIFT) -> Array:
    """The bits of the values of exp_avg_sq's codes [n], as if none were special (0 or infinity)."""
    bits = scale.view(np.uint16).astype(np.uint32) << np.uint32(16)
    base, choice = bits & np.uint32(SCALE_BITS), bits >> np.uint32(16) & np.uint32(NUM_SHIFTS - 1)
    base, shift = (y.repeat(BLOCK)[: codes.size] for y in (base, choice + np.uint32(min_shift)))
    return base + (codes.astype(np.uint32) << shift)


def _unit_bits(codes: Array, scale: Array) -> Array:
    """The bits of exp_avg's unit: the power of two at or below the root of exp_avg_sq."""
    return (_plain_bits(codes, scale) >> np.uint32(1)) + np.uint32(ROOT) & np.uint32(EXPONENT)


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


def unpack_weights(state: Mapping[str, Array]) -> Array:
    """The float32 weights of a state of any format, by the names of its buffers; exact."""
    if "master" in state:
        return state["master"]
    signs = state.get("exp_avg_sq")
    return join(state[HIGH_HALF], state["master_low"], signs if _is_float32(signs) else None)


def pack_weights(p: Array, state_format: str, moments: dict[str, Array]) -> dict[str, Array]:
    """Float32 weights as the buffers of a format. Of "fp32-split" exp_avg_sq, in `moments`, gets its signs."""
    names = weight_buffers(state_format)
    if len(names) == 3:
        *halves, moments["exp_avg_sq"] = split_to_even(p, moments["exp_avg_sq"])
        return dict(zip(names, halves, strict=False))
    return dict(zip(names, [p] if len(names) == 1 else split(p), strict=True))


def unpack_moments(state: Mapping[str, Array], state_format: str) -> list[Array]:
    """The float32 moments of a state of any format, also a former one; exact."""
    kinds = moment_buffers(state_format)
    own = [state[x.name] for x in kinds]
    if state_format == "8bit-1":
        return [*unpack_first_codes(*own)]
    if state_format == "8bit":
        return [unpack_exp_avg(*own), unpack_floats(*own[1:], signed=False)]
    if any(x.dtype == "uint8" for x in kinds):
        pairs = zip(kinds[::2], own[::2], own[1::2], strict=True)
        return [unpack_floats(codes, scale, signed=x.signed) for x, codes, scale in pairs]
    return [np.abs(x) if state_format == "fp32-split" and x is own[1] else to_float32(x) for x in own]


def pack_moments(moments: Sequence[Array], state_format: str, step: int) -> dict[str, Array]:
    """Float32 moments as the buffers of a format, rounded as step `step` does."""
    kinds = moment_buffers(state_format)
    spread = [dither(x.size, step, i) for i, x in enumerate(moments)]
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


def kernel_layout(name: str, *, weights: bool = True) -> tuple[list[str], list[str]]:
    """A format as the compiled kernel takes it.

    The names of its weights, their low half, two moments and two scales, "" where it has none; then how weights
    and moments are kept, in the kernel's words.

    >>> kernel_layout("lion-8bit")
    (['master_high', 'master_low', 'exp_avg', '', 'exp_avg_scale', ''], ['HALVES', 'SIGNED', 'KEPT_NONE'])
    """
    masters, kinds = weight_buffers(name), [x for x in moment_buffers(name) if x.shared == 1]
    codes = "UNSIGNED", "SIGNED"
    kept = [codes[x.signed] if x.dtype == "uint8" else f"KEPT_{x.dtype.upper()}" for x in kinds]
    if name == "8bit":
        kept[0] = "BESIDE"
    own = [x.name for x in kinds] + ["", ""]
    known = [x.name for x in moment_buffers(name)]
    scales = [f"{x}_scale" if f"{x}_scale" in known else "" for x in own[:2]]
    how = ("MASTER", "HALVES", "HALVES_TO_EVEN")[len(masters) - 1] if weights else "NO_WEIGHTS"
    halves = [*masters[:2], ""][:2] if weights else ["", ""]
    return [*halves, *own[:2], *scales], [how, *kept, "KEPT_NONE", "KEPT_NONE"][:3]


def _is_float32(x: Array | None) -> bool:
    return x is not None and x.dtype == np.float32


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
