"""Adam, gradient accumulation and the sum of squares in host memory: checked calls into the compiled kernel.

Arguments are checked before the kernel starts, because it sees addresses only: a call that raises has changed no
buffer. `adam_reference` and `compact_reference` define what the kernel computes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, AdamFormat
from zfunc.core.regions import SUM_PARTS
from zfunc.optim.argument_checks import (
    INTO,
    Decay,
    Span,
    check_disjoint,
    checked_arguments,
    checked_span,
    checked_threads,
    numel_of,
    refuse,
    update_spans,
)
from zfunc.optim.compact import QuantizedMoment, SplitMaster, adam_format, named_state
from zfunc.optim.compact_reference import EXP_AVG, EXP_AVG_SQ, first_dither
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam

KERNEL_DECAYS: dict[Decay, int] = {
    "none": cpu_adam.NO_DECAY,
    "decoupled": cpu_adam.DECOUPLED,
    "l2": cpu_adam.L2,
}
KERNEL_FORMATS: dict[AdamFormat, int] = {
    "fp32": cpu_adam.MOMENTS_FP32,
    "fp32-split": cpu_adam.MOMENTS_FP32_SPLIT,
    "16bit": cpu_adam.MOMENTS_16BIT,
    "8bit": cpu_adam.MOMENTS_8BIT,
}


def adam_update_(
    master: Tensor | SplitMaster,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | QuantizedMoment,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    into: tuple[Tensor | SplitMaster, Tensor, Tensor | QuantizedMoment] | None = None,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    threads: int | None = None,
) -> None:
    """One Adam step over 1-D contiguous host buffers, in one pass over memory: in place, or `into` other buffers.

    - `master`, `exp_avg`, `exp_avg_sq`: [n] fp32, updated. Or compact: a SplitMaster with two [n] fp32 moments (the
      same bits; exp_avg_sq's sign belongs to the master then), two [n] bf16, or [n] uint8 and a QuantizedMoment.
      Slices of compact buffers begin at a multiple of 64.
    - `grad`: [n] fp32, bf16 or fp16, read only. It is multiplied by `grad_scale`: unscaling and clipping in one.
    - `out`: [n] bf16, fp16 or fp32, receives the rounded new weights; `master.high` is a split master's bf16.
    - `into`: (master, exp_avg, exp_avg_sq) of the same types and sizes. They receive the new state, with the same
      bits as in place, and the first three buffers are read only.
    - `step` counts from 1. `threads=None` is `default_threads()`; the thread count never changes a bit.

    The arithmetic is that of `adam_reference.reference_update`, between unpacking and packing as in
    `compact_reference`.

    Raises TypeError or ValueError, with every buffer unchanged, for a wrong dtype, device, shape or layout, buffers
    that overlap, memory whose ends are read-only, and factors out of range or not finite: skip a step with a norm
    of inf or NaN. Gradients may hold inf and NaN, which propagate.

    >>> weights, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> adam_update_(weights, m, v, torch.tensor([0.5, 0.0]), step=1, lr=0.25, eps=0.25)
    >>> weights
    tensor([0.8333, 1.0000])
    >>> shadow = tuple(torch.empty(2) for _ in range(3))
    >>> adam_update_(weights, m, v, torch.ones(2), into=shadow, step=2, lr=0.25, eps=0.25)
    >>> weights, shadow[0]
    (tensor([0.8333, 1.0000]), tensor([0.6500, 0.8625]))
    """
    state = master, exp_avg, exp_avg_sq
    if into is not None:
        _check_same_types(into, state)
    host_adam_(
        named_state(*state),
        grad,
        out=out,
        into=None if into is None else named_state(*into),
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
        threads=threads,
    )


def host_adam_(
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    out: Tensor | None = None,
    into: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
    isa: int = -1,
    **arguments: Any,
) -> None:
    """`adam_update_` with the state by the names in `zfunc.core.optimizer_state`, and `checked_arguments`.

    `isa`: one of the kernel's instruction sets, -1 for the best one here. It changes no bit.
    """
    state_format = adam_format(state)
    spans = update_spans(state_format, state, grad, out, into)
    step, factors, decay = checked_arguments(**arguments)
    cpu_adam.adam_update(
        KERNEL_FORMATS[state_format],
        *_addresses(spans),
        first_dither(step, EXP_AVG),
        first_dither(step, EXP_AVG_SQ),
        _address(spans, "grad"),
        _address(spans, "out"),
        grad.numel(),
        KERNEL_DTYPES[grad.dtype],
        cpu_adam.NONE if out is None else KERNEL_DTYPES[out.dtype],
        KERNEL_DECAYS[decay],
        *factors,
        checked_threads(threads),
        isa,
        into=_addresses(spans, INTO) if into is not None else (),
    )


def _addresses(spans: Mapping[str, Span], prefix: str = "") -> list[int]:
    """The addresses of a state in the kernel's order, 0 for a buffer that its format does not have."""
    master = _address(spans, prefix + "master") or _address(spans, prefix + HIGH_HALF)
    others = ("master_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_scale")
    return [master, *(_address(spans, prefix + name) for name in others)]


def _address(spans: Mapping[str, Span], name: str) -> int:
    return spans[name][0] if name in spans else 0


def accumulate_(acc: Tensor, grad: Tensor, *, first: bool, threads: int | None = None) -> Tensor:
    """Add `grad` to `acc`, or copy it there if `first`; returns the sum of squares of the new `acc`, exactly.

    `acc`: [n] fp32, written. `grad`: [n] fp32, bf16 or fp16. The result is [SUM_PARTS] fp64, which `math.fsum` adds
    up. Such parts are added without rounding, so the total of several calls has the same bits wherever the elements
    were cut, at multiples of 64, and for any thread count and instruction set. inf and NaN propagate, so it is the
    finite check as well. Raises TypeError or ValueError, with `acc` unchanged, for buffers as in `adam_update_`.

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


def _sum(acc: int, grad_address: int, grad: Tensor, first: bool, threads: int | None) -> Tensor:
    parts = torch.empty(SUM_PARTS, dtype=torch.float64, device="cpu")
    cpu_adam.accumulate(
        acc,
        grad_address,
        parts.data_ptr(),
        grad.numel(),
        KERNEL_DTYPES[grad.dtype],
        bool(first),
        checked_threads(threads),
    )
    return parts


def _check_same_types(into: Any, state: tuple[Any, Any, Any]) -> None:
    """Raise TypeError unless `into` has three buffers of the types of `state`."""
    if not isinstance(into, tuple) or len(into) != len(state):
        got = f"{len(into)} of them" if isinstance(into, tuple) else type(into).__name__
        refuse(TypeError, "into", got, "a tuple of three", "pass (master, exp_avg, exp_avg_sq), or None")
    for name, new, old in zip(("master", "exp_avg", "exp_avg_sq"), into, state, strict=True):
        compact = [x for x in (SplitMaster, QuantizedMoment) if isinstance(new, x) or isinstance(old, x)]
        if not all(isinstance(new, x) and isinstance(old, x) for x in compact):
            got, expected = type(new).__name__, f"{type(old).__name__}, as in the state given"
            refuse(TypeError, INTO + name, got, expected, "pass the same type")
