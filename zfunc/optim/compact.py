"""Optimizer state between NumPy and torch, and the weights in a state of any format."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, stored_buffers
from zfunc.optim.compact_reference import join, split, split_to_even
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


def master_weights(state: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """The fp32 weights `start` to `stop` of a state in any format, on the host; read only: maybe a view."""
    if "master" in state:
        return state["master"][start:stop].cpu()
    names = HIGH_HALF, "master_low", *(("exp_avg_sq",) if _has_signs(state) else ())
    return torch.from_numpy(join(*(as_array(state[name][start:stop].cpu()) for name in names)))


def initial_state(weights: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp32 weights [n] as the buffers that hold them in such a state before the first step, on the host."""
    if "master" in state:
        return {"master": weights}
    p, names = weights.numpy(), (HIGH_HALF, "master_low", "exp_avg_sq")
    halves = split_to_even(p, np.zeros(p.size, np.float32)) if _has_signs(state) else split(p)
    found = dict(zip(names, map(as_tensor, halves), strict=False))
    return found | {HIGH_HALF: found[HIGH_HALF].view(torch.bfloat16)}


def _has_signs(state: Mapping[str, Tensor]) -> bool:
    """Whether the sign of exp_avg_sq belongs to the halves: beside fp32 moments."""
    return "exp_avg_sq" in state and state["exp_avg_sq"].dtype == torch.float32


def as_array(x: Tensor) -> Any:
    """The tensor's memory as NumPy, which has no bf16: its bits as uint16."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def as_state(arrays: Iterable[Any], state_format: str) -> dict[str, Tensor]:
    """The memory of these arrays as the buffers of a format, in its order."""
    kinds = stored_buffers(state_format)
    return {x.name: as_tensor(a).view(TORCH_DTYPES[x.dtype]) for x, a in zip(kinds, arrays, strict=True)}


def as_tensor(x: Any) -> Tensor:
    """The array's memory as torch, which has few operations for uint16: its bits as int16."""
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.view(np.int16) if x.dtype == np.uint16 else x)
