"""A file and the flags of `zfunc train`, merged into its settings.

A flag sets what the file leaves open; a flag that contradicts the file is an error. Where neither sets a key, the
command's default holds, or DeepSpeed's if the file has the block of the key.
"""

from collections.abc import Mapping
from typing import Any

from attrs import fields_dict

from zfunc.options import AUTO, flag, ratio
from zfunc.train.deepspeed.arguments import (
    ACCUMULATION,
    BUCKET_SIZE,
    CPU_CHECKPOINTING,
    DEVICE,
    ENABLED,
    NVME_PATH,
    PARAM_DEVICE,
    PERSISTENCE,
    PREFETCH,
    RATIO,
    STAGE,
    TRAIN,
    WEIGHT_DECAY,
    batch_left_open,
    batch_sizes,
    has_16bit_moments,
    offload_ratio,
    optimizer_name,
    peak_lr,
    placement,
    precision,
    weight_decay,
)
from zfunc.train.deepspeed.keys import KEYS
from zfunc.train.deepspeed.lr import LR, MAX_LR, WARMUP, sets_lr_alone
from zfunc.train.deepspeed.reader import ConfigSource
from zfunc.train.deepspeed.resolved import GivenValue, ResolvedValues, resolve_values
from zfunc.train.settings import TrainSettings
from zfunc.train.sinks import SINKS

SINK_BLOCKS = {kind: f"{kind}.enabled" for kind in SINKS if f"{kind}.enabled" in KEYS}
"""The sinks that DeepSpeed has too, each with the key that switches it on."""
SAME = {  # flags whose values are those of their keys
    "clip": "gradient_clipping",
    "bucket_size": BUCKET_SIZE,
    **{kind: key for kind, key in SINK_BLOCKS.items() if kind in fields_dict(TrainSettings)},
}
FLAGS: Mapping[str, str] = {
    **SAME,
    "lr": LR,
    "weight_decay": WEIGHT_DECAY,
    "warmup": WARMUP,
    "batch_size": TRAIN,
    "micro_batches": ACCUMULATION,
    "offload_ratio": RATIO,
}
"""Flags and the keys that they set."""
PLACES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "stage": (STAGE, {"1": 1, "2": 2, "3": 3}),
    "params_on": (PARAM_DEVICE, {"device": "none", "host": "cpu", "disk": "nvme"}),
    "activations_on": (CPU_CHECKPOINTING, {"device": False, "host": True, "disk": True}),
}
"""Flags and their keys, each with the key's value for every one of the flag's."""


def flags_by_key(flags: Mapping[str, Any]) -> dict[str, GivenValue]:
    """What flags set, by key; None and "auto" set nothing."""
    given: dict[str, GivenValue] = {}
    for name, value in flags.items():
        if value in (None, AUTO):
            continue
        if name == "offload_ratio":
            ratio(flag(name), value)
            given[RATIO] = GivenValue(float(value), flag(name))
        elif name in PLACES:
            key, of = PLACES[name]
            if value in of:  # or the flag is refused
                given[key] = GivenValue(of[value], flag(name), value)
        elif name in FLAGS:
            given[FLAGS[name]] = GivenValue(value, flag(name))
        elif name == "precision":
            given |= {key: GivenValue(value == kind, flag(name), value) for kind, key in ENABLED.items()}
        elif name == "moments" and value == "fp32":
            given["bf16.bf16_optimizer_states"] = GivenValue(False, flag(name), value)
            given["optimizer.params.fp32_optimizer_states"] = GivenValue(True, flag(name), value)
    return given


def merge_flags(flags: Mapping[str, Any], source: ConfigSource, world: int) -> dict[str, Any]:
    """Settings of `zfunc train` on `world` ranks: the flags, and what the file adds.

    Raises ValueError for an invalid file, and for a flag that contradicts it.
    """
    values = resolve_values(source, flags_by_key(flags))
    _check_lr(values, flags)
    settings = {
        **{name: values[key] for name, key in SAME.items() if values.sets(key)},
        **_optimizer(values, flags),
        **_offload(values, flags),
        **_placement(values, flags),
        **_batch(values, world),
    }
    if (in_file := precision(values)) is not None:
        settings["precision"] = in_file
    return {**settings, **{name: value for name, value in flags.items() if value is not None}}


def _batch(values: ResolvedValues, world: int) -> dict[str, Any]:
    if batch_left_open(values):
        return {"micro_batches": values[ACCUMULATION]} if values.sets(ACCUMULATION) else {}
    sizes = batch_sizes(values, world)
    return {"batch_size": sizes.train, "micro_batches": sizes.accumulation}


def _optimizer(values: ResolvedValues, flags: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"moments": "16bit"} if has_16bit_moments(values) else {}
    if values.has("optimizer"):
        settings |= {"lr": peak_lr(values), "weight_decay": weight_decay(values)}
    if values.sets("optimizer.type"):
        settings["optimizer"] = name = optimizer_name(values)
        if flags.get("optimizer") not in (None, name):
            raise _contradiction("optimizer", flags["optimizer"], values, "optimizer.type")
    if values.sets(MAX_LR) and not values.sets(LR):
        settings["lr"] = values[MAX_LR]
    return settings


def _offload(values: ResolvedValues, flags: Mapping[str, Any]) -> dict[str, Any]:
    if not any(name in values.file for name in (DEVICE, RATIO)):
        return {}
    share, given = offload_ratio(values), flags.get("offload_ratio")
    if given not in (None, AUTO) and float(given) != share:
        raise _contradiction("offload_ratio", given, values, DEVICE)
    return {"offload_ratio": str(share)}


def _placement(values: ResolvedValues, flags: Mapping[str, Any]) -> dict[str, Any]:
    settings = placement(values)
    state_on = flags.get("state_on")
    if state_on not in (None, AUTO, settings.get("state_on", state_on)):
        raise _contradiction("state_on", state_on, values, DEVICE)
    if flags.get("swap") and settings.get("swap") and tuple(flags["swap"]) != settings["swap"]:
        raise _contradiction("swap", ", ".join(flags["swap"]), values, NVME_PATH)
    for name, key in (("weight_slots", PREFETCH), ("persistent_params", PERSISTENCE)):
        given = flags.get(name)
        if given is not None and str(given) != str(settings.get(name, given)):
            raise _contradiction(name, given, values, key)
    return settings


def _contradiction(name: str, given: Any, values: ResolvedValues, key: str) -> ValueError:
    return ValueError(
        f"{flag(name)}: got {given}, and {values.source} says {key} {values[key]}, expected one of them: leave out "
        f"the first, or the file's {key.rpartition('.')[2]}"
    )


def _check_lr(values: ResolvedValues, flags: Mapping[str, Any]) -> None:
    """Raise ValueError for a --lr, --lr-schedule or --warmup that the file's scheduler would ignore."""
    kind = values["scheduler.type"]
    if kind is not None and "lr_schedule" in flags:
        raise ValueError(
            f"--lr-schedule: got {flags['lr_schedule']}, and {values.source} has the scheduler {kind}, expected "
            "one of them: leave out --lr-schedule"
        )
    lr, warmup = flags.get("lr"), flags.get("warmup")
    if lr is not None and sets_lr_alone(values) and not (MAX_LR in values.file and values[MAX_LR] == lr):
        raise ValueError(
            f"--lr: got {lr:g}, and {values.source} has the scheduler {kind}, which sets the learning rate alone, "
            'expected one of them: leave out --lr, or write "warmup_max_lr": "auto" for a scheduler that has it'
        )
    if warmup is not None and kind in ("LRRangeTest", "OneCycle"):
        raise ValueError(
            f"--warmup: got {warmup}, and {values.source} has the scheduler {kind}, which has no warm-up, expected "
            "one of them: leave out --warmup"
        )
