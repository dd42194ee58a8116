"""An element-wise update, accumulation and the sum of squares in host memory: checked calls of the kernel.

Arguments are checked before the kernel starts, because it sees addresses only: a call that raises has changed no
buffer. `reference` defines what the kernel computes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zfunc.core.regions import SUM_PARTS
from zfunc.optim.argument_checks import (
    INTO,
    check_disjoint,
    checked_span,
    checked_step,
    checked_threads,
    numel_of,
    update_spans,
)
from zfunc.optim.compiled_rules import compiled
from zfunc.optim.device_update import device_update_
from zfunc.optim.formats import first_dither, kernel_layout
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam
from zfunc.optim.rules import Decay, Factors, Rule

DECAYS = {"none": cpu_adam.NO_DECAY, "l2": cpu_adam.L2, "decoupled": cpu_adam.DECOUPLED}


def host_update_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    rule: Rule,
    state_format: str,
    factors: Factors,
    number: int,
    decay: Decay,
    out: Tensor | None = None,
    into: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
    isa: int = -1,
) -> None:
    """Update `number` over 1-D contiguous host buffers, by name, in place or `into` others, in one pass.

    `grad`: [n] fp32, bf16 or fp16, read only. `out`: [n] of such a type, receives the rounded new weights, or the
    result of a rule without weights. Slices of compact buffers begin at a multiple of 64. Threads and instruction
    set change no bit. A rule that the kernel lacks is compiled, or run in torch operations (`compiled_rules`).

    Raises TypeError or ValueError, with every buffer unchanged, for a wrong dtype, device, shape or layout, buffers
    that overlap, and memory whose ends are read-only. Gradients may hold inf and NaN, which propagate.
    """
    spans = update_spans(state_format, state, grad, out, into, weights=rule.weights)
    number = checked_step(number)
    team = checked_threads(threads)
    kernel = cpu_adam if rule.name else compiled(rule)
    if kernel is None:
        for name in () if into is None else into:
            into[name].copy_(state[name])  # pyright: ignore
        how = {"rule": rule, "state_format": state_format, "factors": factors}
        device_update_(state if into is None else into, grad, number=number, decay=decay, out=out, **how)  # pyright: ignore
        return
    room = cpu_adam.MOMENTS if rule.name else kernel.num_moments
    names, kept = kernel_layout(state_format, room, weights=rule.weights)
    new = INTO if into is not None else ""
    addresses = [spans[x][0] if x in spans else 0 for x in ("grad", "out", *names, *(new + x for x in names))]
    types = [cpu_adam.NONE if x is None else KERNEL_DTYPES[x.dtype] for x in (grad, out)]
    which = cpu_adam.RULES[rule.name] if rule.name else 0
    how = [which, *types, DECAYS[decay], *(getattr(cpu_adam, x) for x in kept)]
    dithers = [first_dither(number, moment) for moment in range(room)]
    kernel.update(addresses, how, dithers, factors, grad.numel(), team, cpu_adam.checked(isa))


def accumulate_(acc: Tensor, grad: Tensor, *, first: bool, threads: int | None = None) -> Tensor:
    """Add `grad` to `acc`, or copy it there if `first`; returns the sum of squares of the new `acc`, exactly.

    `acc`: [n] fp32, written. `grad`: [n] fp32, bf16 or fp16. The result is [SUM_PARTS] fp64, which `math.fsum` adds
    up. Such parts are added without rounding, so the total of several calls has the same bits wherever the elements
    were cut, at multiples of 64, and for any thread count and instruction set. inf and NaN propagate, so it is the
    finite check as well. Raises TypeError or ValueError, with `acc` unchanged, for buffers as in `host_update_`.

    >>> import math
    >>> acc = torch.empty(2)
    >>> math.fsum(accumulate_(acc, torch.tensor([1.0, 2.0]), first=True))
    5.0
    """
    n = numel_of(acc)
    spans = [
        checked_span("acc", acc, n, [torch.float32]),
        checked_span("grad", grad, n, KERNEL_DTYPES, written=False),
    ]
    check_disjoint(spans)
    return _sum(spans[0][0], spans[1][0], grad, first, threads)


def square_sum(grad: Tensor, *, threads: int | None = None) -> Tensor:
    """The sum of squares of grad [n] (fp32, bf16 or fp16), with the result and guarantees of `accumulate_`.

    >>> square_sum(torch.tensor([3.0, 4.0], dtype=torch.bfloat16)).sum().item()
    25.0
    """
    address = checked_span("grad", grad, numel_of(grad), KERNEL_DTYPES, written=False)[0]
    return _sum(0, address, grad, False, threads)


def _sum(acc: int, address: int, grad: Tensor, first: bool, threads: int | None) -> Tensor:
    parts = torch.empty(SUM_PARTS, dtype=torch.float64, device="cpu")
    sizes = parts.data_ptr(), grad.numel(), KERNEL_DTYPES[grad.dtype]
    cpu_adam.accumulate(acc, address, *sizes, bool(first), checked_threads(threads))
    return parts
