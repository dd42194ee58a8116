"""SGD, Lion and Adagrad in torch operations, for buckets whose optimizer state stays on the device.

The bits are those of `one_buffer_reference` on any device with IEEE arithmetic, by the rules of `device_adam`.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from zfunc.core.layout import round_up
from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers, state_slice
from zfunc.optim.adam_reference import EXP_AVG_FLOOR, GRAD_FLOOR
from zfunc.optim.argument_checks import checked_step, update_spans
from zfunc.optim.compact_reference import BLOCK, MIN_SHIFT, NUM_SHIFTS
from zfunc.optim.device_formats import (
    NAN,
    SIGN,
    Scratch,
    bits_of,
    dithers,
    flush_,
    join_,
    load_,
    pack_bf16_,
    pack_floats_,
    split_,
    unpack_floats_,
)
from zfunc.optim.one_buffer_reference import Rule, RuleFactors, has_sign
from zfunc.optim.workspaces import ONE_BUFFER_FLOATS, PIECE


def device_one_buffer_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    state_format: str,
    rule: Rule,
    factors: RuleFactors,
    step: int,
    decoupled: bool,
    out: Tensor | None = None,
) -> None:
    """One step over 1-D contiguous buffers of one device, in place, with the bits of `host_one_buffer_`.

    Raises TypeError or ValueError as that does, with every buffer unchanged.
    """
    weighted = rule != "direction"
    update_spans(state_format, state, grad, out, device=None, weights=weighted)
    checked_step(step)
    with np.errstate(over="ignore"):  # grad_floor may be infinite
        k = RuleFactors._make(float(np.float32(x)) for x in factors)
    n, device = grad.numel(), grad.device
    piece = min(round_up(n, BLOCK), PIECE)
    with torch.no_grad():
        floats = torch.empty(ONE_BUFFER_FLOATS * piece, device=device)  # fp32
        mask = torch.empty(piece, dtype=torch.bool, device=device)
        for start in range(0, n, PIECE):
            stop = min(n, start + PIECE)
            parts = state_slice(state_format, state, start, stop)
            size = round_up(stop - start, BLOCK)
            g, _, _, term, p, m, direction = floats[: ONE_BUFFER_FLOATS * size].view(-1, size)
            scratch = Scratch(term, g, floats[size : 3 * size].view(torch.float64), mask[:size])
            if weighted:
                _unpack_weights(parts, p, scratch)
            _unpack_buffer(state_format, parts, m, scratch)
            load_(g, grad[start:stop])
            flush_(g, k.grad_floor, scratch).mul_(k.grad_scale)
            if k.decay and not decoupled:
                flush_(g.add_(torch.mul(p, k.decay, out=term)), GRAD_FLOOR, scratch)
            change = _RULES[rule](m, g, direction, k, scratch)
            if weighted:
                if k.decay and decoupled:
                    change.add_(torch.mul(p, k.decay, out=term))
                p.sub_(change)
            if out is not None:
                out[start:stop].copy_((p if weighted else direction)[: stop - start])
            _pack_buffer_(state_format, parts, m, step, scratch)
            if weighted:
                _pack_weights_(parts, p, scratch)


# ---- the rules: each updates m, and returns the change in `direction`; the gradient may be overwritten ---------


def _momentum_(m: Tensor, g: Tensor, k: RuleFactors, scratch: Scratch) -> None:
    flush_(m.mul_(k.keep).add_(torch.mul(g, k.add, out=scratch.a)), EXP_AVG_FLOOR, scratch)


def _sgd_(m: Tensor, g: Tensor, direction: Tensor, k: RuleFactors, scratch: Scratch) -> Tensor:
    _momentum_(m, g, k, scratch)
    return torch.mul(m, k.rate, out=direction)


def _nesterov_(m: Tensor, g: Tensor, direction: Tensor, k: RuleFactors, scratch: Scratch) -> Tensor:
    _momentum_(m, g, k, scratch)
    return torch.mul(m, k.keep, out=direction).add_(g).mul_(k.rate)


def _lion_(m: Tensor, g: Tensor, direction: Tensor, k: RuleFactors, scratch: Scratch) -> Tensor:
    torch.mul(m, k.look_keep, out=direction).add_(torch.mul(g, k.look_add, out=scratch.a))
    _momentum_(m, g, k, scratch)
    torch.ne(direction, direction, out=scratch.mask)
    none = torch.eq(direction, 0.0)
    bits = bits_of(direction).bitwise_and_(SIGN)
    bits.bitwise_or_(bits_of(scratch.a.fill_(k.rate)))
    bits.masked_fill_(none, 0).masked_fill_(scratch.mask, NAN)
    return direction


def _adagrad_(m: Tensor, g: Tensor, direction: Tensor, k: RuleFactors, scratch: Scratch) -> Tensor:
    m.add_(torch.mul(g, g, out=direction))
    root = scratch.wide.copy_(torch.add(m, k.initial, out=scratch.a)).sqrt_()
    direction.copy_(root).add_(k.eps)
    return torch.div(g, direction, out=direction).mul_(k.rate)


def _direction_(m: Tensor, g: Tensor, direction: Tensor, k: RuleFactors, scratch: Scratch) -> Tensor:
    _momentum_(m, g, k, scratch)
    return torch.mul(m, k.look_keep, out=direction).add_(torch.mul(g, k.look_add, out=scratch.a))


_RULES = {
    "sgd": _sgd_,
    "nesterov": _nesterov_,
    "lion": _lion_,
    "adagrad": _adagrad_,
    "direction": _direction_,
}


# ---- the formats ------------------------------------------------------------------------------------------


def _unpack_weights(parts: dict[str, Tensor], p: Tensor, scratch: Scratch) -> None:
    if "master" in parts:
        load_(p, parts["master"])
    else:
        join_(p, parts[HIGH_HALF], parts["master_low"], scratch)


def _unpack_buffer(state_format: str, parts: dict[str, Tensor], m: Tensor, scratch: Scratch) -> None:
    own = _own(state_format, parts)
    if not own:
        m.zero_()
    elif len(own) == 1:
        load_(m, own[0])
    else:
        unpack_floats_(m, *own, scratch, signed=has_sign(state_format))


def _pack_weights_(parts: dict[str, Tensor], p: Tensor, scratch: Scratch) -> None:
    if "master" in parts:
        parts["master"].copy_(p[: parts["master"].numel()])
    else:
        split_(parts[HIGH_HALF], parts["master_low"], p, scratch)


def _pack_buffer_(
    state_format: str, parts: dict[str, Tensor], m: Tensor, step: int, scratch: Scratch
) -> None:
    own = _own(state_format, parts)
    if not own:
        return
    if len(own) == 2:
        signed = has_sign(state_format)
        dither, _ = dithers(step, (MIN_SHIFT + signed + NUM_SHIFTS - 1, 0), m.device)
        pack_floats_(*own, m, dither, scratch, signed=signed)
    elif own[0].dtype == torch.bfloat16:
        pack_bf16_(own[0], m, dithers(step, (16, 0), m.device)[0], scratch)
    else:
        own[0].copy_(m[: own[0].numel()])


def _own(state_format: str, parts: dict[str, Tensor]) -> list[Tensor]:
    """The buffer and its scale."""
    return [parts[x.name] for x in moment_buffers(state_format)]
