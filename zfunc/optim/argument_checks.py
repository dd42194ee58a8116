"""Checks of an update's arguments: buffers, before the kernel sees an address, and the factors of a step.

A failed check raises TypeError or ValueError with what was got, what was expected and what to do, and has changed
no buffer.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from zfunc.core.optimizer_state import STATE_FORMATS, moment_buffers
from zfunc.optim.adam_reference import Coefficients, coefficients
from zfunc.optim.kernel_loader import KERNEL_DTYPES, cpu_adam
from zfunc.optim.setting_checks import check_factors, checked_betas, checked_eps, checked_finite, refuse
from zfunc.runtime.thread_budget import default_threads, limit_threads
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

MAX_STEP = 2**53  # the largest float64 up to which every integer is exact
Span = tuple[int, int, str]  # first address, address after the last byte, name for errors
Decay = Literal["none", "decoupled", "l2"]
CPU = torch.device("cpu")

INTO = "into "  # prefix of the buffers that receive a new state
_SHOWN = {"master_high": "master.high", "master_low": "master.low", "exp_avg_sq_scale": "exp_avg_sq.scales"}


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
            shown = _SHOWN.get(x.name, x.name)
            if x.name == "exp_avg_sq" and state_format == "8bit":
                shown = "exp_avg_sq.codes"
            size, dtypes = -(-n // x.shared), (TORCH_DTYPES[x.dtype],)
            spans[prefix + x.name] = checked_span(
                prefix + shown, buffers[x.name], size, dtypes, device=device, written=written
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
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in dtypes
        or tensor.device != device
        or tensor.layout is not torch.strided
        or tensor.dim() != 1
        or tensor.numel() != n
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        _refuse_buffer(name, tensor, n, dtypes, device)
    try:
        address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    except RuntimeError as error:  # a wrapper of torch.func
        raise TypeError(
            f"{name}: got {type(tensor).__name__} without memory of its own; expected a plain tensor; "
            "call this outside torch.func transforms and torch.compile"
        ) from error
    end = address + n * tensor.element_size()
    if n and (not address or _bytes_left(tensor) < end - address):
        refuse(
            ValueError, name, "a tensor whose memory is not allocated", "a plain tensor", "allocate it again"
        )
    on_cpu = device.type == "cpu"
    if written and n and on_cpu and not (cpu_adam.writable(address) and cpu_adam.writable(end - 1)):
        refuse(ValueError, name, "read-only memory", "memory that can be written", "clone it first")
    return address, end, name


def _bytes_left(tensor: Tensor) -> int:
    """Bytes of the storage from the first element on: it can be resized under a tensor."""
    return tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()


def _refuse_buffer(
    name: str, tensor: Any, n: int, dtypes: Collection[torch.dtype], device: torch.device
) -> NoReturn:
    if type(tensor).__module__ == "zfunc.optim.compact":
        refuse(TypeError, name, type(tensor).__name__, "a torch.Tensor", "keep the master in a SplitMaster")
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
    refuse(ValueError, name, f"stride {tensor.stride()[0]}", "a contiguous buffer", "pass .contiguous()")


def check_disjoint(spans: Collection[Span]) -> None:
    """Raise ValueError where two buffers share memory."""
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            refuse(
                ValueError,
                f"{last} and {name}",
                f"memory that overlaps by {end - start} bytes",
                "separate buffers",
                "clone one of them",
            )
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


def checked_arguments(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> tuple[int, Coefficients, Decay]:
    """An update's step number, its coefficients in double, and the kind of its weight decay.

    Raises TypeError or ValueError for an argument out of range or a coefficient too large for float32.
    """
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
