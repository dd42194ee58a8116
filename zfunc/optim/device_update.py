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

from zfunc.core.optimizer_state import state_slice
from zfunc.core.regions import SUM_PARTS
from zfunc.optim.argument_checks import checked_step, update_spans
from zfunc.optim.device_formats import dithers, moments_of, pack_moments_, pack_weights_, weights_of
from zfunc.optim.rules import Decay, Factors, Rule, step
from zfunc.optim.workspaces import PIECE


class Torch:
    """`rules.Operations` on float32 tensors."""

    def flush(self, x: Tensor, floor: float, /) -> Tensor:
        """x, which is 0 where its size is below the floor."""
        return x.masked_fill_(x.abs() < floor, 0.0)

    def sqrt(self, x: Tensor, /) -> Tensor:
        """The nearest float32."""
        return x.double().sqrt_().float()

    def signed(self, x: Tensor, size: float, /) -> Tensor:
        """`size` with the sign of x; 0 where x is 0, NaN where it is NaN."""
        full = torch.full_like(x, size).copysign_(x).masked_fill_(x == 0, 0.0)
        return full.masked_fill_(x.isnan(), torch.nan)


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
    spread = dithers(number, state_format, grad.device)

    def update(parts: Mapping[str, Tensor], grad: Tensor, out: Tensor | None) -> None:
        p, *moments = step(
            Torch(),
            rule,
            k,
            decay,
            grad.to(torch.float32, copy=True),
            weights_of(parts) if rule.weights else None,
            *moments_of(parts, state_format),
        )
        if out is not None:
            out.copy_(p)
        pack_moments_(parts, moments[: len(spread)], state_format, spread)
        if rule.weights:
            pack_weights_(parts, p)

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
