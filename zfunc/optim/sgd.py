"""The optimizer SGD (stochastic gradient descent) as a value with checked settings."""

from typing import Any, ClassVar

from attrs import field, frozen

from zfunc.errors import refuse
from zfunc.optim.elementwise import Elementwise, LearningRate, lr_field, number_field
from zfunc.optim.rules import EXP_AVG_FLOOR, Factors, Operations


@frozen
class SGD(Elementwise):
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

    state: ClassVar = ("momentum_buffer",)
    usual: ClassVar = 0.1, 1e-4, {"momentum": 0.9}
    deepspeed: ClassVar = "momentum dampening nesterov"

    lr: LearningRate = lr_field(1e-3)
    momentum: float = number_field("momentum", 0.0)
    dampening: float = number_field("dampening", 0.0)
    nesterov: bool = field(default=False, kw_only=True)

    @nesterov.validator  # pyright: ignore
    def _check_nesterov(self, _: object, value: Any) -> None:
        if value and not (self.momentum and not self.dampening):
            got = f"momentum={self.momentum} and dampening={self.dampening}"
            refuse("nesterov", got, "a momentum above 0 and no dampening", "pass such as momentum=0.9")

    @property
    def kernel(self) -> str:  # pyright: ignore
        """The name of SGD's rule in the compiled kernel, which depends on `nesterov`."""
        return "nesterov" if self.nesterov else "sgd"

    def update(self, o: Operations, k: Factors, g: Any, m: Any = 0.0) -> tuple[Any, ...]:
        """SGD's rule for gradient `g` and momentum `m`: returns the change of the weights (along the
        momentum, with Nesterov's variant along its next value), then the new momentum."""
        m = o.flush(k.keep * m + k.add * g, EXP_AVG_FLOOR)
        return k.rate * (g + k.keep * m if self.nesterov else m), m

    def scalars(self, step: int, lr: float) -> dict[str, float]:
        """The scalars of SGD's rule (fields of `Factors`) in step number `step`, at learning rate `lr`."""
        add = 1.0 - self.dampening if step > 1 and self.momentum else 1.0
        return {"rate": lr, "keep": self.momentum, "add": add}

    def state_format(self, group: int = 0) -> str:
        """The name of SGD's state format in `zfunc.core.optimizer_state.STATE_FORMATS`: weights, maybe momentum."""
        return super().state_format(group) if self.momentum else f"weights-{self.moments}"
