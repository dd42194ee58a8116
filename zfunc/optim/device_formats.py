"""The compact formats in torch operations: compact state to float32 and back, on any device.

The bits are those of `compact_reference`. Everything is exact int32 arithmetic that wraps or stays in range, or one
float32 sum rounded once; values are brought into range before they are converted to fewer bits. int32, because not
every device computes with uint32: where the sign is masked off, an arithmetic right shift equals a logical one.

Floats are in scratch of whole blocks, which is 0 beyond the last element of a shorter tensor.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.optim.compact_reference import (
    BLOCK,
    CUT,
    EXP_AVG,
    EXP_AVG_SQ,
    INFINITE,
    LARGEST,
    LIMIT,
    MIN_SHIFT,
    NUM_SHIFTS,
    ROOT,
    SCALE_BITS,
    SMALLEST_NORMAL,
    SPREAD,
    first_dither,
)

NAN, INFINITY = 0x7FC00000, 0x7F800000  # bits of a float32
SIGN, SIZE = -(1 << 31), 0x7FFFFFFF  # the bit of its sign, as int32, and the others
BINADE = 1 << 23  # from a float32's bits to those of its double


class Scratch(NamedTuple):
    """Temporaries for one piece; no function relies on what another left in them."""

    a: Tensor  # [n] fp32
    b: Tensor  # [n] fp32
    wide: Tensor  # [n] fp64, shares memory with b
    mask: Tensor  # [n] bool


def dithers(step: int, cuts: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The dithers of exp_avg and exp_avg_sq for one block: two [64] int32, of `cuts` bits each."""
    index = torch.arange(BLOCK, dtype=torch.int64, device=device) * SPREAD
    first, second = (
        ((index + first_dither(step, moment)) & 0xFFFFFFFF) >> (32 - cut)
        for moment, cut in zip((EXP_AVG, EXP_AVG_SQ), cuts, strict=True)
    )
    return first.int(), second.int()


def load_(x: Tensor, values: Tensor) -> None:
    """x [whole blocks] = values [n], converted, then zeros."""
    x[: values.numel()].copy_(values)
    x[values.numel() :].zero_()


def bits_of(x: Tensor) -> Tensor:
    """float32 x viewed as int32."""
    return x.view(torch.int32)


def flush_(x: Tensor, floor: float, scratch: Scratch) -> Tensor:
    """x, which is 0 where its size is below the floor."""
    torch.lt(torch.abs(x, out=scratch.a), floor, out=scratch.mask)
    return x.masked_fill_(scratch.mask, 0.0)


# ---- the split master ---------------------------------------------------------------------------------


def join_(x: Tensor, high: Tensor, low: Tensor, scratch: Scratch, exp_avg_sq: Tensor | None = None) -> None:
    """x = the float32 of the halves high [n] bf16 and low [n] int16, and of the sign of exp_avg_sq [n] fp32."""
    bits, small = bits_of(x), bits_of(scratch.a)
    load_(bits, high.view(torch.int16))
    load_(small, low)
    bits.bitwise_left_shift_(16).add_(small)
    if exp_avg_sq is not None:  # a sign adds 1 << 16
        torch.bitwise_and(bits_of(exp_avg_sq), SIGN, out=small)
        bits.sub_(small.bitwise_right_shift_(15))


def split_(high: Tensor, low: Tensor, x: Tensor, scratch: Scratch, exp_avg_sq: Tensor | None = None) -> None:
    """high [n] bf16, low [n] int16 = the halves of x, which is overwritten; and the sign of exp_avg_sq [n] fp32."""
    bits, up, n = bits_of(x), bits_of(scratch.a), high.numel()
    torch.ne(x, x, out=scratch.mask)
    bits.masked_fill_(scratch.mask, NAN)  # other NaNs could round over to a zero
    torch.add(bits, 1 << 15, out=up)
    if exp_avg_sq is not None:  # a tie is rounded down to an even half
        down = bits_of(scratch.b)
        torch.eq(torch.bitwise_and(bits, 0x1FFFF, out=down), 1 << 15, out=scratch.mask)
        up.sub_(down.copy_(scratch.mask))
        bits_of(exp_avg_sq).bitwise_and_(SIZE).bitwise_or_(down.bitwise_left_shift_(31))
    high.view(torch.int16).copy_(up.bitwise_right_shift_(16)[:n])
    low.copy_(bits.bitwise_left_shift_(16).bitwise_right_shift_(16)[:n])


# ---- bfloat16 moments ---------------------------------------------------------------------------------


def pack_bf16_(to: Tensor, x: Tensor, dither: Tensor, scratch: Scratch) -> None:
    """to [n] bf16 = x, rounded up with the probability of the dither; NaN stays NaN."""
    bits = bits_of(scratch.a)
    torch.add(_blocks(bits_of(x)), dither, out=_blocks(bits))
    torch.ne(x, x, out=scratch.mask)
    bits.masked_fill_(scratch.mask, NAN).bitwise_right_shift_(16)
    to.view(torch.int16).copy_(bits[: to.numel()])


# ---- 8-bit moments ------------------------------------------------------------------------------------
# A code of exp_avg is subnormal (linear) or normal (logarithmic). Both are computed, and comparing them selects
# one: below the smallest normal value the linear result is the larger one when packing, the smaller one when
# unpacking. The unit of exp_avg follows from the code of exp_avg_sq as if that were not special, so exp_avg_sq
# comes first both ways, and its infinities and zeros last.

# Bits of the dithers; exp_avg_sq's are those of its coarsest codes.
CODES_CUTS = (
    CUT,
    MIN_SHIFT + NUM_SHIFTS - 1,
)


def unpack_codes_(
    m: Tensor, v: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor, scratch: Scratch
) -> None:
    """m, v = the values of codes [n] uint8, given the scales [ceil(n / 64)] int16 of exp_avg_sq."""
    bits, log, linear = (bits_of(y) for y in (m, scratch.a, scratch.b))
    load_(bits, exp_avg)
    torch.bitwise_and(bits, 127, out=log)
    log.bitwise_left_shift_(CUT).add_(SMALLEST_NORMAL)
    torch.sub(_floats(log), _float(SMALLEST_NORMAL), out=_floats(linear))
    torch.minimum(log.sub_(BINADE), linear, out=linear)
    linear.bitwise_or_(bits.bitwise_and_(128).bitwise_left_shift_(24))
    base = (scales[:, None].int() & (SCALE_BITS >> 16)).bitwise_left_shift_(16)
    shift = (scales[:, None].int() & (NUM_SHIFTS - 1)).add_(MIN_SHIFT)
    load_(bits_of(v), exp_avg_sq)
    _blocks(bits_of(v)).bitwise_left_shift_(shift).add_(base)
    _unit_(log, bits_of(v))
    torch.mul(_floats(linear), _floats(log), out=m)
    load_(log, exp_avg_sq)
    bits_of(v).masked_fill_(torch.eq(log, 0, out=scratch.mask), 0)
    bits_of(v).masked_fill_(torch.eq(log, INFINITE, out=scratch.mask), INFINITY)


def pack_codes_(
    exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor, m: Tensor, v: Tensor,
    dithers: tuple[Tensor, Tensor], scratch: Scratch,
) -> None:  # fmt: skip
    """Codes [n] uint8 and exp_avg_sq's scales [ceil(n / 64)] int16 = m and v, which are overwritten."""
    bits, log, linear = (_blocks(bits_of(y)) for y in (v, scratch.a, scratch.b))
    mask = _blocks(scratch.mask)
    shift, base = pack_floats_(exp_avg_sq, scales, v, dithers[1], scratch, signed=False)
    _unit_(bits, log.bitwise_left_shift_(shift).add_(base))
    m.mul_(_floats(bits.neg_().add_(254 << 23)).view(-1))
    bits = _blocks(bits_of(m))
    bits.masked_fill_(torch.ne(_blocks(m), _blocks(m), out=mask), NAN)  # without a sign
    torch.bitwise_and(bits, SIZE, out=log).clamp_(max=LARGEST)
    torch.add(_floats(log), _float(SMALLEST_NORMAL), out=_floats(linear))
    torch.maximum(linear, log.add_(BINADE), out=linear).sub_(SMALLEST_NORMAL).add_(dithers[0])
    linear.bitwise_right_shift_(CUT).bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
    exp_avg.copy_(linear.view(-1)[: exp_avg.numel()])


def pack_floats_(
    codes: Tensor, scales: Tensor, x: Tensor, dither: Tensor, scratch: Scratch, *, signed: bool
) -> tuple[Tensor, Tensor]:
    """Codes [n] uint8 and scales [ceil(n / 64)] int16 = x, as `compact_reference.pack_floats`.

    `dither` has the bits of the coarsest codes. x becomes the sizes of its values. Returns shift and base of each
    block; the codes without signs are in scratch.a.
    """
    infinite, min_shift = INFINITE >> signed, MIN_SHIFT + signed
    coarsest = 1 << min_shift + NUM_SHIFTS - 1
    limit = LIMIT & -coarsest
    bits, log, sign = (_blocks(bits_of(y)) for y in (x, scratch.a, scratch.b))
    mask = _blocks(scratch.mask)
    if signed:
        torch.bitwise_right_shift(bits, 24, out=sign).bitwise_and_(128)
    bits.bitwise_and_(SIZE)
    if signed:
        sign.masked_fill_(torch.gt(bits, INFINITY, out=mask), 0)
    torch.mul(bits, torch.le(bits, limit, out=mask), out=log)  # infinite values count as 0
    top = log.amax(dim=1, keepdim=True).add_(coarsest - 1).bitwise_and_(-coarsest)
    # The smallest less 1, where 0 wraps to the largest.
    below = log.sub_(1).bitwise_and_(SIZE).amin(dim=1, keepdim=True)
    choice = torch.zeros_like(top)
    for k in range(NUM_SHIFTS - 1):
        choice.add_(top - below - 1 > infinite - 2 << min_shift + k)
    shift = choice + min_shift
    base = top.sub_(torch.full_like(shift, infinite - 1).bitwise_left_shift_(shift)).clamp_(min=0)
    torch.bitwise_right_shift(dither, NUM_SHIFTS - 1 - choice, out=log)
    # A positive value stays positive: it may be a divisor.
    log.add_(bits).sub_(base).bitwise_right_shift_(shift).clamp_(min=1)
    log.masked_fill_(torch.eq(bits, 0, out=mask), 0).masked_fill_(torch.gt(bits, limit, out=mask), infinite)
    codes.copy_((sign.bitwise_or_(log) if signed else log).view(-1)[: codes.numel()])
    scales.copy_(base.bitwise_right_shift(16).bitwise_or_(choice)[:, 0])
    return shift, base


def unpack_floats_(x: Tensor, codes: Tensor, scales: Tensor, scratch: Scratch, *, signed: bool) -> None:
    """x = the values of codes [n] uint8 that `pack_floats_` made, given the scales [ceil(n / 64)] int16."""
    infinite = INFINITE >> signed
    bits, sign = bits_of(x), bits_of(scratch.a)
    base = (scales[:, None].int() & (SCALE_BITS >> 16)).bitwise_left_shift_(16)
    shift = (scales[:, None].int() & (NUM_SHIFTS - 1)).add_(MIN_SHIFT + signed)
    load_(sign, codes)
    torch.bitwise_and(sign, infinite, out=bits)
    none = torch.eq(bits, 0)
    torch.eq(bits, infinite, out=scratch.mask)
    _blocks(bits).bitwise_left_shift_(shift).add_(base)
    bits.masked_fill_(none, 0).masked_fill_(scratch.mask, INFINITY)
    if signed:
        bits.bitwise_or_(sign.bitwise_and_(128).bitwise_left_shift_(24))


def _unit_(to: Tensor, bits: Tensor) -> None:
    """to = the bits of exp_avg's unit, given those of exp_avg_sq; `bits` may be more than a float's 31."""
    torch.bitwise_right_shift(bits, 1, out=to)
    to.bitwise_and_(SIZE).add_(ROOT).bitwise_and_(INFINITY)


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _float(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]
