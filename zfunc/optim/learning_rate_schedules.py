"""Learning rates: pure functions of the step, counted from 1.

Each schedule is a frozen value: it prints, compares and can be kept with a run; there is no state to restore. Any
function `step -> lr` serves as a schedule, and so does a number, as a constant learning rate.
"""

import math
from collections.abc import Callable
from typing import Any

from attrs import field, frozen

from zfunc.values import number, whole


def _checked(check: Callable[..., Any], **bounds: Any) -> Any:
    return lambda owner, x, value: check(f"{type(owner).__name__}: {x.name}", value, **bounds)


_rate, _warmup = _checked(number, least=0, hint="pass such as 1e-4"), _checked(whole, least=0)


@frozen
class LinearWarmup:
    """A learning rate that rises linearly to `lr` at step `warmup` and stays; above 0 from the first step.

    >>> rate = linear_warmup(1.0, warmup=4)
    >>> [rate(step) for step in (1, 2, 4, 100)]
    [0.25, 0.5, 1.0, 1.0]
    """

    lr: float = field(validator=_rate)
    warmup: int = field(validator=_warmup)

    def __call__(self, step: int) -> float:
        """The learning rate of step number `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"the learning rate of step {step}; steps are counted from 1; pass 1 or above")
        return self.lr * (min(1.0, step / self.warmup) if self.warmup else 1.0)


@frozen
class _Decaying(LinearWarmup):
    total: int = field()
    final: float = field(default=0.0, validator=_rate)

    @total.validator  # pyright: ignore
    def _after_the_warmup(self, _: object, value: Any) -> None:
        whole(f"{type(self).__name__}: total, warmup included", value, least=self.warmup + 1)

    def __call__(self, step: int) -> float:
        """The learning rate of step number `step`, counted from 1: a linear warmup, then the fall to `final`."""
        if step <= self.warmup:
            return super().__call__(step)
        gone = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        return self.final + (self.lr - self.final) * self.left(gone)

    def left(self, gone: float) -> float:
        """The fraction of the fall from `lr` to `final` that remains after the fraction `gone` of its steps."""
        raise NotImplementedError


@frozen
class WarmupCosine(_Decaying):
    """A learning rate that rises to `lr` at step `warmup`, then falls along half a cosine to `final` at `total`.

    `final` is a learning rate, not a fraction of `lr` (Loshchilov & Hutter 2017, without restarts).

    >>> rate = warmup_cosine(1.0, warmup=2, total=10, final=0.1)
    >>> [round(rate(step), 3) for step in (1, 2, 6, 10, 11)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    >>> rate
    WarmupCosine(lr=1.0, warmup=2, total=10, final=0.1)
    """

    def left(self, gone: float) -> float:
        """The fraction of the fall from `lr` to `final` that half a cosine leaves after `gone` of its steps."""
        return 0.5 * (1.0 + math.cos(math.pi * gone))


@frozen
class WarmupLinear(_Decaying):
    """A learning rate that rises to `lr` at step `warmup`, then falls linearly to `final` at step `total`.

    >>> rate = warmup_linear(1.0, warmup=2, total=6)
    >>> [rate(step) for step in (1, 2, 3, 6, 9)]
    [0.5, 1.0, 0.75, 0.0, 0.0]
    """

    def left(self, gone: float) -> float:
        """The fraction of the fall from `lr` to `final` that remains after the fraction `gone` of its steps."""
        return 1.0 - gone


@frozen
class Scaled:
    """A learning rate, or a schedule of one, times a constant factor, such as that of a layer.

    >>> rate = scaled(warmup_cosine(1.0, warmup=2, total=10), 0.5)
    >>> rate(1), rate(2)
    (0.25, 0.5)
    """

    rate: Callable[[int], float]
    factor: float = field(validator=_rate)

    def __call__(self, step: int) -> float:
        """The learning rate of step number `step`, counted from 1, times the factor."""
        return self.rate(step) * self.factor


linear_warmup, warmup_cosine, warmup_linear, scaled = LinearWarmup, WarmupCosine, WarmupLinear, Scaled
