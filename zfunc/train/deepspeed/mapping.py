"""A DeepSpeed configuration as zfunc's: `zfunc.from_deepspeed`, and `config` among the settings of a training.

Nothing is dropped silently: what the file sets and what has no effect is logged, the rest is an error. No torch
here, so a wrong file is refused before torch is loaded.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from attrs import evolve, field, frozen

from zfunc.core.display import counted
from zfunc.core.setting_values import DISK
from zfunc.core.settings import StepSettings
from zfunc.core.shares import two_tiers
from zfunc.errors import refuse
from zfunc.optim.by_name import CLASSES, make_optimizer
from zfunc.optim.elementwise import decay_all
from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.keys import KEYS, OPTIMIZERS, ConfigValues, Source, read_values
from zfunc.train.deepspeed.learning_rate_schedules import (
    PARAMS,
    SCHEDULERS,
    LRSchedule,
    lr_schedule,
    moved_betas,
)
from zfunc.train.settings import TrainSettings

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION, CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
ZERO, PARAM = "zero_optimization.", "optimizer.params."
STAGE, DEVICE, RATIO = f"{ZERO}stage", f"{ZERO}offload_optimizer.device", f"{ZERO}offload_optimizer.ratio"
PARAM_DEVICE = f"{ZERO}offload_param.device"
SWITCHES = ("fp16.enabled", BF16 := "bf16.enabled")
LR, WEIGHT_DECAY = f"{PARAM}lr", f"{PARAM}weight_decay"
WARMUP, MAX_LR = f"{PARAMS}warmup_num_steps", f"{PARAMS}warmup_max_lr"
log = logging.getLogger("zfunc")


# --- for a loop of one's own ------------------------------------------------------------------------------


@frozen
class DeepSpeedSettings:
    """A DeepSpeed configuration converted to arguments of `zfunc.compile` and `zfunc.init`, with their notes."""

    compile: Mapping[str, Any]  # arguments of zfunc.compile
    loss_scale: LossScale | None  # argument of zfunc.init; None except in fp16
    train_batch_size: int  # sequences of a step over all ranks
    steps_per_print: int | None  # for your own loop, as is wall_clock_breakdown
    wall_clock_breakdown: bool
    notes: tuple[str, ...]  # the lines that were logged


def from_deepspeed(
    source: Source,
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
    values = read_values(source, given)
    check_complete(values)
    # The optimizer, whose learning rate a scheduler may begin with
    name, arguments = named_optimizer(values)
    optimizer: Any = make_optimizer(name, decay=decay, **arguments)
    rate = lr_schedule(values, lr=getattr(optimizer, "optimizers", (optimizer,))[0].lr)
    if rate is not None:
        optimizer = make_optimizer(name, decay=decay, **{**arguments, "lr": rate})
    # The settings of a step; the moments are the optimizer's
    settings: dict[str, Any] = {} if leaves_precision_open(values) else {"precision": "fp32"}
    settings |= {} if values.leaves_open(STAGE) else {"stage": 1}
    settings |= {} if values.leaves_open(CLIPPING) else {"clip_norm": values[CLIPPING] or None}
    settings |= {x: value for x, value, _ in decided(values) if x != "moments"}
    train, settings["micro_batches"], batch = batch_sizes(values, world)
    known = attrs.fields_dict(StepSettings)
    compiled = {"optimizer": optimizer, **{x: value for x, value in settings.items() if x in known}}
    scale = loss_scale(values) if settings.get("precision") == "fp16" else None
    lines = tuple(notes(values, batch, rate))
    for line in lines:
        log.info("%s: %s", values.source, line)
    every, breakdown = values["steps_per_print"], values["wall_clock_breakdown"]
    return DeepSpeedSettings(MappingProxyType(compiled), scale, train, every, breakdown, lines)


# --- for a training's settings ----------------------------------------------------------------------------


@frozen
class ConfigExtras:
    """What a DeepSpeed configuration and a file of a Trainer's arguments add to a training that no setting has:
    optimizer arguments, the loss scale, steps between printed lines, learning rate and log lines. `config` is the
    DeepSpeed file, with the settings' optimizer where its own type is "auto".

    `learning_rate` makes the rate by step from the total number of steps, which is None if nobody knows it: from
    the file's scheduler, or as the settings say; `by_pass`: settings that become the number of steps in one epoch,
    each with the file's field that asks for it.
    """

    optimizer: Mapping[str, Any]  # arguments beside lr and weight decay
    learning_rate: Callable[[int | None], Callable[[int], float]]
    loss_scale: LossScale | None = None
    steps_per_print: int | None = None
    notes: tuple[str, ...] = ()  # log lines
    by_pass: Mapping[str, str] = field(factory=dict[str, str])
    config: ConfigValues | None = None


def config_extras(settings: TrainSettings) -> ConfigExtras:
    """What the DeepSpeed file `settings.config` adds to a training with these settings."""
    usual = CLASSES[settings.optimizer].usual[2]
    if (values := settings.config) is None:
        return ConfigExtras(usual, settings.learning_rate)
    if values.leaves_open("optimizer.type"):
        values = evolve(values, given={"optimizer.type": settings.optimizer})
    own = {k: v for k, v in named_optimizer(values)[1].items() if k not in ("lr", "weight_decay", "moments")}
    if values.has("optimizer"):
        usual = {name: x for name, x in usual.items() if values.leaves_open(PARAM + name)}
    scale = loss_scale(values) if settings.precision == "fp16" else None

    def rate(total: int | None) -> Callable[[int], float]:
        steps = {"total_num_steps": total, "warmup_num_steps": max(1, settings.warmup_of(total))}
        return lr_schedule(values, lr=settings.lr, **steps) or settings.learning_rate(total)

    optimizer = MappingProxyType({**usual, **own})
    return ConfigExtras(optimizer, rate, scale, values["steps_per_print"], config=values)


def with_config(given: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Settings of a training on `world` ranks: those given, and what the file at `given["config"]` adds, whose
    content takes the place of its path.

    Raises ValueError for an invalid file, and for a setting that contradicts it or that its scheduler ignores.
    """
    values = read_values(given["config"])
    values = evolve(values, decides=tuple(decided(values)))
    given = {x: value for x, value in given.items() if value is not None} | {"config": values}
    values.check(given)
    settings = {name: said for name, said, _ in values.decides}
    if values.file.get(key := f"{given.get('precision')}.enabled") is False:
        raise values.refused("precision", given["precision"], key)
    if values["scheduler.type"] is not None:
        heard = {"lr_schedule": False, "warmup": WARMUP in values.auto, "lr": not sets_lr_alone(values)}
        for name in (x for x in heard if x in given and not heard[x]):
            raise values.refused(name, given[name], "scheduler.type")
    sizes = given.get("batch_size"), given.get("micro_batches")
    check_complete(values, batch=not any(x in values.auto for x in (TRAIN, MICRO)) and sizes[0] is None)
    if sizes[0] is not None or values[TRAIN] is not None or values[MICRO] is not None:
        settings["batch_size"], settings["micro_batches"], _ = batch_sizes(values, world, *sizes)
    return {**settings, **given}


def startup_notes(
    settings: TrainSettings, values: ConfigValues | None, world: int, lr: Callable[[int], float]
) -> Iterator[str]:
    """The log lines about the DeepSpeed file `values` of `ConfigExtras.config` at the start of a training."""
    if values is not None:
        rate = lr if isinstance(lr, LRSchedule) else None
        batch = batch_sizes(values, world, settings.batch_size, settings.micro_batches)[2]
        own = [] if rate else [f"no scheduler: the learning rate warms up, then it is {settings.lr_schedule}"]
        yield from (f"{Path(values.source).name}: {line}" for line in (*notes(values, batch, rate), *own))


# --- what a file decides ----------------------------------------------------------------------------------


def decided(values: ConfigValues) -> Iterator[tuple[str, Any, str]]:
    """The training settings that a DeepSpeed file decides: name, value, and the key that decides each."""
    # Those that one key says
    for key in (KEYS[x] for x in KEYS if KEYS[x].sets and values.sets(x)):
        value = values[key.name] if key.values is None else key.values.get(str(values[key.name]))
        if value is not None:
            yield key.sets, value, key.name
    if values.has(ZERO[:-1]) and STAGE not in values.auto and not values.sets(STAGE):
        yield "stage", 1, STAGE
    # The precision, of two switches
    kinds = [x.partition(".")[0] for x in SWITCHES if values[x]]
    if len(kinds) > 1:
        raise ValueError(f"{values.source}: got fp16 and bf16 both enabled, expected one: switch one off")
    if kinds:
        yield "precision", kinds[0], f"{kinds[0]}.enabled"
    elif any(map(values.sets, SWITCHES)) and not leaves_precision_open(values):
        yield "precision", "fp32", ""
    # Where state and parameters are
    far = DISK if values[DEVICE] == "nvme" else "host"
    if values.sets(DEVICE) or values.sets(RATIO):
        off = values.sets(DEVICE) and values[DEVICE] == "none"
        share = 0.0 if off else values[RATIO]
        if far == DISK and share < 1:
            got = f"{RATIO} {share:g} with device nvme"
            do = "leave it out; `state_on` host:0.25,disk keeps a quarter on the host"
            refuse(values.source, got, "1, as the rest would be on the device", do)
        yield "state_on", two_tiers("device", 1 - share, far), RATIO if far == "host" and not off else DEVICE
    params = {"none": "device", "cpu": "host", "nvme": "disk"}[values[PARAM_DEVICE]]
    if values.sets(PARAM_DEVICE) and values[STAGE] == 3:
        yield "params_on", params, PARAM_DEVICE
    if values[DEVICE] == "nvme":
        blocks = ("offload_optimizer", "offload_param")[: 1 + (values[STAGE] == 3 and params == "disk")]
        folders = dict.fromkeys(values[f"{ZERO}{block}.nvme_path"] for block in blocks)
        yield "swap", tuple(x for x in folders if x), f"{ZERO}offload_optimizer.nvme_path"
    # The optimizer
    if values.sets("optimizer.type"):
        yield "optimizer", named_optimizer(values)[0], "optimizer.type"
    if values.has("optimizer"):
        found = named_optimizer(values)[1]
        yield from ((name, found[name], PARAM + name) for name in ("lr", "weight_decay") if name in found)
    if values.sets(MAX_LR) and not values.sets(LR):
        yield "lr", values[MAX_LR], MAX_LR


def leaves_precision_open(values: ConfigValues) -> bool:
    """Whether the file leaves bf16 or fp16 at "auto", switches neither on, and does not switch bf16 off."""
    auto, on = any(map(values.leaves_open, SWITCHES)), any(values[x] for x in SWITCHES)
    return auto and not on and not values.sets(BF16)


def check_complete(values: ConfigValues, *, batch: bool = True) -> None:
    """Raise ValueError with every value that the file needs and lacks; with `batch` also for the batch size."""
    lacking: list[str] = []
    if batch and values[TRAIN] is None and values[MICRO] is None:
        lacking.append(f"got neither {TRAIN} nor {MICRO}, expected one of them, as DeepSpeed does: write one")
    for block, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if values.has(block) and values[f"{block}.type"] is None and f"{block}.type" not in values.auto:
            lacking.append(f'got {block} without a type, expected one: write such as "type": "{example}"')
    if values["optimizer.type"] == "Muon" and not values.sets(LR) and LR not in values.auto:
        lacking.append(
            f"{LR}: got none with the type Muon, which has two defaults, expected one for all: write it"
        )
    if lacking:
        raise ValueError(f"{values.source}: " + "\n".join(lacking))


def batch_sizes(
    values: ConfigValues, world: int, train: int | None = None, steps: int | None = None
) -> tuple[int, int, str]:
    """Sequences of a step, micro-batches of a rank, and text of their product, of a file on `world` ranks.

    `train` are the sequences of a step, `steps` the micro-batches, where the file has none. Raises ValueError for
    keys that contradict each other.

    >>> batch_sizes(read_values({"train_batch_size": 16, "gradient_accumulation_steps": 2}), world=4)
    (16, 2, '16 = 2 x 2 micro-batches x 4 ranks')
    """
    train, micro, steps = values[TRAIN] or train, values[MICRO], values[ACCUMULATION] or steps
    if steps is None:
        steps = max(1, train // (micro * world)) if train and micro else 1
    if micro is None:
        micro = max(1, (train or 1) // (steps * world))
    product = f"{micro} x {counted(steps, 'micro-batch')} x {counted(world, 'rank')}"
    if train not in (None, micro * steps * world):
        raise ValueError(
            f"{values.source}: got {TRAIN} {train}, expected {product} = {micro * steps * world}: correct {TRAIN}, "
            f"{MICRO} or {ACCUMULATION}, or leave one out"
        )
    return micro * steps * world, steps, f"{micro * steps * world} = {product}"


def loss_scale(values: ConfigValues) -> LossScale:
    """The loss scale of a DeepSpeed file that trains in fp16. Raises ValueError for bounds that cannot hold."""
    names = ("loss_scale", "loss_scale_window", "min_loss_scale", "initial_scale_power")
    fixed, window, minimum, power = (values[f"fp16.{x}"] for x in names)
    if fixed:
        return LossScale(scale=fixed, window=0)
    if not window or not 0 < minimum <= 2.0**power:
        raise ValueError(
            f"{values.source}: fp16: got loss_scale_window {window}, min_loss_scale {minimum} and a first scale of "
            f"2**{power}, expected 1 or more, and the first not below the smallest: correct them, or set loss_scale"
        )
    hysteresis, consecutive = values["fp16.hysteresis"], values["fp16.consecutive_hysteresis"]
    return LossScale(
        2.0**power, window, hysteresis=hysteresis, minimum=float(minimum), consecutive=consecutive
    )


def optimizer_params(name: str) -> list[str]:
    """The keys of a DeepSpeed file's `optimizer.params` that have an effect on the optimizer `name`."""
    switches = ["fp32_optimizer_states", *(["adam_w_mode", "torch_adam"] if name == "adamw" else [])]
    return ["lr", "weight_decay", *CLASSES[name].deepspeed.split(), *switches]


def named_optimizer(values: ConfigValues) -> tuple[str, dict[str, Any]]:
    """The optimizer of a DeepSpeed configuration: its name for `optim.by_name.make_optimizer`, AdamW by default,
    and its arguments, without those left at "auto" and without `decay`."""
    kind: str = values["optimizer.type"] or "AdamW"
    name = "adamw" if kind == "Adam" else kind.lower()
    usual = OPTIMIZERS.get(name, {})
    moved = moved_betas(values) if "betas" in usual else {}
    if not values.has("optimizer"):
        return name, moved if values.leaves_open(LR) else {"lr": values[LR], **moved}
    arguments = {**usual, "moments": "fp32"}
    if name == "adamw":
        arguments["decoupled"] = kind != "Adam" or values[f"{PARAM}adam_w_mode"]
        arguments["weight_decay"] = (
            0.01 if kind == "AdamW" and values[f"{PARAM}torch_adam"] else 0.0
        )  # torch's
    if values["bf16.bf16_optimizer_states"] or not values[f"{PARAM}fp32_optimizer_states"]:
        arguments["moments"] = "16bit"
    if LR in values.auto:  # zfunc's own rate goes with Muon's own scaling
        arguments.pop("adjust_lr_fn", None)
    for x in ("lr", "weight_decay", *CLASSES[name].deepspeed.split()):
        if values.sets(PARAM + x):
            arguments[x] = values[PARAM + x]
        elif values.leaves_open(PARAM + x):
            arguments.pop(x, None)
    return name, {**arguments, **moved}


def sets_lr_alone(values: ConfigValues) -> bool:
    """Whether the file's scheduler sets the learning rate without the optimizer's `lr`."""
    kind = values["scheduler.type"]
    if kind == "WarmupLR":
        return MAX_LR not in values.auto and values.sets(MAX_LR)
    return kind in ("LRRangeTest", "OneCycle") or (kind == "WarmupDecayLR" and MAX_LR not in values.auto)


def notes(values: ConfigValues, batch: str, rate: LRSchedule | None) -> Iterator[str]:
    """Log lines on a file's surprising values, keys without effect, its `batch` sizes, and learning `rate`."""
    yield from (f"{old} is the old name of {new}" for new, old in values.old.items())
    if auto := [x for x in values.auto if not values.sets(x) and KEYS[x].fate != "ignored"]:
        yield f'"auto" is zfunc\'s default, or what was passed: {", ".join(auto)}'
    kind, made = values["scheduler.type"], values["optimizer.type"]
    idle: dict[str, list[str]] = {}
    for name, value in values.file.items():
        block, _, last = name.rpartition(".")
        if KEYS[name].fate == "ignored":
            if KEYS[name].type != "object" or KEYS[name].acts(value):
                idle.setdefault(KEYS[name].note, []).append(name)
        elif name == LR and sets_lr_alone(values) and value != values[MAX_LR]:
            idle[f"{kind} sets the learning rate alone, as in DeepSpeed"] = [name]
        elif name == PARAM_DEVICE and value != "none" and values[STAGE] != 3:
            idle["for stage 3 only, as in DeepSpeed"] = [name]
        elif block == PARAM[:-1] and made and last not in optimizer_params(named_optimizer(values)[0]):
            idle.setdefault(f"not of the optimizer {made}", []).append(name)
        elif block == PARAMS[:-1] and kind and last not in SCHEDULERS[kind][1]:
            idle.setdefault(f"not of the scheduler {kind}", []).append(name)
    idle |= {"nothing reads it": values.unread} if values.unread else {}
    yield from (f"no effect: {', '.join(keys)}: {reason}" for reason, keys in idle.items())
    yield f"{TRAIN}: {batch}"
    if rate is not None:
        yield f"scheduler: {kind}: {rate}"
