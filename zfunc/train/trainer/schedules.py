"""The learning rates of transformers' Trainer: pure functions of the step, counted from 1.

Each gives what `transformers.get_scheduler` gives, whose first step has the rate at 0: a warm-up begins with none.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from attrs import field, frozen

from zfunc.errors import did_you_mean
from zfunc.train.trainer.fields import read_field

WARMUPS, DECAYS = ("linear", "cosine", "1-sqrt"), ("linear", "cosine", "1-sqrt")


@frozen
class TrainerSchedule:
    """The Trainer's learning rate schedule `kind`: `lr` times a factor by step, that rises for `warmup` steps
    and ends at step `total`.

    >>> rate = TrainerSchedule("linear", {}, lr=1.0, warmup=2, total=4)
    >>> [rate(step) for step in (1, 2, 3, 4, 5)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    kind: str
    params: Mapping[str, Any] = field(hash=False)  # all that the kind has
    lr: float
    warmup: int
    total: int

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"the learning rate of step {step}; steps are counted from 1; pass 1 or above")
        given = SimpleNamespace(lr=self.lr, warmup=self.warmup, total=self.total, **self.params)
        return self.lr * SCHEDULES[self.kind][0](given, step - 1)


def check_params(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of schedule `kind`, defaults included. Raises ValueError for a wrong or missing parameter."""
    known, both = SCHEDULES[kind][1], dict(SCHEDULES[kind][1])
    for name, value in params.items():
        if name not in known:
            hint = did_you_mean(name, [*known])
            names = ", ".join(known) or "none"
            raise ValueError(f"got {name!r} for {kind}, expected {names}{hint}: correct lr_scheduler_kwargs")
        words = {"warmup_type": WARMUPS, "decay_type": DECAYS}.get(name)
        plain = read_field([*words] if words else "float", value)
        if value is not None and plain is None:
            raise ValueError(
                f"got {name} {value!r}, expected {', '.join(words or ['a number'])}: correct lr_scheduler_kwargs"
            )
        both[name] = known[name] if value is None else plain
    if "min_lr" in known and (both["min_lr"] is None) == (both["min_lr_rate"] is None):
        raise ValueError(f"got {kind}, expected min_lr or min_lr_rate, one of them, in lr_scheduler_kwargs")
    if "num_decay_steps" in known and both["num_decay_steps"] is None:
        raise ValueError(f"got {kind} without num_decay_steps, expected it in lr_scheduler_kwargs: add it")
    return both


# --- factors of the n-th step, counted from 0 -------------------------------------------------------------


def _rise(p: Any, n: int) -> float | None:
    """The progress at step `n` of the warm-up by parameters `p`, 0 to 1; None when the warm-up is over."""
    return n / max(1, p.warmup) if n < p.warmup else None


def _gone(p: Any, n: int) -> float:
    """The share of the steps after the warm-up that are over at step `n`, by the schedule's parameters `p`."""
    return (n - p.warmup) / max(1, p.total - p.warmup)


def _after_warmup(factor: Callable[[Any, int], float]) -> Callable[[Any, int], float]:
    def warmed(p: Any, n: int) -> float:
        return factor(p, n) if (rise := _rise(p, n)) is None else rise

    return warmed


def _wave(num_cycles: float, gone: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * gone))


def _floor(p: Any) -> float:
    """The least factor on `lr` by the schedule's parameters `p`: min_lr_rate, or min_lr divided by `lr`."""
    return p.min_lr / p.lr if p.min_lr_rate is None else p.min_lr_rate


def _above(factor: float, least: float) -> float:
    return max(0.0, factor * (1.0 - least) + least)


def _restarts(p: Any, n: int) -> float:
    gone = _gone(p, n)
    return 0.0 if gone >= 1.0 else max(0.0, _wave(0.5, p.num_cycles * gone % 1.0))


def _polynomial(p: Any, n: int) -> float:
    left = 0.0 if n > p.total else 1.0 - (n - p.warmup) / max(1, p.total - p.warmup)
    return ((p.lr - p.lr_end) * left**p.power + p.lr_end) / p.lr


def _inverse_sqrt(p: Any, n: int) -> float:
    scale = (p.warmup or 10_000) if p.timescale is None else p.timescale
    return 1.0 / math.sqrt((n + scale - p.warmup) / scale)


def _warm_cosine(p: Any, n: int) -> float:
    """The factor of step `n` by a cosine whose warm-up begins above 0, one step ahead of the other schedules."""
    if n < p.warmup:
        if p.warmup_lr_rate is None:
            return (n + 1.0) / max(1, p.warmup)
        return p.warmup_lr_rate + (1.0 - p.warmup_lr_rate) * n / max(1, p.warmup - 1)
    return _above(_wave(p.num_cycles, _gone(p, n + 1)), _floor(p))


def _stable(p: Any, n: int) -> float:
    """The factor of step `n` by parameters `p`: up in the warm-up, constant at 1, down over `num_decay_steps`."""
    if (rise := _rise(p, n)) is not None:
        shapes = (rise, 0.5 * (1.0 - math.cos(math.pi * rise)), 1.0 - math.sqrt(1.0 - rise))
        return _above(shapes[WARMUPS.index(p.warmup_type)], p.min_lr_ratio)
    flat = p.total - p.warmup - p.num_decay_steps if p.num_stable_steps is None else p.num_stable_steps
    gone = (n - p.warmup - flat) / max(1, p.num_decay_steps)
    if gone < 0:
        return 1.0
    if n >= p.warmup + flat + p.num_decay_steps:
        return p.min_lr_ratio
    shapes = (1.0 - gone, _wave(p.num_cycles, gone), 1.0 - math.sqrt(gone))
    return _above(shapes[DECAYS.index(p.decay_type)], p.min_lr_ratio)


_LEAST = {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}
_STABLE = {
    **{"num_decay_steps": None, "num_stable_steps": None, "warmup_type": "linear", "decay_type": "cosine"},
    **{"min_lr_ratio": 0.0, "num_cycles": 0.5},
}
SCHEDULES: Mapping[str, tuple[Callable[[Any, int], float], Mapping[str, Any]]] = {
    "linear": (_after_warmup(lambda p, n: max(0.0, 1.0 - _gone(p, n))), {}),
    "cosine": (_after_warmup(lambda p, n: _wave(p.num_cycles, _gone(p, n))), {"num_cycles": 0.5}),
    "cosine_with_restarts": (_after_warmup(_restarts), {"num_cycles": 1}),
    "polynomial": (_after_warmup(_polynomial), {"lr_end": 1e-7, "power": 1.0}),
    "constant": (lambda _p, _n: 1.0, {}),
    "constant_with_warmup": (_after_warmup(lambda _p, _n: 1.0), {}),
    "inverse_sqrt": (_after_warmup(_inverse_sqrt), {"timescale": None}),
    "cosine_with_min_lr": (
        _after_warmup(lambda p, n: _above(_wave(p.num_cycles, _gone(p, n)), _floor(p))),
        _LEAST,
    ),
    "cosine_warmup_with_min_lr": (_warm_cosine, {**_LEAST, "warmup_lr_rate": None}),
    "warmup_stable_decay": (_stable, _STABLE),
}
"""Each schedule's factor of the learning rate, and its parameters in lr_scheduler_kwargs with their defaults."""
