"""The formats of the optimizer state: the buffers of each, by name. No torch here.

A buffer has one element for each parameter of the layout, or for each block of 64, so an aligned slice of the
layout is a slice of every buffer. Every format has the fp32 weights, as `master` or as the two halves `master_high`
and `master_low`. ("Parameters" here counts elements.)
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from attrs import frozen

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.layout import ALIGNMENT

Moments = Literal["fp32", "16bit", "8bit"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)
AdamFormat = Literal["fp32", "fp32-split", "16bit", "8bit"]
T = TypeVar("T")


@frozen
class StateBuffer:
    """One buffer of an optimizer's state: its name, its dtype, and how many parameter elements share one
    element of it.

    To update a `whole` buffer, one rank needs the whole parameter, for a `matrix` buffer the whole matrix.
    `signed` is False for a moment that is never negative, such as a mean of squares.
    """

    name: str
    dtype: Dtype
    shared: int = 1
    whole: bool = False
    matrix: bool = False
    signed: bool = True

    def numel(self, parameters: int) -> int:
        """The number of elements of the buffer for `parameters` parameters (elements)."""
        return -(-parameters // self.shared)

    def nbytes(self, parameters: int) -> int:
        """The size in bytes of the buffer for `parameters` parameters (elements)."""
        return self.numel(parameters) * DTYPES[self.dtype].nbytes


_SPLIT = (StateBuffer("master_high", "bf16"), StateBuffer("master_low", "int16"))

_MASTER = (StateBuffer("master", "fp32"),)


def formats_of(
    kind: str, moments: tuple[str, ...], unsigned: tuple[str, ...] = (), *, matrix: bool = False
) -> dict[str, tuple[StateBuffer, ...]]:
    """The state formats of an optimizer, by name: `kind` with "-fp32", "-16bit" or "-8bit". Each is a tuple
    of buffers: the weights, and the `moments`, which take 4, 2 or 1.03 bytes a parameter. Moments named in
    `unsigned` are never negative; with `matrix`, an update of the moments needs whole matrices.

    >>> [x.name for x in formats_of("sgd", ("momentum_buffer",))["sgd-8bit"]]
    ['master_high', 'master_low', 'momentum_buffer', 'momentum_buffer_scale']
    """

    def buffers(dtype: Dtype) -> list[StateBuffer]:
        return [StateBuffer(x, dtype, signed=x not in unsigned, matrix=matrix) for x in moments]

    scales = (StateBuffer(f"{x}_scale", "int16", shared=ALIGNMENT) for x in moments)
    return {
        f"{kind}-fp32": (*_MASTER, *buffers("fp32")),
        f"{kind}-16bit": (*_SPLIT, *buffers("bf16")),
        f"{kind}-8bit": (*_SPLIT, *(x for pair in zip(buffers("uint8"), scales, strict=True) for x in pair)),
    }


def _adams(dtype: Dtype) -> tuple[StateBuffer, StateBuffer]:
    return StateBuffer("exp_avg", dtype), StateBuffer("exp_avg_sq", dtype, signed=False)


STATE_FORMATS: dict[str, tuple[StateBuffer, ...]] = {
    "fp32": (*_MASTER, *_adams("fp32")),
    "fp32-split": (*_SPLIT, *_adams("fp32")),
    "16bit": (*_SPLIT, *_adams("bf16")),
    "8bit": (*_SPLIT, *_adams("uint8"), StateBuffer("exp_avg_sq_scale", "int16", shared=ALIGNMENT)),
    **formats_of("weights", ()),
}
"""The formats by name. The first four are Adam's: 12, 12, 8 and 6.03 bytes a parameter. SGD without momentum keeps
the weights alone: 4 bytes. The class of any other optimizer adds its own (`zfunc.optim.elementwise`).

"fp32-split" has the bits of "fp32" and needs no bf16 copy beside it. Its high half is rounded as that copy is, ties
to even; an int16 cannot say which way a tie went, so the sign of exp_avg_sq does
(`zfunc.optim.formats.split_to_even`).
"""


def adam_format(moments: Moments, *, split_master: bool) -> AdamFormat:
    """The name of Adam's state format with `moments`; fp32 ones have a split master if `split_master`.

    >>> adam_format("fp32", split_master=True), adam_format("8bit", split_master=False)
    ('fp32-split', '8bit')
    """
    return "fp32-split" if moments == "fp32" and split_master else moments


def format_with(name: str, moments: Moments) -> str:
    """The name of the state format that has `moments` and belongs to the same optimizer as format `name`.

    >>> format_with("adafactor-small-fp32", "8bit"), format_with("fp32-split", "16bit")
    ('adafactor-small-8bit', '16bit')
    """
    owner = owner_of(name)
    return f"{owner}-{moments}" if owner else moments


def owner_of(name: str) -> str:
    """The optimizer whose state format `name` is, "" for Adam: formats of one owner convert into each other.

    >>> [owner_of(x) for x in ("adafactor-small-fp32", "lion-8bit", "fp32-split", "my_own")]
    ['adafactor-small', 'lion', '', 'my_own']
    """
    owner, _, moments = name.removesuffix("-split").rpartition("-")
    return owner if moments in MOMENTS else name


def updates_matrices(name: str) -> bool:
    """Whether an update of optimizer state in format `name` needs all of a matrix."""
    return any(x.matrix for x in STATE_FORMATS[name])


def updates_parameters(name: str) -> bool:
    """Whether an update of optimizer state in format `name` needs all of a parameter."""
    return any(x.whole for x in STATE_FORMATS[name])


def weight_buffers(name: str) -> tuple[str, ...]:
    """The names of the buffers of state format `name` from which the fp32 weights are read.

    >>> weight_buffers("16bit"), weight_buffers("fp32-split")[2:]
    (('master_high', 'master_low'), ('exp_avg_sq',))
    """
    masters = tuple(x.name for x in STATE_FORMATS[name] if x.name.startswith("master"))
    return (*masters, "exp_avg_sq") if name == "fp32-split" else masters


def moment_buffers(name: str) -> tuple[StateBuffer, ...]:
    """The buffers of state format `name` other than the weights.

    >>> [x.name for x in moment_buffers("8bit")]
    ['exp_avg', 'exp_avg_sq', 'exp_avg_sq_scale']
    """
    return tuple(x for x in STATE_FORMATS[name] if not x.name.startswith("master"))


def state_slice(name: str, state: Mapping[str, T], start: int, stop: int) -> dict[str, T]:
    """Slices, by name, of buffers `state` in format `name` for parameters `start`, a multiple of 64, to `stop`."""
    return {
        x.name: state[x.name][x.numel(start) : x.numel(stop)]  # pyright: ignore
        for x in STATE_FORMATS[name]
        if x.name in state
    }


PARAMS = "params"  # parameters in the dtype of the device, where the disk has them
GRADIENT = "gradient"  # of a bucket, in a slot with the state that it updates
FROZEN = "frozen"  # the only kind of state of a frozen parameter: its values
EMA = StateBuffer("ema", "fp32")
"""The moving average of the weights, beside a state of any format."""

HIGH_HALF = _SPLIT[0].name
"""The bf16 half of a split master, which is also the device's copy when that computes in bf16."""

MASTER = _MASTER[0].name
"""The fp32 weights in one buffer; also of frozen parameters, where they are kept beside rounded ones."""
