"""`Metrics`: what one step reports."""

from typing import Any

from attrs import field, frozen
from torch import Tensor

from zfunc.checkpoint.writer import SaveResult
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.runtime.torch_dtypes import byte_view


def _compared(aux: dict[str, Any]) -> dict[str, Any]:
    """The auxiliary outputs `aux` in a form for `==`: floats, and of a tensor its type, shape and bytes."""
    return {
        name: (x.dtype, x.shape, byte_view(x).numpy().tobytes()) if isinstance(x, Tensor) else x
        for name, x in aux.items()
    }


@frozen
class Metrics:
    """The report of one training step.

    `loss` is the mean loss. `aux` has the last segment's auxiliary outputs by name: of scalars the mean, as a
    float; of outputs with one entry per row those of all ranks' batches, as a host tensor. `grad_norm` is the
    norm of the unscaled gradient before clipping; with the setting `norms`, `norms` has each parameter's by
    name. `step` is the step's number, from 1; `skipped` is True after an overflow at this `loss_scale`.
    `seconds` is the duration, `host_seconds` the part of it in host operations. `sent_bytes` went to other
    ranks (see `zfunc.runtime.collectives`). `timeline` and its `plan` are set with `trace=True`; `saved`, the
    checkpoint's path or the reason of its failure, with `save=`.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float
    step: int
    seconds: float
    host_seconds: float
    sent_bytes: int = 0
    aux: dict[str, Any] = field(factory=dict[str, Any], eq=_compared)
    norms: dict[str, float] = field(factory=dict[str, float])
    timeline: Timeline | None = None
    plan: Plan | None = None
    saved: SaveResult | None = None
