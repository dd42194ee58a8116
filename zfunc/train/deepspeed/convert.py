"""`zfunc.from_deepspeed`: a DeepSpeed configuration as arguments of `zfunc.compile` and `zfunc.init`; and what a
configuration adds to the settings of `zfunc train`.

Nothing is dropped silently: what the file sets and what has no effect is logged, the rest is an error.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from os import PathLike
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from zfunc.core.settings import StepSettings
from zfunc.optim.adamw import AdamW
from zfunc.optim.by_name import make_optimizer
from zfunc.optim.loss_scale import LossScale
from zfunc.optim.optimizer_settings import decay_all
from zfunc.train.deepspeed.lr import LR, LRSchedule, lr_schedule
from zfunc.train.deepspeed.reader import ConfigValues, read_config_file, read_values
from zfunc.train.deepspeed.settings import (
    STAGE,
    WEIGHT_DECAY,
    batch_sizes,
    check_complete,
    check_settings,
    decided,
    notes,
    optimizer_arguments,
    optimizer_name,
    peak_lr,
)
from zfunc.train.settings import OPTIMIZER_ARGUMENTS, TrainSettings

log = logging.getLogger("zfunc")


@frozen
class DeepSpeedSettings:
    """A configuration as zfunc's arguments."""

    compile: Mapping[str, Any]  # arguments of zfunc.compile
    loss_scale: LossScale | None  # argument of zfunc.init; None except in fp16
    train_batch_size: int  # sequences of a step over all ranks
    steps_per_print: int | None  # for your own loop, as is wall_clock_breakdown
    wall_clock_breakdown: bool
    notes: tuple[str, ...]  # the lines that were logged


def from_deepspeed(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    world: int = 1,
    given: Mapping[str, Any] | None = None,
    decay: Callable[[str, tuple[int, ...]], bool] = decay_all,
) -> DeepSpeedSettings:
    """Convert a DeepSpeed configuration, a file or a dict, for `zfunc.compile` and `zfunc.init`.

    `world` is the number of ranks. `given` has values, by dotted key, for what the file leaves out or has as
    "auto"; an "auto" without one is the default of `zfunc.compile`, or of the optimizer. `decay(name,
    shape)` selects the parameters that weight decay applies to; all of them by default, as in DeepSpeed without
    parameter groups. Keys without effect are logged. docs/deepspeed.md has every key.

    Raises ValueError for unknown keys, with the nearest known ones, for values of another type, for contradictory
    or missing batch sizes, for what is unsupported, and for `given` values that the file contradicts.

    >>> config = from_deepspeed({
    ...     "train_batch_size": 8,
    ...     "gradient_accumulation_steps": 2,
    ...     "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    ... })
    >>> config.train_batch_size, config.compile["micro_batches"], config.compile["optimizer"].lr
    (8, 2, 0.0003)
    """
    values = read_values(read_config_file(source), given)
    check_complete(values)
    name, arguments = optimizer_name(values), optimizer_arguments(values)
    if not values.leaves_open(LR):
        arguments["lr"] = peak_lr(values)
    optimizer: Any = make_optimizer(name, decay=decay, **arguments)
    rate = lr_schedule(values, getattr(optimizer, "optimizers", (optimizer,))[0].lr)
    if rate is not None:
        optimizer = make_optimizer(name, decay=decay, **{**arguments, "lr": rate})
    settings = {
        "precision": "fp32",
        **({} if values.leaves_open(STAGE) else {"stage": 1}),
        **({} if values.leaves_open("gradient_clipping") else {"clip": values["gradient_clipping"]}),
        **{name: value for name, value, _ in decided(values) if name != "moments"},  # which the optimizer has
    }
    if "clip" in settings:
        settings["clip_norm"] = settings["clip"] or None
    train, settings["micro_batches"], batch = batch_sizes(values, world)
    known = attrs.fields_dict(StepSettings)
    compiled = {"optimizer": optimizer, **{x: value for x, value in settings.items() if x in known}}
    scale = loss_scale(values) if settings["precision"] == "fp16" else None
    lines = [*notes(values, batch, rate, scale)]
    for line in lines:
        log.info("%s: %s", values.source, line)
    every, breakdown = values["steps_per_print"], values["wall_clock_breakdown"]
    return DeepSpeedSettings(MappingProxyType(compiled), scale, train, every, breakdown, tuple(lines))


def loss_scale(values: ConfigValues) -> LossScale:
    """The loss scale of a file that trains in fp16. Raises ValueError for bounds that are none."""
    fixed, window, minimum, power, hysteresis, consecutive = (
        values[f"fp16.{x}"]
        for x in (
            *("loss_scale", "loss_scale_window", "min_loss_scale", "initial_scale_power", "hysteresis"),
            "consecutive_hysteresis",
        )
    )
    if fixed:
        return LossScale(scale=fixed, window=0)
    if not window or not 0 < minimum <= 2.0**power:
        raise ValueError(
            f"{values.source}: fp16: got loss_scale_window {window}, min_loss_scale {minimum} and a first scale of "
            f"2**{power}, expected 1 or more, and the first not below the smallest: correct them, or set loss_scale"
        )
    return LossScale(
        2.0**power, window, hysteresis=hysteresis, minimum=float(minimum), consecutive=consecutive
    )


# --- for zfunc train ---------------------------------------------------------------------------------------


@frozen
class ConfigExtras:
    """What a configuration sets that has no flag in `zfunc train`, with the defaults for none."""

    values: ConfigValues | None = None
    optimizer: Mapping[str, Any] = MappingProxyType({})  # arguments beside lr and weight decay
    loss_scale: LossScale | None = None
    steps_per_print: int | None = None

    def rate(self, lr: float, total: int | None, warmup: int) -> LRSchedule | None:
        """The file's scheduler; `total` and `warmup` count steps, for a file that leaves them open."""
        if self.values is None:
            return None
        return lr_schedule(self.values, lr, total_num_steps=total, warmup=warmup)


@lru_cache(maxsize=4)
def config_extras(settings: TrainSettings) -> ConfigExtras:
    """What `settings.config` adds to the settings. Raises ValueError if they contradict it."""
    usual = OPTIMIZER_ARGUMENTS[settings.optimizer]
    if settings.config is None:
        return ConfigExtras(optimizer=MappingProxyType(dict(usual)))
    source = read_config_file(settings.config)
    values = read_values(source)
    check_settings({f.name: getattr(settings, f.name) for f in attrs.fields(TrainSettings)}, values)
    if values.leaves_open("optimizer.type"):
        values = read_values(source, {"optimizer.type": settings.optimizer})
    own = {k: v for k, v in optimizer_arguments(values).items() if k not in ("weight_decay", "moments")}
    if callable(betas := own.get("betas")) and settings.steps is not None:
        _check_betas(AdamW(betas=betas), settings)
    if values.has("optimizer"):
        usual = {name: x for name, x in usual.items() if values.leaves_open(f"optimizer.params.{name}")}
    scale = loss_scale(values) if settings.precision == "fp16" else None
    return ConfigExtras(values, MappingProxyType({**usual, **own}), scale, values["steps_per_print"])


def _check_betas(adam: AdamW, settings: TrainSettings) -> None:
    """Raise ValueError, before the first update, if a later one would have betas out of range."""
    try:
        for step in range(1, (settings.steps or 0) + 1):
            adam.betas_at(step)
    except ValueError as error:
        message = str(error).partition("; pass")[0]
        raise ValueError(
            f"{settings.config}: {message}: lower scheduler.params.decay_mom_rate, or train fewer steps"
        ) from error


def startup_notes(settings: TrainSettings, world: int, lr: Callable[[int], float]) -> Iterator[str]:
    """The log lines about the file at the start of a training."""
    extras = config_extras(settings)
    if settings.config is None or (values := extras.values) is None:
        return
    rate = lr if isinstance(lr, LRSchedule) else None
    _, _, batch = batch_sizes(values, world, settings.batch_size, settings.micro_batches)
    lines = [*notes(values, batch, rate, extras.loss_scale)]
    if rate is None:
        then = {"cosine": "decays along a cosine", "linear": "decays along a line", "constant": "stays"}
        lines.append(f"no scheduler: the learning rate warms up, then {then[settings.lr_schedule]}")
    if values[WEIGHT_DECAY]:
        lines.append("weight_decay applies to matrices and embeddings, not to norms and biases")
    yield from (f"{settings.config.name}: {line}" for line in lines)
