"""The last segment's output: the loss, alone or with auxiliary outputs.

Auxiliary outputs are scalars by name, such as an accuracy: `(loss, {"accuracy": hits.float().mean()})`. They are
reported, as means over micro-batches and ranks, and have no gradient.
"""

from collections.abc import Mapping
from typing import Any, cast

from attrs import fields
from torch import Tensor

from zfunc.engine.stages.metrics import Metrics

RESERVED = frozenset(f.name for f in fields(Metrics))


def loss_and_aux(segment: str, y: Any) -> tuple[Tensor, dict[str, Any]]:
    """Split the last segment's output `y` into loss and auxiliary outputs by name. ValueError for other outputs."""
    loss, aux = y, {}
    if isinstance(y, tuple):
        parts = cast("tuple[Any, ...]", y)
        if len(parts) != 2 or not isinstance(parts[1], Mapping):
            raise ValueError(
                f"segment {segment!r}: got ({', '.join(map(_kind, parts))}) from the last segment, expected a "
                "scalar, the mean loss, or that and auxiliary outputs: return (loss, {'accuracy': ...})"
            )
        loss, aux = cast("tuple[Any, Mapping[Any, Any]]", parts)
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        raise ValueError(
            f"segment {segment!r}: got {_kind(loss)} from the last segment, expected a scalar: the mean loss of "
            "its micro-batch, as from F.cross_entropy(logits, targets)"
        )
    for name, value in aux.items():
        _check_aux(segment, name, value)
    return loss, {name: aux[name] for name in sorted(aux)}


def _check_aux(segment: str, name: str, value: Any) -> None:
    """Raise ValueError unless an auxiliary output is a scalar, and its name is no field of `Metrics`."""
    what = f"segment {segment!r}: auxiliary output {name!r}"
    if name in RESERVED:
        raise ValueError(f"{what}: got the name of a metric that every step has, expected another: rename it")
    scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex()
    if not scalar and not isinstance(value, bool | int | float):
        raise ValueError(
            f"{what}: got {_kind(value)}, expected a scalar: return a mean, such as {name}.mean()"
        )


def _kind(x: Any) -> str:
    return f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def aux_names(y: Any) -> tuple[str, ...]:
    """The names of the auxiliary outputs in `y`, the output of the last segment's `checked` function."""
    return () if isinstance(y, Tensor) else y[1].names


def check_aux_names(segment: str, names: tuple[str, ...], before: tuple[str, ...]) -> None:
    """Raise ValueError unless the last segment's auxiliary outputs `names` equal those of the call `before`."""
    if names != before:
        raise ValueError(
            f"segment {segment!r}: got the auxiliary outputs {names} after {before}, expected the same names "
            "in every call: return all of them always"
        )
