"""What is said, once, of a file: what was taken from it in a few lines, and what of it has no effect, and why.

The invariant: no key that is in the file is passed over in silence: it is named here, or what it decides is.
"""

from collections.abc import Iterator

from zfunc.deepspeed.batch import Batch
from zfunc.deepspeed.rate import LR, sets_lr_alone
from zfunc.deepspeed.schedules import Schedule
from zfunc.deepspeed.values import Values
from zfunc.loss_scale import LossScale


def names(values: Values) -> Iterator[str]:
    """Old names, what the file leaves open, and what has no effect."""
    for old, new in values.old:
        yield f"{old} is the old name of {new}"
    for name in values.auto:
        value = values[name]
        told = "not known before the training is" if value is None else f"{value}"
        yield f'{name}: "auto" is {told}{"" if values.says(name) or value is None else ", the default there"}'
    for why, keys in values.without_effect():
        yield f"no effect here: {', '.join(keys)}: {why}"
    if values.says(LR) and sets_lr_alone(values):
        yield f"no effect: {LR}: the scheduler {values['scheduler.type']} sets the learning rate alone, as it does there"


def decisions(values: Values, batch: Batch, rate: Schedule | None, scale: LossScale | None) -> Iterator[str]:
    """What decides how the training goes."""
    if batch.train is not None:
        yield f"train_batch_size: {batch}"
    if rate is not None:
        yield f"scheduler: {rate}"
    if scale is not None:
        yield f"fp16: {scale}" if scale.window else f"fp16: a fixed loss scale of {scale.scale:g}"
    if values["zero_optimization.stage"] == 0 and batch.world > 1:
        yield "zero_optimization.stage: 0 trains as 1, with the same result: each rank keeps a slice of the state"
    if "gradient_clipping" not in values.file and not values.says("gradient_clipping"):
        yield f"gradient_clipping: not in the file, so {values['gradient_clipping']:g}, the default there"
