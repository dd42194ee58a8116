"""Compact optimizer state as tensors: the split master and block-scaled 8-bit moments, there and back.

The invariant: these types only say what the bytes are. What they mean is in compact_reference.py, and converting
goes through it; the kernel updates them in place.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from zfunc.core.optimizer_state import HIGH_HALF, Moments
from zfunc.optim.buffer_checks import span_of
from zfunc.optim.compact_reference import BLOCK, join, split


@frozen(eq=False)
class SplitMaster:
    """fp32 weights [n] in two halves; `high` is their bf16 copy, rounded to nearest, ties away from zero.

    >>> halves = SplitMaster.of(torch.tensor([1.0, 3.1415927]))
    >>> halves.high, halves.join()
    (tensor([1.0000, 3.1406], dtype=torch.bfloat16), tensor([1.0000, 3.1416]))
    """

    high: Tensor  # [n] bf16
    low: Tensor  # [n] int16

    @classmethod
    def of(cls, weights: Tensor) -> "SplitMaster":
        """The halves of fp32 weights [n] on the host; TypeError or ValueError for others."""
        numel = weights.numel() if isinstance(weights, Tensor) else 0
        span_of("weights", weights, numel, [torch.float32], written=False)
        high, low = split(weights.detach().numpy())
        return cls(torch.from_numpy(high.view(np.int16)).view(torch.bfloat16), torch.from_numpy(low))

    def join(self) -> Tensor:
        """The fp32 weights [n], exact: a NaN comes back as a NaN."""
        high = self.high.view(torch.int16).numpy().view(np.uint16)
        return torch.from_numpy(join(high, self.low.numpy()))


@frozen(eq=False)
class QuantizedMoment:
    """exp_avg_sq [n] in 8 bits an element, and a scale for each block of 64 elements.

    The exp_avg beside it is [n] uint8 and needs no scale: its codes count in units that follow from these.
    """

    codes: Tensor  # [n] uint8
    scales: Tensor  # [ceil(n / 64)] int16

    @classmethod
    def zeros(cls, n: int) -> "QuantizedMoment":
        """exp_avg_sq before the first step."""
        return cls(torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // BLOCK), dtype=torch.int16))


def named_master(master: Any) -> dict[str, Any]:
    """fp32 weights, whole or in halves, as the buffers of `zfunc.core.optimizer_state` by name."""
    if isinstance(master, SplitMaster):
        return {HIGH_HALF: master.high, "master_low": master.low}
    return {"master": master}


def named_state(master: Any, exp_avg: Any, exp_avg_sq: Any) -> dict[str, Any]:
    """What `adam_update_` takes, as the buffers of `zfunc.core.optimizer_state` by name."""
    weights = named_master(master)
    if "master" in weights or not isinstance(exp_avg_sq, QuantizedMoment):
        return {**weights, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    codes = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq.codes, "exp_avg_sq_scale": exp_avg_sq.scales}
    return {**weights, **codes}


def moments_of(state: Mapping[str, Any]) -> Moments:
    """The format of Adam's state whose buffers have these names."""
    return "fp32" if "master" in state else "8bit" if "exp_avg_sq_scale" in state else "16bit"


def master_weights(state: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """The fp32 weights of parameters `start` to `stop` on the host, of any format: to be read only."""
    if "master" in state:
        return state["master"][start:stop].cpu()
    high, low = (state[name][start:stop].cpu() for name in (HIGH_HALF, "master_low"))
    return SplitMaster(high, low).join()
