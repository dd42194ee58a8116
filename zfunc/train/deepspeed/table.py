"""All rows in one table, with the blocks they are in, the kinds of training they belong to, and their old names.

The invariant: a name is in the table once; an old name stands for one that is in it.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from zfunc.train.deepspeed.key import Key
from zfunc.train.deepspeed.main_keys import MAIN_KEYS
from zfunc.train.deepspeed.other_keys import OTHER_KEYS
from zfunc.train.deepspeed.zero_keys import ZERO_KEYS

ROWS: tuple[Key, ...] = (*MAIN_KEYS, *ZERO_KEYS, *OTHER_KEYS)
KEYS: Mapping[str, Key] = {key.name: key for key in ROWS}


@frozen
class Old:
    """A name that files still have: what it is called now, and the value of one where the other has `value`."""

    now: str
    value: Mapping[Any, Any] | None = None  # None: the same value

    def values(self, got: Any) -> Any:
        """The value under the new name, for one under the old name."""
        return got if self.value is None else self.value.get(got, got)


_SWITCH = {True: "cpu", False: "none"}
_STAGE3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)

OLD: Mapping[str, Old] = {
    "zero_optimization.cpu_offload": Old("zero_optimization.offload_optimizer.device", _SWITCH),
    "zero_optimization.cpu_offload_param": Old("zero_optimization.offload_param.device", _SWITCH),
    "zero_optimization.cpu_offload_use_pin_memory": Old("zero_optimization.offload_optimizer.pin_memory"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Old(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{f"zero_optimization.{name}": Old(f"zero_optimization.stage3_{name}") for name in _STAGE3},
    "allgather_size": Old("zero_optimization.allgather_bucket_size"),
    "bfloat16.enabled": Old("bf16.enabled"),
}


def _blocks() -> frozenset[str]:
    found = {""}
    for name in (*KEYS, *OLD):
        while name := name.rpartition(".")[0]:
            found.add(name)
    return frozenset(found)


BLOCKS: frozenset[str] = _blocks()
"""Every object a file may have, by its dotted name; "" is the file."""


def names_in(block: str) -> list[str]:
    """The keys that a block may have, in the table's order, as a file writes them.

    >>> names_in("bf16")[0]
    'enabled'
    """
    prefix = f"{block}." if block else ""
    inside = (name[len(prefix) :] for name in (*KEYS, *OLD) if name.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in inside))


def elsewhere(last: str) -> list[str]:
    """The blocks that have a key of this name."""
    return [key.block for key in ROWS if key.last == last]
