"""A file held against the table: every key known, every value of the right kind, nothing that is refused.

The invariant: Values says of every key in the table what holds, and knows whether the file says it, somebody else,
or nobody. What the file says is never changed by anybody else.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from attrs import field, frozen

from zfunc.errors import did_you_mean
from zfunc.train.deepspeed.key import NO_EFFECT, Key
from zfunc.train.deepspeed.reading import ConfigSource
from zfunc.train.deepspeed.table import BLOCKS, KEYS, OLD, elsewhere, names_in

AUTO = "auto"  # "from the model or the command line", in a file


@frozen
class GivenValue:
    """A value from outside the file, for what it leaves open, and how an error calls where it is from."""

    value: Any
    label: str
    shown: Any = None  # what the user wrote, if that is not the value


@frozen
class ResolvedValues:
    """What holds: `file` is what the file says, `auto` what it leaves open in words, `given` what others say of
    keys it does not say; `old` are the old names in it, each with the new one.

    >>> values = resolve_values(ConfigSource("x.json", {"bf16": {"enabled": "auto"}}))
    >>> values["bf16.enabled"], values.says("bf16.enabled"), values.auto
    (False, False, ('bf16.enabled',))
    """

    source: str
    file: Mapping[str, Any]
    auto: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(factory=dict)  # pyright: ignore[reportUnknownVariableType]
    old: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> Any:
        """What holds for a key: the file's value, else the one given, else the default there."""
        if name in self.file:
            return self.file[name]
        return self.given[name] if name in self.given else KEYS[name].default

    def says(self, name: str) -> bool:
        """Whether anybody says it."""
        return name in self.file or name in self.given

    def has(self, block: str) -> bool:
        """Whether the file has anything in a block."""
        return any(name.startswith(f"{block}.") for name in (*self.file, *self.auto))

    def without_effect(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every reason why keys of this file have no effect, with those keys."""
        reasons: dict[str, list[str]] = {}
        for name in self.file:
            if KEYS[name].fate == NO_EFFECT:
                reasons.setdefault(KEYS[name].told, []).append(name)
        return ((why, tuple(names)) for why, names in reasons.items())


def resolve_values(source: ConfigSource, given: Mapping[str, GivenValue] | None = None) -> ResolvedValues:
    """What `source` says, and what is `given` where it says nothing.

    Raises ValueError for a key that is not in the table, with the nearest that is; for a value of another kind; for
    what is refused, with what to do instead; and for a value given that the file contradicts.
    """
    found, unknown = list[tuple[str, Any]](), list[str]()
    _walk(source.values, "", found, unknown)
    if unknown:
        raise ValueError(f"{source.name}: " + "\n".join(unknown))
    file, auto, old = dict[str, Any](), list[str](), list[tuple[str, str]]()
    for written, value in found:
        name = written
        if written in OLD:
            name, value = OLD[written].now, OLD[written].values(value)
            old.append((written, name))
        if name in file or name in auto:
            raise ValueError(
                f"{source.name}: got both {written} and {name}, its name today, expected one: delete the old one"
            )
        if value == AUTO and KEYS[name].default != AUTO:
            auto.append(name)
        else:
            file[name] = _checked(source.name, KEYS[name], value)
    mine = {
        name: one.value for name, one in (given or {}).items() if not _agrees(source.name, file, name, one)
    }
    return ResolvedValues(source.name, file, tuple(auto), mine, tuple(old))


def _walk(values: Mapping[str, Any], block: str, found: list[tuple[str, Any]], unknown: list[str]) -> None:
    """Every key with its dotted name; null says nothing."""
    for last, value in values.items():
        name = f"{block}.{last}" if block else str(last)
        if name == "zero_optimization" and isinstance(value, bool):  # the oldest form
            found.append(("zero_optimization.stage", int(value)))
        elif name in KEYS or name in OLD:
            if value is not None:
                found.append((name, value))
        elif name in BLOCKS:
            if isinstance(value, Mapping):
                _walk(cast("Mapping[str, Any]", value), name, found, unknown)
            elif value not in (None, AUTO):
                unknown.append(f"got {name} {value!r}, expected an object: write {name!r}: {{ }}")
        else:
            unknown.append(_unknown(str(last), block))


def _unknown(last: str, block: str) -> str:
    where = f"in {block!r}" if block else "at the top level"
    others = [f"in {other!r}" if other else "at the top level" for other in elsewhere(last)]
    hint = f" (it belongs {' or '.join(others)})" if others else did_you_mean(last, names_in(block))
    return f"got the key {last!r} {where}, which is not known there{hint}: correct it, or delete it"


def _checked(source: str, key: Key, value: Any) -> Any:
    read = key.takes.read(value)
    if read is None:
        hint = did_you_mean(value, key.takes.told.split(", ")) if isinstance(value, str) else ""
        raise ValueError(f"{source}: {key.name}: got {value!r}, expected {key.takes.told}{hint}: correct it")
    if instead := key.refusal(read):
        raise ValueError(f"{source}: {key.name}: got {value!r}, which zfunc does not do: {instead}")
    return read


def _agrees(source: str, file: Mapping[str, Any], name: str, given: GivenValue) -> bool:
    """Whether the file says it too. Raises ValueError if it says another value, or there is no such key."""
    if name not in KEYS:
        raise ValueError(
            f"{given.label}: got no key of a file, expected one{did_you_mean(name, list(KEYS))}: correct it"
        )
    if KEYS[name].takes.read(given.value) is None:
        raise ValueError(f"{given.label}: got {given.value!r}, expected {KEYS[name].takes.told}: correct it")
    if name not in file:
        return False
    if file[name] != given.value:
        raise ValueError(
            f"{given.label}: got {given.shown or given.value}, and {source} says {name} {file[name]}, expected one "
            f'of them: leave out the first, or write "{AUTO}" into the file'
        )
    return True
