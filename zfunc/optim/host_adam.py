"""The host sweeps: Adam, accumulation and the sum of squares as checked calls into the kernel.

The invariant: a call that raises has touched no buffer. Everything is checked before the kernel starts,
because the kernel sees addresses only. What the kernel computes is in adam_reference.py and compact_reference.py.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zfunc.core.dtypes import PRECISIONS
from zfunc.core.optimizer_state import HIGH_HALF, MOMENTS, STATE_FORMATS, Moments
from zfunc.optim.adam_reference import Coefficients, coefficients
from zfunc.optim.buffer_checks import (
    check_disjoint,
    check_factors,
    checked_betas,
    checked_eps,
    checked_finite,
    checked_step,
    checked_threads,
    refuse,
    span_of,
)
from zfunc.optim.compact import QuantizedMoment, SplitMaster, moments_of, named_state
from zfunc.optim.compact_reference import EXP_AVG, EXP_AVG_SQ, first_dither
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

Types = dict[torch.dtype, int]
FLOATS: Types = {TORCH_DTYPES[x]: getattr(cpu_adam, x.upper()) for x in PRECISIONS}


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
    """One Adam step over 1-D contiguous host buffers, in place or `into` others, in one sweep.

    master, exp_avg, exp_avg_sq: [n] fp32, updated; or compact: a SplitMaster with two [n] bf16 moments, or
    with [n] uint8 and QuantizedMoment. grad: [n] fp32, bf16 or fp16, read and never written; it is multiplied by
    `grad_scale` (unscale and clip in one factor). out: [n] bf16, fp16 or fp32, receives the rounded new weights; a
    split master has its bf16 copy already, `master.high`. Slices of compact buffers have to begin with a block: at
    a multiple of 64. into: (master, exp_avg, exp_avg_sq) of the same kinds and sizes; they receive the new state,
    the same bits as in place, and the first three are read and never written. `step` counts from 1. `threads=None`
    takes `default_threads()`; the thread count never changes a bit. The arithmetic is that of
    `adam_reference.reference_update`, between unpacking and packing as in `compact_reference`.

    Raises TypeError or ValueError, with every buffer untouched, on a wrong dtype, device, shape or layout, on
    buffers that overlap, on memory that cannot be written (at its ends), and on factors out of range or not
    finite: a step whose norm is inf or NaN has to be skipped, not applied. Gradients themselves may hold inf and
    NaN; they propagate.

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
        _check_kinds(into, state)
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
    **arguments: Any,
) -> None:
    """`adam_update_` of buffers by the names of `zfunc.core.optimizer_state`; see `checked_arguments`."""
    moments = moments_of(state)
    n = _numel(state[BUFFERS[moments][0].name])
    spans = _spans(moments, state, n, written=into is None)
    fresh = {} if into is None else _spans(moments, into, n, to=_INTO)
    others = {"grad": span_of("grad", grad, n, FLOATS, written=False)}
    if out is not None:
        others["out"] = span_of("out", out, n, FLOATS)
    check_disjoint([*spans.values(), *fresh.values(), *others.values()])
    step, factors, decay = checked_arguments(**arguments)
    cpu_adam.adam_update(
        KERNEL_MOMENTS[moments],
        *_addresses(spans),
        first_dither(step, EXP_AVG),
        first_dither(step, EXP_AVG_SQ),
        others["grad"][0],
        0 if out is None else others["out"][0],
        n,
        FLOATS[grad.dtype],
        cpu_adam.NONE if out is None else FLOATS[out.dtype],
        KERNEL_DECAYS[decay],
        *factors,
        checked_threads(threads),
        into=_addresses(fresh) if fresh else (),
    )


def accumulate_(acc: Tensor, grad: Tensor, *, first: bool, threads: int | None = None) -> float:
    """Add grad to acc, or put it there if `first`; returns the sum of squares of the new acc, in double.

    acc: [n] fp32, written. grad: [n] fp32, bf16 or fp16. The sum is taken in an order fixed by n alone:
    the same bits for any thread count and instruction set. inf and NaN propagate into it, so it is the
    finite check as well. Bad buffers raise TypeError or ValueError and leave acc untouched.

    >>> acc = torch.empty(2)
    >>> accumulate_(acc, torch.tensor([1.0, 2.0]), first=True), accumulate_(acc, torch.ones(2), first=False)
    (5.0, 13.0)
    """
    n = _numel(acc)
    spans = [span_of("acc", acc, n, [torch.float32]), span_of("grad", grad, n, FLOATS, written=False)]
    check_disjoint(spans)
    return cpu_adam.accumulate(
        spans[0][0], spans[1][0], n, FLOATS[grad.dtype], bool(first), checked_threads(threads)
    )


def square_sum(grad: Tensor, *, threads: int | None = None) -> float:
    """The sum of squares of grad [n] (fp32, bf16 or fp16) in double, with the guarantees of `accumulate_`.

    >>> square_sum(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    25.0
    """
    n = _numel(grad)
    address = span_of("grad", grad, n, FLOATS, written=False)[0]
    return cpu_adam.accumulate(0, address, n, FLOATS[grad.dtype], False, checked_threads(threads))


# ---- what a step is told ---------------------------------------------------------------------------


Decay = Literal["none", "decoupled", "l2"]


def checked_arguments(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float,
) -> tuple[int, Coefficients, Decay]:
    """An update's number, its factors, and how it decays; TypeError or ValueError where an argument is out of
    range, or a factor too large for fp32."""
    step = checked_step(step)
    factors = coefficients(
        step,
        checked_finite("lr", lr, minimum=0.0),
        checked_betas(betas),
        checked_eps(eps),
        checked_finite("weight_decay", weight_decay, minimum=0.0),
        decoupled,
        checked_finite("grad_scale", grad_scale),
    )
    check_factors(factors)
    return step, factors, "none" if not weight_decay else "decoupled" if decoupled else "l2"


# ---- the buffers of a state ------------------------------------------------------------------------

_INTO = "into "
_ARGUMENTS = ("master", "master_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_scale")  # in the kernel's order
_SHOWN = {"master_high": "master.high", "master_low": "master.low", "exp_avg_sq_scale": "exp_avg_sq.scales"}

Span = tuple[int, int, str]


class Buffer(NamedTuple):
    """How a buffer of a state is checked: its names, its dtype, how many parameters share an element of it."""

    name: str
    argument: str  # of the kernel: either kind of master is the first
    shown: str  # in errors
    dtypes: tuple[torch.dtype]
    shared: int


def _buffers(moments: Moments) -> tuple[Buffer, ...]:
    shown = {**_SHOWN, **({"exp_avg_sq": "exp_avg_sq.codes"} if moments == "8bit" else {})}
    return tuple(
        Buffer(
            x.name,
            "master" if x.name == HIGH_HALF else x.name,
            shown.get(x.name, x.name),
            (TORCH_DTYPES[x.dtype],),
            x.shared,
        )
        for x in STATE_FORMATS[moments]
    )


BUFFERS: dict[Moments, tuple[Buffer, ...]] = {x: _buffers(x) for x in MOMENTS}
KERNEL_DECAYS: dict[Decay, int] = {
    "none": cpu_adam.NO_DECAY,
    "decoupled": cpu_adam.DECOUPLED,
    "l2": cpu_adam.L2,
}
KERNEL_MOMENTS: dict[Moments, int] = {
    "fp32": cpu_adam.MOMENTS_FP32,
    "16bit": cpu_adam.MOMENTS_16BIT,
    "8bit": cpu_adam.MOMENTS_8BIT,
}


def _numel(tensor: Any) -> int:
    return tensor.numel() if isinstance(tensor, Tensor) else 0


def _spans(
    moments: Moments, state: Mapping[str, Any], n: int, *, to: str = "", written: bool = True
) -> dict[str, Span]:
    """Where the buffers of a state are, by the kernel's arguments; anything but buffers of its format raises."""
    return {
        x.argument: span_of(to + x.shown, state[x.name], -(-n // x.shared), x.dtypes, written=written)
        for x in BUFFERS[moments]
    }


def _addresses(spans: Mapping[str, Span]) -> list[int]:
    return [spans[name][0] if name in spans else 0 for name in _ARGUMENTS]


def _check_kinds(into: Any, state: tuple[Any, Any, Any]) -> None:
    """Raise unless the new state goes to three of the kinds of the old one."""
    if not isinstance(into, tuple) or len(into) != len(state):
        got = f"{len(into)} of them" if isinstance(into, tuple) else type(into).__name__
        refuse(TypeError, "into", got, "a tuple of three", "pass (master, exp_avg, exp_avg_sq), or None")
    for name, new, old in zip(("master", "exp_avg", "exp_avg_sq"), into, state, strict=True):
        kinds = [x for x in (SplitMaster, QuantizedMoment) if isinstance(new, x) or isinstance(old, x)]
        if not all(isinstance(new, x) and isinstance(old, x) for x in kinds):
            got, expected = type(new).__name__, f"{type(old).__name__}, as in the state given"
            refuse(TypeError, _INTO + name, got, expected, "make it of the same kind")
