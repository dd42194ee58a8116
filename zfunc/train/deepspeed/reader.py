"""A configuration as users write it, JSON with comments and trailing commas, checked against the table in one pass.

Every key is known, every value has its type, nothing is unsupported; all that is wrong is said at once.
"""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen

from zfunc.errors import did_you_mean
from zfunc.options import AUTO
from zfunc.train.deepspeed.keys import (
    BLOCKS,
    KEYS,
    OLD_NAMES,
    OLD_SWITCHES,
    READ_BY_NAME,
    names_in,
    read_value,
)

LIMIT = 1 << 20  # bytes; such files have a few thousand, and json5 is slow


@frozen
class ConfigSource:
    """A file or dict as read: its `values`, and the `name` that errors use."""

    name: str
    values: Mapping[str, Any]


@frozen
class ConfigValues:
    """The value of every key.

    >>> values = read_values(ConfigSource("x.json", {"bf16": {"enabled": "auto"}}))
    >>> values["bf16.enabled"], values.sets("bf16.enabled"), values.auto
    (False, False, ['bf16.enabled'])
    """

    source: str
    given: Mapping[str, Any] = field(factory=dict[str, Any])  # what the caller sets where the file does not
    file: dict[str, Any] = field(factory=dict[str, Any])  # what the file sets
    auto: list[str] = field(factory=list[str])  # keys that are "auto" in the file
    old: dict[str, str] = field(factory=dict[str, str])  # names of today, each with the file's old one
    unread: list[str] = field(factory=list[str])  # names in the file that DeepSpeed ignores too

    def __getitem__(self, name: str) -> Any:
        """The file's value of a key, else the caller's, else DeepSpeed's default."""
        return self.file.get(name, self.given.get(name, KEYS[name].default))

    def sets(self, name: str) -> bool:
        """Whether the file or the caller sets a key."""
        return name in self.file or name in self.given

    def leaves_open(self, name: str) -> bool:
        """Whether a key is "auto" and nobody gives it: then zfunc's own default for the kind of run holds."""
        return name in self.auto and name not in self.given

    def has(self, block: str) -> bool:
        """Whether the file has anything in a block."""
        return any(name.startswith(f"{block}.") for name in (*self.file, *self.auto))

    def ignored(self) -> dict[str, list[str]]:
        """Keys in the file that have no effect, by the reason."""
        reasons = {"DeepSpeed ignores it too": [*self.unread]} if self.unread else {}
        for name, value in self.file.items():
            key = KEYS[name]
            if key.fate == "ignored" and (key.type != "object" or key.acts(value)):
                reasons.setdefault(key.note, []).append(name)
        return reasons

    def refused(self, name: str, got: Any, key: str) -> ValueError:
        """The error for an argument that contradicts a key."""
        return ValueError(
            f"{name}: got {got}, and {self.source} says {key} {self[key]}, expected one of them: leave one out, or "
            f'write "{AUTO}" into the file'
        )


def read_config_file(source: str | PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """Read a file, or take a dict as if it were one.

    Raises ValueError, with the line, for a syntax error; TypeError for anything but a path or a dict.

    >>> read_config_file({"train_batch_size": 8}).values["train_batch_size"]
    8
    """
    if isinstance(source, Mapping):
        return ConfigSource("the dict", dict(source))
    import json5

    path = Path(source).expanduser()
    try:
        if path.stat().st_size > LIMIT:
            raise ValueError("more than 1 MiB")
        values = json5.loads(path.read_bytes().decode("utf-8-sig"), allow_duplicate_keys=False)
    except OSError as error:
        raise ValueError(f"{path}: got {error.strerror!r}, expected a JSON file: pass one") from error
    except (ValueError, RecursionError) as error:
        at = str(error).replace("<string>:", "line ", 1)  # json5 gives line, token and column
        raise ValueError(
            f"{path}: got {at}, expected JSON, with comments as // and /* */: correct it"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got a {type(values).__name__}, expected a JSON object: put it in {{ }}")
    return ConfigSource(str(path), cast("dict[str, Any]", values))


def read_values(source: ConfigSource, given: Mapping[str, Any] | None = None) -> ConfigValues:
    """Check `source`, and fill what it leaves open with `given`, by key.

    Raises ValueError for unknown keys, each with the nearest one, for values of another type, for what is
    unsupported, with what to do instead; and for a given value that the file contradicts.
    """
    values = ConfigValues(source.name, dict(given or {}))
    wrong = list(_take(values, _of_known_optimizer(source.values), ""))
    for name, value in values.given.items():
        if name not in KEYS or read_value(KEYS[name].type, value) is None:
            hint = (
                f"expected {KEYS[name].expected}"
                if name in KEYS
                else f"expected a key{did_you_mean(name, list(KEYS))}"
            )
            wrong.append(f"given[{name!r}]: got {value!r}, {hint}: correct it")
        elif values.file.get(name, value) != value:
            raise values.refused(f"given[{name!r}]", value, name)
    if wrong:
        raise ValueError(f"{source.name}: " + "\n".join(wrong))
    return values


def _take(values: ConfigValues, block_values: Mapping[str, Any], block: str) -> Iterator[str]:
    """Take the keys of a block, by dotted name, and say what is wrong with them; null sets nothing."""
    for last, value in block_values.items():
        written = name = f"{block}.{last}" if block else str(last)
        if name == "zero_optimization" and isinstance(value, bool):  # an early form
            name, value = "zero_optimization.stage", int(value)
        if name in OLD_NAMES:
            name = OLD_NAMES[written]
            value = OLD_SWITCHES[value] if isinstance(value, bool) and name.endswith(".device") else value
            values.old[name] = written
        if name in KEYS:
            if value is not None:
                yield from _take_value(values, name, value)
        elif name in BLOCKS:
            if isinstance(value, Mapping):
                yield from _take(values, cast("Mapping[str, Any]", value), name)
            elif value not in (None, AUTO):
                yield f"got {name} {value!r}, expected an object: write {name!r}: {{ }}"
        elif block in READ_BY_NAME and not did_you_mean(str(last), names_in(block)):
            values.unread.append(name)
        else:
            others = [key.block or "the file itself" for key in KEYS.values() if key.last == last]
            near = did_you_mean(str(last), names_in(block))
            hint = f" (it belongs in {' or '.join(others)})" if others else near
            yield f"got the key {last!r} in {block or 'the file itself'}, which is unknown{hint}: correct it"


def _of_known_optimizer(file: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file, without the parameters of an optimizer that zfunc lacks: its name alone is refused."""
    block = file.get("optimizer")
    kind = cast("Mapping[str, Any]", block).get("type") if isinstance(block, Mapping) else None
    known = kind in (None, AUTO) or read_value(KEYS["optimizer.type"].type, kind)
    return file if known else {**file, "optimizer": {"type": kind}}


def _take_value(values: ConfigValues, name: str, value: Any) -> Iterator[str]:
    key = KEYS[name]
    if name in values.file or name in values.auto:
        yield f"got both {values.old[name]} and {name}, its name today, expected one: delete the old one"
    elif value == AUTO and key.default != AUTO:
        values.auto.append(name)
    elif (plain := read_value(key.type, value)) is None:
        hint = did_you_mean(value, key.expected.split(", ")) if isinstance(value, str) else ""
        yield f"{name}: got {value!r}, expected {key.expected}{hint}: correct it"
    elif instead := key.refusal(plain):
        yield f"{name}: got {value!r}, which is not supported: {instead}"
    else:
        values.file[name] = plain
