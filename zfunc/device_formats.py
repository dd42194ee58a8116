"""The formats of compact_reference.py in torch operations: compact state to float32 and back, on any device.

The invariant: the bits are the reference's. Everything is int32 arithmetic that wraps or stays in range, exact, or
one float32 sum rounded once; what is converted to fewer bits is in their range first. int32 because not every
device computes with uint32: an arithmetic shift to the right stands for a logical one where the sign is cut off.

Floats here lie in scratch of whole blocks; what is there beyond the last element of a shorter tensor is 0.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.compact_reference import (
    BLOCK,
    CUT,
    EXP_AVG,
    EXP_AVG_SQ,
    HIGHEST_CODE,
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

NAN, INFINITY, SIZE = 0x7FC00000, 0x7F800000, 0x7FFFFFFF  # bits of a float32; those beside its sign
BINADE = 1 << 23  # from a float32's bits to those of its double


class Scratch(NamedTuple):
    """Buffers of one piece whose contents do not matter between two steps of a computation."""

    a: Tensor  # [n] fp32
    b: Tensor  # [n] fp32
    wide: Tensor  # [n] fp64, in whose memory b is
    mask: Tensor  # [n] bool


def dithers(step: int, cuts: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """What rounding adds to exp_avg and exp_avg_sq over a block: two [64] int32, of so many bits each."""
    index = torch.arange(BLOCK, dtype=torch.int64, device=device) * SPREAD
    first, second = (
        ((index + first_dither(step, moment)) & 0xFFFFFFFF) >> (32 - cut)
        for moment, cut in zip((EXP_AVG, EXP_AVG_SQ), cuts, strict=True)
    )
    return first.int(), second.int()


def load_(x: Tensor, values: Tensor) -> None:
    """x [whole blocks] = values [n], converted; 0 beyond them."""
    x[: values.numel()].copy_(values)
    x[values.numel() :].zero_()


def bits_of(x: Tensor) -> Tensor:
    """The bits of float32 x as int32: the same memory."""
    return x.view(torch.int32)


# ---- the split master ---------------------------------------------------------------------------------


def join_(x: Tensor, high: Tensor, low: Tensor, scratch: Scratch) -> None:
    """x = the float32 whose halves these are: high [n] bf16, low [n] int16."""
    bits, small = bits_of(x), bits_of(scratch.a)
    load_(bits, high.view(torch.int16))
    load_(small, low)
    bits.bitwise_left_shift_(16).add_(small)


def split_(high: Tensor, low: Tensor, x: Tensor, scratch: Scratch) -> None:
    """The halves of x, whose contents are lost: high [n] bf16, low [n] int16."""
    bits, up, n = bits_of(x), bits_of(scratch.a), high.numel()
    torch.ne(x, x, out=scratch.mask)
    bits.masked_fill_(scratch.mask, NAN)  # other NaNs could round over to a zero
    torch.add(bits, 1 << 15, out=up)
    high.view(torch.int16).copy_(up.bitwise_right_shift_(16)[:n])
    low.copy_(bits.bitwise_left_shift_(16).bitwise_right_shift_(16)[:n])


# ---- bfloat16 moments ---------------------------------------------------------------------------------


def pack_bf16_(to: Tensor, x: Tensor, dither: Tensor, scratch: Scratch) -> None:
    """to [n] bf16 = x, rounded up with the probability the dither gives; NaN stays NaN."""
    bits = bits_of(scratch.a)
    torch.add(_blocks(bits_of(x)), dither, out=_blocks(bits))
    torch.ne(x, x, out=scratch.mask)
    bits.masked_fill_(scratch.mask, NAN).bitwise_right_shift_(16)
    to.view(torch.int16).copy_(bits[: to.numel()])


# ---- 8-bit moments ------------------------------------------------------------------------------------
# A code of exp_avg is subnormal or not. Both readings are computed, and which one holds is their order: below the
# smallest normal value the linear scale lies above the logarithmic one when packing, and beneath it when unpacking.
# exp_avg_sq comes first both ways: the unit of exp_avg follows from what is kept of it.

CODES_CUTS = CUT, MIN_SHIFT + NUM_SHIFTS - 1  # of the dithers: exp_avg_sq's has the bits of its coarsest codes


def unpack_exp_avg_sq_(x: Tensor, codes: Tensor, scales: Tensor, scratch: Scratch) -> None:
    """x = the values of codes [n] uint8, given the scales [ceil(n / 64)] int16 of their blocks."""
    base = scales[:, None].int() & (SCALE_BITS >> 16)
    shift = (scales[:, None].int() & (NUM_SHIFTS - 1)).add_(MIN_SHIFT)
    load_(bits_of(x), codes)
    _decode_(bits_of(x), base.bitwise_left_shift_(16), shift, scratch)


def pack_exp_avg_sq_(codes: Tensor, scales: Tensor, x: Tensor, dither: Tensor, scratch: Scratch) -> None:
    """codes [n] uint8 and scales [ceil(n / 64)] int16 = x, rounded; x is then the values of its codes."""
    bits, finite = _blocks(bits_of(x)), _blocks(bits_of(scratch.a))
    bits.bitwise_and_(SIZE)
    finite.copy_(bits)
    finite.masked_fill_(torch.gt(bits, LIMIT, out=_blocks(scratch.mask)), 0)
    coarsest = 1 << MIN_SHIFT + NUM_SHIFTS - 1
    top = finite.amax(dim=1, keepdim=True).add_(coarsest - 1).bitwise_and_(-coarsest)
    finite.sub_(1).bitwise_and_(SIZE)  # 0 becomes the largest of all
    span = top - finite.amin(dim=1, keepdim=True) - 1
    choice = torch.zeros_like(span)
    for k in range(NUM_SHIFTS - 1):
        choice.add_(span > HIGHEST_CODE - 1 << MIN_SHIFT + k)
    shift = choice + MIN_SHIFT
    base = top.sub_(shift.new_full(shift.shape, HIGHEST_CODE).bitwise_left_shift_(shift)).clamp_(min=0)
    units = finite.copy_(dither).bitwise_right_shift_(NUM_SHIFTS - 1 - choice).sub_(base).add_(bits)
    units.bitwise_right_shift_(shift).clamp_(min=1)  # what is above 0 stays there: it divides
    units.masked_fill_(torch.eq(bits, 0, out=_blocks(scratch.mask)), 0)
    units.masked_fill_(torch.gt(bits, LIMIT, out=_blocks(scratch.mask)), INFINITE)
    bits.copy_(units)
    codes.copy_(bits_of(x)[: codes.numel()])
    scales.copy_(base.bitwise_right_shift(16).bitwise_or_(choice)[:, 0])
    _decode_(bits_of(x), base, shift, scratch)


def unpack_exp_avg_(x: Tensor, codes: Tensor, exp_avg_sq: Tensor, scratch: Scratch) -> None:
    """x = the values of codes [n] uint8, given the unpacked exp_avg_sq."""
    bits, log, linear = (bits_of(y) for y in (x, scratch.a, scratch.b))
    load_(bits, codes)
    torch.bitwise_and(bits, 127, out=log)
    log.bitwise_left_shift_(CUT).add_(SMALLEST_NORMAL)
    torch.sub(_floats(log), _float(SMALLEST_NORMAL), out=_floats(linear))
    torch.minimum(log.sub_(BINADE), linear, out=linear)
    linear.bitwise_or_(bits.bitwise_and_(128).bitwise_left_shift_(24))
    _unit_(log, exp_avg_sq)
    torch.mul(_floats(linear), _floats(log), out=x)


def pack_exp_avg_(codes: Tensor, x: Tensor, dither: Tensor, exp_avg_sq: Tensor, scratch: Scratch) -> None:
    """codes [n] uint8 = x, rounded, given the values of exp_avg_sq's new codes; the contents of x are lost."""
    bits, log, linear = (bits_of(y) for y in (x, scratch.a, scratch.b))
    _unit_(log, exp_avg_sq)
    x.mul_(_floats(log.neg_().add_(254 << 23)))
    bits.masked_fill_(torch.ne(x, x, out=scratch.mask), NAN)  # without a sign
    torch.bitwise_and(bits, SIZE, out=log)
    log.clamp_(max=LARGEST)
    torch.add(_floats(log), _float(SMALLEST_NORMAL), out=_floats(linear))
    torch.maximum(linear.sub_(SMALLEST_NORMAL), log.sub_(SMALLEST_NORMAL - BINADE), out=linear)
    _blocks(linear).add_(dither)
    linear.bitwise_right_shift_(CUT).bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
    codes.copy_(linear[: codes.numel()])


def _decode_(bits: Tensor, base: Tensor, shift: Tensor, scratch: Scratch) -> None:
    """The bits of values where the codes of exp_avg_sq were."""
    zero, rows = _blocks(scratch.mask), _blocks(bits)
    infinite = rows == INFINITE
    torch.eq(rows, 0, out=zero)
    rows.bitwise_left_shift_(shift).add_(base).masked_fill_(zero, 0).masked_fill_(infinite, INFINITY)


def _unit_(to: Tensor, exp_avg_sq: Tensor) -> None:
    """to = the bits of exp_avg's unit."""
    torch.bitwise_right_shift(bits_of(exp_avg_sq), 1, out=to)
    to.bitwise_and_(SIZE).add_(ROOT).bitwise_and_(INFINITY)


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _float(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]
