"""Adagrad as a value with checked settings. `one_buffer_reference` defines an update."""

from collections.abc import Mapping
from typing import Any

import attrs

from zfunc.core.optimizer_state import Moments
from zfunc.optim.one_buffer import OneBufferOptimizer
from zfunc.optim.one_buffer_reference import Rule, RuleFactors, rule_factors
from zfunc.optim.optimizer_settings import (
    Decay,
    LearningRate,
    at_least_0,
    decay_all,
    lr_setting,
)
from zfunc.optim.setting_checks import checked_eps


@attrs.frozen
class Adagrad(OneBufferOptimizer):
    """Adagrad (Duchi et al. 2011) with L2 weight decay, as `torch.optim.Adagrad` has it.

    The state `sum` is that of the squared gradients alone: `initial_accumulator_value` is added when it is used, so
    a resumed training may change it. `lr` is a value or a pure function of the step, counted from 1, which
    `lr_decay` divides by 1 + (step - 1) * lr_decay. `decay(name, shape)` says whether weight decay applies to a
    parameter. `moments` is the format of the sum, as SGD's of its momentum, without a sign.

    Raises ValueError or TypeError for values out of range.

    >>> Adagrad(lr=0.1, moments="8bit").state_format()
    'adagrad-8bit'
    """

    lr: LearningRate = attrs.field(default=1e-2, converter=lr_setting)
    lr_decay: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("lr_decay"))
    weight_decay: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("weight_decay"))
    initial_accumulator_value: float = attrs.field(
        default=0.0, kw_only=True, converter=at_least_0("initial_accumulator_value")
    )
    eps: float = attrs.field(default=1e-10, kw_only=True, converter=checked_eps)
    decay: Decay = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)

    @property
    def kind(self) -> str:
        """Of the formats of its state."""
        return "adagrad"

    @property
    def rule(self) -> Rule:
        """The update that the kernel makes."""
        return "adagrad"

    def rule_factors(
        self, step: int, factors: Mapping[str, Any], weight_decay: float, grad_scale: float
    ) -> RuleFactors:
        """The scalars of step `step`."""
        return rule_factors(
            grad_scale=grad_scale,
            rate=factors["lr"] / (1.0 + (step - 1) * self.lr_decay),
            decay=weight_decay,
            eps=self.eps,
            initial=self.initial_accumulator_value,
        )
