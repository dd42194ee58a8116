"""Compact optimizer state as tensors: the split master and block-scaled 8-bit moments, conversion between formats.

These classes hold the packed bytes; `compact_reference` defines and converts them, and the kernel updates them in
place.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from zfunc.core.optimizer_state import ADAM_FORMATS, HIGH_HALF, Moments, stored_buffers
from zfunc.errors import CheckpointError
from zfunc.optim.argument_checks import checked_span, numel_of
from zfunc.optim.compact_reference import BLOCK, Compact, join, pack, split, unpack, unpack_first_codes
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


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
        """Split contiguous fp32 weights [n] on the host; TypeError or ValueError for anything else."""
        checked_span("weights", weights, numel_of(weights), [torch.float32], written=False)
        high, low = split(weights.detach().numpy())
        return cls(_as_tensor(high).view(torch.bfloat16), _as_tensor(low))

    def join(self) -> Tensor:
        """The fp32 weights [n], exact: a NaN comes back as a NaN."""
        return torch.from_numpy(join(_as_array(self.high), self.low.numpy()))


@frozen(eq=False)
class QuantizedMoment:
    """exp_avg_sq [n] in 8 bits an element, with one scale for each block of 64 elements.

    The matching exp_avg is [n] uint8 without a scale: its unit follows from the element's exp_avg_sq.
    """

    codes: Tensor  # [n] uint8
    scales: Tensor  # [ceil(n / 64)] int16

    @classmethod
    def zeros(cls, n: int) -> "QuantizedMoment":
        """exp_avg_sq before the first step."""
        return cls(
            torch.zeros(n, dtype=torch.uint8, device="cpu"),
            torch.zeros(-(-n // BLOCK), dtype=torch.int16, device="cpu"),
        )


def named_master(master: Any) -> dict[str, Any]:
    """fp32 weights, or a SplitMaster, as buffers by the names in `zfunc.core.optimizer_state`."""
    if isinstance(master, SplitMaster):
        return {HIGH_HALF: master.high, "master_low": master.low}
    return {"master": master}


def named_state(master: Any, exp_avg: Any, exp_avg_sq: Any) -> dict[str, Any]:
    """The state arguments of `adam_update_` as buffers by the names in `zfunc.core.optimizer_state`."""
    state = {**named_master(master), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if "master" not in state and isinstance(exp_avg_sq, QuantizedMoment):
        state |= {"exp_avg_sq": exp_avg_sq.codes, "exp_avg_sq_scale": exp_avg_sq.scales}
    return state


def moments_of(state: Mapping[str, Any]) -> Moments:
    """The format of an Adam state, from the names of its buffers."""
    return "fp32" if "master" in state else "8bit" if "exp_avg_sq_scale" in state else "16bit"


def master_weights(state: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """The fp32 weights `start` to `stop` of a state in any format, on the host; read only: maybe a view."""
    if "master" in state:
        return state["master"][start:stop].cpu()
    high, low = (state[name][start:stop].cpu() for name in (HIGH_HALF, "master_low"))
    return SplitMaster(high, low).join()


def convert_moments(
    state: Mapping[str, Tensor], stored: str, moments: Moments, step: int
) -> dict[str, Tensor]:
    """Adam's state on the host, of the format `stored`, in another of its formats, by the names of its buffers.

    It goes through fp32: weights stay exact, moments are rounded as update `step` would have rounded them. Raises
    CheckpointError for a format that is not Adam's.
    """
    if stored not in ADAM_FORMATS:
        raise CheckpointError(
            f"got optimizer state in the format {stored!r}, expected {moments!r}, this program's: load it "
            "with the optimizer that saved it, or pass its parameters to init(program, params=...)"
        )
    arrays = [_as_array(state[x.name]) for x in stored_buffers(stored)]
    if stored == "fp32":
        master, exp_avg, exp_avg_sq = arrays
    elif stored == "8bit-1":
        master, (exp_avg, exp_avg_sq) = join(*arrays[:2]), unpack_first_codes(*arrays[2:])
    else:
        master, exp_avg, exp_avg_sq = unpack(Compact(*arrays))
    if moments == "fp32":
        converted = [master, exp_avg, exp_avg_sq]
    else:
        packed = pack(master, exp_avg, exp_avg_sq, moments=moments, step=step)
        converted = [x for x in packed if x is not None]
    return {
        buffer.name: _as_tensor(x).view(TORCH_DTYPES[buffer.dtype])
        for buffer, x in zip(stored_buffers(moments), converted, strict=True)
    }


def _as_array(x: Tensor) -> Any:
    """The tensor's memory as NumPy, which has no bf16: its bits as uint16."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def _as_tensor(x: Any) -> Tensor:
    """The array's memory as torch, which has few operations for uint16: its bits as int16."""
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.view(np.int16) if x.dtype == np.uint16 else x)
