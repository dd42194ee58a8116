"""Lion as a value with checked settings. `one_buffer_reference` defines an update."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs

from zfunc.core.optimizer_state import Moments
from zfunc.optim.one_buffer import OneBufferOptimizer
from zfunc.optim.one_buffer_reference import Rule, RuleFactors, rule_factors
from zfunc.optim.optimizer_settings import (
    Betas,
    Decay,
    LearningRate,
    at_least_0,
    betas_at_step,
    betas_setting,
    decay_all,
    lr_setting,
)


@attrs.frozen
class Lion(OneBufferOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), with decoupled decay.

    Every weight moves by `lr` in the direction of the sign of beta1 * exp_avg + (1 - beta1) * gradient, and not at
    all where that is 0. So the size of gradients, and clipping, change their balance with exp_avg alone. The paper
    takes a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times larger.

    `lr` and `betas` are values or pure functions of the step, counted from 1; `decay(name, shape)` says whether
    weight decay applies to a parameter. `moments` is the format of exp_avg, as SGD's of its momentum.

    Raises ValueError or TypeError for values out of range.

    >>> Lion(lr=1e-4, weight_decay=1.0).factors(1)
    {'lr': 0.0001, 'betas': (0.9, 0.99)}
    """

    decoupled: ClassVar[bool] = True

    lr: LearningRate = attrs.field(default=1e-4, converter=lr_setting)
    betas: Betas | Callable[[int], Betas] = attrs.field(
        default=(0.9, 0.99), kw_only=True, converter=betas_setting
    )
    weight_decay: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("weight_decay"))
    decay: Decay = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)

    @property
    def kind(self) -> str:
        """Of the formats of its state."""
        return "lion"

    @property
    def rule(self) -> Rule:
        """The update that the kernel makes."""
        return "lion"

    def betas_at(self, step: int) -> Betas:
        """The betas of a step, counted from 1; ValueError where one is not in [0, 1)."""
        return betas_at_step(self.betas, step)

    def factors(self, step: int) -> dict[str, Any]:
        """The learning rate and the betas of step `step`, counted from 1."""
        return {"lr": self.lr_at(step), "betas": self.betas_at(step)}

    def rule_factors(
        self, step: int, factors: Mapping[str, Any], weight_decay: float, grad_scale: float
    ) -> RuleFactors:
        """The scalars of step `step`."""
        del step
        lr, (beta1, beta2) = factors["lr"], factors["betas"]
        return rule_factors(
            grad_scale=grad_scale,
            rate=lr,
            decay=lr * weight_decay,
            keep=beta2,
            add=1.0 - beta2,
            look_keep=beta1,
            look_add=1.0 - beta1,
        )
