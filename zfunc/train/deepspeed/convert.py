"""`zfunc.from_deepspeed`: a DeepSpeed configuration as arguments of `zfunc.compile` and `zfunc.init`, or beside the
settings of `zfunc train`.

Nothing of the file is dropped in silence: what was taken and what has no effect is logged; all else is an error.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from os import PathLike
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from zfunc.optim.adamw import AdamW, decay_all
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed import arguments
from zfunc.train.deepspeed.arguments import (
    BUCKET_SIZE,
    DEVICE,
    RATIO,
    adam_arguments,
    batch_sizes,
    zero_stage,
)
from zfunc.train.deepspeed.cli_merge import flags_by_key
from zfunc.train.deepspeed.lr import LR, LRSchedule, WarmupCosineLR, WarmupDecayLR, lr_schedule
from zfunc.train.deepspeed.messages import decision_notes, name_notes
from zfunc.train.deepspeed.reader import read_config_file
from zfunc.train.deepspeed.resolved import GivenValue, ResolvedValues, resolve_values
from zfunc.train.settings import TrainSettings
from zfunc.train.sinks import SINKS

log = logging.getLogger("zfunc")


@frozen
class DeepSpeedSettings:
    """A file in zfunc's terms.

    `compile` are arguments of `zfunc.compile`; `loss_scale` is one of `zfunc.init` (None but in fp16);
    `train_batch_size` the sequences of a step over all ranks. Every `steps_per_print` steps a line is to be
    printed, with the parts of a step if `wall_clock_breakdown`. `notes` are the lines that were logged.
    """

    compile: Mapping[str, Any]
    loss_scale: LossScale | None
    train_batch_size: int
    steps_per_print: int | None
    wall_clock_breakdown: bool
    notes: tuple[str, ...]


def from_deepspeed(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    world: int = 1,
    given: Mapping[str, Any] | None = None,
    decay: Callable[[str, tuple[int, ...]], bool] = decay_all,
) -> DeepSpeedSettings:
    """DeepSpeed's configuration, a file or a dict, for `zfunc.compile` and `zfunc.init`.

    `world` is the number of ranks. `given` has values, by dotted key, for what the file leaves open: what is "auto"
    or missing. `decay(name, shape)` says which parameters weight decay touches; in DeepSpeed it is all of them,
    unless a program makes groups. What has no effect here is logged, once. docs/deepspeed.md has every key.

    Raises ValueError for unknown keys, with the nearest that are known, for values of another type, for batch
    sizes that contradict each other or are missing, for what is unsupported, and for `given` values that the file
    contradicts.

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
    rate = lr_schedule(values, lr=values[LR])
    adam = AdamW(values[LR] if rate is None else rate, decay=decay, **adam_arguments(values))
    if isinstance(rate, WarmupDecayLR | WarmupCosineLR) and rate.total_num_steps is None:
        raise ValueError(
            f"{values.source}: got {values['scheduler.type']} without its total_num_steps, expected the steps of "
            'the training: write them, or pass given={"scheduler.params.total_num_steps": ...}'
        )
    precision = arguments.precision(values) or "fp32"
    scale = arguments.loss_scale(values) if precision == "fp16" else None
    batch = batch_sizes(values, world)
    compiled: dict[str, Any] = {
        "optimizer": adam,
        "precision": precision,
        "clip_norm": values["gradient_clipping"] or None,
        "micro_batches": batch.accumulation,
        "stage": zero_stage(values),
    }
    if values.says(BUCKET_SIZE):
        compiled["bucket_size"] = values[BUCKET_SIZE]
    if values.says(DEVICE) or values.says(RATIO):
        compiled["offload_ratio"] = arguments.offload_ratio(values)
    notes = (*name_notes(values), *decision_notes(values, batch, rate, scale), *_sink_notes(values))
    for line in notes:
        log.info("%s: %s", values.source, line)
    every, breakdown = values["steps_per_print"], values["wall_clock_breakdown"]
    return DeepSpeedSettings(MappingProxyType(compiled), scale, batch.train, every, breakdown, notes)


def _sink_notes(values: ResolvedValues) -> Iterator[str]:
    """What of a file only `zfunc train` does."""
    for block in SINKS:
        if values[f"{block}.enabled"]:
            yield f"{block}: `zfunc train` writes it; a loop of one's own writes what of its metrics it wants"


# --- beside the settings of zfunc train --------------------------------------------------------------------


@frozen
class ConfigExtras:
    """What a file sets that is no setting of `zfunc train`: arguments of AdamW, settings of the step that have no
    flag, the scheduler, the loss scale, when lines are printed. The defaults are those of `zfunc train` without a
    file.
    """

    values: ResolvedValues | None = None
    adam: Mapping[str, Any] = MappingProxyType({"betas": (0.9, 0.95)})
    step: Mapping[str, Any] = MappingProxyType({})
    loss_scale: LossScale | None = None
    steps_per_print: int | None = None

    def rate(self, lr: float, total: int | None, warmup: int) -> LRSchedule | None:
        """The file's scheduler; `total` and `warmup` steps are for one that leaves them open."""
        return None if self.values is None else lr_schedule(self.values, lr=lr, total=total, warmup=warmup)


@lru_cache(maxsize=4)
def config_extras(settings: TrainSettings) -> ConfigExtras:
    """What `settings.config` adds to the settings. Raises ValueError for a file that they contradict."""
    if settings.config is None:
        return ConfigExtras()
    flags = attrs.asdict(settings)
    del flags["offload_ratio"], flags["moments"]
    values = resolve_values(read_config_file(settings.config), flags_by_key(flags))
    adam = {k: v for k, v in adam_arguments(values).items() if k in ("betas", "eps", "decoupled")}
    if callable(betas := adam.get("betas")) and settings.steps is not None:
        _check_betas(AdamW(betas=betas), settings)
    return ConfigExtras(
        values,
        MappingProxyType({**ConfigExtras().adam, **adam}),
        MappingProxyType({"stage": zero_stage(values)}),
        arguments.loss_scale(values) if settings.precision == "fp16" else None,
        values["steps_per_print"],
    )


def _check_betas(adam: AdamW, settings: TrainSettings) -> None:
    """Raises ValueError, before the first update, for a file whose betas a later update cannot use."""
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
    """The lines about the file at the start of a training with these settings and learning rate."""
    values = config_extras(settings).values
    if settings.config is None or values is None:
        return
    rate = lr if isinstance(lr, LRSchedule) else None
    scale = config_extras(settings).loss_scale
    notes = [*name_notes(values), *decision_notes(values, batch_sizes(values, world), rate, scale)]
    if rate is None:
        notes.append("no scheduler, so the learning rate warms up and falls along a cosine")
    if values[arguments.WEIGHT_DECAY]:
        notes.append("weight_decay is of matrices and embeddings, not of norms and biases")
    yield from (f"{settings.config.name}: {note}" for note in notes)
