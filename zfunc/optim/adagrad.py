"""The optimizer Adagrad as a value with checked settings."""

from typing import Any, ClassVar

from attrs import frozen

from zfunc.optim.elementwise import Elementwise, LearningRate, eps_field, lr_field, number_field
from zfunc.optim.rules import Factors, Operations


@frozen
class Adagrad(Elementwise):
    """Adagrad (Duchi et al. 2011) with L2 weight decay, as `torch.optim.Adagrad`.

    The state `sum` is the sum of squared gradients; `initial_accumulator_value` is added only where the sum
    is used, so it may be changed when training resumes. `lr` is a value or a pure function of the step,
    counted from 1, and is divided by 1 + (step - 1) * lr_decay. `decay(name, shape)` says whether weight
    decay applies to a parameter. `moments` is the format of the sum: "fp32", "16bit" or "8bit", without a
    sign.

    Raises ValueError or TypeError for values out of range.

    >>> Adagrad(lr=0.1, moments="8bit").state_format()
    'adagrad-8bit'
    """

    state: ClassVar = ("sum",)
    unsigned: ClassVar = ("sum",)
    kernel: ClassVar = "adagrad"
    usual: ClassVar = 2e-2, 0.0, {}
    deepspeed: ClassVar = "eps lr_decay initial_accumulator_value"

    lr: LearningRate = lr_field(1e-2)
    lr_decay: float = number_field("lr_decay", 0.0)
    initial_accumulator_value: float = number_field("initial_accumulator_value", 0.0)
    eps: float = eps_field(1e-10)

    def update(self, o: Operations, k: Factors, g: Any, m: Any) -> tuple[Any, ...]:
        """Adagrad's rule for gradient `g` and sum of squares `m`: returns the change of the weights, gradient
        over root of the new sum, and the new sum."""
        m = m + g * g
        return k.rate * (g / (o.sqrt(m + k.initial) + k.eps)), m

    def scalars(self, step: int, lr: float) -> dict[str, float]:
        """The scalars of Adagrad's rule (fields of `Factors`) in step number `step`, at learning rate `lr`."""
        rate = lr / (1.0 + (step - 1) * self.lr_decay)
        return {"rate": rate, "eps": self.eps, "initial": self.initial_accumulator_value}
