"""The five learning rates that files name: pure functions of the update, counted from 1.

The invariant: each gives, bit by bit, what DeepSpeed 0.19 sets for its n-th update. There a scheduler counts
batches from -1 and is asked before it has started: update n uses batch n - 2, the first update an initial value, so
that a warm-up moves nothing in its first two. That is kept, off by one as it may look. An update that an
overflow skips does not count, there and here.

Fields are the names of the file. `total_num_steps` may be None, not known yet: nothing decays then.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from zfunc.train.deepspeed.table import KEYS


@frozen
class LRRangeTest:
    """Rises from `lr_range_test_min_lr` without end, to find the highest that trains (Smith 2018, section 3).

    >>> rate = LRRangeTest(lr_range_test_min_lr=1.0, lr_range_test_step_size=2)
    >>> [rate(step) for step in (1, 2, 3)]
    [1.0, 1.5, 2.0]
    """

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __attrs_post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        interval = float(_counted(step) - 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)


@frozen
class OneCycle:
    """One cycle up and down between two rates, then a decay from the lower one (Smith 2018, section 4).

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

    def __attrs_post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        height = self.height(step)
        if height is None:
            return self.cycle_min_lr / self.decay(step, self.decay_lr_rate)
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height

    def height(self, step: int) -> float | None:
        """Where in the cycle an update is between the lower rate, 0, and the higher, 1; None after it."""
        last, total = _counted(step) - 2, self._first + self._second
        return self._height(last + 1, total) if last < total else None

    def decay(self, step: int, rate: float) -> float:
        """What has become of 1 in an update after the cycle, with `rate` of it more every `decay_step_size`."""
        if not self.decay_step_size:
            return 1.0
        return 1 + rate * ((_counted(step) - 1 - self._first - self._second) / self.decay_step_size)

    @property
    def _first(self) -> float:
        return float(self.cycle_first_step_size)

    @property
    def _second(self) -> float:
        return self._first if self.cycle_second_step_size is None else float(self.cycle_second_step_size)

    def _height(self, batch: int, total: float) -> float:
        """Where between the two rates, 0 to 1, in the order of operations there: the bits are to be the same."""
        ratio = self._first / total
        x = 1.0 + batch / total - math.floor(1 + batch / total)
        rising = x <= ratio
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs > 0:
            at = batch % total
            up = at * stairs / self._first if at <= self._first else (total - at) * stairs / self._second
            return math.floor(up) / stairs
        return x / ratio if rising else (x - 1) / (ratio - 1)


@frozen
class WarmupLR:
    """Rises to `warmup_max_lr`, along a logarithm or a line, and stays there.

    >>> rate = WarmupLR(warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    >>> [rate(step) for step in (1, 2, 3, 6, 9)]
    [0.0, 0.0, 0.25, 1.0, 1.0]
    """

    warmup_max_lr: float
    warmup_min_lr: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def __attrs_post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        return _warmed(self, step, lambda _: 1.0)


@frozen
class WarmupDecayLR:
    """Rises as WarmupLR, then falls along a line, to `warmup_min_lr` at `total_num_steps`.

    >>> rate = WarmupDecayLR(total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear")
    >>> [rate(step) for step in (1, 2, 3, 4, 6, 8)]
    [0.0, 0.0, 0.5, 1.0, 0.5, 0.0]
    """

    total_num_steps: int | None
    warmup_max_lr: float = 1e-3
    warmup_min_lr: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def __attrs_post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        return _warmed(self, step, self._fall)

    def _fall(self, last: int) -> float:
        if self.total_num_steps is None:
            return 1.0
        span = float(max(1.0, self.total_num_steps - _steps(self.warmup_num_steps)))
        return max(0.0, float(self.total_num_steps - last) / span)


@frozen
class WarmupCosineLR:
    """Rises from `warmup_min_ratio` of the optimizer's `lr`, then falls along half a cosine to `cos_min_ratio`.

    >>> rate = WarmupCosineLR(4, lr=1.0, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.0)
    >>> [round(rate(step), 3) for step in (1, 2, 3, 4, 5, 9)]
    [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    """

    total_num_steps: int | None
    lr: float
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: Literal["log", "linear"] = "log"

    def __attrs_post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        last = _counted(step) - 2
        if last < 0:
            return 0.0
        rise = _rise(last, self.warmup_num_steps, self.warmup_type)
        if rise is not None:
            return self.lr * (self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio))
        return self.lr * self._fall(last)

    def _fall(self, last: int) -> float:
        if self.total_num_steps is None:
            return 1.0
        warm = _steps(self.warmup_num_steps)
        progress = min(1.0, (last - warm + 1) / max(1, self.total_num_steps - warm))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


Schedule: TypeAlias = LRRangeTest | OneCycle | WarmupLR | WarmupDecayLR | WarmupCosineLR
SCHEDULES: dict[str, type[Schedule]] = {
    c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def _check(rate: Any) -> None:
    """Every field by its key's row in the table."""
    for name, value in attrs.asdict(rate).items():
        takes = KEYS["optimizer.params.lr" if name == "lr" else f"scheduler.params.{name}"].takes
        if value is not None and takes.read(value) is None:
            raise ValueError(f"{type(rate).__name__}: {name} is {value!r}; expected {takes.told}; correct it")


def _counted(step: int) -> int:
    if step < 1:
        raise ValueError(f"the learning rate of step {step}; steps are counted from 1; pass 1 or above")
    return step


def _steps(warmup: int) -> int:
    return max(2, warmup)  # a logarithm of 1 is no divisor


def _warmed(rate: WarmupLR | WarmupDecayLR, step: int, after: Callable[[int], float]) -> float:
    """The rate of an update: `after` says what share of the way up is left of it when the warm-up is over."""
    last = _counted(step) - 2
    if last < 0:
        return rate.warmup_min_lr
    rise = _rise(last, rate.warmup_num_steps, rate.warmup_type)
    gamma = after(last) if rise is None else rise
    return rate.warmup_min_lr + (rate.warmup_max_lr - rate.warmup_min_lr) * gamma


def _rise(last: int, warmup: int, kind: str) -> float | None:
    """How far the warm-up is, 0 to 1; None when it is over."""
    if last >= _steps(warmup):
        return None
    if kind == "linear":
        return last / _steps(warmup)
    return 1.0 / math.log(_steps(warmup)) * math.log(last + 1)
