"""The precision a file asks for, and the loss scale of fp16.

The invariant: two precisions are an error; none is fp32, as there, unless the file leaves it open.
"""

from zfunc.optim.loss_scale import LossScale
from zfunc.train.deepspeed.values import ResolvedValues

ENABLED = {"fp16": "fp16.enabled", "bf16": "bf16.enabled"}


def precision(values: ResolvedValues) -> str | None:
    """ "fp16", "bf16", "fp32", or None for a file that says nothing of it.

    >>> from zfunc.train.deepspeed.values import resolve_values
    >>> from zfunc.train.deepspeed.reading import read_config_file
    >>> precision(resolve_values(read_config_file({"bf16": {"enabled": True}})))
    'bf16'
    """
    on = [name for name, key in ENABLED.items() if values[key]]
    if len(on) > 1:
        raise ValueError(f"{values.source}: got fp16 and bf16 both enabled, expected one: switch one off")
    if on:
        return on[0]
    said = any(values.says(key) for key in ENABLED.values())
    return "fp32" if said else None


def loss_scale(values: ResolvedValues) -> LossScale:
    """The loss scale of a file that trains in fp16.

    >>> from zfunc.train.deepspeed.values import resolve_values
    >>> from zfunc.train.deepspeed.reading import read_config_file
    >>> loss_scale(resolve_values(read_config_file({"fp16": {"enabled": True, "initial_scale_power": 8}}))).scale
    256.0
    """
    fixed = values["fp16.loss_scale"]
    if fixed:
        return LossScale(scale=fixed, window=0)
    for name in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        if not values[name]:
            raise ValueError(
                f"{values.source}: {name}: got 0 for a loss scale that moves, expected 1 or more: raise it, or fix "
                "the scale with fp16.loss_scale"
            )
    power, minimum = values["fp16.initial_scale_power"], values["fp16.min_loss_scale"]
    if 2.0**power < minimum:
        raise ValueError(
            f"{values.source}: got fp16.initial_scale_power {power} and min_loss_scale {minimum}, expected a first "
            f"scale of 2**{power} = {2**power} not below the smallest: raise the power, or lower the minimum"
        )
    return LossScale(
        scale=2.0**power,
        window=values["fp16.loss_scale_window"],
        hysteresis=values["fp16.hysteresis"],
        minimum=float(minimum),
        consecutive=values["fp16.consecutive_hysteresis"],
    )
