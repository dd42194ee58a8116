"""What is logged, once, of a file: what was taken from it, in a few lines, and what of it has no effect, and why.

No key in the file is passed over in silence: it is named here, or what it decides is.
"""

from collections.abc import Iterator

from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.arguments import BatchSizes
from zfunc.train.deepspeed.lr import BETA2, LR, MAX_LR, LRSchedule, cycles_betas, sets_lr_alone
from zfunc.train.deepspeed.resolved import ResolvedValues


def name_notes(values: ResolvedValues) -> Iterator[str]:
    """Old names, what the file leaves open, and what has no effect."""
    for old, new in values.old:
        yield f"{old} is the old name of {new}"
    for name in values.auto:
        if not name.startswith("scheduler.") and values[name] is not None:  # the scheduler's line has those
            origin = "" if values.says(name) else ", the default there"
            yield f'{name}: "auto" is {values[name]}{origin}'
    for why, keys in values.ignored().items():
        yield f"no effect here: {', '.join(keys)}: {why}"
    if LR in values.file and sets_lr_alone(values) and values[LR] != values[MAX_LR]:
        yield f"no effect: {LR}: the scheduler {values['scheduler.type']} sets the learning rate alone, as there"


def decision_notes(
    values: ResolvedValues, batch: BatchSizes, rate: LRSchedule | None, scale: LossScale | None
) -> Iterator[str]:
    """What decides how the training goes."""
    yield f"train_batch_size: {batch}"
    if rate is not None:
        yield f"scheduler: {rate}"
    if cycles_betas(values):
        name = "optimizer.params.betas"
        instead = f", and not the {values[name][1]:g} of {name}" if values.says(name) else ""
        yield f"scheduler: OneCycle moves beta1 too, and beta2 is {BETA2:g}{instead}, as there"
    if str(values["optimizer.type"]).lower() == "adam" and values["optimizer.params.adam_w_mode"]:
        yield "optimizer.type: Adam decays weights as AdamW does, as it does there, unless adam_w_mode is false"
    if scale is not None:
        yield f"fp16: {_loss_scale(scale)}"
    if values["zero_optimization.stage"] == 0 and batch.world > 1:
        yield "zero_optimization.stage: 0 trains as 1, with the same result: each rank keeps a slice of the state"
    if not values.says("gradient_clipping") and "gradient_clipping" not in values.auto:
        yield f"gradient_clipping: not in the file, so {values['gradient_clipping']:g}, the default there"


def _loss_scale(scale: LossScale) -> str:
    if not scale.window:
        return f"a fixed loss scale of {scale.scale:g}"
    refilled = ", refilled by every step without one" if scale.consecutive else ""
    return (
        f"a loss scale that begins at {scale.scale:g}, doubles after {scale.window} steps without an overflow, "
        f"halves at overflow {scale.hysteresis}{refilled}, and is at least {scale.minimum:g}"
    )
