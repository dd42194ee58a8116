"""A file and a command line together: settings of `zfunc train` in which no two of them say different things.

The invariant: a flag holds where the file says nothing or "auto"; one that the file contradicts is an error. What
neither says is the command's default, but for what the file's own blocks have defaults for.
"""

from collections.abc import Mapping
from typing import Any

from zfunc.options import AUTO, flag, ratio
from zfunc.train.deepspeed.batch import batch_sizes, left_open
from zfunc.train.deepspeed.precision import ENABLED, precision
from zfunc.train.deepspeed.rate import LR, MAX_LR, WARMUP, sets_lr_alone
from zfunc.train.deepspeed.reading import ConfigSource
from zfunc.train.deepspeed.values import GivenValue, ResolvedValues, resolve_values

_Z = "zero_optimization."
DEVICE, RATIO = f"{_Z}offload_optimizer.device", f"{_Z}offload_optimizer.ratio"

FLAGS: Mapping[str, str] = {
    "lr": LR,
    "weight_decay": "optimizer.params.weight_decay",
    "warmup": WARMUP,
    "clip": "gradient_clipping",
    "batch_size": "train_batch_size",
    "micro_batches": "gradient_accumulation_steps",
    "bucket_size": f"{_Z}reduce_bucket_size",
    "offload_ratio": RATIO,
    "tensorboard": "tensorboard.enabled",
    "wandb": "wandb.enabled",
}
"""Settings of the command that are keys of the file."""
_ALIKE = ("clip", "bucket_size", "tensorboard", "wandb")  # of them, those that mean the same in both


def flags_by_key(flags: Mapping[str, Any]) -> dict[str, GivenValue]:
    """What the flags say, by key. `zfunc train` is told "auto" for what it chooses itself, which says nothing."""
    told: dict[str, GivenValue] = {}
    for name, value in flags.items():
        if name == "offload_ratio" and value not in (None, AUTO):
            ratio(name, value)
            told[RATIO] = GivenValue(float(value), flag(name))
        elif name in FLAGS and value not in (None, AUTO):
            told[FLAGS[name]] = GivenValue(value, flag(name))
        if name == "precision" and value not in (None, AUTO):
            told |= {key: GivenValue(value == kind, flag(name), value) for kind, key in ENABLED.items()}
        if name == "moments" and value == "fp32":
            told["bf16.bf16_optimizer_states"] = GivenValue(False, flag(name), value)
            told["optimizer.params.fp32_optimizer_states"] = GivenValue(True, flag(name), value)
    return told


def merge_flags(flags: Mapping[str, Any], source: ConfigSource, world: int) -> dict[str, Any]:
    """The flags, and what the file says beside them, as settings of `zfunc train` on `world` ranks.

    Raises ValueError for a file that is wrong, and for a flag that it contradicts.
    """
    values = resolve_values(source, flags_by_key(flags))
    _check_lr(values, flags)
    found = {
        **{name: values[FLAGS[name]] for name in _ALIKE if values.says(FLAGS[name])},
        **_optimizer(values),
        **_offload(values, flags),
        **_batch(values, world),
    }
    if (chosen := precision(values)) is not None:
        found["precision"] = chosen
    return {**found, **{name: value for name, value in flags.items() if value is not None}}


def _batch(values: ResolvedValues, world: int) -> dict[str, Any]:
    if left_open(values):
        steps = FLAGS["micro_batches"]
        return {"micro_batches": values[steps]} if values.says(steps) else {}
    made = batch_sizes(values, world)
    return {"batch_size": made.train, "micro_batches": made.accumulation}


def _optimizer(values: ResolvedValues) -> dict[str, Any]:
    found: dict[str, Any] = {"moments": "16bit"} if sixteen_bit(values) else {}
    if values.has("optimizer"):
        found |= {"lr": values[LR], "weight_decay": weight_decay(values)}
    if values.says(MAX_LR) and not values.says(LR):
        found["lr"] = values[MAX_LR]
    return found


def weight_decay(values: ResolvedValues) -> float:
    """The weight decay of the file: without a word, none, or torch's own for its AdamW."""
    name = FLAGS["weight_decay"]
    torchs = values["optimizer.params.torch_adam"] and str(values["optimizer.type"]).lower() == "adamw"
    return 0.01 if torchs and not values.says(name) else values[name]


def sixteen_bit(values: ResolvedValues) -> bool:
    """Whether the file wants moments in 16 bits."""
    return values["bf16.bf16_optimizer_states"] or not values["optimizer.params.fp32_optimizer_states"]


def offload_ratio(values: ResolvedValues) -> float:
    """The share of the optimizer's state on the host. Without `offload_optimizer`, all of it."""
    if DEVICE in values.file:
        return 0.0 if values[DEVICE] == "none" else values[RATIO]
    return values[RATIO]


def _offload(values: ResolvedValues, flags: Mapping[str, Any]) -> dict[str, Any]:
    if not any(name in values.file for name in (DEVICE, RATIO)):
        return {}
    share, told = offload_ratio(values), flags.get("offload_ratio")
    if told not in (None, AUTO) and float(told) != share:
        raise ValueError(
            f"--offload-ratio: got {told}, and {values.source} says {DEVICE} {values[DEVICE]}, expected one "
            "of them: leave out the first, or the file's offload_optimizer"
        )
    return {"offload_ratio": str(share)}


def _check_lr(values: ResolvedValues, flags: Mapping[str, Any]) -> None:
    """A --lr or --warmup that the file's scheduler would not hear."""
    kind = values["scheduler.type"]
    lr, warmup = flags.get("lr"), flags.get("warmup")
    if lr is not None and sets_lr_alone(values) and not (MAX_LR in values.file and values[MAX_LR] == lr):
        raise ValueError(
            f"--lr: got {lr:g}, and {values.source} has the scheduler {kind}, which sets the learning rate alone, "
            'expected one of them: leave out --lr, or write "warmup_max_lr": "auto" for a scheduler that has it'
        )
    if warmup is not None and kind in ("LRRangeTest", "OneCycle"):
        raise ValueError(
            f"--warmup: got {warmup}, and {values.source} has the scheduler {kind}, which has none, expected "
            "one of them: leave out --warmup"
        )
