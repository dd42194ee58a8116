"""What a file says of the optimizer, as the arguments of `zfunc.AdamW`, which needs torch and is not known here.

The invariant: whatever the file calls Adam is the Adam it is there.
"""

from typing import Any

from zfunc.errors import did_you_mean
from zfunc.train.deepspeed.flags import sixteen_bit, weight_decay
from zfunc.train.deepspeed.momentum import betas, cycles
from zfunc.train.deepspeed.values import ResolvedValues

ADAMS = ("adam", "adamw")


def adam_arguments(values: ResolvedValues) -> dict[str, Any]:
    """Arguments of `zfunc.AdamW` but for `lr` and `decay`; without an optimizer, of betas that cycle alone.

    >>> from zfunc.train.deepspeed.values import resolve_values
    >>> from zfunc.train.deepspeed.reading import read_config_file
    >>> adam_arguments(resolve_values(read_config_file({"optimizer": {"type": "Adam"}})))["decoupled"]
    True
    """
    if not values.has("optimizer"):
        return {"betas": betas(values)} if cycles(values) else {}
    kind = values["optimizer.type"]
    if kind is None or kind.lower() not in ADAMS:
        got = "no type" if kind is None else f"the type {kind!r}"
        raise ValueError(
            f"{values.source}: optimizer: got {got}{did_you_mean(kind or '', ['Adam', 'AdamW'])}, expected Adam or "
            'AdamW, which are the optimizers here: write "type": "AdamW"'
        )
    return {
        "betas": betas(values),
        "eps": values["optimizer.params.eps"],
        "weight_decay": weight_decay(values),
        "decoupled": kind.lower() == "adamw" or values["optimizer.params.adam_w_mode"],
        "moments": "16bit" if sixteen_bit(values) else "fp32",
    }
