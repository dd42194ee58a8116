"""The formats of compact_reference.py in torch operations: compact state to float32 and back, on any device.

The invariant: the bits are the reference's. Everything is int32 arithmetic that wraps or stays in range, exact, or
one float32 sum rounded once; what is converted to fewer bits is in their range first. int32 because not every
device computes with uint32: an arithmetic shift to the right stands for a logical one where the sign is cut off.

Floats here lie in scratch of whole blocks; what is there beyond the last element of a shorter tensor is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.compact_reference import BLOCK, CUT, EXP_AVG, EXP_AVG_SQ, NOT_FINITE, SPREAD, Code, first_dither

NAN, INFINITY, SIZE = 0x7FC00000, 0x7F800000, 0x7FFFFFFF  # bits of a float32; those beside its sign
BINADE = 1 << 23  # from a float32's bits to those of its double


class Scratch(NamedTuple):
    """Buffers of one piece whose contents do not matter between two steps of a computation."""

    a: Tensor  # [n] fp32
    b: Tensor  # [n] fp32
    wide: Tensor  # [n] fp64, in whose memory b is
    mask: Tensor  # [n] bool


def dithers(step: int, shift: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What rounding adds to exp_avg and exp_avg_sq over a block: two [64] int32, cut below the last bit kept."""
    index = torch.arange(BLOCK, dtype=torch.int64, device=device) * SPREAD
    first, second = (
        ((index + first_dither(step, moment)) & 0xFFFFFFFF) >> shift for moment in (EXP_AVG, EXP_AVG_SQ)
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
# A code is subnormal or not. Both readings are computed, and which one holds is their order: below the smallest
# normal value the linear scale lies above the logarithmic one when packing, and beneath it when unpacking. Blocks
# that are not finite go through with numbers that mean nothing, and are overwritten.


def unpack_codes_(x: Tensor, codes: Tensor, stored: Tensor, code: Code, scratch: Scratch) -> None:
    """x = the values of codes [n] uint8, given the stored exponents [ceil(n / 64)] uint8 of their blocks."""
    bits, log, linear = (_blocks(bits_of(y)) for y in (x, scratch.a, scratch.b))
    exponent = stored[:, None].int() + code.lowest
    normal = _smallest_normal(exponent, code)
    load_(bits_of(x), codes)
    torch.bitwise_and(bits, 127 if code.signed else 255, out=log)
    log.bitwise_left_shift_(CUT).add_(normal)
    torch.sub(_floats(log), _floats(normal), out=_floats(linear))
    torch.minimum(log.sub_(BINADE), linear, out=linear)
    if code.signed:
        linear.bitwise_or_(bits.bitwise_and_(128).bitwise_left_shift_(24))
    bits.copy_(linear)
    bits.masked_fill_(exponent >= 255, NAN)


def pack_codes_(
    codes: Tensor, stored: Tensor, x: Tensor, dither: Tensor, code: Code, scratch: Scratch
) -> None:
    """codes [n] uint8 and stored exponents [ceil(n / 64)] uint8 = x, rounded; the contents of x are lost."""
    bits, log, linear = (_blocks(bits_of(y)) for y in (x, scratch.a, scratch.b))
    torch.bitwise_and(bits, SIZE, out=log)
    largest = log.amax(dim=1, keepdim=True).clamp_(max=INFINITY)
    # After rounding up to what a code keeps, so no code overflows. What is that close to inf counts as inf.
    exponent = largest.add_((1 << CUT) - 1).bitwise_right_shift_(23).clamp_(min=code.lowest)
    normal = _smallest_normal(exponent, code)
    torch.add(_floats(log), _floats(normal), out=_floats(linear))
    torch.maximum(linear.sub_(normal), log.sub_(normal - BINADE), out=linear)
    linear.add_(dither).bitwise_right_shift_(CUT)
    if code.signed:
        linear.bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
    else:
        torch.maximum(linear, bits.bitwise_and_(SIZE).clamp_(max=1), out=linear)  # above 0 stays above 0
    not_finite = exponent >= 255
    linear.masked_fill_(not_finite, 0)
    codes.copy_(linear.view(-1)[: codes.numel()])
    stored.copy_(exponent.sub_(code.lowest).masked_fill_(not_finite, NOT_FINITE)[:, 0])


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _smallest_normal(exponent: Tensor, code: Code) -> Tensor:
    """For every block the bits of its smallest value that is not subnormal."""
    return (exponent - ((1 << code.exponent_bits) - 2)).bitwise_left_shift_(23)
