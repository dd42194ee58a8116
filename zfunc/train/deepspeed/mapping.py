"""A DeepSpeed configuration as zfunc's: `zfunc.from_deepspeed`, and `config` among the settings of a training.

Nothing is dropped silently: what the file sets and what has no effect is logged, the rest is an error. No torch
here, so a wrong file is refused before torch is loaded.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from zfunc.core.settings import StepSettings
from zfunc.optim.by_name import CLASSES, make_optimizer
from zfunc.optim.loss_scale import LossScale
from zfunc.optim.optimizer_settings import decay_all
from zfunc.options import AUTO
from zfunc.train.deepspeed.keys import KEYS, ConfigValues, Source, read_values
from zfunc.train.deepspeed.learning_rate_schedules import (
    BETA2,
    LR,
    MAX_LR,
    WARMUP,
    LRSchedule,
    cycles_betas,
    lr_schedule,
    onecycle_betas,
    sets_lr_alone,
)
from zfunc.train.settings import OPTIMIZERS, TrainSettings

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION, CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
ZERO, PARAM = "zero_optimization.", "optimizer.params."
STAGE, DEVICE, RATIO = f"{ZERO}stage", f"{ZERO}offload_optimizer.device", f"{ZERO}offload_optimizer.ratio"
PARAM_DEVICE = f"{ZERO}offload_param.device"
WEIGHT_DECAY = f"{PARAM}weight_decay"
Read = Callable[[Any], Any]
SETTINGS: tuple[tuple[str, str, Read], ...] = (  # each with its key, and its value of the key's
    ("batch_size", TRAIN, int),
    ("micro_batches", ACCUMULATION, int),
    ("clip", CLIPPING, float),
    ("bucket_size", f"{ZERO}reduce_bucket_size", int),
    ("stage", STAGE, lambda stage: stage or 1),
    ("weight_slots", f"{ZERO}stage3_prefetch_bucket_size", {0: 1}.get),
    ("persistent_params", f"{ZERO}stage3_param_persistence_threshold", int),
    ("activations_on", "activation_checkpointing.cpu_checkpointing", {True: "host", False: "device"}.get),
    ("moments", "bf16.bf16_optimizer_states", {True: "16bit"}.get),
    ("moments", f"{PARAM}fp32_optimizer_states", {False: "16bit"}.get),
)
# Arguments of each optimizer that have the name of a key; and its keys with another effect, or none.
PARAMS = {name: x.deepspeed for name, x in CLASSES.items() if x.deepspeed}
MUON = {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10, "adjust_lr_fn": "original"}  # without the keys
log = logging.getLogger("zfunc")


# --- for a loop of one's own ------------------------------------------------------------------------------


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
    name, arguments = optimizer_name(values), optimizer_arguments(values)
    if not values.leaves_open(LR):
        arguments["lr"] = _peak_lr(values)
    optimizer: Any = make_optimizer(name, decay=decay, **arguments)
    rate = lr_schedule(values, getattr(optimizer, "optimizers", (optimizer,))[0].lr)
    if rate is not None:
        optimizer = make_optimizer(name, decay=decay, **{**arguments, "lr": rate})
    settings: dict[str, Any] = {"precision": "fp32"}
    settings |= {} if values.leaves_open(STAGE) else {"stage": 1}
    settings |= {} if values.leaves_open(CLIPPING) else {"clip_norm": values[CLIPPING] or None}
    settings |= {
        name: value for name, value, _ in decided(values) if name != "moments"
    }  # the optimizer has it
    train, settings["micro_batches"], batch = batch_sizes(values, world)
    known = attrs.fields_dict(StepSettings)
    compiled = {"optimizer": optimizer, **{x: value for x, value in settings.items() if x in known}}
    scale = loss_scale(values) if settings["precision"] == "fp16" else None
    lines = tuple(notes(values, batch, rate, scale))
    for line in lines:
        log.info("%s: %s", values.source, line)
    every, breakdown = values["steps_per_print"], values["wall_clock_breakdown"]
    return DeepSpeedSettings(MappingProxyType(compiled), scale, train, every, breakdown, lines)


# --- for a training's settings ----------------------------------------------------------------------------


@frozen
class ConfigExtras:
    """What a configuration sets that is no setting of a training, with the defaults for none."""

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
    usual = OPTIMIZERS[settings.optimizer][2]
    if settings.config is None:
        return ConfigExtras(optimizer=MappingProxyType(dict(usual)))
    values = read_values(settings.config)
    check_settings({f.name: getattr(settings, f.name) for f in attrs.fields(TrainSettings)}, values)
    if values.leaves_open("optimizer.type"):
        values = read_values(settings.config, {"optimizer.type": settings.optimizer})
    own = {k: v for k, v in optimizer_arguments(values).items() if k not in ("weight_decay", "moments")}
    if values.has("optimizer"):
        usual = {name: x for name, x in usual.items() if values.leaves_open(f"optimizer.params.{name}")}
    scale = loss_scale(values) if settings.precision == "fp16" else None
    return ConfigExtras(values, MappingProxyType({**usual, **own}), scale, values["steps_per_print"])


def with_config(given: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Settings of a training on `world` ranks: those given, and what the file of `given["config"]` adds.

    Raises ValueError for an invalid file, and for a setting that contradicts it or that its scheduler ignores.
    """
    values = read_values(given["config"])
    check_settings(given, values)
    kind = values["scheduler.type"]
    unheard = {
        "lr_schedule": kind is not None,
        "warmup": kind is not None and WARMUP not in values.auto,
        "lr": sets_lr_alone(values),
    }
    for name in (x for x, ignored in unheard.items() if ignored and given.get(x) is not None):
        raise values.refused(name, given[name], "scheduler.type")
    settings = {name: value for name, value, _ in decided(values)}
    sizes = given.get("batch_size"), given.get("micro_batches")
    check_complete(values, batch=not any(x in values.auto for x in (TRAIN, MICRO)) and sizes[0] is None)
    if sizes[0] is not None or values[TRAIN] is not None or values[MICRO] is not None:
        settings["batch_size"], settings["micro_batches"], _ = batch_sizes(values, world, *sizes)
    return {**settings, **{name: value for name, value in given.items() if value is not None}}


def check_settings(settings: Mapping[str, Any], values: ConfigValues) -> None:
    """Raise ValueError, with the setting and the key, for one that contradicts the file; "auto" does not."""
    for name, said, key in decided(values):
        got = settings.get(name)
        if key in values.file and got not in (None, AUTO, ()) and _plain(got) != _plain(said):
            raise values.refused(name, got, key)
    if values.file.get(key := f"{settings.get('precision')}.enabled") is False:
        raise values.refused("precision", settings["precision"], key)


def _plain(value: Any) -> float | str:
    """A value as it is compared, whether it was typed or read."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


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


# --- what a file decides ----------------------------------------------------------------------------------


def decided(values: ConfigValues) -> Iterator[tuple[str, Any, str]]:
    """The settings of a training that a file decides: name, value, and the key that says so."""
    for name, key, read in SETTINGS:
        if values.sets(key) and (value := read(values[key])) is not None:
            yield name, value, key
    if values.has(ZERO[:-1]) and STAGE not in values.auto and not values.sets(STAGE):
        yield "stage", 1, STAGE
    kinds = [x for x in ("fp16", "bf16") if values[f"{x}.enabled"]]
    if len(kinds) > 1:
        raise ValueError(f"{values.source}: got fp16 and bf16 both enabled, expected one: switch one off")
    if kinds:
        yield "precision", kinds[0], f"{kinds[0]}.enabled"
    elif values.sets("fp16.enabled") or values.sets("bf16.enabled"):
        yield "precision", "fp32", ""
    if values.sets(DEVICE) or values.sets(RATIO):
        off = values.sets(DEVICE) and values[DEVICE] == "none"
        yield "offload_ratio", 0.0 if off else values[RATIO], DEVICE if off else RATIO
    params = {"none": "device", "cpu": "host", "nvme": "disk"}[values[PARAM_DEVICE]]
    if values.sets(PARAM_DEVICE) and values[STAGE] == 3:
        yield "params_on", params, PARAM_DEVICE
    if values[DEVICE] == "nvme":
        yield "state_on", "disk", DEVICE
        blocks = ("offload_optimizer", "offload_param")[: 1 + (values[STAGE] == 3 and params == "disk")]
        folders = dict.fromkeys(values[f"{ZERO}{block}.nvme_path"] for block in blocks)
        yield "swap", tuple(x for x in folders if x), f"{ZERO}offload_optimizer.nvme_path"
    if values.sets("optimizer.type"):
        yield "optimizer", optimizer_name(values), "optimizer.type"
    if values.has("optimizer"):
        if not values.leaves_open(LR):
            yield "lr", _peak_lr(values), LR
        if not values.leaves_open(WEIGHT_DECAY):
            yield "weight_decay", _weight_decay(values), WEIGHT_DECAY
    if values.sets(MAX_LR) and not values.sets(LR):
        yield "lr", values[MAX_LR], MAX_LR


def check_complete(values: ConfigValues, *, batch: bool = True) -> None:
    """Raise ValueError with all that the file lacks."""
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
    """Sequences of a step, micro-batches of a rank, and both as a product, of a file on `world` ranks.

    `train` and `steps` are for a file that leaves them open. Raises ValueError for keys that contradict each other.

    >>> batch_sizes(read_values({"train_batch_size": 16, "gradient_accumulation_steps": 2}), world=4)
    (16, 2, '16 = 2 x 2 micro-batches x 4 ranks')
    """
    train, micro, steps = values[TRAIN] or train, values[MICRO], values[ACCUMULATION] or steps
    if steps is None:
        steps = max(1, train // (micro * world)) if train and micro else 1
    if micro is None:
        micro = max(1, (train or 1) // (steps * world))
    product = f"{micro} x {steps} micro-batches x {world} ranks"
    if train not in (None, micro * steps * world):
        raise ValueError(
            f"{values.source}: got {TRAIN} {train}, expected {product} = {micro * steps * world}: correct {TRAIN}, "
            f"{MICRO} or {ACCUMULATION}, or leave one out"
        )
    return micro * steps * world, steps, f"{micro * steps * world} = {product}"


def loss_scale(values: ConfigValues) -> LossScale:
    """The loss scale of a file that trains in fp16. Raises ValueError for bounds that are none."""
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


def params_of(name: str) -> tuple[str, ...]:
    """The keys in `optimizer.params` that an optimizer may have."""
    return ("lr", "weight_decay", *" ".join(PARAMS[name]).split())


def optimizer_name(values: ConfigValues) -> str:
    """The file's optimizer as one of `by_name.CLASSES`; AdamW without any."""
    name = (values["optimizer.type"] or "AdamW").lower()
    return "adamw" if name == "adam" else name


def optimizer_arguments(values: ConfigValues) -> dict[str, Any]:
    """Arguments of the class of `optimizer_name`, without `lr`, `decay` and what is left at "auto".

    Raises ValueError for a parameter that the optimizer does not have.
    """
    name = optimizer_name(values)
    named = PARAMS[name][0].split()
    cycled = {"betas": onecycle_betas(values)} if cycles_betas(values) and "betas" in named else {}
    if not values.has("optimizer"):
        return cycled
    for key in (x for x in values.file if x.startswith(PARAM)):
        if key.removeprefix(PARAM) not in params_of(name):
            raise ValueError(
                f"{values.source}: {key}: got it with the type {values['optimizer.type']}, which does not have it: "
                "delete it"
            )
    usual = () if name in ("adagrad", "muon") else ("betas", "eps")  # DeepSpeed's differ from zfunc's
    arguments = {x: values[PARAM + x] for x in named if x in usual or values.sets(PARAM + x)}
    if name == "muon":
        arguments = {**MUON, **arguments}
        if LR in values.auto:  # zfunc's own rate goes with its own scaling
            del arguments["adjust_lr_fn"]
    if name == "adamw":
        arguments["decoupled"] = values["optimizer.type"] != "Adam" or values[f"{PARAM}adam_w_mode"]
    small = values["bf16.bf16_optimizer_states"] or not values[f"{PARAM}fp32_optimizer_states"]
    arguments |= {"weight_decay": _weight_decay(values), "moments": "16bit" if small else "fp32"}
    return {**{x: y for x, y in arguments.items() if not values.leaves_open(PARAM + x)}, **cycled}


def _peak_lr(values: ConfigValues) -> float:
    return 1e-2 if values["optimizer.type"] == "Adagrad" and not values.sets(LR) else values[LR]


def _weight_decay(values: ConfigValues) -> float:
    """The file's weight decay; by default 0, or 0.01 as in torch with torch_adam and AdamW."""
    of_torch = values[f"{PARAM}torch_adam"] and values["optimizer.type"] == "AdamW"
    return 0.01 if of_torch and not values.sets(WEIGHT_DECAY) else values[WEIGHT_DECAY]


def notes(
    values: ConfigValues, batch: str, rate: LRSchedule | None, scale: LossScale | None
) -> Iterator[str]:
    """What a file sets that may surprise, and its keys without effect: no key is dropped silently."""
    for new, old in values.old.items():
        yield f"{old} is the old name of {new}"
    if auto := [x for x in values.auto if not values.sets(x) and KEYS[x].fate != "ignored"]:
        yield f'"auto" is zfunc\'s default, or what was passed: {", ".join(auto)}'
    for reason, keys in values.ignored().items():
        yield f"no effect: {', '.join(keys)}: {reason}"
    if LR in values.file and sets_lr_alone(values) and values[LR] != values[MAX_LR]:
        yield f"no effect: {LR}: {values['scheduler.type']} sets the learning rate alone, as in DeepSpeed"
    if values.file.get(PARAM_DEVICE) in ("cpu", "nvme") and values[STAGE] != 3:
        yield f"no effect: {PARAM_DEVICE}: for stage 3 only, as in DeepSpeed"
    yield f"{TRAIN}: {batch}"
    if rate is not None:
        yield f"scheduler: {rate}"
    if cycles_betas(values):
        yield f"scheduler: OneCycle moves beta1 too, and beta2 is {BETA2:g}, as in DeepSpeed"
    if scale is not None:
        grows = f", doubles after {scale.window} steps without an overflow" if scale.window else ", and stays"
        yield f"fp16: a loss scale that starts at {scale.scale:g}{grows}"
    if values["optimizer.type"] == "Adam" and values[f"{PARAM}adam_w_mode"]:
        yield "optimizer.type: Adam is AdamW unless adam_w_mode is false, as in DeepSpeed"
    if not values.sets(CLIPPING) and CLIPPING not in values.auto:
        yield f"{CLIPPING}: not in the file: {values[CLIPPING]:g}, DeepSpeed's default"
