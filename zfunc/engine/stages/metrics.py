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

    - `loss`: the mean loss of the batches of all ranks.
    - `grad_norm`: the norm of the unscaled gradient before clipping.
    - `lr`: the learning rate of the update.
    - `skipped`: whether there was no update, after an overflow at this `loss_scale`.
    - `loss_scale`: the factor of the loss in backward; 1 but in fp16.
    - `step`: the number of the step, from 1.
    - `seconds`: the duration of the step.
    - `host_seconds`: the part of it in which operations ran on the host.
    - `sent_bytes`: bytes to other ranks, as `zfunc.runtime.collectives` counts them.
    - `aux`: the last segment's auxiliary outputs by name: of scalars the mean, as a float; of outputs with one
      entry per row those of all ranks' batches, as a tensor on the host.
    - `norms`: with the setting `norms`, the norm of each parameter's gradient by name, as `grad_norm`.
    - `timeline`: with `trace=True`, the measured step.
    - `plan`: with `trace=True`, the plan of which `timeline` is.
    - `saved`: with `save=`, the checkpoint's path, or the reason of its failure.
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
