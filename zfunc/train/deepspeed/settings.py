"""What a file decides of zfunc's settings, merged with flags; what is logged of it. No torch here."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zfunc.optim.loss_scale import LossScale
from zfunc.options import AUTO
from zfunc.train.deepspeed.keys import KEYS
from zfunc.train.deepspeed.lr import (
    BETA2,
    LR,
    MAX_LR,
    WARMUP,
    LRSchedule,
    cycles_betas,
    onecycle_betas,
    sets_lr_alone,
)
from zfunc.train.deepspeed.reader import ConfigSource, ConfigValues, read_values

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
ZERO, PARAM = "zero_optimization.", "optimizer.params."
STAGE, DEVICE, RATIO = f"{ZERO}stage", f"{ZERO}offload_optimizer.device", f"{ZERO}offload_optimizer.ratio"
PARAM_DEVICE = f"{ZERO}offload_param.device"
WEIGHT_DECAY = f"{PARAM}weight_decay"
SETTINGS: tuple[
    tuple[str, str, Callable[[Any], Any]], ...
] = (  # each with its key, and its value of the key's
    ("batch_size", TRAIN, int),
    ("micro_batches", ACCUMULATION, int),
    ("clip", "gradient_clipping", float),
    ("bucket_size", f"{ZERO}reduce_bucket_size", int),
    ("stage", STAGE, lambda stage: stage or 1),
    ("weight_slots", f"{ZERO}stage3_prefetch_bucket_size", {0: 1}.get),
    ("persistent_params", f"{ZERO}stage3_param_persistence_threshold", int),
    ("activations_on", "activation_checkpointing.cpu_checkpointing", {True: "host", False: "device"}.get),
    ("moments", "bf16.bf16_optimizer_states", {True: "16bit"}.get),
    ("moments", f"{PARAM}fp32_optimizer_states", {False: "16bit"}.get),
)
PARAMS = {  # arguments of each optimizer that have the name of a key; and its keys with another effect, or none
    "adamw": (
        "betas eps",
        "adam_w_mode torch_adam bias_correction amsgrad fp32_optimizer_states foreach fused set_grad_none "
        "max_grad_norm",
    ),
    "sgd": ("momentum dampening nesterov", "foreach fused"),
    "lion": ("betas", "fp32_optimizer_states"),
    "adagrad": ("eps lr_decay initial_accumulator_value", "amsgrad fp32_optimizer_states foreach fused"),
    "muon": ("momentum betas eps", "fp32_optimizer_states muon_lr adam_lr ns_method"),
}
MUON = {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10, "adjust_lr_fn": "original"}  # without the keys


def params_of(name: str) -> tuple[str, ...]:
    """The keys in `optimizer.params` that an optimizer may have."""
    return ("lr", "weight_decay", *" ".join(PARAMS[name]).split())


def decided(values: ConfigValues) -> Iterator[tuple[str, Any, str]]:
    """The settings of `zfunc train` that a file decides: name, value, and the key that says so."""
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
        blocks = (
            "offload_optimizer",
            *(["offload_param"] if values[STAGE] == 3 and params == "disk" else ()),
        )
        folders = dict.fromkeys(values[f"{ZERO}{block}.nvme_path"] for block in blocks)
        yield "swap", tuple(x for x in folders if x), f"{ZERO}offload_optimizer.nvme_path"
    if values.sets("optimizer.type"):
        yield "optimizer", optimizer_name(values), "optimizer.type"
    if values.has("optimizer"):
        if not values.leaves_open(LR):
            yield "lr", peak_lr(values), LR
        if not values.leaves_open(WEIGHT_DECAY):
            yield "weight_decay", weight_decay(values), WEIGHT_DECAY
    if values.sets(MAX_LR) and not values.sets(LR):
        yield "lr", values[MAX_LR], MAX_LR


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


def merge_flags(flags: Mapping[str, Any], source: ConfigSource, world: int) -> dict[str, Any]:
    """Settings of `zfunc train` on `world` ranks: the flags, and what the file adds.

    A flag sets what the file leaves open. Raises ValueError for an invalid file, for a flag that contradicts
    it, and for one that its scheduler would ignore.
    """
    values = read_values(source)
    check_settings(flags, values)
    kind = values["scheduler.type"]
    steps = values.file.get(WARMUP)
    unheard = {  # flags that the scheduler ignores
        "lr_schedule": kind is not None,
        "warmup": kind in ("LRRangeTest", "OneCycle") or steps not in (None, flags.get("warmup")),
        "lr": sets_lr_alone(values) and flags.get("lr") != values.file.get(MAX_LR),
    }
    for name in (x for x, ignored in unheard.items() if ignored and flags.get(x) is not None):
        raise values.refused(name, flags[name], WARMUP if name == "warmup" and steps else "scheduler.type")
    settings = {name: value for name, value, _ in decided(values)}
    sizes = flags.get("batch_size"), flags.get("micro_batches")
    check_complete(values, batch=not any(x in values.auto for x in (TRAIN, MICRO)) and sizes[0] is None)
    if sizes[0] is not None or values[TRAIN] is not None or values[MICRO] is not None:
        settings["batch_size"], settings["micro_batches"], _ = batch_sizes(values, world, *sizes)
    return {**settings, **{name: value for name, value in flags.items() if value is not None}}


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

    >>> from zfunc.train.deepspeed.reader import read_config_file
    >>> values = read_values(read_config_file({"train_batch_size": 16, "gradient_accumulation_steps": 2}))
    >>> batch_sizes(values, world=4)
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


# --- the optimizer ---------------------------------------------------------------------------------------


def optimizer_name(values: ConfigValues) -> str:
    """The file's optimizer as one of `OPTIMIZER_NAMES`; AdamW without any."""
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
    arguments |= {"weight_decay": weight_decay(values), "moments": "16bit" if small else "fp32"}
    return {**{x: y for x, y in arguments.items() if not values.leaves_open(PARAM + x)}, **cycled}


def peak_lr(values: ConfigValues) -> float:
    """The optimizer's learning rate; without one in the file DeepSpeed's default."""
    return 1e-2 if values["optimizer.type"] == "Adagrad" and not values.sets(LR) else values[LR]


def weight_decay(values: ConfigValues) -> float:
    """The file's weight decay; by default 0, or 0.01 as in torch with torch_adam and AdamW."""
    of_torch = values[f"{PARAM}torch_adam"] and values["optimizer.type"] == "AdamW"
    return 0.01 if of_torch and not values.sets(WEIGHT_DECAY) else values[WEIGHT_DECAY]


# --- what is logged --------------------------------------------------------------------------------------


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
    if not values.sets("gradient_clipping") and "gradient_clipping" not in values.auto:
        yield f"gradient_clipping: not in the file: {values['gradient_clipping']:g}, DeepSpeed's default"
