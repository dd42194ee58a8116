"""Learning rates: pure functions of the step, counted from 1.

Each is a frozen value, so it prints, compares and can be kept with a run; there is no state to restore.
Any function `step -> lr` serves as well.
"""

import math
from typing import Any

import attrs


def _rate(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{type(instance).__name__}: {attribute.name} is {value!r}; expected a number; pass a float"
        )
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{type(instance).__name__}: {attribute.name} is {value!r}; expected a finite number, "
            "zero or above; pass a learning rate such as 1e-4"
        )


def _warmup(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{type(instance).__name__}: {attribute.name} is {value!r}; expected a whole number of steps, "
            "zero or above; pass 0 for no warmup"
        )


def _total(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= instance.warmup:
        raise ValueError(
            f"{type(instance).__name__}: {attribute.name} is {value!r} and warmup is {instance.warmup}; "
            "expected a whole number of steps above warmup; total counts the warmup too"
        )


@attrs.frozen
class Constant:
    """The same learning rate at every step: what `constant` returns."""

    lr: float = attrs.field(validator=_rate)

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return _ramp(step, 0) * self.lr


@attrs.frozen
class LinearWarmup:
    """A linear rise to `lr` at step `warmup`, then `lr`: what `linear_warmup` returns."""

    lr: float = attrs.field(validator=_rate)
    warmup: int = attrs.field(validator=_warmup)

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return _ramp(step, self.warmup) * self.lr


@attrs.frozen
class WarmupCosine:
    """A linear rise, then half a cosine down to `final` at step `total`: what `warmup_cosine` returns."""

    lr: float = attrs.field(validator=_rate)
    warmup: int = attrs.field(validator=_warmup)
    total: int = attrs.field(validator=_total)
    final: float = attrs.field(default=0.0, validator=_rate)

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return _ramp(step, self.warmup) * self.lr
        left = 0.5 * (1.0 + math.cos(math.pi * _progress(step, self.warmup, self.total)))
        return self.final + (self.lr - self.final) * left


@attrs.frozen
class WarmupLinear:
    """A linear rise, then a line down to `final` at step `total`: what `warmup_linear` returns."""

    lr: float = attrs.field(validator=_rate)
    warmup: int = attrs.field(validator=_warmup)
    total: int = attrs.field(validator=_total)
    final: float = attrs.field(default=0.0, validator=_rate)

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return _ramp(step, self.warmup) * self.lr
        return self.final + (self.lr - self.final) * (1.0 - _progress(step, self.warmup, self.total))


def constant(lr: float) -> Constant:
    """The same learning rate at every step.

    >>> constant(1e-3)(7)
    0.001
    """
    return Constant(lr)


def linear_warmup(lr: float, warmup: int) -> LinearWarmup:
    """Rise linearly, reach `lr` at step `warmup`, stay there. The first step already moves.

    >>> rate = linear_warmup(1.0, warmup=4)
    >>> [rate(step) for step in (1, 2, 4, 100)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return LinearWarmup(lr, warmup)


def warmup_cosine(lr: float, warmup: int, total: int, final: float = 0.0) -> WarmupCosine:
    """Rise to `lr` at step `warmup`, then fall along half a cosine to `final` at step `total`; stay there.

    `final` is a learning rate, not a fraction of `lr` (Loshchilov & Hutter 2017, without restarts).

    >>> rate = warmup_cosine(1.0, warmup=2, total=10, final=0.1)
    >>> [round(rate(step), 3) for step in (1, 2, 6, 10, 11)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    >>> rate
    WarmupCosine(lr=1.0, warmup=2, total=10, final=0.1)
    """
    return WarmupCosine(lr, warmup, total, final)


def warmup_linear(lr: float, warmup: int, total: int, final: float = 0.0) -> WarmupLinear:
    """Rise to `lr` at step `warmup`, then fall linearly to `final` at step `total`; stay there.

    >>> rate = warmup_linear(1.0, warmup=2, total=6)
    >>> [rate(step) for step in (1, 2, 3, 6, 9)]
    [0.5, 1.0, 0.75, 0.0, 0.0]
    """
    return WarmupLinear(lr, warmup, total, final)


def _ramp(step: int, warmup: int) -> float:
    if step < 1:
        raise ValueError(f"the learning rate of step {step}; steps are counted from 1; pass 1 or above")
    return min(1.0, step / warmup) if warmup else 1.0


def _progress(step: int, warmup: int, total: int) -> float:
    return min(1.0, (step - warmup) / (total - warmup))
