"""DeepSpeed's five learning-rate schedulers, and OneCycle's betas: pure functions of the update, counted from 1.

Each gives, bit by bit, what DeepSpeed 0.19 sets for its n-th update. Its schedulers count batches from -1, and the
first update runs before the scheduler has started: update n uses batch n - 2, the first one an initial value, so a
warm-up moves nothing in its first two. That looks off by one and is kept. Updates skipped for an overflow do not
count, in DeepSpeed or here.

Fields have the names and defaults of the file's keys. `total_num_steps` is None while the length is not known: then
nothing decays.
"""

import math
from typing import Any, Literal, cast

import attrs
from attrs import frozen

from zfunc.train.deepspeed.keys import ConfigValues
from zfunc.train.settings import FINAL_LR

PARAMS = "scheduler.params."
BETA2 = 0.99  # of OneCycle, whatever the optimizer's betas are


@frozen
class LRSchedule:
    """A learning rate whose fields are keys of the file."""

    def __call__(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        if step < 1:
            raise ValueError(f"the learning rate of step {step}; steps are counted from 1; pass 1 or above")
        return self._at(step - 2)

    def _at(self, batch: int) -> float:
        """The learning rate of a batch as DeepSpeed counts them; -1 is the first update's."""
        raise NotImplementedError


@frozen
class LRRangeTest(LRSchedule):
    """Rises from `lr_range_test_min_lr` without end, to find the highest that trains (Smith 2018, section 3)."""

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def _at(self, batch: int) -> float:
        interval = float(batch + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)


@frozen
class OneCycle(LRSchedule):
    """One cycle up and down between two rates, then a decay from the lower one (Smith 2018, section 4).

    `betas` of an update: beta1 falls while the rate rises, and rises after the cycle.

    >>> rate = OneCycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=2)
    >>> [rate(step) for step in (1, 2, 3, 4, 5, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def _at(self, batch: int) -> float:
        height = self._height(batch)
        if height is None:
            return self.cycle_min_lr / self._decay(batch, self.decay_lr_rate)
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height

    def betas(self, step: int) -> tuple[float, float]:
        """The betas of an update, counted from 1. AdamW refuses an update for which beta1 has decayed up to 1.

        The first has the lowest beta1, though the cycle begins with the highest: DeepSpeed sets betas after it.
        """
        if step == 1:
            return self.cycle_min_mom, BETA2
        height = self._height(step - 2)
        if height is None:
            return self.cycle_max_mom * self._decay(step - 2, self.decay_mom_rate), BETA2
        return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height, BETA2

    @property
    def _sizes(self) -> tuple[float, float]:
        """Batches in which the rate rises, and falls."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return float(first), float(first if second is None else second)

    def _decay(self, batch: int, rate: float) -> float:
        """The factor of a batch after the cycle: 1, plus `rate` every `decay_step_size` batches."""
        if not self.decay_step_size:
            return 1.0
        first, second = self._sizes
        return 1 + rate * ((batch + 1 - first - second) / self.decay_step_size)

    def _height(self, batch: int) -> float | None:
        """The position of a batch in the cycle, 0 at the lower rate to 1 at the higher; None after it."""
        first, second = self._sizes
        total = first + second
        if batch >= total:
            return None
        batch += 1
        ratio = first / total  # in DeepSpeed's order of operations, for the same bits
        x = 1.0 + batch / total - math.floor(1 + batch / total)
        rising, stairs = x <= ratio, self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs > 0:
            at = batch % total
            up = at * stairs / first if at <= first else (total - at) * stairs / second
            return math.floor(up) / stairs
        return x / ratio if rising else (x - 1) / (ratio - 1)


@frozen(kw_only=True)
class WarmupLR(LRSchedule):
    """Rises from `warmup_min_lr` to `warmup_max_lr`, along a logarithm or a line, and stays there; or, as
    WarmupDecayLR, falls along a line, back at `total_num_steps`.

    >>> rate = WarmupLR(warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    >>> [rate(step) for step in (1, 2, 3, 6, 9)]
    [0.0, 0.0, 0.25, 1.0, 1.0]
    """

    warmup_min_lr: float = 0.0
    warmup_max_lr: float = 1e-3
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"
    total_num_steps: int | None = None

    def _at(self, batch: int) -> float:
        if batch < 0:
            return self.warmup_min_lr
        rise, total = _rise(self, batch), self.total_num_steps
        if rise is None and total is not None:
            span = float(max(1.0, total - max(2, self.warmup_num_steps)))
            rise = max(0.0, float(total - batch) / span)
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * (
            1.0 if rise is None else rise
        )


@frozen(kw_only=True)
class WarmupCosineLR(LRSchedule):
    """Rises from `warmup_min_ratio` of the optimizer's `lr`, then falls along half a cosine to `cos_min_ratio`."""

    lr: float
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"
    cos_min_ratio: float = 0.0001
    total_num_steps: int | None = None

    def _at(self, batch: int) -> float:
        if batch < 0:
            return 0.0
        if (rise := _rise(self, batch)) is not None:
            return self.lr * (self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio))
        if self.total_num_steps is None:
            return self.lr
        warmup = max(2, self.warmup_num_steps)
        progress = min(1.0, (batch - warmup + 1) / max(1, self.total_num_steps - warmup))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return self.lr * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


def _rise(rate: WarmupLR | WarmupCosineLR, batch: int) -> float | None:
    """The progress of the warm-up, 0 to 1; None when it is over."""
    steps = max(2, rate.warmup_num_steps)  # the logarithm of 1 is 0, and divides
    if batch >= steps:
        return None
    return batch / steps if rate.warmup_type == "linear" else 1.0 / math.log(steps) * math.log(batch + 1)


# --- from a file -----------------------------------------------------------------------------------------

SCHEDULERS: dict[str, type[LRSchedule]] = {
    **{x.__name__: x for x in (LRRangeTest, OneCycle, WarmupLR, WarmupCosineLR)},
    "WarmupDecayLR": WarmupLR,
}


def params_of(kind: str) -> list[str]:
    """The names that a scheduler has in `scheduler.params`."""
    without = ("lr", "total_num_steps" if kind == "WarmupLR" else "")
    return [x.name for x in attrs.fields(cast("Any", SCHEDULERS[kind])) if x.name not in without]


def lr_schedule(values: ConfigValues, **own: Any) -> LRSchedule | None:
    """The scheduler of a file; None without one.

    `own` are the optimizer's `lr`, and the caller's `total_num_steps` and `warmup_num_steps`, for what the file
    leaves open. Raises ValueError for parameters that the file and the caller lack.
    """
    if (kind := values["scheduler.type"]) is None:
        return None
    own = {"warmup_max_lr": own["lr"], "warmup_type": "linear", "cos_min_ratio": FINAL_LR, **own}
    without_key = ("total_num_steps", "warmup_max_lr" if kind == "WarmupLR" else "")
    params = {"lr": own["lr"]} if kind == "WarmupCosineLR" else {}
    for name in params_of(kind):
        if values.sets(PARAMS + name):
            params[name] = values[PARAMS + name]
        elif name in own and (name in without_key or values.leaves_open(PARAMS + name)):
            params[name] = own[name]
    needed = {*params_of(kind)} & {"total_num_steps", "cycle_min_lr", "cycle_max_lr"}
    if lacking := sorted(needed - params.keys(), reverse=True):
        raise ValueError(
            f"{values.source}: got {kind} without {' and '.join(lacking)}, expected it in scheduler.params: add it"
        )
    return SCHEDULERS[kind](**params)


def moved_betas(values: ConfigValues) -> dict[str, Any]:
    """The argument `betas` of an optimizer, where OneCycle moves them with the learning rate."""
    rate = lr_schedule(values, lr=0.0) if values["scheduler.type"] == "OneCycle" else None
    return {"betas": rate.betas} if isinstance(rate, OneCycle) and rate.cycle_momentum else {}
