"""Muon as a value with checked settings.

`one_buffer_reference` defines the direction and the update along it, `newton_schulz` what is between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import attrs

from zfunc.core.decision import StepDecision
from zfunc.core.layout import UpdateWork
from zfunc.core.optimizer_state import Moments
from zfunc.optim.base import ParameterPart
from zfunc.optim.one_buffer import OneBufferOptimizer
from zfunc.optim.one_buffer_reference import Rule, RuleFactors, rule_factors
from zfunc.optim.optimizer_settings import Decay, LearningRate, at_least_0, decay_all, lr_setting
from zfunc.optim.setting_checks import checked_finite, refuse
from zfunc.optim.workspaces import QUINTIC, Quintic, newton_schulz_work
from zfunc.values import number, whole

if TYPE_CHECKING:
    from torch import Tensor

AdjustLr = Literal["original", "match_rms_adamw"]


def _momentum_setting(value: Any) -> float:
    momentum = checked_finite("momentum", value, minimum=0.0)
    if momentum >= 1.0:
        refuse(ValueError, "momentum", repr(value), "a number in [0, 1)", "pass such as 0.95")
    return momentum


def _steps_setting(value: Any) -> int:
    return whole("ns_steps", value, 1, 99)


def _quintic_setting(value: Any) -> Quintic:
    a, b, c = (number("ns_coefficients", x) for x in value)
    return a, b, c


@attrs.frozen
class Muon(OneBufferOptimizer):
    """Muon for matrices (Jordan et al. 2024), as `torch.optim.Muon` has it; other parameters take another one.

    The momentum is the running mean momentum * momentum_buffer + (1 - momentum) * gradient; the direction is that,
    or with `nesterov` the same mean of it and the gradient. The weights move along what Newton-Schulz makes of the
    direction of a matrix, with singular values near 1. The learning rate of a matrix [rows, columns] is `lr` *
    max(1, rows / columns) ** 0.5 or, with `adjust_lr_fn="match_rms_adamw"`, `lr` * 0.2 * max(rows, columns) ** 0.5,
    for which AdamW's learning rates serve (Liu et al. 2025, "Muon is Scalable for LLM Training"). Weight decay is
    decoupled, by `lr` itself.

    `lr` is a value or a pure function of the step, counted from 1; `decay(name, shape)` says whether weight decay
    applies to a parameter. `moments` is the format of momentum_buffer, as SGD's. `ns_steps`, `ns_coefficients` and
    `eps` are Newton-Schulz's.

    Raises ValueError or TypeError for values out of range. `compile` raises ValueError for a parameter that is no
    matrix.

    >>> Muon(lr=0.02).lr_ratio((400, 100))
    2.0
    """

    decoupled: ClassVar[bool] = True

    lr: LearningRate = attrs.field(default=1e-3, converter=lr_setting)
    momentum: float = attrs.field(default=0.95, kw_only=True, converter=_momentum_setting)
    nesterov: bool = attrs.field(default=True, kw_only=True)
    weight_decay: float = attrs.field(default=0.1, kw_only=True, converter=at_least_0("weight_decay"))
    adjust_lr_fn: AdjustLr = attrs.field(default="original", kw_only=True)
    ns_steps: int = attrs.field(default=5, kw_only=True, converter=_steps_setting)
    ns_coefficients: Quintic = attrs.field(default=QUINTIC, kw_only=True, converter=_quintic_setting)
    eps: float = attrs.field(default=1e-7, kw_only=True, converter=at_least_0("eps"))
    decay: Decay = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check every field."""
        if self.adjust_lr_fn not in (known := get_args(AdjustLr)):
            refuse(ValueError, "adjust_lr_fn", repr(self.adjust_lr_fn), " or ".join(known), "choose one")
        super().__attrs_post_init__()

    @property
    def kind(self) -> str:
        """Of the formats of its state."""
        return "muon"

    @property
    def rule(self) -> Rule:
        """The update that the kernel makes, whose gradient is the orthogonal direction."""
        return "sgd"

    def rule_factors(
        self, step: int, factors: Mapping[str, Any], weight_decay: float, grad_scale: float
    ) -> RuleFactors:
        """The scalars of step `step`. The direction has been scaled."""
        del step, grad_scale
        return rule_factors(grad_scale=1.0, rate=factors["lr"], decay=factors["lr"] * weight_decay)

    def lr_ratio(self, shape: tuple[int, ...]) -> float:
        """What the learning rate of a matrix is multiplied by."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def arguments(
        self, decision: StepDecision, group: int, part: ParameterPart | None = None
    ) -> dict[str, Any]:
        """What both kernels take besides tensors to move the weights of a matrix along a direction."""
        assert part is not None  # by the format of its state
        arguments = super().arguments(decision, group)
        factors: RuleFactors = arguments["factors"]
        rate = checked_finite("lr of a matrix", factors.rate * self.lr_ratio(part.shape))
        return {
            **arguments,
            "state_format": f"weights-{self.moments}",
            "factors": factors._replace(rate=rate),
        }

    def host_direction(
        self, state: Mapping[str, Tensor], grad: Tensor, decision: StepDecision, *, group: int, out: Tensor
    ) -> None:
        """Update the momentum of parameters in host memory, and write the direction to `out`, in bf16."""
        del group
        self.host_kernel(state, grad, out=out, **self.direction_arguments(decision))

    def device_direction(
        self, state: Mapping[str, Tensor], grad: Tensor, decision: StepDecision, *, group: int, out: Tensor
    ) -> None:
        """The same, to the bit, in torch operations on the tensors' device."""
        del group
        self.device_kernel(state, grad, out=out, **self.direction_arguments(decision))

    def orthogonalize(self, direction: Tensor, *, group: int) -> Tensor:
        """The orthogonal direction of a whole matrix [rows, columns] in bf16, which may be overwritten."""
        del group
        from zfunc.optim.newton_schulz import orthogonalize_

        return orthogonalize_(direction, steps=self.ns_steps, coefficients=self.ns_coefficients, eps=self.eps)

    def matrix_work(self, shape: tuple[int, ...], *, group: int) -> UpdateWork:
        """What `orthogonalize` of a matrix takes."""
        del group
        return newton_schulz_work(shape, self.ns_steps)

    def direction_arguments(self, decision: StepDecision) -> dict[str, Any]:
        """What both kernels take besides tensors to make a direction."""
        keep, add = self.momentum, 1.0 - self.momentum
        ahead = (keep, add) if self.nesterov else (1.0, 0.0)
        return {
            "state_format": self.state_format(),
            "rule": "direction",
            "factors": rule_factors(
                grad_scale=checked_finite("grad_scale", decision.grad_scale),
                rate=0.0,
                decay=0.0,
                keep=keep,
                add=add,
                look_keep=ahead[0],
                look_add=ahead[1],
            ),
            "step": decision.number,
            "decoupled": True,
        }
