"""Compact optimizer state as tensors: the split master and block-scaled 8-bit moments, conversion between formats.

These classes hold the packed bytes; `compact_reference` defines and converts them, and the kernel updates them in
place.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from zfunc.core.optimizer_state import ADAM_FORMATS, HIGH_HALF, AdamFormat, stored_buffers
from zfunc.optim.argument_checks import checked_span, numel_of
from zfunc.optim.compact_reference import (
    BLOCK,
    Compact,
    join,
    pack,
    split,
    split_to_even,
    unpack,
    unpack_first_codes,
)
from zfunc.optim.setting_checks import another_optimizer
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


@frozen(eq=False)
class SplitMaster:
    """fp32 weights [n] in two halves; `high` is their bf16 copy, rounded to nearest, ties away from zero.

    Beside fp32 moments an update rounds ties to even, and the fp32 exp_avg_sq has a sign where one was rounded down
    (`compact_reference.split_to_even`). `of` and `join` know nothing of it.

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
        return cls(as_tensor(high).view(torch.bfloat16), as_tensor(low))

    def join(self) -> Tensor:
        """The fp32 weights [n], exact: a NaN comes back as a NaN."""
        return torch.from_numpy(join(as_array(self.high), self.low.numpy()))


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


def named_state(master: Any, exp_avg: Any, exp_avg_sq: Any) -> dict[str, Any]:
    """The state arguments of `adam_update_` as buffers by the names in `zfunc.core.optimizer_state`."""
    if not isinstance(master, SplitMaster):
        return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    state = {HIGH_HALF: master.high, "master_low": master.low, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if isinstance(exp_avg_sq, QuantizedMoment):
        state |= {"exp_avg_sq": exp_avg_sq.codes, "exp_avg_sq_scale": exp_avg_sq.scales}
    return state


def adam_format(state: Mapping[str, Any]) -> AdamFormat:
    """The format of an Adam state, from its buffers."""
    if "master" in state:
        return "fp32"
    if "exp_avg_sq_scale" in state:
        return "8bit"
    return "fp32-split" if all(_is_fp32(state.get(x)) for x in ("exp_avg", "exp_avg_sq")) else "16bit"


def master_weights(state: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
    """The fp32 weights `start` to `stop` of a state in any format, on the host; read only: maybe a view."""
    if "master" in state:
        return state["master"][start:stop].cpu()
    names = HIGH_HALF, "master_low", *(("exp_avg_sq",) if adam_format(state) == "fp32-split" else ())
    return torch.from_numpy(join(*(as_array(state[name][start:stop].cpu()) for name in names)))


def initial_state(weights: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp32 weights [n] as the buffers that hold them in such a state before the first step, on the host."""
    if "master" in state:
        return {"master": weights}
    if adam_format(state) == "fp32-split":
        high, low, zeros = map(
            as_tensor, split_to_even(weights.numpy(), np.zeros(weights.numel(), np.float32))
        )
        return {HIGH_HALF: high.view(torch.bfloat16), "master_low": low, "exp_avg_sq": zeros}
    halves = SplitMaster.of(weights)
    return {HIGH_HALF: halves.high, "master_low": halves.low}


def convert_moments(
    state: Mapping[str, Tensor], stored: str, wanted: AdamFormat, step: int
) -> dict[str, Tensor]:
    """Adam's state on the host, of the format `stored`, in another of its formats, by the names of its buffers.

    It goes through fp32: weights stay exact, moments are rounded as update `step` would have rounded them. Raises
    CheckpointError for a format that is not Adam's.
    """
    if stored not in ADAM_FORMATS:
        raise another_optimizer(stored, wanted)
    arrays = [as_array(state[x.name]) for x in stored_buffers(stored)]
    if stored == "fp32":
        master, exp_avg, exp_avg_sq = arrays
    elif stored == "8bit-1":
        master, (exp_avg, exp_avg_sq) = join(*arrays[:2]), unpack_first_codes(*arrays[2:])
    else:
        master, exp_avg, exp_avg_sq = unpack(Compact(*arrays))
    if wanted == "fp32":
        converted = [master, exp_avg, exp_avg_sq]
    else:
        packed = pack(master, exp_avg, exp_avg_sq, moments=wanted, step=step)
        converted = [x for x in packed if x is not None]
    return as_state(converted, wanted)


def _is_fp32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32


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
