"""DeepSpeed's keys, of keys.toml, and a file read by them: JSON with comments and trailing commas.

Every key is known, every value has its type, nothing is unsupported; all that is wrong is said at once. Checks,
messages and docs/deepspeed.md are derived from the table.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen

from zfunc.core.setting_values import DISK
from zfunc.core.shares import words_of
from zfunc.errors import SettingError, did_you_mean
from zfunc.options import AUTO

# Blocks whose other keys have no effect: DeepSpeed 0.19 ignores them too, or they follow the one that is known.
READ_BY_NAME = ("aio", "activation_checkpointing", "tensor_parallel", "compile")
# And those of which it takes some keys, and leaves others, such as "_comment", alone.
COMMENTED = ("", "optimizer", "scheduler", *READ_BY_NAME)
FATES = ("supported", "ignored", "unsupported")
OLD_SWITCHES = {True: "cpu", False: "none"}  # of offloading, as the values of today


@frozen
class Key:
    """A key of a DeepSpeed configuration. An unsupported key may have its default value, or be switched off."""

    name: str  # dotted
    type: str | list[Any]  # as keys.toml describes it
    default: Any  # DeepSpeed's
    fate: str  # one of FATES
    note: str  # how it is supported, why it is ignored, or what to do instead of an unsupported one
    sets: str = ""  # the setting of a training that it alone decides
    values: Mapping[str, Any] | None = None  # of that setting, by the key's; None: the same

    @property
    def block(self) -> str:
        """The dotted name of the JSON object that has this key; "" is the whole file."""
        return self.name.rpartition(".")[0]

    @property
    def expected(self) -> str:
        """The type that this key's values must have, in words for errors."""
        if isinstance(self.type, list):
            return ", ".join(map(str, self.type))
        name, _, bounds = self.type.partition(" ")
        low, _, high = bounds.partition("..")
        return f"{name} from {low} to {high}" if high else f"{name}, {low} or more" if low else name

    def acts(self, value: Any) -> bool:
        """Whether `value` differs from this key's default; of an object, whether it is neither empty nor off."""
        if self.type != "object":
            return value != self.default
        on = cast("dict[str, Any]", value).get("enabled", value) if isinstance(value, dict) else value
        return on not in (None, False, AUTO, {})


def read_value(kind: str | list[Any], value: Any) -> Any:
    """A JSON value converted to `kind`, the type of a configuration key; None for a value of another type.

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
    return Key(
        name, row["type"], default, fate, row[fate].format_map(notes), row.get("sets", ""), row.get("as")
    )


_TABLE = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())
KEYS = {name: _key(name, row, _TABLE["notes"]) for name, row in _TABLE["keys"].items()}
OLD_NAMES: dict[str, str] = _TABLE["old"]
"""Names that older files have, each with the name of today."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    name: {x: tuple(cast("list[Any]", y)) if isinstance(y, list) else y for x, y in row.items()}
    for name, row in _TABLE["optimizers"].items()
}
"""The defaults of DeepSpeed's optimizers, by the names of `by_name.CLASSES`."""
_NAMES: dict[str, dict[str, None]] = {}  # that a block may have, in the table's order
for _name in (*KEYS, *OLD_NAMES):
    while _name:
        _block, _, _last = _name.rpartition(".")
        _NAMES.setdefault(_block, {})[_last] = None
        _name = _block
BLOCKS = _NAMES.keys() - {""}
"""Objects that a file may have, by dotted name."""


# --- a file -----------------------------------------------------------------------------------------------


@frozen
class ConfigValues:
    """A DeepSpeed configuration as read: the value of every key, by dotted name.

    >>> values = read_values({"bf16": {"enabled": "auto"}})
    >>> values["bf16.enabled"], values.sets("bf16.enabled"), values.auto
    (False, False, ['bf16.enabled'])
    """

    source: str  # the file's path as written, for errors and records
    given: Mapping[str, Any] = field(factory=dict[str, Any])  # what the caller sets where the file does not
    file: dict[str, Any] = field(factory=dict[str, Any])  # what the file sets
    auto: list[str] = field(factory=list[str])  # keys that are "auto" in the file
    old: dict[str, str] = field(factory=dict[str, str])  # names of today, each with the file's old one
    unread: list[str] = field(factory=list[str])  # names in the file that are in no table
    written: Mapping[str, Any] = field(factory=dict[str, Any])  # the file's JSON object
    decides: tuple[tuple[str, Any, str], ...] = ()  # settings of a training: name, value, deciding key

    def __getitem__(self, name: str) -> Any:
        """The value of key `name` in the file, else the one that the caller gave, else DeepSpeed's default."""
        return self.file.get(name, self.given.get(name, KEYS[name].default))

    def sets(self, name: str) -> bool:
        """Whether the configuration file or the caller sets key `name`."""
        return name in self.file or name in self.given

    def leaves_open(self, name: str) -> bool:
        """Whether key `name` is "auto" in the file, and the caller gives no value: zfunc's own default holds."""
        return name in self.auto and name not in self.given

    def has(self, block: str) -> bool:
        """Whether the configuration file sets any key in the object `block`, "auto" included."""
        return any(name.startswith(f"{block}.") for name in (*self.file, *self.auto))

    def refused(self, name: str, got: Any, key: str) -> ValueError:
        """The error for a setting `name` whose value `got` contradicts configuration key `key`."""
        got = f"{got}, and {self.source} says {key} {self[key]}"
        return SettingError(name, got, "one of them", f'leave one out, or write "{AUTO}" into the file')

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError, with setting and key, for a `given` setting that contradicts the file; "auto" does
        not."""
        for name, said, key in self.decides:
            got = given.get(name, AUTO)
            # How much of the state stays on the host beside the disk, no file says.
            part = (name, said) == ("state_on", DISK) and DISK in words_of(str(got))
            if key in self.file and got not in (AUTO, ()) and str(got) != str(said) and not part:
                raise self.refused(name, got, key)


Source = str | PathLike[str] | Mapping[str, Any]


def read_file(source: Source, more: str = "") -> Mapping[str, Any]:
    """Read a JSON object from a file; a dict is returned unchanged. Raises ValueError for a missing file, and
    for a syntax error, with its line; `more` is text on other formats that the caller reads."""
    if isinstance(source, Mapping):
        return source
    import json5

    path = Path(source)
    try:
        values = json5.loads(path.expanduser().read_bytes().decode("utf-8-sig"), allow_duplicate_keys=False)
    except OSError as error:
        raise ValueError(f"{path}: got {error.strerror!r}, expected a JSON file{more}: pass one") from error
    except (ValueError, RecursionError) as error:
        at = str(error).replace("<string>:", "line ", 1)  # json5 gives line, token and column
        raise ValueError(
            f"{path}: got {at}, expected JSON, with comments as // and /* */{more}: correct it"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got a {type(values).__name__}, expected a JSON object: put it in {{ }}")
    return cast("dict[str, Any]", values)


def read_values(source: Source, given: Mapping[str, Any] | None = None) -> ConfigValues:
    """The values of a DeepSpeed configuration, a file or dict; `given` fills, by key, what the file leaves open.

    Raises ValueError for unknown keys, each with the nearest known one, for values of another type, for unsupported
    keys, with what to do instead; and for a given value that the file contradicts.
    """
    name = "the dict" if isinstance(source, Mapping) else str(Path(source))
    values = ConfigValues(name, dict(given or {}), written=read_file(source))
    wrong = [*_take(values, values.written, "")]
    for name, value in values.given.items():
        if name not in KEYS:
            wrong.append(
                f"given: got the key {name!r}, which is unknown{did_you_mean(name, [*KEYS])}: correct it"
            )
        elif read_value(KEYS[name].type, value) is None:
            wrong.append(f"given[{name!r}]: got {value!r}, expected {KEYS[name].expected}: correct it")
        elif values.file.get(name, value) != value:
            raise values.refused(f"given[{name!r}]", value, name)
    if wrong:
        raise ValueError(f"{values.source}: " + "\n".join(wrong))
    return values


def _take(values: ConfigValues, block_values: Mapping[str, Any], block: str) -> Iterator[str]:
    """Store the keys of object `block` in `values`, by dotted name; yield an error text for each wrong one."""
    for last, value in block_values.items():
        written = name = f"{block}.{last}" if block else str(last)
        if name == "zero_optimization" and isinstance(value, bool):  # an early form
            name, value = "zero_optimization.stage", int(value)
        if name in OLD_NAMES:
            name = OLD_NAMES[written]
            value = OLD_SWITCHES[value] if isinstance(value, bool) and name.endswith(".device") else value
            values.old[name] = written
        if name in KEYS:
            wrong = "" if value is None else _take_value(values, KEYS[name], value)
            yield from [wrong] * (wrong != "")
            if wrong and name == "optimizer.type":  # then its parameters are not judged
                return
        elif name in BLOCKS:
            if isinstance(value, Mapping):
                yield from _take(values, cast("Mapping[str, Any]", value), name)
            elif value not in (None, AUTO):
                yield f"got {name} {value!r}, expected an object: write {name!r}: {{ }}"
        elif _is_idle(block, str(last), value):
            values.unread.append(name)
        else:
            homes = [x for x, names in _NAMES.items() if last in names]
            near = did_you_mean(str(last), [*_NAMES[block]], cutoff=0.8 if block in READ_BY_NAME else 0.4)
            if block in READ_BY_NAME and not near:
                values.unread.append(name)
            else:
                moved = f": move it to {homes[0] or 'the file itself'}" if len(homes) == 1 else ""
                advice = moved or f"{near}: correct it"
                yield f"got the key {last!r} in {block or 'the file itself'}, which is unknown{advice}"


def _is_idle(block: str, name: str, value: Any) -> bool:
    """Whether unknown key `name` of `block` means nothing: an allowed comment, or a block switched off."""
    off = isinstance(value, Mapping) and cast("Mapping[str, Any]", value).get("enabled") is False
    return (block in COMMENTED and name.startswith("_")) or (not block and off)


def _take_value(values: ConfigValues, key: Key, value: Any) -> str:
    """Store `value` of `key` in `values`, or return a text on what is wrong with the value; "" if nothing."""
    name = key.name
    if name in values.file or name in values.auto:
        return f"got both {values.old[name]} and {name}, its name today, expected one: delete the old one"
    if value == AUTO and key.default != AUTO:
        values.auto.append(name)
        return ""
    if (plain := read_value(key.type, value)) is None:
        hint = did_you_mean(value, key.expected.split(", ")) if isinstance(value, str) else ""
        return f"{name}: got {value!r}, expected {key.expected}{hint}: correct it"
    if key.fate == "unsupported" and key.acts(plain):
        return f"{name}: got {value!r}, which is not supported: {key.note}"
    values.file[name] = plain
    return ""
