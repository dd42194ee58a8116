"""DeepSpeed's keys, read from keys.toml: checks, messages and docs/deepspeed.md are derived from this table."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from zfunc.options import AUTO

READ_BY_NAME = ("aio", "activation_checkpointing")  # where DeepSpeed 0.19 ignores unknown keys
FATES = ("supported", "ignored", "unsupported")


@frozen
class Key:
    """A key. An unsupported one may have its default, or be switched off."""

    name: str  # dotted
    type: str | list[Any]  # as keys.toml describes it
    default: Any  # DeepSpeed's
    fate: str  # one of FATES
    note: str  # how it is supported, why it is ignored, or what to do instead of an unsupported one
    exceptions: tuple[Any, ...] = ()  # values of a supported key that are refused
    instead: str = ""  # what to do about those
    switch: str = ""  # the key of a block that alone turns it on

    @property
    def block(self) -> str:
        """The object that has the key; "" is the file."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def expected(self) -> str:
        """Its type, for errors."""
        if isinstance(self.type, list):
            return ", ".join(map(str, self.type))
        name, _, bounds = self.type.partition(" ")
        low, _, high = bounds.partition("..")
        return f"{name} from {low} to {high}" if high else f"{name}, {low} or more" if low else name

    def refusal(self, value: Any) -> str:
        """Why a value of its type is refused; "" if it is accepted."""
        if value in self.exceptions:
            return self.instead
        return self.note if self.fate == "unsupported" and self.acts(value) else ""

    def acts(self, value: Any) -> bool:
        """Whether a value differs from the default; of a block, whether it is on."""
        if self.type != "object":
            return value != self.default
        if self.switch and isinstance(value, dict):
            return cast("dict[str, Any]", value).get(self.switch) not in (None, False, 0, AUTO)
        return switched_on(value)


def read_value(kind: str | list[Any], value: Any) -> Any:
    """A value as its type has it; None for a value of another type.

    >>> read_value("int 1..", 5e8), read_value("int 1..", 0.5), read_value("int 1..", 0)
    (500000000, None, None)
    >>> read_value("float 0..1", 1), read_value("float 0..", float("nan")), read_value(["cpu", "nvme"], "CPU")
    (1.0, None, 'cpu')
    """
    if isinstance(kind, list):
        return next((x for x in kind if str(x).lower() == str(value).lower()), None)
    name, _, bounds = kind.partition(" ")
    if name in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        low, _, high = bounds.partition("..")
        inside = float(low or "-inf") <= value <= float(high or "inf")
        number = {"int": int, "float": float}[name](value)
        return number if inside and number == value else None
    if name == "betas":
        many = cast("list[Any]", value) if isinstance(value, list | tuple) else []
        pair = [read_value("float 0..1", x) for x in many]
        return tuple(pair) if len(pair) == 2 and None not in pair else None
    kinds: dict[str, Any] = {"bool": bool, "text": str, "object": (dict, bool)}
    return value if isinstance(value, kinds[name]) else None


def _key(name: str, row: dict[str, Any], notes: Mapping[str, str]) -> Key:
    (fate,) = (fate for fate in FATES if fate in row)
    default = None if (default := row.get("default")) is None else read_value(row["type"], default)
    exceptions = tuple(row.get("except", ()))
    note, more = row[fate].format_map(notes), (row.get("instead", ""), row.get("switch", ""))
    return Key(name, row["type"], default, fate, note, exceptions, *more)


_TABLE = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())
KEYS = {name: _key(name, row, _TABLE["notes"]) for name, row in _TABLE["keys"].items()}
OLD_NAMES: dict[str, str] = _TABLE["old"]
"""Names that older files have, each with the name of today."""
OLD_SWITCHES = {True: "cpu", False: "none"}  # of offloading, as the values of today


def _blocks() -> Iterator[str]:
    for name in (*KEYS, *OLD_NAMES):
        while name := name.rpartition(".")[0]:
            yield name


BLOCKS = frozenset(_blocks())
"""Objects that a file may have, by dotted name."""


def names_in(block: str) -> list[str]:
    """The keys that a block may have, in the table's order, as a file writes them.

    >>> names_in("bf16")[0]
    'enabled'
    """
    prefix = f"{block}." if block else ""
    inside = (name[len(prefix) :] for name in (*KEYS, *OLD_NAMES) if name.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in inside))


def switched_on(value: Any) -> bool:
    """Whether a block is on: by the keys `enabled` in it; without any, by not being empty.

    >>> switched_on({"enabled": False, "size": 3}), switched_on({"size": 3}), switched_on({})
    (False, True, False)
    """
    switches = list(_switches(cast("dict[str, Any]", value))) if isinstance(value, dict) else []
    return any(switches) if switches else bool(cast("object", value))


def _switches(block: dict[str, Any]) -> Iterator[bool]:
    for name, value in block.items():
        if name == "enabled":
            yield bool(value)
        elif isinstance(value, dict):
            yield from _switches(cast("dict[str, Any]", value))
