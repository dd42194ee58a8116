"""The values that settings of a step may have: words, limits and checks; and what to use for settings now gone."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

from attrs import evolve, field

from zfunc.core.graph import Graph
from zfunc.core.pipeline import InGroups
from zfunc.core.plan import Plan
from zfunc.errors import SettingError, SettingTypeError, refuse
from zfunc.options import AUTO, Check, OneOf, Option, not_negative
from zfunc.values import whole

Recompute = Literal["all", "none", "min-cut"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Schedule = Callable[[Graph], Plan]

DISK: Literal["disk"] = "disk"
PLACES: tuple[Literal["device", "host"], ...] = ("device", "host")
TIERS_OF: dict[str, tuple[str, ...]] = {  # where things may be, the nearest first
    "state_on": ("host", DISK),
    "params_on": (*PLACES, DISK),
    "grads_on": (*PLACES, DISK),
    "activations_on": (*PLACES, DISK),
}
# Of the state, as much in the first place as fits or helps.
DEVICE_SHARE, DISK_SHARE = f"device:{AUTO},host", f"host:{AUTO},disk"
UPDATE_SHARES = ("host", "host:0.75,device", "host,device", "host:0.25,device", "device")
# The settings that may be "auto", and what `zfunc.compile` tries in this order; a search of the planner tries more.
CHOICES = {**TIERS_OF, "recompute": ("min-cut", "all"), "update_on": UPDATE_SHARES, "tiles": (1,)}
BY_DEVICE = "by-device"  # the schedule and the order, unless one is named

SHARES = (
    'Several are for shares of the segments, from the first: "host:0.25,device"; without numbers equal ones.'
)
MOST_TILES = 1 << 16
SHORTEST_TILE = 512  # tokens: below, a device waits for launches, as many as the square of the tiles
MOST_DEVICES = 1024
MOST_MICRO_BATCHES = 1 << 16  # the operations of each are planned one by one
ONE_DEVICE = {"horizontal": 1, "vertical": MOST_MICRO_BATCHES}  # its orders: micro-batches of a group
OPTION, CHECK, HELP, TRIES = "option", "check", "help", "tries"  # keys of a field's metadata

_WITH_NORM = "pass defer, which hides the host with the same bits"
# Settings that are gone, and what to use instead.
GONE = {
    **dict.fromkeys(("delay_from", "delayed"), f"{_WITH_NORM}; examples/systems has the other"),
    "speculate": f"{_WITH_NORM} and no shadow",
    "parallel": "pass pp, the number of pipeline stages",
    "sync_buffers": "leave it out: ranks keep the buffers of rank 0, as with DistributedDataParallel",
    **dict.fromkeys(
        ("weight_slots", "grad_slots", "host_slots"), "pass `slots`, which is the number of them all"
    ),
    **dict.fromkeys(("update_slots", "state_slots"), "pass `slots`, of which the state has one more"),
    "offload_ratio": "pass the device's share of the state, which is the rest, as `state_on='device:0.25,host'`",
    "disk_ratio": "pass the host's share of the state, which is the rest, as `state_on='host:0.25,disk'`",
    "accumulate": "pass it as `order`, that of one device; several add up on the host with `grads_on=host`",
    "moments": "pass it to the optimizer, as in zfunc.AdamW(moments='8bit')",
}
_RATES = "pass it to the optimizer, as in zfunc.AdamW(lr=1e-3)"
ELSEWHERE = {
    "loss": "pass the segments of zfunc.segments(model, example, loss)",
    **dict.fromkeys(("lr", "learning_rate", "betas", "eps", "weight_decay"), _RATES),
    **dict.fromkeys(("max_norm", "max_grad_norm", "gradient_clipping"), "pass it as `clip_norm`"),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps"), "pass it as `micro_batches`"),
}
"""Names that other trainers take beside settings: where zfunc has each."""
OF_OPTIMIZER = ("moments",)  # fields that `zfunc.compile` has from the optimizer; plans vary them, too

joined = ", ".join
ORDER_SIGNATURE = "(devices, segments, micro_batches) -> passes"
one_or_more = partial(whole, least=1)


def make_setting(
    default: Any,
    check: Check,
    group: str,
    help: str,
    detail: str = "",
    *,
    note: str = "",
    tries: tuple[Any, ...] = (),
    **more: Any,
) -> Any:
    """An attrs field for a setting of a step with its command-line flag (an Option in the help group `group`,
    with arguments `more`; no flag if `group` is ""). `check` validates both; a flag takes "auto" only where a
    command offers it.

    `tries` are the values that the planner tries, those that need most device memory first; "auto" among them
    stands for computed values. `detail` follows `help` in documentation, `note` in the help of commands.
    """
    typed = evolve(check, names=[x for x in check.names if x != AUTO]) if isinstance(check, OneOf) else check
    option = Option(group, help + note, typed, **more)
    documentation = f"{help}. {detail}" if detail else f"{help}."
    return field(default=default, metadata={OPTION: option, CHECK: check, HELP: documentation, TRIES: tries})


def tile_counts(tokens: int) -> list[int]:
    """The numbers of tiles that "auto" tries for a row of `tokens` tokens, the fewest first: divisors of `tokens`.

    >>> tile_counts(3000), tile_counts(1)
    ([1, 4, 5], [1])
    """
    divisors = [n for n in range(1, tokens // SHORTEST_TILE + 1) if tokens % n == 0] or [1]
    near = (min(divisors, key=lambda n: abs(n - wanted)) for wanted in (1, 4, 16, 64, 256, 1024))
    return list(dict.fromkeys(near))


def schedule_for(schedule: str | Schedule, *, on_cpu: bool) -> str | Schedule:
    """The setting `schedule`, or, if it is left to the device, the name of the default schedule on a CPU
    (`on_cpu`) or an accelerator."""
    return ("SharedCores" if on_cpu else "Overlapped") if schedule == BY_DEVICE else schedule


def name_or_callable(signature: str, name: str, value: Any) -> Any:
    """Check setting `name`: a text, or a callable of `signature`; a class is called to make an object.
    Returns the result; raises TypeError for other values."""
    if isinstance(value, type):
        try:
            return value()
        except TypeError as error:
            expected = f"one that takes no arguments, or an object ({error})"
            do = "pass an object of it"
            raise SettingTypeError(name, f"the class {value.__name__}", expected, do) from error
    if not isinstance(value, str) and not callable(value):
        do = "pass a name or an object of zfunc.schedules"
        refuse(name, f"a {type(value).__name__}", f"a callable {signature}", do, SettingTypeError)
    return value


def order_or_group_size(name: str, value: Any) -> Any:
    """Check setting `order`: a name, a callable, or the number of micro-batches in a group. Returns the name,
    the callable or the number; text of digits becomes a number."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    value = value.size if isinstance(value, InGroups) else value
    check = one_or_more if isinstance(value, int) else partial(name_or_callable, ORDER_SIGNATURE)
    return check(name, value)


def word_or_number(words: tuple[str, ...], other: str, check: Check) -> Check:
    """Make a check of a setting that takes one of `words`, or a number (also as text) that `check` accepts.
    `other` describes these numbers in error messages."""

    def either(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return check(name, value)
        if value in words:
            return value
        try:
            typed = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise SettingError(name, repr(value), f"{joined(words)}, or {other}", "choose one") from None
        return check(name, typed)

    return either


def clip_norm_or_none(name: str, value: Any) -> float | None:
    """Check `clip_norm`: a number of 0 or more; 0 returns None, which does not clip."""
    return not_negative(name, value) or None


def size_or_names(name: str, value: Any) -> int | str:
    """Check `persistent_params`: a number of elements, or names of segments or parameters, as a list or
    joined by commas. Returns the number, or the names as text joined by commas."""
    if isinstance(value, list | tuple):
        value = ",".join(str(part) for part in cast("Sequence[Any]", value))
    if not isinstance(value, str):
        return whole(name, value, least=0)
    if "" in value.split(","):
        refuse(name, f"{value!r}", "names of segments or parameters, joined by commas", "name some")
    return int(value) if value.isdecimal() else value


def globs_of_names(name: str, value: Any) -> tuple[str, ...]:
    """Check setting `name`: globs of parameter names, as a list or as text with commas; return them as a tuple."""
    texts: list[Any] = [*cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) for text in texts):
        refuse(name, f"{value!r}", "globs of names", "pass such as '*norm*,*.router'", SettingTypeError)
    globs = tuple(glob for text in texts for glob in text.split(",") if text)
    if "" in globs:
        refuse(name, f"{value!r}", "globs joined by commas", "leave out the empty one")
    return globs


def swap_folders(name: str, value: Any) -> tuple[str, ...]:
    """Check setting `swap`: the path of a folder, or a list with one for each drive; return a tuple of paths."""
    folders: list[Any] = [*cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else [value]
    for folder in folders:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):  # pyright: ignore
            refuse(name, f"{folder!r}", "the path of a folder", "pass one for each drive", SettingTypeError)
    return tuple(os.fsdecode(folder) for folder in folders)
