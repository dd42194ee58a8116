"""Compact optimizer state: the definition of its formats, in torch operations on any device.

A compact update is unpack, a rule, pack (`updates.device_update_`). All arithmetic is float32; only the state
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
from functools import cache

import torch
from torch import Tensor, where

from zfunc.core.layout import ALIGNMENT as BLOCK  # elements that share a scale, and the period of the dither
from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers, weight_buffers
from zfunc.optim.rules import first_dither

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


# ---- tensors as their bits -----------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    """The bits of float32 `x`, as int32."""
    return x.view(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    """The float32 values whose bits are the int32 `bits`; a view."""
    return bits.view(torch.float32)


def _ints(x: Tensor) -> Tensor:
    """The bits of `x`, of 8-bit or 16-bit elements (bfloat16 included) or bool, as int32."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).int()


def _bf16(bits: Tensor) -> Tensor:
    """The bfloat16 values whose bits are the int32 `bits`."""
    return bits.to(torch.int16).view(torch.bfloat16)


def _blocks(x: Tensor) -> Tensor:
    """`x` [n] as blocks [blocks, 64], the last padded with zeros; a view if 64 divides n."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


# ---- the split master ----------------------------------------------------------------------------------


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 nearest to float32 `x` (ties away from zero), and the int16 with which `join` restores `x`.

    >>> join(*split(torch.tensor([1.0, -3.1415927])))
    tensor([ 1.0000, -3.1416])
    """
    bits = where(x != x, NAN, _bits(x))  # other NaNs could round over to a zero
    return _bf16(bits + 0x8000 >> 16), (bits << 16 >> 16).to(torch.int16)


def split_to_even(x: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split fp32 `x` [n] into its bf16 rounding (ties to even), 16 lower bits, and exp_avg_sq with a sign
    that is set where a tie was rounded down.

    An even bfloat16 is the rounding of 65,537 values, one more than an int16 tells apart: the ties on both
    sides have the same lower bits. The sign of exp_avg_sq, which is never negative, says which side it was.

    >>> high, low, v = split_to_even(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]), torch.tensor([0.5, 0.5]))
    >>> high, low.tolist(), v
    (tensor([1.0000, 1.0156], dtype=torch.bfloat16), [-32768, -32768], tensor([-0.5000,  0.5000]))
    >>> join(high, low, v)
    tensor([1.0039, 1.0117])
    """
    bits = where(x != x, NAN, _bits(x))
    down = _ints((bits & 0x1FFFF) == 0x8000)
    signs = _floats(_bits(exp_avg_sq) & SIZE | down << 31)
    return _bf16(bits + 0x8000 - down >> 16), (bits << 16 >> 16).to(torch.int16), signs


def join(high: Tensor, low: Tensor, exp_avg_sq: Tensor | None = None) -> Tensor:
    """The float32 values with halves `high` and `low`; those of `split_to_even` also need its exp_avg_sq."""
    bits = (_ints(high) << 16) + _ints(low)
    if exp_avg_sq is not None:
        bits = bits - (_bits(exp_avg_sq) >> 31 << 16)  # a sign adds 1 << 16
    return _floats(bits)


# ---- rounding of moments -------------------------------------------------------------------------------


def dither(step: int, moment: int, like: Tensor) -> Tensor:
    """The dithers (what rounding adds below the last bit kept) of the 64 elements of a block of moment number
    `moment` in step `step`: [64] int32, in units of 2^-31, on the device of `like`."""
    places = torch.arange(BLOCK, device=like.device)  # int64: the product has up to 38 bits
    return (places * SPREAD + first_dither(step, moment) & 0xFFFFFFFF).bitwise_right_shift_(1).int()


def pack_bf16(x: Tensor, dither: Tensor) -> Tensor:
    """Round float32 `x` [n] to bfloat16: add `dither` [64] below the last bit and truncate, without bias."""
    rounded = _blocks(_bits(x)) + (dither >> 15)
    bits = where(_blocks(x) != _blocks(x), NAN, rounded)
    return _bf16(bits >> 16).reshape(-1)[: len(x)]


def pack_floats(x: Tensor, dither: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Round a moment, float32 `x` [n], with `dither` [64] to 8-bit codes [n] uint8, and a scale for each
    block of 64 elements [ceil(n / 64)] int16.

    If the moment is `signed`, the highest bit of a code is the sign.
    """
    infinite, min_shift = INFINITE >> signed, MIN_SHIFT + signed
    coarsest = 1 << min_shift + NUM_SHIFTS - 1
    limit = LIMIT & -coarsest
    bits = _blocks(_bits(x))
    size = bits & SIZE
    finite = size * (size <= limit)  # infinite values count as 0
    top = finite.amax(1, keepdim=True) + (coarsest - 1) & -coarsest  # the value of the highest code
    below = (finite - 1 & SIZE).amin(1, keepdim=True)  # the smallest less 1, where 0 wraps to the largest
    del finite
    reach = [infinite - 2 << min_shift + k for k in range(NUM_SHIFTS - 1)]  # down to code 1
    choice = sum(_ints(top - below - 1 > y) for y in reach)
    shift = choice + min_shift
    base = (top - (infinite - 1 << shift)).clamp_(min=0)
    codes = (dither >> 31 - shift) + size - base >> shift
    # Positive stays positive: it may be a divisor.
    codes = where(size == 0, 0, codes.clamp_(min=1))
    codes = where(size > limit, infinite, codes)
    if signed:  # of a NaN, no CPU's sign
        codes = codes | where(size > EXPONENT, 0, bits >> 24 & 128)
    return codes.to(torch.uint8).view(-1)[: len(x)], (base >> 16 | choice).to(torch.int16)[:, 0]


def unpack_floats(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The float32 values [n] of `codes` [n] and `scale` [ceil(n / 64)]; `signed` as in `pack_floats`."""
    infinite = INFINITE >> signed
    given = _blocks(_ints(codes))
    size = given & infinite
    bits = where(size == infinite, EXPONENT, _plain_bits(size, scale, MIN_SHIFT + signed))
    bits = where(size == 0, 0, bits) | (given & 255 - infinite) << 24
    return _floats(bits).reshape(-1)[: len(codes)]


# A code of exp_avg is subnormal (linear) or normal (logarithmic). Both readings are computed, and comparing them
# selects one: below the smallest normal value the linear result is the larger one when packing, the smaller one
# when unpacking.


def pack_exp_avg(x: Tensor, dither: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Round exp_avg `x` [n] fp32 with `dither` [64] to 8-bit codes [n] uint8. An element's unit is the power
    of two at or below the root of its exp_avg_sq, which is given as `codes` and `scale`."""
    bits = _bits(_blocks(x) * _floats((254 << 23) - _unit_bits(codes, scale)))
    bits = where((bits & SIZE) > EXPONENT, NAN, bits)  # without a sign
    log = where((bits & SIZE) > LARGEST, LARGEST, bits & SIZE)
    rounded = torch.maximum(_bits(_floats(log) + 0.25), log + BINADE)
    del log  # a device has no room for more
    rounded = rounded - SMALLEST_NORMAL + (dither >> 31 - CUT)
    return (rounded >> CUT | bits >> 24 & 128).to(torch.uint8).view(-1)[: len(x)]


def unpack_exp_avg(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of exp_avg, given its 8-bit codes `x` [n], and exp_avg_sq as `codes` and `scale`."""
    given = _blocks(_ints(x))
    log = ((given & 127) << CUT) + SMALLEST_NORMAL
    linear = _bits(_floats(log) - 0.25)
    units = torch.minimum(log - BINADE, linear) | (given & 128) << 24
    return (_floats(units) * _floats(_unit_bits(codes, scale))).reshape(-1)[: len(x)]


def _plain_bits(codes: Tensor, scale: Tensor, min_shift: int) -> Tensor:
    """The bits of the fp32 values of 8-bit `codes` in blocks of 64, without the codes' special meanings of 0
    and infinity. A code is shifted left by `min_shift` plus the two lowest bits of its block's
    `scale`, whose upper bits are added."""
    given = _ints(scale)[:, None]
    return (codes << (given & NUM_SHIFTS - 1) + min_shift) + ((given & SCALE_BITS >> 16) << 16)


def _unit_bits(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 bits of the units of exp_avg: for each element, the power of two at or below the root of
    its exp_avg_sq, which `codes` and `scale` encode."""
    plain = _plain_bits(_blocks(_ints(codes)), scale, MIN_SHIFT)
    return (plain >> 1 & SIZE) + ROOT & EXPONENT


# ---- whole states --------------------------------------------------------------------------------------


def unpack_weights(state: Mapping[str, Tensor]) -> Tensor:
    """The exact float32 weights of an optimizer state in any format, maybe a view of a buffer in `state`."""
    if "master" in state:
        return state["master"]
    return join(state[HIGH_HALF], state["master_low"], state["exp_avg_sq"] if _has_signs(state) else None)


def master_weights(state: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of the fp32 weights of a state in any format, on the host. Read only:
    perhaps a view of the state."""
    names = [x for x in ("master", HIGH_HALF, "master_low", "exp_avg_sq") if x in state]
    return unpack_weights(
        {x: state[x][start:stop].cpu() for x in names if x != "exp_avg_sq" or _has_signs(state)}
    )


def initial_state(weights: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The host buffers, by name, that hold fp32 `weights` [n] in the format of `state` before the first step;
    moments that start at 0 are left out."""
    if "master" in state:
        return {"master": weights}
    even = _has_signs(state)
    halves = split_to_even(weights, weights.new_zeros(len(weights))) if even else split(weights)
    return dict(zip((HIGH_HALF, "master_low", "exp_avg_sq"), halves, strict=False))


def _has_signs(state: Mapping[str, Tensor]) -> bool:
    """Whether split master weights have a 33rd bit, in the sign of exp_avg_sq, as with fp32 moments."""
    return "master" not in state and "exp_avg_sq" in state and state["exp_avg_sq"].itemsize == 4


def unpack_moments(state: Mapping[str, Tensor], state_format: str) -> list[Tensor]:
    """The float32 values of all moments of `state` in format `state_format`; maybe views of its buffers."""
    kinds = moment_buffers(state_format)
    own = [state[x.name] for x in kinds]
    if state_format == "8bit":
        return [unpack_exp_avg(*own), unpack_floats(*own[1:], signed=False)]
    if any(x.dtype == "uint8" for x in kinds):
        pairs = zip(kinds[::2], own[::2], own[1::2], strict=True)
        return [unpack_floats(codes, scale, signed=x.signed) for x, codes, scale in pairs]
    return [x.abs() if state_format == "fp32-split" and x is own[1] else x.float() for x in own]


def pack(p: Tensor | None, moments: Sequence[Tensor], state_format: str, step: int) -> dict[str, Tensor]:
    """Encode float32 weights `p` (None: none) and `moments` in `state_format`; returns the buffers by name.
    Moments are rounded as in step number `step`."""
    kinds = moment_buffers(state_format)

    def spread(moment: int) -> Tensor:
        return dither(step, moment, moments[moment])

    if state_format == "8bit":
        codes = pack_floats(moments[1], spread(1), signed=False)
        packed = [pack_exp_avg(moments[0], spread(0), *codes), *codes]
    elif any(x.dtype == "uint8" for x in kinds):
        each = enumerate(zip(kinds[::2], moments, strict=True))
        packed = [y for i, (kind, x) in each for y in pack_floats(x, spread(i), signed=kind.signed)]
    else:
        each = enumerate(zip(kinds, moments, strict=True))
        packed = [pack_bf16(x, spread(i)) if kind.dtype == "bf16" else x for i, (kind, x) in each]
    weights: tuple[Tensor, ...] = ()
    masters = weight_buffers(state_format)
    if p is not None and len(masters) == 3:  # the sign of exp_avg_sq says how a tie was rounded
        *weights, packed[1] = split_to_even(p, packed[1])
    elif p is not None:
        weights = (p,) if len(masters) == 1 else split(p)
    return dict(zip((*masters[: len(weights)], *(x.name for x in kinds)), (*weights, *packed), strict=True))


@cache
def kernel_layout(state_format: str, room: int = 2, *, weights: bool = True) -> tuple[list[str], list[str]]:
    """How a compiled kernel with room for `room` moments reads state of format `state_format`, as two lists.

    First the names of the buffers: weights and their low half (if `weights`), moments, scales; "" for none.
    Then the kernel's words for how weights and each moment are stored.

    >>> kernel_layout("lion-8bit")
    (['master_high', 'master_low', 'exp_avg', '', 'exp_avg_scale', ''], ['HALVES', 'SIGNED', 'KEPT_NONE'])
    """
    masters, known = weight_buffers(state_format), {x.name: x for x in moment_buffers(state_format)}
    moments = [x for x in known.values() if x.shared == 1]
    how = ("MASTER", "HALVES", "HALVES_TO_EVEN")[len(masters) - 1]
    kept = [
        ("UNSIGNED", "SIGNED")[x.signed] if x.dtype == "uint8" else f"KEPT_{x.dtype.upper()}" for x in moments
    ]
    if state_format == "8bit":
        kept[0] = "BESIDE"
    scales = [f"{x.name}_scale" if f"{x.name}_scale" in known else "" for x in moments]
    rows = (masters[:2] if weights else (), 2), ([x.name for x in moments], room), (scales, room)
    names = [name for own, size in rows for name in [*own, *[""] * size][:size]]
    return names, [how if weights else "NO_WEIGHTS", *kept, *["KEPT_NONE"] * room][: room + 1]
