"""An element-wise update in torch operations, for buckets whose optimizer state stays on the device.

The bits are those of `reference` on any device with IEEE arithmetic, because

- every operation rounds once, in the rule's order: none may contract a product and a sum into a fused one
  (`addcmul`, `addcdiv`, `lerp`, `add` with an alpha);
- factors are rounded to float32 before torch sees them, so its own conversion is exact;
- nothing is divided by a number: on CUDA that would be a product with its reciprocal;
- the square root goes through float64, because torch's of float32 is not always the nearest on CPUs (MKL's). The
  nearest float32 of a float64 root is right even where that is off by an ulp.

The payload of a NaN is not promised. Elements go through in pieces, in memory that `elementwise_workspace`
bounds, and nothing waits for the device.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from zfunc.core.optimizer_state import moment_buffers, state_slice
from zfunc.core.regions import SUM_PARTS
from zfunc.optim.argument_checks import checked_step, update_spans
from zfunc.optim.formats import pack_moments, pack_weights, unpack_moments, unpack_weights
from zfunc.optim.rules import Decay, Factors, Rule, step
from zfunc.optim.tensors import TORCH
from zfunc.optim.workspaces import PIECE


def device_update_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    rule: Rule,
    state_format: str,
    factors: Factors,
    number: int,
    decay: Decay,
    out: Tensor | None = None,
) -> None:
    """Update `number` over 1-D contiguous buffers of one device, in place, with the bits of `host_update_`.

    On CUDA the operations are queued on the current stream. Raises TypeError or ValueError, with every buffer
    unchanged, for a wrong dtype, shape, device or layout, and buffers that overlap.
    """
    update_spans(state_format, state, grad, out, device=None, weights=rule.weights)
    checked_step(number)
    with np.errstate(over="ignore"):  # grad_floor may be infinite
        k = Factors._make(float(np.float32(x)) for x in factors)
    count = sum(x.shared == 1 for x in moment_buffers(state_format))

    def update(parts: Mapping[str, Tensor], grad: Tensor, out: Tensor | None) -> None:
        p = unpack_weights(parts) if rule.weights else None
        grad = grad.to(torch.float32, copy=True)
        p, *moments = step(TORCH, rule, k, decay, grad, p, *unpack_moments(parts, state_format))
        del grad  # a device has no room for it beside what packing takes
        if out is not None:
            out.copy_(p)
        packed = pack_moments(moments[:count], state_format, number)
        if rule.weights:
            packed = pack_weights(p, state_format, packed) | packed
        for name, x in packed.items():
            parts[name].copy_(x)

    with torch.no_grad():
        for start in range(0, grad.numel(), PIECE):
            stop = min(grad.numel(), start + PIECE)
            part = None if out is None else out[start:stop]
            update(state_slice(state_format, state, start, stop), grad[start:stop], part)


def exact_parts(sums: Tensor) -> Tensor:
    """Sums of squares [..., n] fp64, added up without rounding, in the parts of `host_update.square_sum`.

    >>> exact_parts(torch.tensor([9.0, 16.0], dtype=torch.float64)).shape == (SUM_PARTS,)
    True
    """
    first, last = (1023 + 32 * i - 352 for i in (0, SUM_PARTS))
    unit = torch.arange(first, last, 32, device=sums.device).bitwise_left_shift_(52).view(torch.float64)
    multiples = (sums[..., None] / unit).floor_().mul_(unit)  # powers of two: exact
    above = torch.nn.functional.pad(multiples[..., 1:], (0, 1))
    return torch.where(above.isinf(), above, multiples - above).sum(-2)
