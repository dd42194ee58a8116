"""`zfunc.from_deepspeed`: a DeepSpeed configuration as what `zfunc.compile` and `zfunc.init` take.

The invariant: nothing of the file is dropped in silence. What was taken and what has no effect is said; all else is
an error.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal

import attrs
from attrs import frozen

from zfunc.optim.adamw import AdamW, everything
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.batch import batch_sizes
from zfunc.train.deepspeed.flags import DEVICE, FLAGS, RATIO, offload_ratio
from zfunc.train.deepspeed.flags import flags_by_key as by_key
from zfunc.train.deepspeed.optimizer import adam_arguments
from zfunc.train.deepspeed.precision import loss_scale, precision
from zfunc.train.deepspeed.rate import LR, Schedule, schedule
from zfunc.train.deepspeed.reading import read_config_file
from zfunc.train.deepspeed.said import note_decisions, note_names
from zfunc.train.deepspeed.schedules import WarmupCosineLR, WarmupDecayLR
from zfunc.train.deepspeed.values import GivenValue, ResolvedValues, resolve_values
from zfunc.train.settings import TrainSettings

SINKS = ("tensorboard", "wandb", "csv_monitor")  # blocks of a file; where `zfunc train` writes its figures
log = logging.getLogger("zfunc")


@frozen
class DeepSpeedSettings:
    """What a file says.

    `compile` are arguments of `zfunc.compile`; `loss_scale` is one of `zfunc.init` (None but in fp16);
    `train_batch_size` the sequences of a step over all ranks. Every `steps_per_print` steps a line is to be
    printed, with the parts of a step if `wall_clock_breakdown`. `said` is what was said of the file, a line each.
    """

    compile: Mapping[str, Any]
    loss_scale: LossScale | None
    train_batch_size: int
    steps_per_print: int | None
    wall_clock_breakdown: bool
    said: tuple[str, ...]


def from_deepspeed(
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    world: int = 1,
    given: Mapping[str, Any] | None = None,
    decay: Callable[[str, tuple[int, ...]], bool] = everything,
) -> DeepSpeedSettings:
    """What DeepSpeed's configuration, a file or a dict, says, for `zfunc.compile` and `zfunc.init`.

    `world` is the number of ranks. `given` has values, by dotted key, for what the file leaves open: what is "auto"
    or not there. `decay(name, shape)` says which parameters weight decay touches; there it is all of them, unless a
    program makes groups. What has no effect here is logged, once. docs/deepspeed.md has every key.

    Raises ValueError for keys that are not known, with the nearest that are, for values of another kind, for batch
    sizes that contradict each other or are not there, for what there is not, and for `given` values that the file
    contradicts.

    >>> config = from_deepspeed({
    ...     "train_batch_size": 8,
    ...     "gradient_accumulation_steps": 2,
    ...     "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    ... })
    >>> config.train_batch_size, config.compile["micro_batches"], config.compile["optimizer"].lr
    (8, 2, 0.0003)
    """
    told = {name: GivenValue(value, f"given[{name!r}]") for name, value in (given or {}).items()}
    values = resolve_values(read_config_file(source), told)
    configured = configure(values, world=world, decay=decay)
    for line in configured.said:
        log.info("%s: %s", values.source, line)
    return configured


def configure(
    values: ResolvedValues, *, world: int, decay: Callable[[str, tuple[int, ...]], bool] = everything
) -> DeepSpeedSettings:
    """What checked values say; see `from_deepspeed`, which logs it too."""
    arguments = adam_arguments(values)
    lr = values[LR]
    rate = schedule(values, lr=lr)
    if isinstance(rate, WarmupDecayLR | WarmupCosineLR) and rate.total_num_steps is None:
        raise ValueError(
            f"{values.source}: got {values['scheduler.type']} without its total_num_steps, expected the steps of "
            'the training: write them, or pass given={"scheduler.params.total_num_steps": ...}'
        )
    chosen = precision(values) or "fp32"
    scale = loss_scale(values) if chosen == "fp16" else None
    made = batch_sizes(values, world)
    compiled: dict[str, Any] = {
        "optimizer": AdamW(lr if rate is None else rate, decay=decay, **arguments),
        "precision": chosen,
        "clip_norm": values["gradient_clipping"] or None,
        "micro_batches": made.accumulation,
        "stage": zero_stage(values),
    }
    if values.says(FLAGS["bucket_size"]):
        compiled["bucket_size"] = values[FLAGS["bucket_size"]]
    if values.says(DEVICE) or values.says(RATIO):
        compiled["offload_ratio"] = offload_ratio(values)
    return DeepSpeedSettings(
        MappingProxyType(compiled),
        scale,
        made.train,
        values["steps_per_print"],
        values["wall_clock_breakdown"],
        (*note_names(values), *note_decisions(values, made, rate, scale), *_logs(values)),
    )


def _logs(values: ResolvedValues) -> Iterator[str]:
    """What of a file only `zfunc train` does."""
    for block in SINKS:
        if values[f"{block}.enabled"]:
            yield f"{block}: `zfunc train` writes it; a loop of one's own writes what of its metrics it wants"


def zero_stage(values: ResolvedValues) -> Literal[1, 2]:
    """`zfunc.compile`'s stage for the file's."""
    return 2 if values["zero_optimization.stage"] == 2 else 1


# --- beside the settings of zfunc train --------------------------------------------------------------------


@frozen
class ConfigExtras:
    """What a file says that is no setting of `zfunc train`: arguments of AdamW, the stage, the scheduler, the loss
    scale, when lines are printed. Without a file it is what `zfunc train` has always done.
    """

    values: ResolvedValues | None = None
    adam: Mapping[str, Any] = MappingProxyType({"betas": (0.9, 0.95)})
    stage: Literal[1, 2] = 2
    loss_scale: LossScale | None = None
    steps_per_print: int | None = None

    def rate(self, lr: float, total: int | None, warmup: int) -> Schedule | None:
        """The file's scheduler; `total` and `warmup` steps are for one that leaves them open."""
        return None if self.values is None else schedule(self.values, lr=lr, total=total, warmup=warmup)


@lru_cache(maxsize=4)
def config_extras(settings: TrainSettings) -> ConfigExtras:
    """What `settings.config` says beside the settings. Raises ValueError for a file that they contradict."""
    if settings.config is None:
        return ConfigExtras()
    theirs = {
        name: value
        for name, value in attrs.asdict(settings).items()
        if name not in ("offload_ratio", "moments")
    }
    values = resolve_values(read_config_file(settings.config), by_key(theirs))
    arguments = {k: v for k, v in adam_arguments(values).items() if k in ("betas", "eps", "decoupled")}
    if callable(betas := arguments.get("betas")) and settings.steps is not None:
        _check_betas(AdamW(betas=betas), settings)
    return ConfigExtras(
        values,
        MappingProxyType({**ConfigExtras().adam, **arguments}),
        zero_stage(values),
        loss_scale(values) if settings.precision == "fp16" else None,
        values["steps_per_print"],
    )


def _check_betas(adam: AdamW, settings: TrainSettings) -> None:
    """Refuse a file by which an update of this training cannot be made, before any of them is."""
    try:
        for step in range(1, (settings.steps or 0) + 1):
            adam.betas_at(step)
    except ValueError as error:
        told = str(error).partition("; pass")[0]
        raise ValueError(
            f"{settings.config}: {told}: lower scheduler.params.decay_mom_rate, or train fewer than {step} --steps"
        ) from error


def startup_notes(settings: TrainSettings, world: int, lr: Callable[[int], float]) -> Iterator[str]:
    """What is said of the file at the start of a training with these settings and learning rate, a line each."""
    what = config_extras(settings)
    if settings.config is None or what.values is None:
        return
    rate = lr if isinstance(lr, Schedule) else None
    lines = note_decisions(what.values, batch_sizes(what.values, world), rate, what.loss_scale)
    for line in (*note_names(what.values), *lines):
        yield f"{settings.config.name}: {line}"
    if rate is None:
        yield f"{settings.config.name}: no scheduler, so the learning rate warms up and falls along a cosine"
    if what.values["optimizer.params.weight_decay"]:
        yield f"{settings.config.name}: weight_decay is of matrices and embeddings, not of norms and biases"
