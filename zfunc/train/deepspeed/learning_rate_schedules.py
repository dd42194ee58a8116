"""DeepSpeed's five learning-rate schedulers, and OneCycle's betas: pure functions of the update, counted from 1.

Each gives, bit by bit, what DeepSpeed 0.19 sets for its n-th update. Its schedulers count batches from -1, and the
first update runs before the scheduler has started: update n uses batch n - 2, the first one an initial value, so a
warm-up moves nothing in its first two. That looks off by one and is kept. Updates skipped for an overflow do not
count, in DeepSpeed or here.

A scheduler is a function of a batch and of its parameters, whose names and defaults are the file's keys.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from attrs import field, frozen

from zfunc.train.deepspeed.keys import KEYS, ConfigValues
from zfunc.train.settings import FINAL_LR

PARAMS = "scheduler.params."
BETA2 = 0.99  # of OneCycle, whatever the optimizer's betas are


@frozen
class LRSchedule:
    """A learning rate by step, as scheduler `kind` of a DeepSpeed file computes it from all of its `params`.

    >>> params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
    >>> rate = LRSchedule("WarmupLR", params)
    >>> [rate(step) for step in (1, 2, 3, 6, 9)]
    [0.0, 0.0, 0.25, 1.0, 1.0]
    """

    kind: str
    params: Mapping[str, Any] = field(hash=False)

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1."""
        if step < 1:
            raise ValueError(f"the learning rate of step {step}; steps are counted from 1; pass 1 or above")
        return SCHEDULERS[self.kind][0](SimpleNamespace(**self.params), step - 2)

    def betas(self, step: int) -> tuple[float, float]:
        """The Adam betas of update `step` under OneCycle. AdamW refuses an update whose beta1 has reached 1."""
        return one_cycle_betas(SimpleNamespace(**self.params), step - 2)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.params.items())


# --- of a batch, counted as DeepSpeed does; -1 is the first update's --------------------------------------


def range_test(p: Any, batch: int) -> float:
    """LRRangeTest: the rate of `batch` by parameters `p`, rising to find the highest that trains (Smith 2018)."""
    interval = float(batch + 1) / p.lr_range_test_step_size
    if p.lr_range_test_staircase:
        interval = math.floor(interval)
    return p.lr_range_test_min_lr * (1 + p.lr_range_test_step_rate * interval)


def one_cycle(p: Any, batch: int) -> float:
    """OneCycle's rate by parameters `p`: up and down once, then a decay from the lower (Smith 2018, section 4)."""
    height, gone = _cycle(p, batch)
    if height is None:
        return p.cycle_min_lr / (1 + p.decay_lr_rate * gone)
    return p.cycle_min_lr + (p.cycle_max_lr - p.cycle_min_lr) * height


def one_cycle_betas(p: Any, batch: int) -> tuple[float, float]:
    """The Adam betas of `batch` by OneCycle's parameters `p`: beta1 falls while the rate rises, and rises
    after the cycle. The first update has the lowest beta1, as DeepSpeed sets betas only after an update."""
    height, gone = _cycle(p, batch)
    if batch < 0:
        return p.cycle_min_mom, BETA2
    if height is None:
        return p.cycle_max_mom * (1 + p.decay_mom_rate * gone), BETA2
    return p.cycle_max_mom - (p.cycle_max_mom - p.cycle_min_mom) * height, BETA2


def _cycle(p: Any, batch: int) -> tuple[float | None, float]:
    """The position of `batch` in OneCycle's cycle, from 0 at the lower rate to 1 at the higher, None after the
    cycle; and how often `decay_step_size` batches have passed since the cycle."""
    first, second = p.cycle_first_step_size, p.cycle_second_step_size
    first, second = float(first), float(first if second is None else second)
    total = first + second
    if batch >= total:
        return None, (batch + 1 - first - second) / p.decay_step_size if p.decay_step_size else 0.0
    batch += 1
    ratio = first / total  # in DeepSpeed's order of operations, for the same bits
    x = 1.0 + batch / total - math.floor(1 + batch / total)
    rising, stairs = x <= ratio, p.cycle_first_stair_count
    if not rising and p.cycle_second_stair_count is not None:
        stairs = p.cycle_second_stair_count
    if stairs > 0:
        at = batch % total
        up = at * stairs / first if at <= first else (total - at) * stairs / second
        return math.floor(up) / stairs, 0.0
    return x / ratio if rising else (x - 1) / (ratio - 1), 0.0


def warmup(p: Any, batch: int) -> float:
    """WarmupLR by parameters `p`: the rate rises along a logarithm or a line, and stays; with `total_num_steps`,
    WarmupDecayLR: the rate falls again along a line, down to the minimum at that step."""
    if batch < 0:
        return p.warmup_min_lr
    rise, total = _rise(p, batch), getattr(p, "total_num_steps", None)
    if rise is None and total is not None:
        rise = max(0.0, float(total - batch) / float(max(1.0, total - max(2, p.warmup_num_steps))))
    return p.warmup_min_lr + (p.warmup_max_lr - p.warmup_min_lr) * (1.0 if rise is None else rise)


def warmup_cosine(p: Any, batch: int) -> float:
    """WarmupCosineLR: the rate rises from `lr` times a ratio of parameters `p`, then falls along half a cosine."""
    if batch < 0:
        return 0.0
    if (rise := _rise(p, batch)) is not None:
        return p.lr * (p.warmup_min_ratio + rise * (1.0 - p.warmup_min_ratio))
    if p.total_num_steps is None:
        return p.lr
    steps = max(2, p.warmup_num_steps)
    progress = min(1.0, (batch - steps + 1) / max(1, p.total_num_steps - steps))
    ratio = (1 + math.cos(math.pi * progress)) / 2
    return p.lr * max(0.0, p.cos_min_ratio + (1.0 - p.cos_min_ratio) * ratio)


def _rise(p: Any, batch: int) -> float | None:
    """The progress at `batch` of the warm-up by parameters `p`, 0 to 1; None when the warm-up is over."""
    steps = max(2, p.warmup_num_steps)  # the logarithm of 1 is 0, and divides
    if batch >= steps:
        return None
    return batch / steps if p.warmup_type == "linear" else 1.0 / math.log(steps) * math.log(batch + 1)


# --- from a file -----------------------------------------------------------------------------------------


def _names(*begin: str) -> tuple[str, ...]:
    """The names of keys in DeepSpeed's `scheduler.params` that start with one of `begin`."""
    return tuple(name for x in KEYS if (name := x.removeprefix(PARAMS)).startswith(begin) and name != x)


_WARMUP = ("warmup_num_steps", "warmup_type")
SCHEDULERS: Mapping[str, tuple[Callable[[Any, int], float], tuple[str, ...]]] = {
    "LRRangeTest": (range_test, _names("lr_range_test_")),
    "OneCycle": (one_cycle, _names("cycle_", "decay_")),
    "WarmupLR": (warmup, ("warmup_min_lr", "warmup_max_lr", *_WARMUP)),
    "WarmupDecayLR": (warmup, ("warmup_min_lr", "warmup_max_lr", *_WARMUP, "total_num_steps")),
    "WarmupCosineLR": (warmup_cosine, ("warmup_min_ratio", *_WARMUP, "cos_min_ratio", "total_num_steps")),
}
"""Each scheduler, and the names that it has in `scheduler.params`."""
_NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")  # they have no default


def lr_schedule(values: ConfigValues, **own: Any) -> LRSchedule | None:
    """The learning rate schedule of a DeepSpeed file; None if the file has no scheduler.

    `own` are the optimizer's `lr`, and the caller's `total_num_steps` and `warmup_num_steps`, for what the file
    leaves open. Raises ValueError for parameters that neither the file nor the caller gives.
    """
    if (kind := values["scheduler.type"]) is None:
        return None
    own = {"warmup_max_lr": own["lr"], "warmup_type": "linear", "cos_min_ratio": FINAL_LR, **own}
    without_key = ("total_num_steps", "warmup_max_lr" if kind == "WarmupLR" else "")
    params = {"lr": own["lr"]} if kind == "WarmupCosineLR" else {}
    for name in SCHEDULERS[kind][1]:
        key = PARAMS + name
        if name in own and (values.leaves_open(key) or (name in without_key and not values.sets(key))):
            params[name] = own[name]
        elif values.sets(key) or name not in _NEEDED:
            params[name] = values[key]
    if kind == "WarmupDecayLR" and params["warmup_max_lr"] is None:
        params["warmup_max_lr"] = 1e-3
    if lacking := [x for x in _NEEDED if x in SCHEDULERS[kind][1] and x not in params]:
        raise ValueError(
            f"{values.source}: got {kind} without {' and '.join(lacking)}, expected it in scheduler.params: add it"
        )
    return LRSchedule(kind, params)


def moved_betas(values: ConfigValues) -> dict[str, Any]:
    """The optimizer argument `betas`, a function of the step, if OneCycle cycles momentum; else no argument."""
    rate = lr_schedule(values, lr=0.0) if values["scheduler.type"] == "OneCycle" else None
    return {"betas": rate.betas} if rate is not None and rate.params["cycle_momentum"] else {}
