"""Dynamic loss scaling for fp16: the scale is a value, and an update is a pure function of it.

The semantics are DeepSpeed's: halve on overflow once the hysteresis is used up, double after `window` steps without
one, never below `minimum`.
"""

from functools import partial
from typing import Any

from attrs import evolve, field, frozen

from zfunc.errors import NonFiniteError
from zfunc.values import number, truth, whole


def _above_0(name: str) -> Any:
    return partial(number, f"LossScale: {name}", positive=True)


def _whole(least: int) -> Any:
    return lambda _, attribute, value: whole(f"LossScale: {attribute.name}", value, least)


@frozen
class LossScale:
    """The fp16 loss scale: the factor of the loss, and the settings and counters of its changes.

    The scale halves after `hysteresis` overflows. That count restarts when the scale grows, and with
    `consecutive` after every step without an overflow. The scale doubles after the first `window` + 1 steps
    in a row without an overflow, and after every `window` more. With `window=0` it never changes. Raises
    ValueError or TypeError for bad settings.

    >>> LossScale(scale=4.0, hysteresis=1).update(overflow=True).scale
    2.0
    """

    scale: float = field(default=2.0**16, converter=_above_0("scale"))
    window: int = field(default=1000, validator=_whole(0))
    hysteresis: int = field(default=2, validator=_whole(1))
    minimum: float = field(default=1.0, converter=_above_0("minimum"))
    left: int = field(default=-1, validator=_whole(-1))  # overflows until the scale halves
    steps: int = field(default=0, validator=_whole(0))  # steps so far
    last_overflow: int = field(default=-1, validator=_whole(-1))  # the step of the last overflow
    consecutive: bool = field(default=False, validator=lambda _, a, x: truth(f"LossScale: {a.name}", x))

    def __attrs_post_init__(self) -> None:
        if self.left < 0:
            object.__setattr__(self, "left", self.hysteresis)

    def update(self, *, overflow: bool) -> "LossScale":
        """The loss scale after a step. Raises NonFiniteError for an `overflow` when the scale is at its minimum."""
        steps = self.steps + 1
        if not overflow:
            stable = self.steps - self.last_overflow - 1
            if self.window > 0 and stable > 0 and stable % self.window == 0:
                return evolve(self, scale=self.scale * 2, left=self.hysteresis, steps=steps)
            return evolve(self, left=self.hysteresis if self.consecutive else self.left, steps=steps)
        if self.window == 0:
            return evolve(self, steps=steps, last_overflow=self.steps)
        if self.left > 1:
            return evolve(self, left=self.left - 1, steps=steps, last_overflow=self.steps)
        if self.scale <= self.minimum:
            raise NonFiniteError(
                f"got a gradient overflow with the loss scale already at its minimum of {self.minimum:g}, "
                f"expected finite gradients at this scale: the state is unharmed. Lower the learning rate, "
                "look for a division or a logarithm that leaves fp16's range, or train in bf16"
            )
        return evolve(self, scale=max(self.scale / 2, self.minimum), steps=steps, last_overflow=self.steps)


UNSCALED = LossScale(scale=1.0, window=0)
"""The loss scale of fp32 and bf16: none."""
