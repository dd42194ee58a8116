"""Adam and AdamW as a value with checked settings. `adam_reference` defines what an update computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import evolve

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import AdamFormat, Moments
from zfunc.optim.adam_reference import coefficients
from zfunc.optim.base import ParameterPart
from zfunc.optim.kernel_optimizer import KernelOptimizer
from zfunc.optim.optimizer_settings import (
    Betas,
    Decay,
    LearningRate,
    at_least_0,
    betas_at_step,
    betas_setting,
    check_moments_and_decay,
    decay_all,
    lr_at_step,
    lr_setting,
)
from zfunc.optim.setting_checks import check_factors, checked_eps, refuse
from zfunc.optim.workspaces import adam_workspace

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class AdamW(KernelOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); `decoupled=False` is Adam with L2.

    `lr` and `betas` are values or pure functions of the step, counted from 1. `decay(name, shape)` says whether
    weight decay applies to a parameter; `matrices_only` leaves out norms and biases. Bias correction uses the betas
    of the current step alone, as in torch: it is exact while they are constant.

    `moments` is the format of the optimizer state between steps, in bytes a parameter: "fp32", 12 (master, exp_avg,
    exp_avg_sq); "16bit", 8 (the master in two exact halves, both moments in bf16); "8bit", 6 (the same master, both
    moments in 8 bits, with a scale for every 64 elements). Arithmetic is always fp32
    (`zfunc.optim.compact_reference`).

    With `split_master` the master of "fp32" is in two halves too, one of which is the bf16 copy for the device: the
    same 12 bytes and the same bits, without 2 bytes more for a copy.

    NumPy scalars and tensors of one element become floats. Raises ValueError or TypeError for values out of range
    and for a learning rate that overflows fp32 in the first step.

    >>> from zfunc import matrices_only
    >>> AdamW(lr=3e-4, weight_decay=0.1, decay=matrices_only).lr_at(1)
    0.0003
    """

    lr: LearningRate = attrs.field(default=1e-3, converter=lr_setting)
    betas: Betas | Callable[[int], Betas] = attrs.field(
        default=(0.9, 0.999), kw_only=True, converter=betas_setting
    )
    eps: float = attrs.field(default=1e-8, kw_only=True, converter=checked_eps)
    weight_decay: float = attrs.field(default=0.01, kw_only=True, converter=at_least_0("weight_decay"))
    decoupled: bool = attrs.field(default=True, kw_only=True)
    decay: Decay = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)
    split_master: bool = attrs.field(default=False, kw_only=True, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.decoupled, bool):
            refuse(
                TypeError, "decoupled", repr(self.decoupled), "True or False", "pass False for Adam with L2"
            )
        check_moments_and_decay(self.moments, self.decay)
        if not callable(self.lr) and not callable(self.betas):
            self._check_factors(1, self.lr, self.betas)  # of all steps the first has the largest

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1; TypeError or ValueError where the schedule returns none."""
        lr = lr_at_step(self.lr, step)
        if callable(self.lr) or callable(self.betas):
            self._check_factors(step, lr, self.betas_at(step))
        return lr

    def state_format(self, group: int = 0) -> AdamFormat:
        """A row of `zfunc.core.optimizer_state.STATE_FORMATS`."""
        del group
        return "fp32-split" if self.moments == "fp32" and self.split_master else self.moments

    def with_moments(self, moments: Moments, *, split_master: bool) -> AdamW:
        """The same optimizer with its moments in another format, on a split master if they are fp32 or not."""
        return evolve(self, moments=moments, split_master=self.split_master or split_master)

    def factors(self, step: int) -> dict[str, Any]:
        """The learning rate and the betas of step `step`, counted from 1."""
        return {"lr": self.lr_at(step), "betas": self.betas_at(step)}

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters allocates."""
        return adam_workspace(numel, self.state_format())

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int = 0
    ) -> dict[str, Tensor]:
        """From any format of Adam's (`zfunc.optim.compact.convert_moments`); CheckpointError for another."""
        from zfunc.optim.compact import convert_moments

        return convert_moments(state, state_format, self.state_format(group), step)

    def host_kernel(self, *args: Any, **arguments: Any) -> None:
        """Adam in host memory (`zfunc.optim.host_adam`)."""
        from zfunc.optim.host_adam import host_adam_

        host_adam_(*args, **arguments)

    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """Adam in torch operations (`zfunc.optim.device_adam`)."""
        from zfunc.optim.device_adam import device_adam_

        device_adam_(*args, **arguments)

    def arguments(
        self, decision: StepDecision, group: int, part: ParameterPart | None = None
    ) -> dict[str, Any]:
        """What both kernels take besides tensors."""
        del part
        return {
            "step": decision.number,
            "lr": decision.factors["lr"],
            "betas": decision.factors["betas"],
            "eps": self.eps,
            "weight_decay": 0.0 if group else self.weight_decay,
            "decoupled": self.decoupled,
            "grad_scale": decision.grad_scale,
        }

    def _check_factors(self, step: int, lr: float, betas: Betas) -> None:
        check_factors(coefficients(step, lr, betas, self.eps, self.weight_decay, self.decoupled, 1.0))

    def betas_at(self, step: int) -> Betas:
        """The betas of a step, counted from 1; ValueError where one is not in [0, 1)."""
        return betas_at_step(self.betas, step)
