"""A row of the table: one key of the file, and what becomes of it.

The invariant: the table is all that is known of a key. Checks, log lines and docs/deepspeed.md are derived from it.
"""

from typing import Any, Literal, cast

from attrs import frozen

from zfunc.train.deepspeed.takes import BLOCK, FLAG, ValueType

Fate = Literal["honoured", "no effect", "refused"]
HONOURED: Fate = "honoured"
NO_EFFECT: Fate = "no effect"
REFUSED: Fate = "refused"


@frozen
class Key:
    """A key by its dotted `name`: what it `takes`, its `default` there, its `fate` here, and in `told` how it is
    honoured, why it has no effect, or what to do instead of what is refused.

    `unsupported` are single values of an honoured key that are refused, for the reason `instead`. A refused key may
    be there with its default, or switched off.
    """

    name: str
    takes: ValueType
    default: Any
    fate: Fate
    told: str
    refused: tuple[Any, ...] = ()
    instead: str = ""

    @property
    def block(self) -> str:
        """The object the key is in; "" is the file itself."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The key as the file writes it."""
        return self.name.rpartition(".")[2]

    def refusal(self, value: Any) -> str:
        """Why this value, in the form that `takes` gives, is refused; "" if it is not."""
        if value in self.refused:
            return self.instead
        off = value == self.default or (self.takes is BLOCK and not switched_on(value))
        return self.told if self.fate == REFUSED and not off else ""


def supported(name: str, takes: ValueType, default: Any, told: str, *refused: Any, instead: str = "") -> Key:
    """A key that does here what it does there, but for the values `unsupported`."""
    return Key(name, takes, default, HONOURED, told, refused, instead)


def ignored(name: str, takes: ValueType, default: Any, why: str) -> Key:
    """A key that has no effect here."""
    return Key(name, takes, default, NO_EFFECT, why)


def unsupported(name: str, instead: str, takes: ValueType = FLAG, default: Any = False) -> Key:
    """A key that asks for what there is not."""
    return Key(name, takes, default, REFUSED, instead)


def each_ignored(block: str, why: str, **keys: tuple[ValueType, Any]) -> tuple[Key, ...]:
    """Keys of one block that have no effect for one reason; each with what it takes and its default."""
    return tuple(ignored(f"{block}.{name}", takes, default, why) for name, (takes, default) in keys.items())


def switched_on(value: Any) -> bool:
    """Whether a block asks for anything: by the keys named `enabled` in it, else by not being empty.

    >>> switched_on({"enabled": False, "size": 3}), switched_on({"size": 3}), switched_on({})
    (False, True, False)
    """
    if not isinstance(value, dict):
        return bool(value)
    block = cast("dict[str, Any]", value)
    switches = list(_switches(block))
    return any(switches) if switches else bool(block)


def _switches(block: dict[str, Any]) -> list[bool]:
    found: list[bool] = []
    for name, value in block.items():
        if name == "enabled":
            found.append(bool(value))
        elif isinstance(value, dict):
            found.extend(_switches(cast("dict[str, Any]", value)))
    return found
