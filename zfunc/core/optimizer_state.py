"""What optimizers keep of every parameter: one table of buffers for each format of their state. No torch here.

The invariant: a buffer's elements follow the layout, one for each parameter or one for each block of 64, so a
slice of the layout that begins on its alignment is a slice of every buffer. Every format has the fp32 weights, as
`master` or as the two halves `master_high` and `master_low`.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from attrs import frozen

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.layout import ALIGNMENT

Moments = Literal["fp32", "16bit", "8bit"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)
T = TypeVar("T")


@frozen
class StateBuffer:
    """A buffer of the optimizer's state: its element type, and how many parameters share an element."""

    name: str
    dtype: Dtype
    shared: int = 1

    def numel(self, parameters: int) -> int:
        """Elements for so many parameters."""
        return -(-parameters // self.shared)

    def nbytes(self, parameters: int) -> int:
        """Bytes for so many parameters."""
        return self.numel(parameters) * DTYPES[self.dtype].nbytes


_SPLIT = (StateBuffer("master_high", "bf16"), StateBuffer("master_low", "int16"))

STATE_FORMATS: dict[str, tuple[StateBuffer, ...]] = {
    "fp32": (
        StateBuffer("master", "fp32"),
        StateBuffer("exp_avg", "fp32"),
        StateBuffer("exp_avg_sq", "fp32"),
    ),
    "16bit": (*_SPLIT, StateBuffer("exp_avg", "bf16"), StateBuffer("exp_avg_sq", "bf16")),
    "8bit": (
        *_SPLIT,
        StateBuffer("exp_avg", "uint8"),
        StateBuffer("exp_avg_sq", "uint8"),
        StateBuffer("exp_avg_sq_scale", "int16", shared=ALIGNMENT),
    ),
}
"""By name; these are Adam's, for each choice of moments: 12, 8 and 6.03 bytes a parameter."""

FORMER_FORMATS: dict[str, tuple[StateBuffer, ...]] = {
    "8bit-1": (
        *_SPLIT,
        StateBuffer("exp_avg", "uint8"),
        StateBuffer("exp_avg_sq", "uint8"),
        StateBuffer("exp_avg_exponent", "uint8", shared=ALIGNMENT),
        StateBuffer("exp_avg_sq_exponent", "uint8", shared=ALIGNMENT),
    ),
}
"""What a checkpoint may hold besides: the first 8-bit moments, which are read and no longer written."""

ADAM_FORMATS = (*MOMENTS, *FORMER_FORMATS)
"""Those that hold Adam's two moments, and are converted into each other when a checkpoint is loaded."""


def stored_buffers(name: str) -> tuple[StateBuffer, ...]:
    """The buffers of a format that a checkpoint may hold."""
    return (STATE_FORMATS if name in STATE_FORMATS else FORMER_FORMATS)[name]


def state_slice(name: str, state: Mapping[str, T], start: int, stop: int) -> dict[str, T]:
    """The state of parameters `start` to `stop`, of buffers by name; `start` begins a block of those that share."""
    return {
        x.name: state[x.name][x.numel(start) : x.numel(stop)]  # pyright: ignore
        for x in STATE_FORMATS[name]
    }


HIGH_HALF = _SPLIT[0].name
"""Of a split master: the bf16 that goes to the device, where that computes in bf16."""
