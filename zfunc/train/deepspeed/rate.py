"""The learning rate that a file asks for, of the optimizer's `lr` and the `scheduler`.

The invariant: parameters of a scheduler are fields of its class, so what another one takes is refused by name.
"""

from typing import Any, cast

import attrs

from zfunc.errors import did_you_mean
from zfunc.train.deepspeed.key import NO_EFFECT, REFUSED
from zfunc.train.deepspeed.schedules import SCHEDULES, Schedule
from zfunc.train.deepspeed.table import KEYS
from zfunc.train.deepspeed.values import ResolvedValues

PARAMS = "scheduler.params."
TOTAL, WARMUP, MAX_LR = f"{PARAMS}total_num_steps", f"{PARAMS}warmup_num_steps", f"{PARAMS}warmup_max_lr"
LR = "optimizer.params.lr"
_CYCLE = ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate")  # of OneCycle's betas


def schedule(
    values: ResolvedValues, *, lr: float, total: int | None = None, warmup: int | None = None
) -> Schedule | None:
    """The scheduler of the file, or None where it has none.

    `lr` is the optimizer's; `total` steps and `warmup` steps are for a file that leaves them open. Raises
    ValueError for parameters that this scheduler does not take, or lacks.
    """
    kind = values["scheduler.type"]
    if kind is None:
        if values.has("scheduler"):
            raise ValueError(
                f"{values.source}: got a scheduler without a type, expected one of {', '.join(SCHEDULES)}: add it"
            )
        return None
    fields = [f.name for f in attrs.fields(cast("Any", SCHEDULES[kind]))]
    _check_names(values, kind, fields)
    told = {name: values[PARAMS + name] for name in fields if values.says(PARAMS + name)}
    if "lr" in fields:
        told["lr"] = lr
    if "warmup_max_lr" in fields and (MAX_LR in values.auto or kind == "WarmupLR"):
        told.setdefault("warmup_max_lr", lr)
    if "warmup_num_steps" in fields and WARMUP in values.auto and warmup is not None:
        told.setdefault("warmup_num_steps", max(1, warmup))
    if "total_num_steps" in fields:
        told.setdefault("total_num_steps", total)
    if lacking := [f.name for f in attrs.fields(cast("Any", SCHEDULES[kind])) if _lacks(f, told)]:
        raise ValueError(
            f"{values.source}: got {kind} without {' and '.join(lacking)}, expected it in scheduler.params: add it"
        )
    return SCHEDULES[kind](**told)


def sets_lr_alone(values: ResolvedValues) -> bool:
    """Whether the scheduler's rate has nothing of the optimizer's `lr`."""
    kind = values["scheduler.type"]
    return kind in ("LRRangeTest", "OneCycle") or (
        kind in ("WarmupLR", "WarmupDecayLR")
        and MAX_LR not in values.auto
        and (values.says(MAX_LR) or kind != "WarmupLR")
    )


def _lacks(field: Any, told: dict[str, Any]) -> bool:
    return field.default is attrs.NOTHING and field.name not in told


def _check_names(values: ResolvedValues, kind: str, fields: list[str]) -> None:
    known = [*fields, *(_CYCLE if kind == "OneCycle" else ())]
    for name in (*values.file, *values.auto):
        last = name.removeprefix(PARAMS)
        if last == name or last in known or KEYS[name].fate == REFUSED:
            continue
        if last == "lr" or KEYS[name].fate != NO_EFFECT or kind != "OneCycle":
            raise ValueError(
                f"{values.source}: got {name}, which {kind} does not take{did_you_mean(last, known)}, expected "
                f"{', '.join(known)}: correct or delete it"
            )
