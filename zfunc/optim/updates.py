"""An element-wise update in host memory, by the kernel, and in torch operations on any device; and sums of squares.

Arguments are checked before anything is written, because the kernel sees addresses only: a call that raises has
changed no buffer. An update is unpack, a rule, pack: `formats` has the formats, `rules` the arithmetic.
In torch the bits are the same on any device with IEEE arithmetic, because

- every operation rounds once, in the rule's order: none may contract a product and a sum into a fused one
  (`addcmul`, `addcdiv`, `lerp`, `add` with an alpha);
- factors are rounded to float32 before torch sees them, so its own conversion is exact;
- nothing is divided by a number: on CUDA that would be a product with its reciprocal;
- the square root goes through float64, because torch's of float32 is not always the nearest on CPUs (MKL's). The
  nearest float32 of a float64 root is right even where that is off by an ulp.

The payload of a NaN is not promised. On a device elements go through in pieces, in memory that
`Elementwise.device_workspace` bounds, and nothing waits for the device.
"""

from collections.abc import Collection, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from zfunc.core.optimizer_state import STATE_FORMATS, moment_buffers, state_slice
from zfunc.core.region_table import SUM_PARTS
from zfunc.errors import refuse
from zfunc.optim.formats import kernel_layout, pack, unpack_moments, unpack_weights
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam
from zfunc.optim.rules import EMA_PIECE, PIECE, RuleStep, apply_step, as_float32, checked_step, first_dither
from zfunc.optim.rules_in_c import compiled
from zfunc.optim.rules_in_cuda import DECAYS, device_kernel, launch
from zfunc.runtime.thread_budget import default_threads, limit_threads
from zfunc.runtime.torch_dtypes import TORCH_DTYPES
from zfunc.values import whole


class _Torch:
    """The operations of a rule (`rules.Operations`) on float32 torch tensors."""

    def flush(self, x: Tensor, floor: float, /) -> Tensor:
        return x.masked_fill_(x.abs() < floor, 0.0)

    def sqrt(self, x: Tensor, /) -> Tensor:
        return x.double().sqrt_().float()

    def signed(self, x: Tensor, size: float, /) -> Tensor:
        full = torch.full_like(x, size).copysign_(x).masked_fill_(x == 0, 0.0)
        return full.masked_fill_(x.isnan(), torch.nan)


# ---- updates ------------------------------------------------------------------------------------------


class CheckedState(dict[str, Tensor]):
    """The buffers of an optimizer state by name, together with the results of checking them, which the next
    update with the same arguments (`asked`) reuses. For other memory its owner makes a new one."""

    asked: tuple[Any, ...] = ()
    spans: "dict[str, Span]"
    known: dict[Any, tuple[list[int], list[int]]]  # addresses and formats of them, as kernels take them


KernelCalls = dict[Any, list[tuple[Any, ...]]]
"""Calls of `host_update_` that are checked and not made, by kernel, whose `update_runs` makes them at once."""


def host_update_(
    step: RuleStep,
    state: Mapping[str, Tensor],
    grad: Tensor,
    *,
    out: Tensor | None = None,
    into: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
    isa: int = -1,
    calls: KernelCalls | None = None,
) -> None:
    """One step of an optimizer over 1-D contiguous host buffers in one pass over memory: `state`, by name, is
    updated in place, or the results go `into` other buffers.

    `grad`: [n] fp32, bf16 or fp16, read only. `out`: [n], likewise, receives the rounded new weights, or the
    result of a rule without weights. Slices of compact buffers begin at multiples of 64. `threads` and `isa`,
    the instruction set (-1: the best), change no bit. A rule that the kernel lacks is compiled, or runs in
    torch operations (`rules_in_c`). If `calls` is given, the kernel's call is added to it, for the caller to
    make.

    Raises TypeError or ValueError, with every buffer unchanged, for a wrong dtype, device, shape or layout,
    buffers that overlap, and memory whose ends are read-only. Gradients may hold inf and NaN, which
    propagate.
    """
    rule, number, team = step.rule, checked_step(step.number), checked_threads(threads)
    spans = update_spans(step.state_format, state, grad, out, into, weights=rule.weights)
    kernel = cpu_adam if rule.name else compiled(rule)
    if kernel is None:
        for name in into or ():
            into[name].copy_(state[name])  # pyright: ignore
        device_update_(step, into or state, grad, out=out)
        return
    room = cpu_adam.MOMENTS if rule.name else kernel.num_moments
    known = state.known if isinstance(state, CheckedState) else {}
    if (key := (kernel, rule.name, step.decay)) not in known:
        names, kept = kernel_layout(step.state_format, room, weights=rule.weights)
        new = INTO if into is not None else ""
        every = "grad", "out", *names, *(new + x for x in names)
        types = [cpu_adam.NONE if x is None else KERNEL_DTYPES[x.dtype] for x in (grad, out)]
        which = cpu_adam.RULES[rule.name] if rule.name else 0
        how = [which, *types, *(getattr(cpu_adam, x) for x in (DECAYS[step.decay], *kept))]
        known[key] = [spans[x][0] if x in spans else 0 for x in every], how
    addresses, how = known[key]
    dithers = [first_dither(number, moment) for moment in range(room)]
    call = addresses, how, dithers, step.factors, grad.numel(), team, cpu_adam.checked(isa)
    if calls is None:
        kernel.update(*call)
    else:
        calls.setdefault(kernel, []).append(call)


def device_update_(
    step: RuleStep, state: Mapping[str, Tensor], grad: Tensor, *, out: Tensor | None = None
) -> None:
    """One optimizer step over 1-D contiguous buffers of one device, in place, with the bits of `host_update_`.

    On CUDA the operations are queued on the current stream. `out` gets the rounded new weights. Raises TypeError
    or ValueError, with every buffer unchanged, for a wrong dtype, shape, device or layout, and overlapping buffers.
    """
    update_spans(step.state_format, state, grad, out, device=None, weights=step.rule.weights)
    checked_step(step.number)
    step = step._replace(factors=as_float32(step.factors))
    if (kernel := device_kernel(step, grad, out)) is not None:
        launch(kernel, step, state, grad, out)
        return
    count = sum(x.shared == 1 for x in moment_buffers(step.state_format))

    def update(parts: Mapping[str, Tensor], grad: Tensor, out: Tensor | None) -> None:
        p = unpack_weights(parts) if step.rule.weights else None
        grad = grad.to(torch.float32, copy=True)
        p, *moments = apply_step(_Torch(), step, grad, p, *unpack_moments(parts, step.state_format))
        del grad  # a device has no room for it beside what packing takes
        if out is not None:
            out.copy_(p)
        weights = p if step.rule.weights else None
        for name, x in pack(weights, moments[:count], step.state_format, step.number).items():
            parts[name].copy_(x)

    with torch.no_grad():
        for start in range(0, grad.numel(), PIECE):
            stop = min(grad.numel(), start + PIECE)
            part = None if out is None else out[start:stop]
            update(state_slice(step.state_format, state, start, stop), grad[start:stop], part)


def average_(ema: Tensor, state: Mapping[str, Tensor], decay: float) -> None:
    """Set the moving average `ema` [n] fp32 to `decay * ema + (1 - decay) * weights`, with the weights of
    `state`, an optimizer state in any format.

    Two products and their sum are each rounded once, so division into slices, device and number of threads
    change no bit. `torch.lerp`, which `torch.optim.swa_utils` uses, rounds once less in vectorized parts.
    """
    for start in range(0, ema.numel(), EMA_PIECE):
        part = ema[start : start + EMA_PIECE]
        weights = unpack_weights({name: x[start : start + part.numel()] for name, x in state.items()})
        part.mul_(decay).add_(weights * (1 - decay))


# ---- sums of squares -----------------------------------------------------------------------------------


def accumulate_(acc: Tensor, grad: Tensor, *, first: bool, threads: int | None = None) -> Tensor:
    """Add `grad` to `acc`, or copy it there if `first`; returns the exact sum of squares of the new `acc`, as
    [21] fp64 parts that `math.fsum` adds up.

    `acc`: [n] fp32, written. `grad`: [n] fp32, bf16 or fp16. Parts of several calls add up without rounding,
    so the total has the same bits wherever the elements are divided (at multiples of 64), for any thread
    count and instruction set. inf and NaN propagate, so the result also shows whether all elements are
    finite. Raises TypeError or ValueError, with `acc` unchanged, for buffers as in `host_update_`.

    >>> import math
    >>> acc = torch.empty(2)
    >>> math.fsum(accumulate_(acc, torch.tensor([1.0, 2.0]), first=True))
    5.0
    """
    into = checked_span("acc", acc, None, [torch.float32])
    given = checked_span("grad", grad, acc.numel(), KERNEL_DTYPES, written=False)
    check_disjoint((into, given))
    return _sum(into[0], given[0], grad, first, threads)


def square_sum(grad: Tensor, *, threads: int | None = None) -> Tensor:
    """The exact sum of squares of `grad` [n] (fp32, bf16 or fp16), in parts [21] fp64 that `math.fsum` adds up.

    >>> square_sum(torch.tensor([3.0, 4.0], dtype=torch.bfloat16)).sum().item()
    25.0
    """
    address = checked_span("grad", grad, None, KERNEL_DTYPES, written=False)[0]
    return _sum(0, address, grad, False, threads)


def _sum(acc: int, address: int, grad: Tensor, first: bool, threads: int | None) -> Tensor:
    parts = torch.empty(SUM_PARTS, dtype=torch.float64, device="cpu")
    sizes = parts.data_ptr(), grad.numel(), KERNEL_DTYPES[grad.dtype]
    cpu_adam.accumulate(acc, address, *sizes, bool(first), checked_threads(threads))
    return parts


def exact_parts(sums: Tensor) -> Tensor:
    """The exact sum over the last dimension of `sums` [..., n] fp64, none negative, in 21 parts for `math.fsum`.

    >>> exact_parts(torch.tensor([9.0, 16.0], dtype=torch.float64)).shape == (SUM_PARTS,)
    True
    """
    first, last = (1023 + 32 * i - 352 for i in (0, SUM_PARTS))
    unit = torch.arange(first, last, 32, device=sums.device).bitwise_left_shift_(52).view(torch.float64)
    multiples = (sums[..., None] / unit).floor_().mul_(unit)  # powers of two: exact
    above = torch.nn.functional.pad(multiples[..., 1:], (0, 1))
    return torch.where(above.isinf(), above, multiples - above).sum(-2)


# ---- checks --------------------------------------------------------------------------------------------

Span = tuple[int, int, str]  # first address, address after the last byte, name for errors
CPU = torch.device("cpu")

INTO = "into "  # prefix of the buffers that receive a new state


def checked_threads(threads: int | None) -> int:
    """The number of threads for an update: `threads`, but at most those available, or the default for None."""
    return default_threads() if threads is None else limit_threads(whole("threads", threads, 1))


def update_spans(
    state_format: str,
    state: Mapping[str, Any],
    grad: Any,
    out: Any,
    into: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = CPU,
    weights: bool = True,
) -> dict[str, Span]:
    """Check the buffers of an update and return their memory ranges by name; names of buffers of `into` begin
    with "into ".

    Buffers of weights are included if `weights` is true. Raises TypeError or ValueError unless all are 1-D
    and contiguous, on `device` (None: the first one's), of the sizes and dtypes of `state_format`, and share
    no memory.
    """
    asked = grad, out, into, device, state_format, weights
    if (
        isinstance(state, CheckedState)
        and state.asked[4:] == asked[4:]
        and all(map(is_, state.asked[:4], asked))
    ):
        return state.spans
    formats = STATE_FORMATS[state_format] if weights else moment_buffers(state_format)
    first = state[formats[0].name]
    n = first.numel() if isinstance(first, Tensor) else 0
    place = device or getattr(first, "device", CPU)
    spans: dict[str, Span] = {}
    for prefix, buffers, written in (("", state, into is None), (INTO, into or {}, True)):
        for x in formats if buffers else ():
            given = prefix + x.name, buffers[x.name], x.numel(n), (TORCH_DTYPES[x.dtype],)
            spans[prefix + x.name] = checked_span(*given, device=place, written=written)
    spans["grad"] = checked_span("grad", grad, n, KERNEL_DTYPES, device=place, written=False)
    if out is not None:
        spans["out"] = checked_span("out", out, n, KERNEL_DTYPES, device=place)
    check_disjoint(spans.values())
    if isinstance(state, CheckedState):
        state.asked, state.spans, state.known = asked, spans, {}
    return spans


def checked_span(
    name: str,
    tensor: Any,
    n: int | None,
    dtypes: Collection[torch.dtype],
    *,
    device: torch.device = CPU,
    written: bool = True,
) -> Span:
    """The memory range of `tensor`, which errors call `name`. Raises TypeError or ValueError unless it is
    contiguous, [n], of one of `dtypes`, on `device`, and writable if `written`."""
    if not isinstance(tensor, Tensor):
        refuse(name, type(tensor).__name__, "a torch.Tensor", "pass torch.from_numpy(array)", TypeError)
    n = tensor.numel() if n is None else n
    if tensor.dtype not in dtypes:
        got, *expected = (str(x).removeprefix("torch.") for x in (tensor.dtype, *dtypes))
        refuse(name, got, " or ".join(expected), "convert it first", TypeError)
    if tensor.device != device:
        do = f"copy it with .to({str(device)!r})"
        refuse(name, f"a tensor on {tensor.device}", f"a tensor on {device}", do)
    if tensor.layout is not torch.strided or tensor.is_neg():
        refuse(name, "a lazy or sparse view", "plain memory", "pass .to_dense() or .resolve_neg()")
    if tensor.dim() != 1 or tensor.numel() != n:
        expected = f"shape [{n}], as the first buffer" if tensor.dim() == 1 else "one dimension"
        refuse(name, f"shape {list(tensor.shape)}", expected, "pass a flat view")
    if not tensor.is_contiguous():
        refuse(name, f"stride {tensor.stride()[0]}", "a contiguous buffer", "pass .contiguous()")
    try:
        address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    except RuntimeError:  # a wrapper of torch.func
        do = "call this outside torch.func transforms and torch.compile"
        refuse(name, f"{type(tensor).__name__} without memory", "a plain tensor", do, TypeError)
    end = address + n * tensor.element_size()
    first = tensor.storage_offset() * tensor.element_size()  # a storage can be resized under a tensor
    if n and (not address or tensor.untyped_storage().nbytes() - first < end - address):
        refuse(name, "a tensor whose memory is not allocated", "a plain tensor", "allocate it again")
    on_cpu = device.type == "cpu"
    if written and n and on_cpu and not (cpu_adam.writable(address) and cpu_adam.writable(end - 1)):
        refuse(name, "read-only memory", "memory that can be written", "clone it first")
    return address, end, name


def check_disjoint(spans: Collection[Span]) -> None:
    """Raise ValueError if two of the buffers in `spans` share memory."""
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            got = f"memory that overlaps by {end - start} bytes"
            refuse(f"{last} and {name}", got, "separate buffers", "clone one of them")
        end, last = stop, name
