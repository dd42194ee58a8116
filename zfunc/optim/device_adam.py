"""Adam where the tensors are: one step in torch operations, for buckets whose state stays on the device.

The invariant: the bits are those of `adam_reference` and `compact_reference`, on any device with IEEE arithmetic.
Every operation is one torch operation that rounds once, in the reference's order; none is one that may contract a
product and a sum into a fused one (`addcmul`, `addcdiv`, `lerp`, `add` with an alpha). Factors are rounded to
float32 before torch sees them, so whatever it converts them to is exact. Nothing is divided by a number: on CUDA
that would be a product with its reciprocal. The square root goes through float64, from which it rounds to the
nearest float32 even where it is itself off by an ulp: torch's of float32 is on CPUs, being MKL's. The payload of a
NaN is not promised.

Elements go through in pieces, in memory that `workspace` bounds. Nothing waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfunc.core.layout import round_up
from zfunc.core.optimizer_state import HIGH_HALF, STATE_FORMATS, Moments
from zfunc.optim.adam_reference import EXP_AVG_FLOOR, EXP_AVG_SQ_FLOOR, GRAD_FLOOR, Coefficients
from zfunc.optim.buffer_checks import check_disjoint, refuse
from zfunc.optim.compact import QuantizedMoment, SplitMaster, moments_of, named_state
from zfunc.optim.compact_reference import BLOCK
from zfunc.optim.device_formats import (
    CODES_CUTS,
    Scratch,
    dithers,
    join_,
    load_,
    pack_bf16_,
    pack_codes_,
    split_,
    unpack_codes_,
)
from zfunc.optim.host_adam import FLOATS, Decay, checked_arguments
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

_CODES = "exp_avg", "exp_avg_sq", "exp_avg_sq_scale"
PIECE = 1 << 22  # elements that go through together: much for a device, little beside a bucket


def workspace(numel: int, moments: Moments) -> int:
    """At most so many bytes does a step over `numel` elements allocate beside its arguments.

    >>> workspace(1 << 30, "fp32") == workspace(PIECE, "fp32") < 14 * PIECE
    True
    """
    n = min(round_up(numel, BLOCK), PIECE)
    small = n // BLOCK * 32 + (1 << 14)  # what there is of every block, and what allocators round up
    return n * (4 * _num_floats(moments) + 1) + small


def device_adam_update_(
    master: Tensor | SplitMaster,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | QuantizedMoment,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> None:
    """One Adam step over 1-D contiguous buffers of one device, in place: `adam_update_` in torch operations.

    Arguments and bits are those of `adam_update_`, but the memory may be any device's. On CUDA the operations are
    queued on the current stream.

    Raises TypeError or ValueError, with every buffer untouched, on a wrong dtype, shape or layout, on buffers that
    overlap or are not on one device, and on factors out of range or not finite.

    >>> weights, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> device_adam_update_(weights, m, v, torch.tensor([0.5, 0.0]), step=1, lr=0.25, eps=0.25)
    >>> weights
    tensor([0.8333, 1.0000])
    """
    device_adam_(
        named_state(master, exp_avg, exp_avg_sq),
        grad,
        out=out,
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
    )


def device_adam_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    out: Tensor | None = None,
    **arguments: Any,
) -> None:
    """`device_adam_update_` of buffers by the names of `zfunc.core.optimizer_state`; see `checked_arguments`."""
    moments, kept = moments_of(state), dict(state)
    _check(moments, kept, grad, out)
    step, factors, decay = checked_arguments(**arguments)
    with np.errstate(over="ignore"):  # a floor may be infinite
        rounded = Coefficients._make(float(np.float32(x)) for x in factors)
    with torch.no_grad():
        _update_(moments, kept, grad, out, _Step(rounded, decay, step))


class _Step(NamedTuple):
    k: Coefficients  # float32 values
    decay: Decay
    number: int


# ---- pieces -------------------------------------------------------------------------------------------


def _num_floats(moments: Moments) -> int:
    """Rows of scratch: gradient, room, a term; and the state as float32 where it is kept as something else."""
    return 3 if moments == "fp32" else 6


def _update_(
    moments: Moments, kept: dict[str, Tensor], grad: Tensor, out: Tensor | None, step: _Step
) -> None:
    n, device = grad.numel(), grad.device
    most = min(round_up(n, BLOCK), PIECE)
    floats = torch.empty(_num_floats(moments) * most, device=device)  # fp32
    mask = torch.empty(most, dtype=torch.bool, device=device)
    cuts = CODES_CUTS if moments == "8bit" else (16, 16)
    rounding = () if moments == "fp32" else dithers(step.number, cuts, device)
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        shared = {buffer.name: buffer.shared for buffer in STATE_FORMATS[moments]}
        parts = {name: kept[name][start // x : -(-stop // x)] for name, x in shared.items()}
        size = stop - start if moments == "fp32" else round_up(stop - start, BLOCK)
        g, _, term, *room = floats[: _num_floats(moments) * size].view(-1, size)
        scratch = Scratch(term, g, floats[: 2 * size].view(torch.float64), mask[:size])
        state = _unpack(moments, parts, room, scratch)
        load_(g, grad[start:stop])
        _adam_(*state, scratch, step)
        if out is not None:
            out[start:stop].copy_(state[0][: stop - start])
        _pack_(moments, parts, state, rounding, scratch)


def _unpack(
    moments: Moments, parts: dict[str, Tensor], room: Sequence[Tensor], scratch: Scratch
) -> Sequence[Tensor]:
    """Master, exp_avg and exp_avg_sq as float32, in their own memory or in `room`."""
    if moments == "fp32":
        return parts["master"], parts["exp_avg"], parts["exp_avg_sq"]
    p, m, v = room
    join_(p, parts[HIGH_HALF], parts["master_low"], scratch)
    if moments == "16bit":
        load_(m, parts["exp_avg"])
        load_(v, parts["exp_avg_sq"])
    else:
        unpack_codes_(m, v, *(parts[name] for name in _CODES), scratch)
    return room


def _pack_(
    moments: Moments, parts: dict[str, Tensor], state: Sequence[Tensor], rounding: Any, scratch: Scratch
) -> None:
    if moments == "fp32":
        return
    (p, m, v), (first, second) = state, rounding
    split_(parts[HIGH_HALF], parts["master_low"], p, scratch)
    if moments == "16bit":
        pack_bf16_(parts["exp_avg"], m, first, scratch)
        pack_bf16_(parts["exp_avg_sq"], v, second, scratch)
    else:
        pack_codes_(*(parts[name] for name in _CODES), m, v, rounding, scratch)


# ---- arithmetic ---------------------------------------------------------------------------------------


def _adam_(p: Tensor, m: Tensor, v: Tensor, scratch: Scratch, step: _Step) -> None:
    """`reference_update` on float32 [n], operation by operation; the gradient is in scratch.b."""
    k, term, g = step.k, scratch.a, scratch.b
    _flush_(g, k.grad_floor, scratch).mul_(k.grad_scale)
    if step.decay == "l2":
        _flush_(g.add_(torch.mul(p, k.decay, out=term)), GRAD_FLOOR, scratch)
    torch.mul(g, g, out=term).mul_(k.one_minus_beta2)
    _flush_(v.mul_(k.beta2).add_(term), EXP_AVG_SQ_FLOOR, scratch)
    _flush_(m.mul_(k.beta1).add_(g.mul_(k.one_minus_beta1)), EXP_AVG_FLOOR, scratch)
    term.copy_(scratch.wide.copy_(v).sqrt_()).mul_(k.inv_sqrt_bias2).add_(k.eps)  # g was there
    torch.div(m, term, out=term).mul_(k.step_size)
    if step.decay == "decoupled":
        term.add_(torch.mul(p, k.decay, out=g))
    p.sub_(term)


def _flush_(x: Tensor, floor: float, scratch: Scratch) -> Tensor:
    torch.lt(torch.abs(x, out=scratch.a), floor, out=scratch.mask)
    return x.masked_fill_(scratch.mask, 0.0)


# ---- the buffers --------------------------------------------------------------------------------------


def _check(moments: Moments, kept: dict[str, Any], grad: Any, out: Any) -> None:
    """Raise unless all are plain buffers of one device, of the sizes and types that belong together."""
    expected = {b.name: (kept[b.name], (TORCH_DTYPES[b.dtype],), b.shared) for b in STATE_FORMATS[moments]}
    expected["grad"] = (grad, FLOATS, 1)
    if out is not None:
        expected["out"] = (out, FLOATS, 1)
    first = kept[STATE_FORMATS[moments][0].name]
    spans = []
    for name, (tensor, types, shared) in expected.items():
        if not isinstance(tensor, Tensor):
            refuse(
                TypeError, name, type(tensor).__name__, "a torch.Tensor", "pass tensors of one kind of state"
            )
        if tensor.dtype not in types:
            told = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
            refuse(TypeError, name, str(tensor.dtype).removeprefix("torch."), told, "convert it first")
        n = -(-first.numel() // shared)
        if tensor.shape != (n,) or not tensor.is_contiguous():
            got = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
            refuse(ValueError, name, got, f"shape [{n}], contiguous", "pass flat views of one length")
        if tensor.device != first.device:
            got = f"a tensor on {tensor.device}"
            refuse(ValueError, name, got, f"one on {first.device}, as the first", "move it there first")
        address = tensor.data_ptr()
        spans.append((address, address + tensor.nbytes, name))
    check_disjoint(spans)
