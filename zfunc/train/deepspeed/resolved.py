"""A file checked against the table: every key known, every value of its type, nothing unsupported.

ResolvedValues has the value of every key of the table: the file's, else the caller's, else DeepSpeed's default.
"""

from collections.abc import Mapping
from typing import Any, cast

from attrs import field, frozen

from zfunc.errors import did_you_mean
from zfunc.options import AUTO
from zfunc.train.deepspeed.keys import BLOCKS, KEYS, OLD_NAMES, Key, blocks_with, names_in
from zfunc.train.deepspeed.reader import ConfigSource


@frozen
class GivenValue:
    """A value for a key that the file leaves open; `label` names its origin in errors."""

    value: Any
    label: str
    written: Any = None  # what the user wrote, if that is not the value


@frozen
class ResolvedValues:
    """The value of every key.

    >>> values = resolve_values(ConfigSource("x.json", {"bf16": {"enabled": "auto"}}))
    >>> values["bf16.enabled"], values.sets("bf16.enabled"), values.auto
    (False, False, ('bf16.enabled',))
    """

    source: str
    file: Mapping[str, Any]  # what the file sets
    auto: tuple[str, ...] = ()  # keys that are "auto" in the file
    given: Mapping[str, Any] = field(factory=dict[str, Any])  # what the caller sets of the others
    old: tuple[tuple[str, str], ...] = ()  # old names in the file, each with the name of today

    def __getitem__(self, name: str) -> Any:
        """The file's value of a key, else the caller's, else DeepSpeed's default."""
        if name in self.file:
            return self.file[name]
        return self.given[name] if name in self.given else KEYS[name].default

    def sets(self, name: str) -> bool:
        """Whether the file or the caller sets a key."""
        return name in self.file or name in self.given

    def has(self, block: str) -> bool:
        """Whether the file has anything in a block."""
        return any(name.startswith(f"{block}.") for name in (*self.file, *self.auto))

    def ignored(self) -> dict[str, list[str]]:
        """Keys in the file that have no effect, by the reason."""
        reasons: dict[str, list[str]] = {}
        for name in self.file:
            if KEYS[name].fate == "ignored":
                reasons.setdefault(KEYS[name].note, []).append(name)
        return reasons


def resolve_values(source: ConfigSource, given: Mapping[str, GivenValue] | None = None) -> ResolvedValues:
    """Check `source`, and fill what it leaves open with `given`.

    Raises ValueError for an unknown key, with the nearest one; for a value of another type; for what is
    unsupported, with what to do instead; and for a given value that the file contradicts.
    """
    entries, unknown = list[tuple[str, Any]](), list[str]()
    _walk(source.values, "", entries, unknown)
    if unknown:
        raise ValueError(f"{source.name}: " + "\n".join(unknown))
    file, auto, old = dict[str, Any](), list[str](), list[tuple[str, str]]()
    for written, value in entries:
        name = written
        if written in OLD_NAMES:
            name, value = OLD_NAMES[written].key, OLD_NAMES[written].value(value)
            old.append((written, name))
        if name in file or name in auto:
            raise ValueError(
                f"{source.name}: got both {written} and {name}, its name today, expected one: delete the old one"
            )
        if value == AUTO and KEYS[name].default != AUTO:
            auto.append(name)
        else:
            file[name] = _read(source.name, KEYS[name], value)
    open_values = {
        name: value.value
        for name, value in (given or {}).items()
        if not _in_file(source.name, file, name, value)
    }
    return ResolvedValues(source.name, file, tuple(auto), open_values, tuple(old))


def _walk(values: Mapping[str, Any], block: str, entries: list[tuple[str, Any]], unknown: list[str]) -> None:
    """Append every key with its dotted name; null sets nothing."""
    for last, value in values.items():
        name = f"{block}.{last}" if block else str(last)
        if name == "zero_optimization" and isinstance(value, bool):  # an early form
            entries.append(("zero_optimization.stage", int(value)))
        elif name in KEYS or name in OLD_NAMES:
            if value is not None:
                entries.append((name, value))
        elif name in BLOCKS:
            if isinstance(value, Mapping):
                _walk(cast("Mapping[str, Any]", value), name, entries, unknown)
            elif value not in (None, AUTO):
                unknown.append(f"got {name} {value!r}, expected an object: write {name!r}: {{ }}")
        else:
            unknown.append(_unknown(str(last), block))


def _unknown(last: str, block: str) -> str:
    def place(block: str) -> str:
        return f"in {block!r}" if block else "at the top level"

    others = [place(other) for other in blocks_with(last)]
    hint = f" (it belongs {' or '.join(others)})" if others else did_you_mean(last, names_in(block))
    return f"got the key {last!r} {place(block)}, which is unknown{hint}: correct or delete it"


def _read(source: str, key: Key, value: Any) -> Any:
    plain, expected = key.type.read(value), key.type.expected
    if plain is None:
        hint = did_you_mean(value, expected.split(", ")) if isinstance(value, str) else ""
        raise ValueError(f"{source}: {key.name}: got {value!r}, expected {expected}{hint}: correct it")
    if instead := key.refusal(plain):
        raise ValueError(f"{source}: {key.name}: got {value!r}, which is not supported: {instead}")
    return plain


def _in_file(source: str, file: Mapping[str, Any], name: str, given: GivenValue) -> bool:
    """Whether the file sets the key, to the same value. Raises ValueError for another value or an unknown key."""
    if name not in KEYS:
        raise ValueError(f"{given.label}: got an unknown key{did_you_mean(name, list(KEYS))}: correct it")
    if KEYS[name].type.read(given.value) is None:
        raise ValueError(
            f"{given.label}: got {given.value!r}, expected {KEYS[name].type.expected}: correct it"
        )
    if name not in file:
        return False
    if file[name] != given.value:
        raise ValueError(
            f"{given.label}: got {given.written or given.value}, and {source} says {name} {file[name]}, expected "
            f'one of them: leave out the first, or write "{AUTO}" into the file'
        )
    return True
