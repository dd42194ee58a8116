"""Compact optimizer state in NumPy: the formats the kernel packs, and a step over them, bit by bit.

The invariant: a compact step is unpack, `adam_reference.reference_update`, pack. All arithmetic stays float32;
only what is kept between two steps is rounded, and its errors even out over the steps: rounded to nearest, a
moment that changes by less than half a unit a step (0.1 % at beta2 = 0.999; bf16's half unit is 0.2 to 0.4 %)
would stand still for ever.

Three formats, each over blocks of 64 consecutive elements counted from the start of the buffer:

- the split master: the weight's bfloat16 (the copy that goes to the device) and the 16 bits it lacks; exact.
- bfloat16 moments.
- 8-bit moments: a code each and an exponent for the block. A code is a float of 4 mantissa bits, subnormals
  included, whose largest binade is the block's: sign and 3 exponent bits for exp_avg, 4 exponent bits for
  exp_avg_sq, whose values span twice as many binades. There a value above 0 never becomes 0: it divides.

Rounding adds a dither below the last bit kept and cuts. The dither of element i of a block in step t is
frac(i / golden ratio + h(t)): evenly spread over a block, and hashed from step to step, because any regular
sequence would fall in step with some gradient or decay that is regular too. So rounding is unbiased, needs no state
and no generator, and depends on nothing but i and t: not on threads, chunks, buckets or ranks.

Sources: split master, in the spirit of Zamirai et al., "Revisiting BFloat16 Training" (2020); block-wise 8-bit
moments, Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022); a shared exponent for a block,
the OCP Microscaling formats (2023).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zfunc.adam_reference import Array, reference_update

BLOCK = 64  # elements that share an exponent, and the period of the dither
MANTISSA_BITS = 4  # that a code keeps
CUT = 23 - MANTISSA_BITS  # bits of a float32 below them
SPREAD = 0x9E3779B9  # from an element to the next: 2^32 / golden ratio
# Stored as the exponent where an element is inf, NaN or above 1.9375 * 2^127: all of the block are NaN then.
NOT_FINITE = 255
EXP_AVG, EXP_AVG_SQ = 0, 1  # the moments have dithers of their own


class Code(NamedTuple):
    """An 8-bit format: its exponent bits, whether it has a sign, and the lowest exponent of a block.

    Below that exponent codes would reach under the floors of `adam_reference`, to products that are denormal.
    What is stored is the exponent above it, so that zeroed bytes are the moments before the first step.
    """

    exponent_bits: int
    signed: bool
    lowest: int


AVG_CODE, AVG_SQ_CODE = Code(3, True, 38), Code(4, False, 26)


class Compact(NamedTuple):
    """The compact state of n elements; the exponents are None where moments are bfloat16."""

    high: Array  # [n] uint16, the bfloat16 half of the master
    low: Array  # [n] int16, what it lacks
    exp_avg: Array  # [n] uint16 holding bf16, or uint8 codes
    exp_avg_sq: Array  # [n] as exp_avg
    exp_avg_exponent: Array | None = None  # [ceil(n / 64)] uint8
    exp_avg_sq_exponent: Array | None = None  # [ceil(n / 64)] uint8


def split(x: Array) -> tuple[Array, Array]:
    """The bfloat16 nearest to x (ties away from zero), as uint16, and the int16 that `join` makes x of again.

    >>> high, low = split(np.float32([1.0, -3.1415927]))
    >>> join(high, low)
    array([ 1.       , -3.1415927], dtype=float32)
    """
    bits = np.where(
        np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)
    )  # other NaNs could round over to a zero
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    return high.astype(np.uint16), bits.astype(np.uint16).view(np.int16)


def join(high: Array, low: Array) -> Array:
    """The float32 whose halves these are."""
    return ((high.astype(np.uint32) << np.uint32(16)) + low.astype(np.int32).view(np.uint32)).view(np.float32)


def first_dither(step: int, moment: int) -> int:
    """The dither of a block's first element, in 2^-32: MurmurHash3's finalizer (Appleby) over step and moment."""
    x = (2 * step + moment) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def dither(n: int, step: int, moment: int) -> NDArray[np.uint32]:
    """What rounding adds in one step: [n] fractions of 2^32, with the period of a block."""
    index = np.arange(n, dtype=np.uint32) % np.uint32(BLOCK)
    return index * np.uint32(SPREAD) + np.uint32(first_dither(step, moment))


def pack_bf16(x: Array, dither: Array) -> Array:
    """Round float32 to bfloat16 (in uint16): up with the probability the dither gives; NaN stays NaN."""
    rounded = x.view(np.uint32) + (dither >> np.uint32(16))
    return (np.where(np.isnan(x), np.uint32(0x7FC00000), rounded) >> np.uint32(16)).astype(np.uint16)


def pack_codes(x: Array, dither: Array, code: Code) -> tuple[Array, Array]:
    """Round float32 x [n] to codes [n] and the stored exponents [ceil(n / 64)] of their blocks, both uint8."""
    size = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest = np.pad(size, (0, -x.size % BLOCK)).reshape(-1, BLOCK).max(axis=1, initial=0)
    # After rounding up to what a code keeps, so no code overflows. What is that close to inf counts as inf.
    exponent = np.maximum((largest + np.uint32((1 << CUT) - 1)) >> np.uint32(23), np.uint32(code.lowest))
    finite = exponent < 255
    normal = _smallest_normal(exponent, code)[: x.size]
    # Below it, adding it lets the float adder line the bits up, as those of a subnormal.
    with np.errstate(all="ignore"):
        small = (size.view(np.float32) + normal.view(np.float32)).view(np.uint32) - normal
    units = np.where(size < normal, small, size - normal + np.uint32(1 << 23))
    q = (units + (dither >> np.uint32(32 - CUT))) >> np.uint32(CUT)
    q = q | (x.view(np.uint32) >> np.uint32(31) << np.uint32(7)) if code.signed else np.maximum(q, size != 0)
    stored = np.where(finite, exponent - np.uint32(code.lowest), NOT_FINITE)
    return np.where(finite.repeat(BLOCK)[: x.size], q, 0).astype(np.uint8), stored.astype(np.uint8)


def unpack_codes(codes: Array, stored: Array, code: Code) -> Array:
    """The float32 values of codes [n], given the stored exponents [ceil(n / 64)] of their blocks; exact."""
    exponent = stored.astype(np.uint32) + np.uint32(code.lowest)
    normal = _smallest_normal(exponent, code)[: codes.size]
    shifted = (
        codes.astype(np.uint32) & np.uint32((1 << (code.exponent_bits + MANTISSA_BITS)) - 1)
    ) << np.uint32(CUT)
    with np.errstate(all="ignore"):
        small = (shifted + normal).view(np.float32) - normal.view(np.float32)
    size = np.where(shifted < 1 << 23, small.view(np.uint32), shifted + normal - np.uint32(1 << 23))
    bits = size | (codes.astype(np.uint32) >> np.uint32(7) << np.uint32(31) if code.signed else np.uint32(0))
    finite = (exponent < 255).repeat(BLOCK)[: codes.size]
    return np.where(finite, bits, np.uint32(0x7FC00000)).astype(np.uint32).view(np.float32)


def _smallest_normal(exponent: Array, code: Code) -> Array:
    """For every element the bits of its block's smallest value that is not subnormal."""
    top = (1 << code.exponent_bits) - 1
    return ((exponent - np.uint32(top - 1)) << np.uint32(23)).repeat(BLOCK)


def pack(master: Array, exp_avg: Array, exp_avg_sq: Array, *, moments: str, step: int) -> Compact:
    """Compact state ("16bit" or "8bit") of float32 buffers [n], its moments rounded as step `step` does."""
    high, low = split(master)
    first = dither(master.size, step, EXP_AVG)
    second = dither(master.size, step, EXP_AVG_SQ)
    if moments == "16bit":
        return Compact(high, low, pack_bf16(exp_avg, first), pack_bf16(exp_avg_sq, second))
    m, m_exponent = pack_codes(exp_avg, first, AVG_CODE)
    v, v_exponent = pack_codes(exp_avg_sq, second, AVG_SQ_CODE)
    return Compact(high, low, m, v, m_exponent, v_exponent)


def unpack(state: Compact) -> tuple[Array, Array, Array]:
    """The float32 master, exp_avg and exp_avg_sq of a compact state; exact."""
    master = join(state.high, state.low)
    if state.exp_avg_exponent is None or state.exp_avg_sq_exponent is None:
        return master, *((x.astype(np.uint32) << np.uint32(16)).view(np.float32) for x in state[2:4])
    return (
        master,
        unpack_codes(state.exp_avg, state.exp_avg_exponent, AVG_CODE),
        unpack_codes(state.exp_avg_sq, state.exp_avg_sq_exponent, AVG_SQ_CODE),
    )


def reference_compact_update(
    state: Compact, grad: Array, *, step: int, out: str | None = None, **settings: Any
) -> tuple[Compact, Array | None]:
    """One Adam step over compact state; arguments as `reference_update`. The inputs are left alone.

    Returns the next state, and the copy where `out` asks for one beside the high half.
    """
    moments = "16bit" if state.exp_avg_exponent is None else "8bit"
    new = reference_update(*unpack(state), grad, step=step, out=out, **settings)
    return pack(new.master, new.exp_avg, new.exp_avg_sq, moments=moments, step=step), new.out
