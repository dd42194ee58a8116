"""The log lines about a file: what it sets, and which keys have no effect, and why. No key is dropped silently."""

from collections.abc import Iterator

from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.arguments import (
    BUCKET_SIZE,
    PARAM_DEVICE,
    PERSISTENCE,
    PREFETCH,
    STAGE,
    BatchSizes,
)
from zfunc.train.deepspeed.keys import KEYS
from zfunc.train.deepspeed.lr import BETA2, LR, MAX_LR, LRSchedule, cycles_betas, sets_lr_alone
from zfunc.train.deepspeed.resolved import ResolvedValues

OWN_DEFAULTS = (BUCKET_SIZE, PREFETCH, PERSISTENCE)  # of zfunc, where nobody sets the key


def name_notes(values: ResolvedValues) -> Iterator[str]:
    """Old names, keys that are "auto", and keys without effect."""
    for old, new in values.old:
        yield f"{old} is the old name of {new}"
    for name in values.auto:
        # The scheduler has a line of its own.
        if name.startswith("scheduler.") or KEYS[name].fate == "ignored":
            continue
        if name in OWN_DEFAULTS and not values.sets(name):
            yield f'{name}: "auto" is zfunc\'s default'
        elif values[name] is not None:
            origin = "" if values.sets(name) else ", DeepSpeed's default"
            yield f'{name}: "auto" is {values[name]}{origin}'
    for reason, keys in values.ignored().items():
        yield f"no effect: {', '.join(keys)}: {reason}"
    if LR in values.file and sets_lr_alone(values) and values[LR] != values[MAX_LR]:
        yield f"no effect: {LR}: {values['scheduler.type']} sets the learning rate alone, as in DeepSpeed"
    if values.file.get(PARAM_DEVICE) in ("cpu", "nvme") and values[STAGE] != 3:
        yield f"no effect: {PARAM_DEVICE}: for stage 3 only, as in DeepSpeed"


def decision_notes(
    values: ResolvedValues, batch: BatchSizes, rate: LRSchedule | None, scale: LossScale | None
) -> Iterator[str]:
    """Batch, scheduler, optimizer and loss scale that follow from the file."""
    yield f"train_batch_size: {batch}"
    if rate is not None:
        yield f"scheduler: {rate}"
    if cycles_betas(values):
        name = "optimizer.params.betas"
        instead = f", and not the {values[name][1]:g} of {name}" if values.sets(name) else ""
        yield f"scheduler: OneCycle moves beta1 too, and beta2 is {BETA2:g}{instead}, as in DeepSpeed"
    if str(values["optimizer.type"]).lower() == "adam" and values["optimizer.params.adam_w_mode"]:
        yield "optimizer.type: Adam is AdamW unless adam_w_mode is false, as in DeepSpeed"
    if scale is not None:
        yield f"fp16: {_loss_scale(scale)}"
    if values["zero_optimization.stage"] == 0 and batch.world > 1:
        yield "zero_optimization.stage: 0 trains as 1, with the same result: optimizer state is always sharded"
    if not values.sets("gradient_clipping") and "gradient_clipping" not in values.auto:
        yield f"gradient_clipping: not in the file: {values['gradient_clipping']:g}, DeepSpeed's default"


def _loss_scale(scale: LossScale) -> str:
    if not scale.window:
        return f"a fixed loss scale of {scale.scale:g}"
    reset = ", counted anew after every step without one" if scale.consecutive else ""
    return (
        f"a loss scale that starts at {scale.scale:g}, doubles after {scale.window} steps without an overflow, "
        f"halves at overflow {scale.hysteresis}{reset}, and is at least {scale.minimum:g}"
    )
