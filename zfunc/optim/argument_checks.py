"""Checks of an update's arguments: buffers, before the kernel sees an address, the step and the threads.

A failed check raises TypeError or ValueError with what was got, what was expected and what to do, and has changed
no buffer.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from zfunc.core.optimizer_state import STATE_FORMATS, moment_buffers
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam
from zfunc.optim.optimizer_settings import refuse
from zfunc.runtime.thread_budget import default_threads, limit_threads
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

MAX_STEP = 2**53  # the largest float64 up to which every integer is exact
Span = tuple[int, int, str]  # first address, address after the last byte, name for errors
CPU = torch.device("cpu")

INTO = "into "  # prefix of the buffers that receive a new state


def checked_threads(threads: int | None) -> int:
    """The number of threads to use: at most those available; the default for None."""
    if threads is None:
        return default_threads()
    if type(threads) is not int:
        refuse(TypeError, "threads", repr(threads), "an int or None", "pass None for the default")
    if threads < 1:
        refuse(ValueError, "threads", repr(threads), "1 or more", "pass None for the default")
    return limit_threads(threads)


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
    """The memory of every buffer of an update, by name; the names of those of `into` begin with "into ".

    Those of the weights are among them with `weights`. Raises TypeError or ValueError unless all are 1-D contiguous
    buffers on `device`, or that of the first, with the sizes and dtypes of `state_format`, and share no memory.
    """
    formats = STATE_FORMATS[state_format] if weights else moment_buffers(state_format)
    first = state[formats[0].name]
    n = numel_of(first)
    device = device or getattr(first, "device", CPU)
    spans: dict[str, Span] = {}
    for prefix, buffers, written in (("", state, into is None), (INTO, into or {}, True)):
        for x in formats if buffers else ():
            name, dtypes = prefix + x.name, (TORCH_DTYPES[x.dtype],)
            spans[name] = checked_span(
                name, buffers[x.name], x.numel(n), dtypes, device=device, written=written
            )
    spans["grad"] = checked_span("grad", grad, n, KERNEL_DTYPES, device=device, written=False)
    if out is not None:
        spans["out"] = checked_span("out", out, n, KERNEL_DTYPES, device=device)
    check_disjoint(spans.values())
    return spans


def numel_of(tensor: Any) -> int:
    """The number of elements of a tensor; 0 for anything else, which `checked_span` refuses."""
    return tensor.numel() if isinstance(tensor, Tensor) else 0


def checked_span(
    name: str,
    tensor: Any,
    n: int,
    dtypes: Collection[torch.dtype],
    *,
    device: torch.device = CPU,
    written: bool = True,
) -> Span:
    """The memory of a 1-D contiguous tensor of `n` elements on `device`; raises for anything else."""
    if not isinstance(tensor, Tensor):
        refuse(TypeError, name, type(tensor).__name__, "a torch.Tensor", "pass torch.from_numpy(array)")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(TypeError, name, str(tensor.dtype).removeprefix("torch."), expected, "convert it first")
    if tensor.device != device:
        got, expected = f"a tensor on {tensor.device}", f"a tensor on {device}"
        refuse(ValueError, name, got, expected, f"copy it with .to({str(device)!r})")
    if tensor.layout is not torch.strided or tensor.is_neg():
        refuse(
            ValueError, name, "a lazy or sparse view", "plain memory", "pass .to_dense() or .resolve_neg()"
        )
    if tensor.dim() != 1 or tensor.numel() != n:
        got, expected = f"shape {list(tensor.shape)}", f"shape [{n}], as the first buffer"
        refuse(ValueError, name, got, expected if tensor.dim() == 1 else "one dimension", "pass a flat view")
    if not tensor.is_contiguous():
        refuse(ValueError, name, f"stride {tensor.stride()[0]}", "a contiguous buffer", "pass .contiguous()")
    try:
        address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    except RuntimeError as error:  # a wrapper of torch.func
        raise TypeError(
            f"{name}: got {type(tensor).__name__} without memory of its own; expected a plain tensor; "
            "call this outside torch.func transforms and torch.compile"
        ) from error
    end = address + n * tensor.element_size()
    first = tensor.storage_offset() * tensor.element_size()  # a storage can be resized under a tensor
    if n and (not address or tensor.untyped_storage().nbytes() - first < end - address):
        got = "a tensor whose memory is not allocated"
        refuse(ValueError, name, got, "a plain tensor", "allocate it again")
    on_cpu = device.type == "cpu"
    if written and n and on_cpu and not (cpu_adam.writable(address) and cpu_adam.writable(end - 1)):
        refuse(ValueError, name, "read-only memory", "memory that can be written", "clone it first")
    return address, end, name


def check_disjoint(spans: Collection[Span]) -> None:
    """Raise ValueError where two buffers share memory."""
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            got = f"memory that overlaps by {end - start} bytes"
            refuse(ValueError, f"{last} and {name}", got, "separate buffers", "clone one of them")
        end, last = stop, name


def checked_step(step: Any) -> int:
    """A step number, counted from 1."""
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        refuse(TypeError, "step", repr(step), "an int", "count steps from 1")
    if not 1 <= number <= MAX_STEP:
        got = repr(step) if number.bit_length() < 64 else f"a number of {number.bit_length()} bits"
        refuse(ValueError, "step", got, f"1 to {MAX_STEP}", "count steps from 1, not 0")
    return number
