"""Optimizer states of every kind for the tests of Adam's other ways: into other buffers, and on a device."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfunc.optim.adam_reference import coefficients
from zfunc.optim.compact import QuantizedMoment, SplitMaster
from zfunc.optim.compact_reference import BLOCK, EXP_AVG, EXP_AVG_SQ, first_dither, pack
from zfunc.optim.kernel_loader import cpu_adam as kernel

MOMENTS = {"fp32": kernel.MOMENTS_FP32, "16bit": kernel.MOMENTS_16BIT, "8bit": kernel.MOMENTS_8BIT}
TYPES = {torch.float32: kernel.FP32, torch.bfloat16: kernel.BF16, torch.float16: kernel.FP16}
DECAYS = {"none": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}
State = tuple[Any, Any, Any]  # master, exp_avg, exp_avg_sq, as adam_update_ takes them


def placed(x: Tensor, offset: int) -> Tensor:
    """A copy of x that begins `offset` elements into its storage, with a block of room after it."""
    store = torch.zeros(x.numel() + offset + BLOCK, dtype=x.dtype)
    store[offset : offset + x.numel()] = x
    return store[offset : offset + x.numel()]


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


def _bf16(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def of_floats(p: np.ndarray, m: np.ndarray, v: np.ndarray, moments: str) -> State:
    """A state of such fp32 weights and moments."""
    if moments == "fp32":
        p, m, v = (torch.from_numpy(x.copy()) for x in (p, m, v))
        return p, m, v
    with np.errstate(all="ignore"):
        kept = pack(p, m, v, moments=moments, step=1)
    master = SplitMaster(_bf16(kept.high), torch.from_numpy(kept.low))
    if moments == "16bit":
        return master, _bf16(kept.exp_avg), _bf16(kept.exp_avg_sq)
    m, codes, scales = map(torch.from_numpy, kept[2:])
    return master, m, QuantizedMoment(codes, scales)


def fresh(n: int, moments: str, seed: int = 0) -> State:
    """Weights of unit size, moments that differ by powers of ten inside a block."""
    rng = np.random.default_rng(seed)
    p, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    m = m * np.exp2(rng.uniform(-20, 0, n)).astype(np.float32)
    return of_floats(p, m, np.square(m), moments)


def any_bytes(n: int, moments: str, seed: int) -> State:
    """Every bit pattern such a state can hold."""
    generator = torch.Generator().manual_seed(seed)

    def random(x: Tensor) -> Tensor:
        nbytes = x.numel() * x.element_size()
        return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(x.dtype)

    return on(fresh(n, moments), random)


def gradient(n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor) -> Tensor:
    """The bits of a buffer."""
    return x.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def bits(x: Tensor) -> Tensor:
    """The bits of a buffer, every NaN alike: its payload is not promised."""
    return exact(torch.where(x.isnan(), torch.full_like(x, torch.nan), x) if x.is_floating_point() else x)


def assert_same(got: Iterable[Any], expected: Iterable[Any]) -> None:
    for one, other in zip(buffers(got), buffers(expected), strict=True):
        wrong = (bits(one.cpu()) != bits(other)).nonzero().flatten()
        assert not wrong.numel(), f"{wrong.numel()} of {other.numel()} differ, the first is {wrong[0]}"


def raw_update(
    moments: str, state: State, grad: Tensor, out: Tensor | None, *, into: State | None = None, step: int = 3,
    weight_decay: float = 0.0, decoupled: bool = True, grad_scale: float = 0.3, threads: int = 1, isa: int = -1,
    chunks: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """The kernel itself, on any instruction set, in parts cut at `chunks`."""
    mode = kernel.NO_DECAY if not weight_decay else kernel.DECOUPLED if decoupled else kernel.L2
    factors = coefficients(step, 1e-3, (0.9, 0.999), 1e-8, weight_decay, decoupled, grad_scale)
    types = TYPES[grad.dtype], kernel.NONE if out is None else TYPES[out.dtype], mode
    for start, stop in itertools.pairwise([0, *chunks, grad.numel()]):
        dithers = first_dither(step, EXP_AVG), first_dither(step, EXP_AVG_SQ)
        to = 0 if out is None else out[start:].data_ptr()
        kernel.adam_update(
            MOMENTS[moments], *_addresses(state, start), *dithers, grad[start:].data_ptr(), to, stop - start,
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
