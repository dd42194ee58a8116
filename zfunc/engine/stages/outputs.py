"""The last segment's output: the loss, alone or with auxiliary outputs.

Auxiliary outputs are tensors by name, `(loss, {"accuracy": hits.float().mean(), "logits": logits})`. They are
reported and have no gradient: scalars as means over micro-batches and ranks; tensors whose first dimension is the
rows of the micro-batch as those of all rows of the batch, in order.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from attrs import fields
from torch import Tensor

from zfunc.core.spec import RowsOutput
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
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"segment {segment!r}: got {_kind(loss)} from the last segment, expected a scalar: the mean loss of "
            "its micro-batch, as from F.cross_entropy(logits, targets)"
        )
    for name, value in aux.items():
        _check_aux(segment, name, value)
    return loss.reshape(()), {name: aux[name] for name in sorted(aux)}


def _check_aux(segment: str, name: str, value: Any) -> None:
    """Raise ValueError unless the auxiliary output `name` is a number or real tensor, not named as a metric."""
    what = f"segment {segment!r}: auxiliary output {name!r}"
    if name in RESERVED:
        raise ValueError(f"{what}: got the name of a metric that every step has, expected another: rename it")
    real = isinstance(value, Tensor) and not value.is_complex()
    if not real and not isinstance(value, bool | int | float):
        raise ValueError(f"{what}: got {_kind(value)}, {_EXPECTED.format(name=name)}")


def check_aux_rows(segment: str, outputs: Iterable[RowsOutput], rows: int) -> None:
    """Raise ValueError unless each of the auxiliary `outputs` that should have one entry per row has as many
    as its inputs have `rows`, and is not empty."""
    for x in outputs:
        if x.shape[0] != rows or not x.nbytes:
            raise ValueError(
                f"segment {segment!r}: auxiliary output {x.name!r}: got shape {x.shape} for {rows} rows, "
                f"{_EXPECTED.format(name=x.name)}"
            )


_EXPECTED = (
    "expected a scalar, or a tensor whose first dimension is the rows of the batch: return a mean, such as "
    "{name}.mean(), or rows"
)


def _kind(x: Any) -> str:
    return f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def aux_names(y: Any) -> tuple[str, ...]:
    """The names of the scalar auxiliary outputs in `y`, the output of the last segment's `checked` function."""
    return () if isinstance(y, Tensor) else y[1].names


def aux_rows(y: Any) -> tuple[RowsOutput, ...]:
    """The descriptions of the auxiliary outputs with one entry per row in `y`, what the last segment's
    `checked` function returned."""
    if isinstance(y, Tensor) or len(y) == 2:
        return ()
    return described(dict(zip(y[2].names, y[2].tensors, strict=True)))


def outputs_of_rows(aux: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those auxiliary outputs in `aux`, by name, that are not scalars, and so must have one entry for each
    row of the batch."""
    return {name: x for name, x in aux.items() if isinstance(x, Tensor) and x.dim()}


def described(rows: Mapping[str, Tensor]) -> tuple[RowsOutput, ...]:
    """Descriptions (name, shape, dtype, bytes) of `rows`, the auxiliary outputs of one micro-batch that have
    one entry per row."""
    return tuple(
        RowsOutput(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes)
        for name, t in rows.items()
    )


def check_aux_names(segment: str, names: tuple[Any, ...], before: tuple[Any, ...]) -> None:
    """Raise ValueError unless the last segment's auxiliary outputs `names` equal an earlier call's, `before`."""
    if names != before:
        raise ValueError(
            f"segment {segment!r}: got the auxiliary outputs {names} after {before}, expected the same names "
            "in every call: return all of them always"
        )
