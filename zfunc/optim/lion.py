"""The optimizer Lion as a value with checked settings."""

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import frozen

from zfunc.optim.elementwise import Betas, Elementwise, LearningRate, betas_field, lr_field
from zfunc.optim.rules import EXP_AVG_FLOOR, Factors, Operations


@frozen
class Lion(Elementwise):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), with decoupled
    weight decay.

    A weight moves by `lr` against the sign of beta1 * exp_avg + (1 - beta1) * gradient, and not at all where
    that is 0. So the size of a gradient matters only relative to exp_avg. The paper takes a learning rate 3
    to 10 times smaller than AdamW's, and a weight decay as many times larger.

    `lr` and `betas` are values or pure functions of the step, counted from 1; `decay(name, shape)` says
    whether weight decay applies to a parameter. `moments` is the format of exp_avg: "fp32", "16bit" or "8bit"
    (see SGD).

    Raises ValueError or TypeError for values out of range.

    >>> Lion(lr=1e-4, weight_decay=1.0).factors(1)
    {'lr': 0.0001, 'betas': (0.9, 0.99)}
    """

    state: ClassVar = ("exp_avg",)
    kernel: ClassVar = "lion"
    usual: ClassVar = 1e-3, 0.4, {}
    deepspeed: ClassVar = "betas"
    decoupled: ClassVar = True

    lr: LearningRate = lr_field(1e-4)
    betas: Betas | Callable[[int], Betas] = betas_field((0.9, 0.99))

    def update(self, o: Operations, k: Factors, g: Any, m: Any) -> tuple[Any, ...]:
        """Lion's rule for gradient `g` and moment `m`: returns the change of the weights, by the sign of one
        mean of both, and the new moment, another mean of both."""
        change = o.signed(k.look_keep * m + k.look_add * g, k.rate)
        return change, o.flush(k.keep * m + k.add * g, EXP_AVG_FLOOR)

    def scalars(self, step: int, lr: float, betas: Betas) -> dict[str, float]:
        """The scalars of Lion's rule in step number `step`."""
        del step
        look, keep = betas
        return {"rate": lr, "keep": keep, "add": 1.0 - keep, "look_keep": look, "look_add": 1.0 - look}
