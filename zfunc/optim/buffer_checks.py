"""Arguments of the host sweeps, checked before the kernel sees an address.

The invariant: a check raises TypeError or ValueError that says what was got, what was expected and what to do,
and touches nothing.
"""

import operator
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from zfunc.optim.adam_reference import SMALLEST_NORMAL, Coefficients
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.runtime.thread_budget import default_threads, limit_threads
from zfunc.values import FLOAT32_MAX, number

MOST_STEPS = 2**53  # a float64 counts no further


def checked_threads(threads: int | None) -> int:
    """As many threads as asked for, or as there are; None takes the default."""
    if threads is None:
        return default_threads()
    if type(threads) is not int:
        refuse(TypeError, "threads", repr(threads), "an int or None", "pass None for the default")
    if threads < 1:
        refuse(ValueError, "threads", repr(threads), "1 or more", "pass None for the default")
    return limit_threads(threads)


def span_of(
    name: str, tensor: Tensor, n: int, types: Collection[torch.dtype], *, written: bool = True
) -> tuple[int, int, str]:
    """Address, end and name of a good buffer of n elements; anything else raises."""
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in types
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.dim() != 1
        or tensor.numel() != n
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        _refuse_buffer(name, tensor, n, types)
    try:
        address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    except RuntimeError as error:  # a wrapper of torch.func
        raise TypeError(
            f"{name}: got {type(tensor).__name__} without memory of its own; expected a plain tensor; "
            "call this outside torch.func transforms and torch.compile"
        ) from error
    end = address + n * tensor.element_size()
    if n and (not address or _room(tensor) < end - address):
        refuse(
            ValueError, name, "a tensor whose memory is gone, or never was", "a plain tensor", "make it anew"
        )
    if written and n and not (cpu_adam.writable(address) and cpu_adam.writable(end - 1)):
        refuse(ValueError, name, "read-only memory", "memory that can be written", "clone it first")
    return address, end, name


def _room(tensor: Tensor) -> int:
    """Bytes there are from the first element on: a storage can be resized under a tensor."""
    return tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()


def _refuse_buffer(name: str, tensor: Any, n: int, types: Collection[torch.dtype]) -> NoReturn:
    if type(tensor).__module__ == "zfunc.optim.compact":
        refuse(TypeError, name, type(tensor).__name__, "a torch.Tensor", "keep the master in a SplitMaster")
    if not isinstance(tensor, Tensor):
        refuse(TypeError, name, type(tensor).__name__, "a torch.Tensor", "pass torch.from_numpy(array)")
    if tensor.dtype not in types:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        refuse(TypeError, name, str(tensor.dtype).removeprefix("torch."), expected, "convert it first")
    if not tensor.is_cpu:
        refuse(ValueError, name, f"a tensor on {tensor.device}", "a tensor on cpu", "copy it with .cpu()")
    if tensor.layout is not torch.strided or tensor.is_neg():
        refuse(
            ValueError, name, "a lazy or sparse view", "plain memory", "pass .to_dense() or .resolve_neg()"
        )
    if tensor.dim() != 1 or tensor.numel() != n:
        got, expected = f"shape {list(tensor.shape)}", f"shape [{n}], as the first buffer"
        refuse(ValueError, name, got, expected if tensor.dim() == 1 else "one dimension", "pass a flat view")
    refuse(ValueError, name, f"stride {tensor.stride()[0]}", "a contiguous buffer", "pass .contiguous()")


def check_disjoint(spans: list[tuple[int, int, str]]) -> None:
    """Raise ValueError where two buffers share memory."""
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            refuse(
                ValueError,
                f"{last} and {name}",
                f"memory that overlaps by {end - start} bytes",
                "buffers apart",
                "clone one of them",
            )
        end, last = stop, name


def checked_step(step: Any) -> int:
    """A step counted from 1."""
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        refuse(TypeError, "step", repr(step), "an int", "count steps from 1")
    if not 1 <= number <= MOST_STEPS:
        got = repr(step) if number.bit_length() < 64 else f"a number of {number.bit_length()} bits"
        refuse(ValueError, "step", got, f"1 to {MOST_STEPS}", "count steps from 1, not 0")
    return number


def checked_betas(betas: Any, name: str = "betas") -> tuple[float, float]:
    """Two decay rates in [0, 1)."""
    try:
        beta1, beta2 = (number(name, beta, least=0.0) for beta in betas)
        good = beta1 < 1.0 and beta2 < 1.0
    except (TypeError, ValueError, RuntimeError):
        beta1 = beta2 = None
        good = False
    if not good:
        refuse(ValueError, name, repr(betas), "two numbers in [0, 1)", "pass such as (0.9, 0.999)")
    return beta1, beta2


def checked_finite(name: str, value: Any, minimum: float = -FLOAT32_MAX) -> float:
    """A number at or above `minimum` that float32 can hold, as a float."""
    try:
        return number(name, value, least=minimum)
    except TypeError:
        refuse(TypeError, name, repr(value), "a number", "pass a float")
    except ValueError:
        floor = " at or above 0" if minimum == 0.0 else ""
        refuse(ValueError, name, repr(value), f"a finite float32{floor}", "correct it, or skip this step")


def checked_eps(value: Any) -> float:
    """0, or what float32 can hold as a normal number: the kernel takes all smaller ones for 0."""
    eps = checked_finite("eps", value, minimum=0.0)
    if 0.0 < eps < SMALLEST_NORMAL:
        refuse(ValueError, "eps", repr(value), "a float32 of at least 1.2e-38, or 0", "pass such as 1e-8")
    return eps


def check_factors(factors: Coefficients) -> None:
    """Raise ValueError where a factor of a step is too large for float32."""
    for name, factor in factors._asdict().items():
        if name not in ("grad_floor", "inv_sqrt_bias2"):
            checked_finite(f"lr, betas and weight_decay (as {name})", factor)


def refuse(kind: type[Exception], name: str, got: str, expected: str, action: str) -> NoReturn:
    """Raise what every check raises: got, expected, next action."""
    raise kind(f"{name}: got {got}; expected {expected}; {action}")
