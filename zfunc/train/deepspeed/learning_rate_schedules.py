"""DeepSpeed's five learning-rate schedulers, and OneCycle's betas: pure functions of the update, counted from 1.

Each gives, bit by bit, what DeepSpeed 0.19 sets for its n-th update. Its schedulers count batches from -1, and the
first update runs before the scheduler has started: update n uses batch n - 2, the first one an initial value, so a
warm-up moves nothing in its first two. That looks off by one and is kept. Updates skipped for an overflow do not
count, in DeepSpeed or here.

Fields have the file's names. `total_num_steps` is None while the length is not known: then nothing decays.
"""

import math
from typing import Any, Literal, TypeAlias, cast

import attrs
from attrs import frozen

from zfunc.errors import did_you_mean
from zfunc.train.deepspeed.keys import ConfigValues
from zfunc.train.settings import FINAL_LR

PARAMS = "scheduler.params."
WARMUP, MAX_LR = f"{PARAMS}warmup_num_steps", f"{PARAMS}warmup_max_lr"
LR = "optimizer.params.lr"
OWN_SHAPE: dict[str, Any] = {"warmup_type": "linear", "cos_min_ratio": FINAL_LR}  # zfunc's own, for "auto"
BETA2 = 0.99  # of OneCycle, whatever the optimizer's betas are
CYCLE_BETAS = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")


@frozen
class _Scheduler:
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
class LRRangeTest(_Scheduler):
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
class OneCycle(_Scheduler):
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

    def _at(self, batch: int) -> float:
        height = self.height(batch)
        if height is None:
            return self.cycle_min_lr / self.decay(batch, self.decay_lr_rate)
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height

    @property
    def _sizes(self) -> tuple[float, float]:
        """Batches in which the rate rises, and falls."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return float(first), float(first if second is None else second)

    def decay(self, batch: int, rate: float) -> float:
        """The factor of a batch after the cycle: 1, plus `rate` every `decay_step_size` batches."""
        first, second = self._sizes
        return (
            1 + rate * ((batch + 1 - first - second) / self.decay_step_size) if self.decay_step_size else 1.0
        )

    def height(self, batch: int) -> float | None:
        """Where in the cycle a batch is, from 0 at the lower rate to 1 at the higher; None after the cycle."""
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


@frozen
class OneCycleBetas:
    """beta1 falls while the learning rate rises (Smith 2018, section 4), and rises after the cycle.

    The first update has the lowest beta1, though the cycle begins with the highest: DeepSpeed sets betas after it.
    """

    cycle: OneCycle
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __call__(self, step: int) -> tuple[float, float]:
        """The betas of an update, counted from 1. AdamW refuses an update for which beta1 has decayed up to 1."""
        if step == 1:
            return self.cycle_min_mom, BETA2
        height = self.cycle.height(step - 2)
        if height is None:
            return self.cycle_max_mom * self.cycle.decay(step - 2, self.decay_mom_rate), BETA2
        return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height, BETA2


@frozen
class WarmupLR(_Scheduler):
    """Rises to `warmup_max_lr`, along a logarithm or a line, and stays there.

    >>> rate = WarmupLR(warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    >>> [rate(step) for step in (1, 2, 3, 6, 9)]
    [0.0, 0.0, 0.25, 1.0, 1.0]
    """

    warmup_max_lr: float
    warmup_min_lr: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def _at(self, batch: int) -> float:
        return _warmed(self, batch, 1.0)


@frozen
class WarmupDecayLR(_Scheduler):
    """Rises as WarmupLR, then falls along a line, to `warmup_min_lr` at `total_num_steps`."""

    total_num_steps: int | None
    warmup_max_lr: float = 1e-3
    warmup_min_lr: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def _at(self, batch: int) -> float:
        if self.total_num_steps is None:
            return _warmed(self, batch, 1.0)
        span = float(max(1.0, self.total_num_steps - max(2, self.warmup_num_steps)))
        return _warmed(self, batch, max(0.0, float(self.total_num_steps - batch) / span))


@frozen
class WarmupCosineLR(_Scheduler):
    """Rises from `warmup_min_ratio` of the optimizer's `lr`, then falls along half a cosine to `cos_min_ratio`."""

    total_num_steps: int | None
    lr: float
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: Literal["log", "linear"] = "log"

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


LRSchedule: TypeAlias = LRRangeTest | OneCycle | WarmupLR | WarmupDecayLR | WarmupCosineLR
SCHEDULERS: dict[str, type[LRSchedule]] = {
    c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def _warmed(rate: WarmupLR | WarmupDecayLR, batch: int, after: float) -> float:
    """The rate of a batch; `after` is its share of the rise once the warm-up is over."""
    if batch < 0:
        return rate.warmup_min_lr
    rise = _rise(rate, batch)
    return rate.warmup_min_lr + (rate.warmup_max_lr - rate.warmup_min_lr) * (after if rise is None else rise)


def _rise(rate: WarmupLR | WarmupDecayLR | WarmupCosineLR, batch: int) -> float | None:
    """How far the warm-up is, 0 to 1; None when it is over."""
    steps = max(2, rate.warmup_num_steps)  # the logarithm of 1 is 0, and divides
    if batch >= steps:
        return None
    return batch / steps if rate.warmup_type == "linear" else 1.0 / math.log(steps) * math.log(batch + 1)


# --- from a file -----------------------------------------------------------------------------------------


def lr_schedule(
    values: ConfigValues, lr: float, *, warmup: int | None = None, **total: int | None
) -> LRSchedule | None:
    """The scheduler of a file; None without one.

    `lr` is the optimizer's; `warmup` and `total_num_steps` count steps, for a file that leaves them open. Raises
    ValueError for parameters that this scheduler does not take, or lacks.
    """
    if (kind := values["scheduler.type"]) is None:
        return None
    fields = attrs.fields_dict(cast("Any", SCHEDULERS[kind]))
    known = [*fields, *(("cycle_momentum", *CYCLE_BETAS) if kind == "OneCycle" else ())]
    for last in (x.removeprefix(PARAMS) for x in (*values.file, *values.auto) if x.startswith(PARAMS)):
        if last not in known:
            hint = did_you_mean(last, known)
            raise ValueError(
                f"{values.source}: got {PARAMS}{last}, which {kind} does not take{hint}: delete it"
            )
    params: dict[str, Any] = {"lr": lr, **total}
    params |= {name: own for name, own in OWN_SHAPE.items() if values.leaves_open(PARAMS + name)}
    if kind == "WarmupLR" or MAX_LR in values.auto:
        params["warmup_max_lr"] = lr
    if WARMUP in values.auto and warmup is not None:
        params["warmup_num_steps"] = max(1, warmup)
    params |= {name: values[PARAMS + name] for name in known if name != "lr" and values.sets(PARAMS + name)}
    params = {name: value for name, value in params.items() if name in fields}
    lacking = [x.name for x in fields.values() if x.default is attrs.NOTHING and x.name not in params]
    if lacking:
        raise ValueError(
            f"{values.source}: got {kind} without {' and '.join(lacking)}, expected it in scheduler.params: add it"
        )
    return SCHEDULERS[kind](**params)


def cycles_betas(values: ConfigValues) -> bool:
    """Whether OneCycle moves the betas with the learning rate."""
    return values["scheduler.type"] == "OneCycle" and values[f"{PARAMS}cycle_momentum"]


def onecycle_betas(values: ConfigValues) -> OneCycleBetas:
    """OneCycle's betas; only for a file where `cycles_betas` is true."""
    cycle = cast("OneCycle", lr_schedule(values, 0.0))  # it takes nothing of the optimizer's
    return OneCycleBetas(cycle, **{name: values[PARAMS + name] for name in CYCLE_BETAS})


def sets_lr_alone(values: ConfigValues) -> bool:
    """Whether the scheduler's rate does not depend on the optimizer's `lr`."""
    kind = values["scheduler.type"]
    if kind == "WarmupLR":
        return MAX_LR not in values.auto and values.sets(MAX_LR)
    return kind in ("LRRangeTest", "OneCycle") or (kind == "WarmupDecayLR" and MAX_LR not in values.auto)
