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

from zfunc.optim.adamw import AdamW
from zfunc.optim.by_name import make_optimizer
from zfunc.optim.loss_scale import LossScale
from zfunc.optim.optimizer_settings import decay_all
from zfunc.train.deepspeed import arguments
from zfunc.train.deepspeed.arguments import (
    BUCKET_SIZE,
    DEVICE,
    RATIO,
    batch_sizes,
    optimizer_arguments,
    optimizer_name,
    peak_lr,
    placement,
    zero_stage,
)
from zfunc.train.deepspeed.cli_merge import PLACES, SINK_BLOCKS, flags_by_key
from zfunc.train.deepspeed.lr import LRSchedule, WarmupCosineLR, WarmupDecayLR, lr_schedule
from zfunc.train.deepspeed.messages import decision_notes, name_notes
from zfunc.train.deepspeed.reader import read_config_file
from zfunc.train.deepspeed.resolved import GivenValue, ResolvedValues, resolve_values
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
    "auto". `decay(name, shape)` selects the parameters that weight decay applies to; all of them by default, as in
    DeepSpeed without parameter groups. Keys without effect are logged. docs/deepspeed.md has every key.

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
    given_values = {name: GivenValue(value, f"given[{name!r}]") for name, value in (given or {}).items()}
    values = resolve_values(read_config_file(source), given_values)
    lr = peak_lr(values)
    rate = lr_schedule(values, lr=lr)
    optimizer = make_optimizer(
        optimizer_name(values), lr=lr if rate is None else rate, decay=decay, **optimizer_arguments(values)
    )
    if isinstance(rate, WarmupDecayLR | WarmupCosineLR) and rate.total_num_steps is None:
        raise ValueError(
            f"{values.source}: got {values['scheduler.type']} without its total_num_steps, expected the steps of "
            'the training: write them, or pass given={"scheduler.params.total_num_steps": ...}'
        )
    precision = arguments.precision(values) or "fp32"
    scale = arguments.loss_scale(values) if precision == "fp16" else None
    batch = batch_sizes(values, world)
    compiled: dict[str, Any] = {
        "optimizer": optimizer,
        "precision": precision,
        "clip_norm": values["gradient_clipping"] or None,
        "micro_batches": batch.accumulation,
        "stage": zero_stage(values),
        **placement(values),
    }
    if values.sets(BUCKET_SIZE):
        compiled["bucket_size"] = values[BUCKET_SIZE]
    if values.sets(DEVICE) or values.sets(RATIO):
        compiled["offload_ratio"] = arguments.offload_ratio(values)
    notes = (*name_notes(values), *decision_notes(values, batch, rate, scale), *_sink_notes(values))
    for line in notes:
        log.info("%s: %s", values.source, line)
    every, breakdown = values["steps_per_print"], values["wall_clock_breakdown"]
    return DeepSpeedSettings(MappingProxyType(compiled), scale, batch.train, every, breakdown, notes)


def _sink_notes(values: ResolvedValues) -> Iterator[str]:
    """Blocks that only `zfunc train` acts on."""
    for block, key in SINK_BLOCKS.items():
        if values[key]:
            yield f"{block}: only `zfunc train` writes it; log the metrics of train_step in your own loop"


# --- for zfunc train ---------------------------------------------------------------------------------------


@frozen
class ConfigExtras:
    """What a configuration sets that has no flag in `zfunc train`, with the defaults for none."""

    values: ResolvedValues | None = None
    optimizer: Mapping[str, Any] = MappingProxyType({})  # arguments beside lr and weight decay
    loss_scale: LossScale | None = None
    steps_per_print: int | None = None

    def rate(self, lr: float, total: int | None, warmup: int) -> LRSchedule | None:
        """The file's scheduler; `total` and `warmup` count steps, for a file that leaves them open."""
        return None if self.values is None else lr_schedule(self.values, lr=lr, total=total, warmup=warmup)


@lru_cache(maxsize=4)
def config_extras(settings: TrainSettings) -> ConfigExtras:
    """What `settings.config` adds to the settings. Raises ValueError if they contradict it."""
    usual = OPTIMIZER_ARGUMENTS[settings.optimizer]
    if settings.config is None:
        return ConfigExtras(optimizer=MappingProxyType(dict(usual)))
    flags = attrs.asdict(settings)
    del flags["offload_ratio"], flags["moments"]
    source = read_config_file(settings.config)
    # The settings have them.
    decided = resolve_values(source).file.keys() & {key for key, _ in PLACES.values()}
    given = {key: value for key, value in flags_by_key(flags).items() if key not in decided}
    values = resolve_values(source, given)
    arguments_in_file = optimizer_arguments(values)
    own = {k: v for k, v in arguments_in_file.items() if k not in ("weight_decay", "moments")}
    if callable(betas := own.get("betas")) and settings.steps is not None:
        _check_betas(AdamW(betas=betas), settings)
    return ConfigExtras(
        values,
        MappingProxyType({**({} if values.has("optimizer") else usual), **own}),
        arguments.loss_scale(values) if settings.precision == "fp16" else None,
        values["steps_per_print"],
    )


def _check_betas(adam: AdamW, settings: TrainSettings) -> None:
    """Raise ValueError, before the first update, if a later one would have betas out of range."""
    try:
        for step in range(1, (settings.steps or 0) + 1):
            adam.betas_at(step)
    except ValueError as error:
        message = str(error).partition("; pass")[0]
        raise ValueError(
            f"{settings.config}: {message}: lower scheduler.params.decay_mom_rate, or train fewer than {step} "
            "--steps"
        ) from error


def startup_notes(settings: TrainSettings, world: int, lr: Callable[[int], float]) -> Iterator[str]:
    """The log lines about the file at the start of a training."""
    values = config_extras(settings).values
    if settings.config is None or values is None:
        return
    rate = lr if isinstance(lr, LRSchedule) else None
    scale = config_extras(settings).loss_scale
    notes = [*name_notes(values), *decision_notes(values, batch_sizes(values, world), rate, scale)]
    if rate is None:
        then = {"cosine": "decays along a cosine", "linear": "decays along a line", "constant": "stays"}
        notes.append(f"no scheduler: the learning rate warms up, then {then[settings.lr_schedule]}")
    if values[arguments.WEIGHT_DECAY]:
        notes.append("weight_decay applies to matrices and embeddings, not to norms and biases")
    yield from (f"{settings.config.name}: {note}" for note in notes)
