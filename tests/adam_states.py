"""Optimizer states of every format, one step of the NumPy reference over them, and one of the raw kernel."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfunc.optim.adam_reference import coefficients, reference_update
from zfunc.optim.compact import QuantizedMoment, SplitMaster, adam_format, named_state
from zfunc.optim.compact_reference import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_SQ,
    Compact,
    first_dither,
    pack,
    reference_compact_update,
)
from zfunc.optim.device_adam import device_adam_
from zfunc.optim.kernel_loader import cpu_adam as kernel

MOMENTS = {
    "fp32": kernel.MOMENTS_FP32,
    "fp32-split": kernel.MOMENTS_FP32_SPLIT,
    "16bit": kernel.MOMENTS_16BIT,
    "8bit": kernel.MOMENTS_8BIT,
}
TYPES = {torch.float32: kernel.FP32, torch.bfloat16: kernel.BF16, torch.float16: kernel.FP16}
NAMES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DECAYS: dict[str, dict[str, Any]] = {
    "none": {"weight_decay": 0.0, "decoupled": True},
    "decoupled": {"weight_decay": 0.1, "decoupled": True},
    "l2": {"weight_decay": 0.1, "decoupled": False},
}
State = tuple[Any, Any, Any]  # master, exp_avg, exp_avg_sq, as adam_update_ takes them


def placed(x: Tensor, offset: int) -> Tensor:
    """A copy of x that begins `offset` elements into its storage, with a block of room after it."""
    store = torch.zeros(x.numel() + offset + BLOCK, dtype=x.dtype)
    store[offset : offset + x.numel()] = x
    return store[offset : offset + x.numel()]


def around(x: Tensor) -> Tensor:
    """What lies before and after a buffer in its storage, as bytes."""
    storage = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage())
    start = x.storage_offset() * x.element_size()
    return torch.cat([storage[:start], storage[start + x.nbytes :]])


def on(state: State, change: Any) -> State:
    """The same kind of state with every buffer changed."""

    def one(x: Any) -> Any:
        if isinstance(x, SplitMaster):
            return SplitMaster(change(x.high), change(x.low))
        return (
            QuantizedMoment(change(x.codes), change(x.scales))
            if isinstance(x, QuantizedMoment)
            else change(x)
        )

    master, exp_avg, exp_avg_sq = map(one, state)
    return master, exp_avg, exp_avg_sq


def copied(state: State, offset: int = 0) -> State:
    return on(state, lambda x: placed(x, offset))


def buffers(state: Iterable[Any]) -> Iterator[Tensor]:
    """High and low halves, codes and scales each by itself."""
    for x in state:
        if isinstance(x, SplitMaster):
            yield from (x.high, x.low)
        elif isinstance(x, QuantizedMoment):
            yield from (x.codes, x.scales)
        else:
            yield x


def array(x: Tensor) -> np.ndarray:
    """As the references take it: bfloat16 in uint16."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def tensor(x: np.ndarray) -> Tensor:
    """Of what a reference returns."""
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == np.uint16
        else torch.from_numpy(x)
    )


def of_compact(state: Compact) -> State:
    """The tensors of a compact state, which share its memory."""
    high, low, exp_avg, exp_avg_sq = map(tensor, state[:4])
    if state.exp_avg_sq_scale is None:
        return SplitMaster(high, low), exp_avg, exp_avg_sq
    return SplitMaster(high, low), exp_avg, QuantizedMoment(exp_avg_sq, tensor(state.exp_avg_sq_scale))


def of_floats(p: np.ndarray, m: np.ndarray, v: np.ndarray, moments: str) -> State:
    """A state of such fp32 weights and moments."""
    if moments == "fp32":
        p, m, v = (torch.from_numpy(x.copy()) for x in (p, m, v))
        return p, m, v
    with np.errstate(all="ignore"):
        return of_compact(pack(p, m, v, moments=moments, step=1))


def reference(state: State, grad: Tensor, out: torch.dtype | None, **arguments: Any) -> tuple[State, Any]:
    """The next state, and the copy of the weights that `out` asks for."""
    arrays = [*map(array, buffers(state))]
    settings = {"out": out and NAMES[out], **arguments}
    if not isinstance(state[0], SplitMaster):
        *new, copy = reference_update(*arrays, array(grad), **settings)
        return tuple(map(tensor, new)), None if copy is None else tensor(copy)
    compact = Compact(*arrays, *[None] * (5 - len(arrays)))
    new, copy = reference_compact_update(compact, array(grad), **settings)
    return of_compact(new), None if copy is None else tensor(copy)


def fresh(n: int, moments: str, seed: int = 0) -> State:
    """Weights of unit size, moments that differ by powers of ten inside a block."""
    rng = np.random.default_rng(seed)
    p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    m = m * np.exp2(rng.uniform(-20, 0, n)).astype(np.float32)
    return of_floats(p, m, np.square(m), moments)


def any_bytes(n: int, moments: str, seed: int) -> State:
    """Every bit pattern such a state can hold."""
    return on(fresh(n, moments), lambda x: random_bytes(x, seed))


def random_bytes(x: Tensor, seed: int) -> Tensor:
    """A buffer of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (x.nbytes,), generator=generator, dtype=torch.uint8).view(x.dtype)


def gradient(n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor) -> Tensor:
    """The bits of a buffer."""
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def bits(x: Tensor) -> Tensor:
    """The bits of a buffer, every NaN alike: its payload is not promised."""
    return exact(torch.where(x.isnan(), torch.full_like(x, torch.nan), x) if x.is_floating_point() else x)


def assert_same(got: Iterable[Any], expected: Iterable[Any]) -> None:
    for one, other in zip(buffers(got), buffers(expected), strict=True):
        wrong = (bits(one.cpu()) != bits(other)).nonzero().flatten()
        assert not wrong.numel(), f"{wrong.numel()} of {other.numel()} differ, the first is {wrong[0]}"


def device_update_(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, **options: Any) -> None:
    """`adam_update_` on the device of its buffers."""
    device_adam_(named_state(master, exp_avg, exp_avg_sq), grad, **options)


def raw_update(
    state: State, grad: Tensor, out: Tensor | None, *, into: State | None = None, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool, grad_scale: float,
    threads: int = 1, isa: int = -1, chunks: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """The kernel itself, on any instruction set, in parts cut at `chunks`."""
    mode = kernel.NO_DECAY if not weight_decay else kernel.DECOUPLED if decoupled else kernel.L2
    factors = coefficients(step, lr, betas, eps, weight_decay, decoupled, grad_scale)
    types = TYPES[grad.dtype], kernel.NONE if out is None else TYPES[out.dtype], mode
    moments = MOMENTS[adam_format(named_state(*state))]
    for start, stop in itertools.pairwise([0, *chunks, grad.numel()]):
        dithers = first_dither(step, EXP_AVG), first_dither(step, EXP_AVG_SQ)
        to = 0 if out is None else out[start:].data_ptr()
        kernel.adam_update(
            moments, *_addresses(state, start), *dithers, grad[start:].data_ptr(), to, stop - start,
            *types, *factors, threads, isa, () if into is None else _addresses(into, start),
        )  # fmt: skip


def _addresses(state: State, start: int) -> list[int]:
    """Master, low half, both moments and the scales, from element `start` on; 0 for what there is not."""
    master, m, v = state
    if not isinstance(master, SplitMaster):
        return [master[start:].data_ptr(), 0, m[start:].data_ptr(), v[start:].data_ptr(), 0]
    halves = [master.high[start:].data_ptr(), master.low[start:].data_ptr()]
    if not isinstance(v, QuantizedMoment):
        return [*halves, m[start:].data_ptr(), v[start:].data_ptr(), 0]
    codes = v.codes[start:].data_ptr(), v.scales[start // BLOCK :].data_ptr()
    return [*halves, m[start:].data_ptr(), *codes]
