"""Adam in torch operations, for buckets whose optimizer state stays on the device.

The bits are those of `adam_reference` and `compact_reference` on any device with IEEE arithmetic, because

- every operation rounds once, in the reference's order: none may contract a product and a sum into a fused one
  (`addcmul`, `addcdiv`, `lerp`, `add` with an alpha);
- factors are rounded to float32 before torch sees them, so its own conversion is exact;
- nothing is divided by a number: on CUDA that would be a product with its reciprocal;
- the square root goes through float64, because torch's of float32 is not always the nearest on CPUs (MKL's). The
  nearest float32 of a float64 root is right even where that is off by an ulp.

The payload of a NaN is not promised. Elements go through in pieces, in memory that `adam_workspace` bounds, and
nothing waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfunc.core.layout import round_up
from zfunc.core.optimizer_state import HIGH_HALF, AdamFormat, state_slice
from zfunc.core.regions import SUM_PARTS
from zfunc.optim.adam_reference import EXP_AVG_FLOOR, EXP_AVG_SQ_FLOOR, GRAD_FLOOR, Coefficients
from zfunc.optim.argument_checks import Decay, checked_arguments, update_spans
from zfunc.optim.compact import adam_format
from zfunc.optim.compact_reference import BLOCK
from zfunc.optim.device_formats import (
    CODES_CUTS,
    Scratch,
    dithers,
    flush_,
    join_,
    load_,
    pack_bf16_,
    pack_codes_,
    split_,
    unpack_codes_,
)
from zfunc.optim.workspaces import PIECE, num_floats

_CODES = "exp_avg", "exp_avg_sq", "exp_avg_sq_scale"


def exact_parts(sums: Tensor) -> Tensor:
    """Sums of squares [..., n] fp64, added up without rounding, in the parts of `zfunc.optim.host_adam.square_sum`.

    >>> exact_parts(torch.tensor([9.0, 16.0], dtype=torch.float64)).sum().item()
    25.0
    """
    first, last = (1023 + 32 * i - 352 for i in (0, SUM_PARTS))
    unit = torch.arange(first, last, 32, device=sums.device).bitwise_left_shift_(52).view(torch.float64)
    multiples = (sums[..., None] / unit).floor_().mul_(unit)  # powers of two: exact
    above = torch.nn.functional.pad(multiples[..., 1:], (0, 1))
    return torch.where(above.isinf(), above, multiples - above).sum(-2)


def device_adam_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    out: Tensor | None = None,
    **arguments: Any,
) -> None:
    """One Adam step over 1-D contiguous buffers of one device, in place, with the bits of `adam_update_`.

    `state` has buffers by the names in `zfunc.core.optimizer_state`; `arguments` are those of `checked_arguments`.
    On CUDA the operations are queued on the current stream.

    Raises TypeError or ValueError, with every buffer unchanged, for a wrong dtype, shape, device or layout, buffers
    that overlap, and factors out of range or not finite.

    >>> state = {"master": torch.ones(2), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    >>> device_adam_(state, torch.tensor([0.5, 0.0]), step=1, lr=0.25, eps=0.25)
    >>> state["master"]
    tensor([0.8333, 1.0000])
    """
    state_format, buffers = adam_format(state), dict(state)
    update_spans(state_format, buffers, grad, out, device=None)
    step, factors, decay = checked_arguments(**arguments)
    with np.errstate(over="ignore"):  # grad_floor may be infinite
        rounded = Coefficients._make(float(np.float32(x)) for x in factors)
    with torch.no_grad():
        _update_(state_format, buffers, grad, out, _Step(rounded, decay, step))


class _Step(NamedTuple):
    k: Coefficients  # float32 values
    decay: Decay
    number: int


# ---- pieces -------------------------------------------------------------------------------------------


def _update_(
    state_format: AdamFormat, buffers: dict[str, Tensor], grad: Tensor, out: Tensor | None, step: _Step
) -> None:
    n, device = grad.numel(), grad.device
    piece = min(round_up(n, BLOCK), PIECE)
    floats = torch.empty(num_floats(state_format) * piece, device=device)  # fp32
    mask = torch.empty(piece, dtype=torch.bool, device=device)
    fp32 = state_format in ("fp32", "fp32-split")  # the moments, in their own memory
    cuts = CODES_CUTS if state_format == "8bit" else (16, 16)
    rounding = () if fp32 else dithers(step.number, cuts, device)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        parts = state_slice(state_format, buffers, start, stop)
        size = stop - start if fp32 else round_up(stop - start, BLOCK)
        g, _, term, *unpacked = floats[: num_floats(state_format) * size].view(-1, size)
        scratch = Scratch(term, g, floats[: 2 * size].view(torch.float64), mask[:size])
        state = _unpack(state_format, parts, unpacked, scratch)
        load_(g, grad[start:stop])
        _adam_(*state, scratch, step)
        if out is not None:
            out[start:stop].copy_(state[0][: stop - start])
        _pack_(state_format, parts, state, rounding, scratch)


def _unpack(
    state_format: AdamFormat, parts: dict[str, Tensor], unpacked: Sequence[Tensor], scratch: Scratch
) -> Sequence[Tensor]:
    """Master, exp_avg and exp_avg_sq as float32, in their own memory or in `unpacked`."""
    if state_format == "fp32":
        return parts["master"], parts["exp_avg"], parts["exp_avg_sq"]
    halves = parts[HIGH_HALF], parts["master_low"]
    if state_format == "fp32-split":
        (p,), v = unpacked, parts["exp_avg_sq"]
        join_(p, *halves, scratch, v)
        return p, parts["exp_avg"], v.abs_()
    p, m, v = unpacked
    join_(p, *halves, scratch)
    if state_format == "16bit":
        load_(m, parts["exp_avg"])
        load_(v, parts["exp_avg_sq"])
    else:
        unpack_codes_(m, v, *(parts[name] for name in _CODES), scratch)
    return unpacked


def _pack_(
    state_format: AdamFormat,
    parts: dict[str, Tensor],
    state: Sequence[Tensor],
    rounding: Any,
    scratch: Scratch,
) -> None:
    if state_format == "fp32":
        return
    p, m, v = state
    halves = parts[HIGH_HALF], parts["master_low"]
    if state_format == "fp32-split":
        split_(*halves, p, scratch, v)
        return
    split_(*halves, p, scratch)
    first, second = rounding
    if state_format == "16bit":
        pack_bf16_(parts["exp_avg"], m, first, scratch)
        pack_bf16_(parts["exp_avg_sq"], v, second, scratch)
    else:
        pack_codes_(*(parts[name] for name in _CODES), m, v, rounding, scratch)


# ---- arithmetic ---------------------------------------------------------------------------------------


def _adam_(p: Tensor, m: Tensor, v: Tensor, scratch: Scratch, step: _Step) -> None:
    """`reference_update` on float32 [n], operation by operation; the gradient is in scratch.b."""
    k, term, g = step.k, scratch.a, scratch.b
    flush_(g, k.grad_floor, scratch).mul_(k.grad_scale)
    if step.decay == "l2":
        flush_(g.add_(torch.mul(p, k.decay, out=term)), GRAD_FLOOR, scratch)
    torch.mul(g, g, out=term).mul_(k.one_minus_beta2)
    flush_(v.mul_(k.beta2).add_(term), EXP_AVG_SQ_FLOOR, scratch)
    flush_(m.mul_(k.beta1).add_(g.mul_(k.one_minus_beta1)), EXP_AVG_FLOOR, scratch)
    term.copy_(scratch.wide.copy_(v).sqrt_()).mul_(k.inv_sqrt_bias2).add_(k.eps)  # g was there
    torch.div(m, term, out=term).mul_(k.step_size)
    if step.decay == "decoupled":
        term.add_(torch.mul(p, k.decay, out=g))
    p.sub_(term)
