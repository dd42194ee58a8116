"""The optimizer as a value, and the host update as checked calls into the kernel.

The invariant: a call that raises has touched no buffer. Everything is checked before the kernel starts,
because the kernel sees addresses only. What the kernel computes is in adam_reference.py.
"""

import ctypes
import importlib
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from zfunc.adam_reference import coefficients
from zfunc.threads import clamp, default_threads


def _load_kernel() -> ModuleType:
    """Import the extension; its OpenMP symbols come from the runtime torch has loaded."""
    try:
        return importlib.import_module("zfunc._cpu_adam")
    except ImportError as first:
        try:
            # By soname: torch's own libgomp, made visible, where there is one; the system's elsewhere.
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
            return importlib.import_module("zfunc._cpu_adam")
        except (ImportError, OSError) as error:
            raise ImportError(
                f"zfunc's host kernel did not load: {first}. If the module is missing, build it: "
                "pip install -e . --no-build-isolation. If an omp_, GOMP_ or __kmpc_ symbol is missing, it was "
                "compiled for another OpenMP runtime than torch's: build with CC=gcc, or install libgomp"
            ) from error


_cpu_adam: Any = _load_kernel()

_TYPES = {torch.float32: _cpu_adam.FP32, torch.bfloat16: _cpu_adam.BF16, torch.float16: _cpu_adam.FP16}
_FLOAT32_MAX = 3.4028234663852886e38


# ---- the optimizer ---------------------------------------------------------------------------------


def everything(name: str, shape: tuple[int, ...]) -> bool:
    """Every parameter is decayed, as in torch."""
    del name, shape
    return True


def matrices_only(name: str, shape: tuple[int, ...]) -> bool:
    """Decay matrices and embeddings, not the vectors of norms and biases.

    >>> matrices_only("head.weight", (8, 4)), matrices_only("head.bias", (8,))
    (True, False)
    """
    del name
    return len(shape) >= 2


def _pair(betas: Any) -> Any:
    return tuple(betas) if isinstance(betas, list) else betas


@attrs.frozen
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); `decoupled=False` is Adam with L2.

    `lr` is a number or a pure function of the step, counted from 1. `decay(name, shape)` says which
    parameters weight decay touches; `matrices_only` leaves out norms and biases. Values out of range
    raise ValueError or TypeError here, at birth.

    >>> AdamW(lr=3e-4, weight_decay=0.1, decay=matrices_only).lr_at(1)
    0.0003
    """

    lr: float | Callable[[int], float] = 1e-3
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), kw_only=True, converter=_pair)
    eps: float = attrs.field(default=1e-8, kw_only=True)
    weight_decay: float = attrs.field(default=0.01, kw_only=True)
    decoupled: bool = attrs.field(default=True, kw_only=True)
    decay: Callable[[str, tuple[int, ...]], bool] = attrs.field(default=everything, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check every field."""
        if not callable(self.lr):
            _finite("lr", self.lr, minimum=0.0)
        _betas(self.betas)
        _finite("eps", self.eps, minimum=0.0)
        _finite("weight_decay", self.weight_decay, minimum=0.0)
        if not isinstance(self.decoupled, bool):
            _refuse(
                TypeError, "decoupled", repr(self.decoupled), "True or False", "pass False for Adam with L2"
            )
        if not callable(self.decay):
            _refuse(
                TypeError, "decay", repr(self.decay), "(name, shape) -> bool", "pass such as matrices_only"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1; ValueError where it is not finite or negative."""
        if not callable(self.lr):
            return self.lr
        return _finite(f"lr at step {step}", self.lr(step), minimum=0.0)


# ---- the sweeps ------------------------------------------------------------------------------------


def adam_update_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
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
    threads: int | None = None,
) -> None:
    """One Adam step over 1-D contiguous host buffers, in place, in one sweep.

    master, exp_avg, exp_avg_sq: [n] fp32, updated. grad: [n] fp32, bf16 or fp16, read and never written;
    it is multiplied by `grad_scale` (unscale and clip in one factor). out: [n] bf16, fp16 or fp32,
    receives the rounded new weights. `step` counts from 1. `threads=None` takes `default_threads()`; the
    thread count never changes a bit. The arithmetic is that of `adam_reference.reference_update`.

    Raises TypeError or ValueError, with every buffer untouched, on a wrong dtype, device, shape or
    layout, on buffers that overlap, and on factors out of range or not finite: a step whose norm is
    inf or NaN has to be skipped, not applied. Gradients themselves may hold inf and NaN; they propagate.

    >>> weights, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> adam_update_(weights, m, v, torch.tensor([0.5, 0.0]), step=1, lr=0.25, eps=0.25)
    >>> weights
    tensor([0.8333, 1.0000])
    """
    n = master.numel() if isinstance(master, Tensor) else 0
    spans = [
        _span("master", master, n, _FP32),
        _span("exp_avg", exp_avg, n, _FP32),
        _span("exp_avg_sq", exp_avg_sq, n, _FP32),
        _span("grad", grad, n, _TYPES),
    ]
    if out is not None:
        spans.append(_span("out", out, n, _TYPES))
    _disjoint(spans)
    factors = coefficients(
        _step(step),
        _finite("lr", lr, minimum=0.0),
        _betas(betas),
        _finite("eps", eps, minimum=0.0),
        _finite("weight_decay", weight_decay, minimum=0.0),
        decoupled,
        _finite("grad_scale", grad_scale),
    )
    mode = _cpu_adam.NO_DECAY if not weight_decay else _cpu_adam.DECOUPLED if decoupled else _cpu_adam.L2
    _cpu_adam.adam_update(
        spans[0][0],
        spans[1][0],
        spans[2][0],
        spans[3][0],
        0 if out is None else spans[4][0],
        n,
        _TYPES[grad.dtype],
        _cpu_adam.NONE if out is None else _TYPES[out.dtype],
        mode,
        *factors,
        _threads(threads),
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
    n = acc.numel() if isinstance(acc, Tensor) else 0
    spans = [_span("acc", acc, n, _FP32), _span("grad", grad, n, _TYPES)]
    _disjoint(spans)
    return _cpu_adam.accumulate(
        spans[0][0], spans[1][0], n, _TYPES[grad.dtype], bool(first), _threads(threads)
    )


def square_sum(grad: Tensor, *, threads: int | None = None) -> float:
    """The sum of squares of grad [n] (fp32, bf16 or fp16) in double, with the guarantees of `accumulate_`.

    >>> square_sum(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    25.0
    """
    n = grad.numel() if isinstance(grad, Tensor) else 0
    address = _span("grad", grad, n, _TYPES)[0]
    return _cpu_adam.accumulate(0, address, n, _TYPES[grad.dtype], False, _threads(threads))


# ---- checks ----------------------------------------------------------------------------------------

_FP32 = {torch.float32: _cpu_adam.FP32}


def _threads(threads: int | None) -> int:
    if threads is None:
        return default_threads()
    if type(threads) is not int:
        _refuse(TypeError, "threads", repr(threads), "an int or None", "pass None for the default")
    if threads < 1:
        _refuse(ValueError, "threads", repr(threads), "1 or more", "pass None for the default")
    return clamp(threads)


def _span(name: str, tensor: Tensor, n: int, types: dict[torch.dtype, int]) -> tuple[int, int, str]:
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
        address = tensor.data_ptr()
    except RuntimeError as error:  # a wrapper of torch.func or a fake tensor
        raise TypeError(
            f"{name}: got {type(tensor).__name__} without memory of its own; expected a plain tensor; "
            "call this outside torch.func transforms and torch.compile"
        ) from error
    return address, address + n * tensor.element_size(), name


def _refuse_buffer(name: str, tensor: Any, n: int, types: dict[torch.dtype, int]) -> NoReturn:
    if not isinstance(tensor, Tensor):
        _refuse(TypeError, name, type(tensor).__name__, "a torch.Tensor", "pass torch.from_numpy(array)")
    if tensor.dtype not in types:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        _refuse(TypeError, name, str(tensor.dtype), expected, "convert it first")
    if not tensor.is_cpu:
        _refuse(ValueError, name, f"a tensor on {tensor.device}", "a tensor on cpu", "copy it with .cpu()")
    if tensor.layout is not torch.strided or tensor.is_neg():
        _refuse(
            ValueError, name, "a lazy or sparse view", "plain memory", "pass .to_dense() or .resolve_neg()"
        )
    if tensor.dim() != 1 or tensor.numel() != n:
        got, expected = f"shape {list(tensor.shape)}", f"shape [{n}], as the first buffer"
        _refuse(ValueError, name, got, expected if tensor.dim() == 1 else "one dimension", "pass a flat view")
    _refuse(ValueError, name, f"stride {tensor.stride()[0]}", "a contiguous buffer", "pass .contiguous()")


def _disjoint(spans: list[tuple[int, int, str]]) -> None:
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            _refuse(
                ValueError,
                f"{last} and {name}",
                f"memory that overlaps by {end - start} bytes",
                "buffers apart",
                "clone one of them",
            )
        end, last = stop, name


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        _refuse(TypeError, "step", repr(step), "an int", "count steps from 1")
    if number < 1 or isinstance(step, bool):
        _refuse(ValueError, "step", repr(step), "1 or more", "count steps from 1, not 0")
    return number


def _betas(betas: Any) -> tuple[float, float]:
    try:
        beta1, beta2 = betas
        good = 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0
    except (TypeError, ValueError):
        good = False
    if not good:
        _refuse(ValueError, "betas", repr(betas), "two numbers in [0, 1)", "pass such as (0.9, 0.999)")
    return betas


def _finite(name: str, value: Any, minimum: float = -_FLOAT32_MAX) -> float:
    try:
        good = minimum <= value <= _FLOAT32_MAX
    except TypeError:
        _refuse(TypeError, name, repr(value), "a number", "pass a float")
    if not good:
        floor = " at or above 0" if minimum == 0.0 else ""
        _refuse(ValueError, name, repr(value), f"a finite float32{floor}", "correct it, or skip this step")
    return value


def _refuse(kind: type[Exception], name: str, got: str, expected: str, action: str) -> NoReturn:
    raise kind(f"{name}: got {got}; expected {expected}; {action}")
