"""DeepSpeed's keys, read from keys.toml: checks, messages and docs/deepspeed.md are derived from this table."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from attrs import frozen

from zfunc.train.deepspeed.value_types import OBJECT, ValueType, value_type

TABLE = Path(__file__).with_name("keys.toml")
Fate = Literal["supported", "ignored", "unsupported"]


@frozen
class Key:
    """A key. An unsupported one may have its default, or be switched off."""

    name: str  # dotted
    type: ValueType
    default: Any  # DeepSpeed's
    fate: Fate
    note: str  # how it is supported, why it is ignored, or what to do instead of an unsupported one
    exceptions: tuple[Any, ...] = ()  # values of a supported key that are refused
    instead: str = ""  # what to do about those

    @property
    def block(self) -> str:
        """The object that has the key; "" is the file."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def refusal(self, value: Any) -> str:
        """Why a value, as read by `type`, is refused; "" if it is accepted."""
        if value in self.exceptions:
            return self.instead
        off = value == self.default or (self.type is OBJECT and not switched_on(value))
        return self.note if self.fate == "unsupported" and not off else ""


@frozen
class OldName:
    """The key that an old name stands for; for a switch, also the values of True and False."""

    key: str
    switch: tuple[Any, Any] | None = None

    def value(self, old: Any) -> Any:
        """The key's value."""
        return self.switch[not old] if self.switch and old in (True, False) else old


def parse_table(text: str) -> tuple[dict[str, Key], dict[str, OldName]]:
    """The keys and old names in a text like keys.toml. Raises ValueError for a wrong row.

    >>> keys, _ = parse_table('[notes]\\n[keys]\\nlr = { type = "float 0..", supported = "as `lr`" }\\n[old]')
    >>> keys["lr"].note
    'as `lr`'
    """
    table = tomllib.loads(text)
    keys = {name: _key(name, row, table["notes"]) for name, row in table["keys"].items()}
    old = {
        name: OldName(to) if isinstance(to, str) else OldName(to["key"], (to["true"], to["false"]))
        for name, to in table["old"].items()
    }
    for name, old_name in old.items():
        if old_name.key not in keys or name in keys:
            raise ValueError(
                f"old name {name}: got {old_name.key}, expected a key of the table for another name"
            )
    return keys, old


def _key(name: str, row: dict[str, Any], notes: Mapping[str, str]) -> Key:
    fates: list[Fate] = [fate for fate in get_args(Fate) if fate in row]
    wrong = row.keys() - {"type", "default", "except", "instead", *fates}
    if len(fates) != 1 or wrong or ("except" in row) != ("instead" in row) or "type" not in row:
        raise ValueError(
            f"{name}: got {', '.join(row)}, expected type, perhaps default, except with instead, and one of "
            f"{', '.join(get_args(Fate))}"
        )
    try:
        kind, note = value_type(row["type"]), row[fates[0]].format_map(notes)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{name}: got {error}, expected a type of value_types.py and notes of the table"
        ) from None
    default, exceptions = row.get("default"), row.get("except", [])
    for value in [*exceptions, *(() if default is None else (default,))]:
        if kind.read(value) is None:
            raise ValueError(f"{name}: got {value!r}, expected {kind.expected}")
    default = None if default is None else kind.read(default)
    return Key(name, kind, default, fates[0], note, tuple(exceptions), row.get("instead", ""))


KEYS, OLD_NAMES = parse_table(TABLE.read_text())


def _blocks() -> frozenset[str]:
    blocks = {""}
    for name in (*KEYS, *OLD_NAMES):
        while name := name.rpartition(".")[0]:
            blocks.add(name)
    return frozenset(blocks)


BLOCKS = _blocks()
"""Objects that a file may have, by dotted name; "" is the file."""


def names_in(block: str) -> list[str]:
    """The keys that a block may have, in the table's order, as a file writes them.

    >>> names_in("bf16")[0]
    'enabled'
    """
    prefix = f"{block}." if block else ""
    inside = (name[len(prefix) :] for name in (*KEYS, *OLD_NAMES) if name.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in inside))


def blocks_with(last: str) -> list[str]:
    """The blocks that have a key whose name ends in `last`."""
    return [key.block for key in KEYS.values() if key.last == last]


def switched_on(value: Any) -> bool:
    """Whether a block is on: by the keys `enabled` in it; without any, by not being empty.

    >>> switched_on({"enabled": False, "size": 3}), switched_on({"size": 3}), switched_on({})
    (False, True, False)
    """
    if not isinstance(value, dict):
        return bool(value)
    block = cast("dict[str, Any]", value)
    switches = list(_switches(block))
    return any(switches) if switches else bool(block)


def _switches(block: dict[str, Any]) -> Iterator[bool]:
    for name, value in block.items():
        if name == "enabled":
            yield bool(value)
        elif isinstance(value, dict):
            yield from _switches(cast("dict[str, Any]", value))
