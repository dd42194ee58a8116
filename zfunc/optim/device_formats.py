"""The compact formats in torch operations: compact state to float32 and back, on any device.

The bits are those of `compact_reference`. Everything is exact int32 arithmetic that wraps or stays in range, or one
float32 sum rounded once; values are brought into range before they are converted to fewer bits. int32, because not
every device computes with uint32: where the sign is masked off, an arithmetic right shift equals a logical one.
"""

import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers
from zfunc.optim.compact_reference import (
    BLOCK,
    CUT,
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
State = Mapping[str, Tensor]


def weights_of(state: State) -> Tensor:
    """The float32 weights of a state of any format, maybe its own memory."""
    if "master" in state:
        return state["master"]
    bits = state[HIGH_HALF].view(torch.int16).int().bitwise_left_shift_(16).add_(state["master_low"])
    if (signs := state.get("exp_avg_sq")) is not None and signs.dtype == torch.float32:
        bits.sub_((_bits(signs) & SIGN).bitwise_right_shift_(15))  # a sign adds 1 << 16
    return _floats(bits)


def pack_weights_(state: State, p: Tensor) -> None:
    """The buffers of the weights = p, and the sign of a float32 exp_avg_sq beside halves, which holds its size."""
    if "master" in state:
        state["master"].copy_(p)
        return
    bits = _bits(p).masked_fill(p.isnan(), NAN)  # other NaNs could round over to a zero
    up = bits + (1 << 15)
    if (signs := state.get("exp_avg_sq")) is not None and signs.dtype == torch.float32:
        down = ((bits & 0x1FFFF) == 1 << 15).int()  # a tie is rounded down to an even half
        up.sub_(down)
        _bits(signs).bitwise_and_(SIZE).bitwise_or_(down.bitwise_left_shift_(31))
    state[HIGH_HALF].view(torch.int16).copy_(up.bitwise_right_shift_(16))
    state["master_low"].copy_(bits.bitwise_left_shift_(16).bitwise_right_shift_(16))


def moments_of(state: State, state_format: str) -> list[Tensor]:
    """The float32 moments of a state, maybe their own memory."""
    kinds = moment_buffers(state_format)
    own = [state[x.name] for x in kinds]
    if state_format == "8bit":
        return _unpack_codes(*own)
    if any(x.shared > 1 for x in kinds):
        pairs = zip(kinds[::2], own[::2], own[1::2], strict=True)
        return [_unpack_floats(codes, scales, signed=x.signed) for x, codes, scales in pairs]
    return [x.abs() if state_format == "fp32-split" and x is own[1] else x.float() for x in own]


def dithers(step: int, state_format: str, device: torch.device) -> list[Tensor]:
    """The dithers of each moment for one block: [64] int32, of as many bits as its coarsest codes lose."""
    kinds = [x for x in moment_buffers(state_format) if x.shared == 1]
    index = torch.arange(BLOCK, dtype=torch.int64, device=device) * SPREAD
    found: list[Tensor] = []
    for moment, x in enumerate(kinds):
        cut = 16 if x.dtype != "uint8" else MIN_SHIFT + x.signed + NUM_SHIFTS - 1
        cut = CUT if state_format == "8bit" and not moment else cut
        found.append((((index + first_dither(step, moment)) & 0xFFFFFFFF) >> (32 - cut)).int())
    return found


def pack_moments_(state: State, moments: Sequence[Tensor], state_format: str, spread: list[Tensor]) -> None:
    """The buffers of the moments = float32 values, rounded with the dithers."""
    kinds = moment_buffers(state_format)
    packed: list[Tensor] = []
    if state_format == "8bit":
        packed = _pack_codes(*moments, *spread)
    for x, values, dither in zip((k for k in kinds if k.shared == 1), moments, spread, strict=True):
        if state_format == "8bit":
            break
        if x.dtype == "uint8":
            packed += _pack_floats(values, dither, signed=x.signed)[:2]
        else:
            packed.append(_round_bf16(values, dither) if x.dtype == "bf16" else values)
    for x, values in zip(kinds, packed, strict=True):
        state[x.name].copy_(values)


def _round_bf16(x: Tensor, dither: Tensor) -> Tensor:
    bits = (_blocks(_bits(x)) + dither).view(-1)[: x.numel()]
    return bits.masked_fill_(x.isnan(), NAN).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


# ---- 8-bit moments ------------------------------------------------------------------------------------
# A code of exp_avg is subnormal (linear) or normal (logarithmic). Both are computed, and comparing them selects
# one: below the smallest normal value the linear result is the larger one when packing, the smaller one when
# unpacking. The unit of exp_avg follows from the code of exp_avg_sq as if that were not special, so exp_avg_sq
# comes first both ways, and its infinities and zeros last.


def _unpack_codes(exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor) -> list[Tensor]:
    codes, n = _blocks(exp_avg.int()), exp_avg.numel()
    log = ((codes & 127) << CUT).add_(SMALLEST_NORMAL)
    linear = _bits(_floats(log) - _float(SMALLEST_NORMAL))
    units = torch.minimum(log.sub_(BINADE), linear).bitwise_or_((codes & 128) << 24)
    m = _floats(units) * _floats(_unit(_plain(_blocks(exp_avg_sq.int()), scales, MIN_SHIFT)))
    return [m.view(-1)[:n], _unpack_floats(exp_avg_sq, scales, signed=False)]


def _pack_codes(m: Tensor, v: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
    codes, scales, plain = _pack_floats(v, second, signed=False)
    x = _blocks(m) * _floats(_unit(plain).neg_().add_(254 << 23))
    bits = _bits(x).masked_fill(x.isnan(), NAN)  # without a sign
    log = (bits & SIZE).clamp_(max=LARGEST)
    linear = _bits(_floats(log) + _float(SMALLEST_NORMAL))
    units = torch.maximum(linear, log.add_(BINADE)).sub_(SMALLEST_NORMAL).add_(first)
    units.bitwise_right_shift_(CUT).bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
    return [units.view(-1)[: m.numel()], codes, scales]


def _pack_floats(x: Tensor, dither: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n] and scales [ceil(n / 64)] of x, as `compact_reference.pack_floats`, and the bits of the values of
    the codes as if none were special."""
    infinite, min_shift = INFINITE >> signed, MIN_SHIFT + signed
    coarsest = 1 << min_shift + NUM_SHIFTS - 1
    limit = LIMIT & -coarsest
    bits = _blocks(_bits(x))
    size = bits & SIZE
    finite = size * (size <= limit)  # infinite values count as 0
    top = finite.amax(dim=1, keepdim=True).add_(coarsest - 1).bitwise_and_(-coarsest)
    # The smallest less 1, where 0 wraps to the largest.
    below = finite.sub_(1).bitwise_and_(SIZE).amin(dim=1, keepdim=True)
    choice = torch.zeros_like(top)
    for k in range(NUM_SHIFTS - 1):
        choice.add_(top - below - 1 > infinite - 2 << min_shift + k)
    shift = choice + min_shift
    base = top.sub_(torch.full_like(shift, infinite - 1).bitwise_left_shift_(shift)).clamp_(min=0)
    # A positive value stays positive: it may be a divisor.
    spread = torch.bitwise_right_shift(dither, NUM_SHIFTS - 1 - choice)
    codes = spread.add_(size).sub_(base).bitwise_right_shift_(shift).clamp_(min=1)
    codes.masked_fill_(size == 0, 0).masked_fill_(size > limit, infinite)
    plain = (codes << shift).add_(base)
    if signed:
        codes.bitwise_or_((bits >> 24).bitwise_and_(128).masked_fill_(size > INFINITY, 0))
    return codes.view(-1)[: x.numel()], base.bitwise_right_shift(16).bitwise_or_(choice)[:, 0], plain


def _unpack_floats(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values of codes [n] that `_pack_floats` made, given the scales [ceil(n / 64)] int16."""
    infinite, given = INFINITE >> signed, _blocks(codes.int())
    size = given & infinite
    bits = _plain(size, scales, MIN_SHIFT + signed)
    bits.masked_fill_(size == 0, 0).masked_fill_(size == infinite, INFINITY)
    if signed:
        bits.bitwise_or_((given & 128).bitwise_left_shift_(24))
    return _floats(bits).view(-1)[: codes.numel()]


def _plain(codes: Tensor, scales: Tensor, min_shift: int) -> Tensor:
    """The bits of the values of blocks of codes, as if none were special."""
    given = scales[:, None].int()
    base = (given & (SCALE_BITS >> 16)).bitwise_left_shift_(16)
    return (codes << (given & (NUM_SHIFTS - 1)).add_(min_shift)).add_(base)


def _unit(bits: Tensor) -> Tensor:
    """The bits of exp_avg's unit, given those of exp_avg_sq; these may be more than a float's 31."""
    return (bits >> 1).bitwise_and_(SIZE).add_(ROOT).bitwise_and_(INFINITY)


def _blocks(x: Tensor) -> Tensor:
    """Blocks of 64, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def _float(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]
