"""Stochastic gradient descent as a value with checked settings. `one_buffer_reference` defines an update."""

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
from zfunc.optim.setting_checks import refuse


@attrs.frozen
class SGD(OneBufferOptimizer):
    """SGD with momentum, dampening, Nesterov's variant and L2 weight decay, as `torch.optim.SGD` has them.

    `lr` is a value or a pure function of the step, counted from 1; `decay(name, shape)` says whether weight decay
    applies to a parameter. The momentum begins with the first gradient, whatever the dampening, as in torch.

    `moments` is the format of the momentum, in bytes a parameter: "fp32", 8 (master, momentum_buffer); "16bit", 6
    (the master in two exact halves, the momentum in bf16); "8bit", 5.03 (the momentum in 8 bits, with a scale for
    every 64 elements). Without momentum there is the master alone: 4.

    Raises ValueError or TypeError for values out of range.

    >>> SGD(lr=0.1, momentum=0.9, nesterov=True).state_format()
    'sgd-fp32'
    """

    lr: LearningRate = attrs.field(default=1e-3, converter=lr_setting)
    momentum: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("momentum"))
    dampening: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("dampening"))
    nesterov: bool = attrs.field(default=False, kw_only=True)
    weight_decay: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("weight_decay"))
    decay: Decay = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check every field."""
        if self.nesterov and not (self.momentum and not self.dampening):
            refuse(
                ValueError,
                "nesterov",
                f"momentum={self.momentum} and dampening={self.dampening}",
                "a momentum above 0 and no dampening",
                "pass such as momentum=0.9",
            )
        super().__attrs_post_init__()

    @property
    def kind(self) -> str:
        """Of the formats of its state; without momentum it has the weights alone."""
        return "sgd" if self.momentum else "weights"

    @property
    def rule(self) -> Rule:
        """The update that the kernel makes."""
        return "nesterov" if self.nesterov else "sgd"

    def rule_factors(
        self, step: int, factors: Mapping[str, Any], weight_decay: float, grad_scale: float
    ) -> RuleFactors:
        """The scalars of step `step`."""
        return rule_factors(
            grad_scale=grad_scale,
            rate=factors["lr"],
            decay=weight_decay,
            keep=self.momentum,
            add=1.0 - self.dampening if step > 1 and self.momentum else 1.0,
        )
