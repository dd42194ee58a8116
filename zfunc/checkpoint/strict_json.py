"""Strict JSON, read by what it should be; safe for untrusted files.

Whatever the bytes are, parsing is fast, takes memory in proportion to them, and gives checked values or a
CheckpointError that names the place. Keys are unique, numbers are finite and fit in 64 bits, text can be encoded.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from reprlib import Repr
from types import NoneType
from typing import Annotated, Any, NoReturn, TypeAlias, cast, get_args, get_origin, get_type_hints

from attrs import NOTHING, define, fields, frozen, has

from zfunc.errors import USE_ANOTHER, CheckpointError, did_you_mean

MAX_INT = 2**63 - 1
IN_MEMORY = {"in a file": False}  # metadata of an attrs class's fields
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_short = Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 80, 80


def parse_json(raw: bytes, where: str) -> "JsonNode":
    """Parse a JSON text, called `where` in errors. Raises CheckpointError for anything but strict JSON."""
    try:
        value = json.loads(
            raw.decode(),
            object_pairs_hook=unique_keys,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        if _SURROGATE.search(raw):  # an escaped lone surrogate cannot be encoded in a file name or a log
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: got {_reason(error)}, expected strict JSON: the file is damaged or not one of zfunc's; "
            f"{USE_ANOTHER}"
        ) from error
    return JsonNode(value, where)


def render(value: Mapping[str, Any]) -> bytes:
    """Strict JSON of a dict of JSON's own types. Raises ValueError for NaN and inf, TypeError for other types."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def _reason(error: Exception) -> str:
    match error:
        case UnicodeError():
            return "text that is not UTF-8"
        case RecursionError():
            return "a value nested too deep"
        case json.JSONDecodeError():
            return f"invalid JSON ({error})"
        case _:
            return str(error)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A parser's `object_pairs_hook`. Raises ValueError for a name that an object has twice.

    >>> json.loads('{"a": 1, "a": 2}', object_pairs_hook=unique_keys)
    Traceback (most recent call last):
    ValueError: the name 'a' twice in one object
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the name {_short.repr(key)} twice in one object")
        result[key] = value
    return result


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        raise ValueError(f"a number of {len(text)} digits, above 64 bits")
    return int(text)


def _number(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {_short.repr(text)}, above all floats")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which JSON does not have")


@define
class Refusal(Exception):  # noqa: N818
    """A value is not what it should be; its place is added on the way out of the objects that it is in."""

    got: str
    expected: str
    place: str = ""


@frozen
class Within:
    """The kind of numbers, or of texts by their number of characters, from `low` to `high`."""

    type: type[int] | type[float] | type[str]
    low: float
    high: float

    def __call__(self, value: Any) -> Any:
        """The value. Raises Refusal for another."""
        value = float(value) if self.type is float and type(value) is int else value
        size: Any = len(value) if type(value) is str else value
        if type(value) is not self.type or not self.low <= size <= self.high:
            unit = " characters" * (self.type is str)
            raise Refusal(_short.repr(value), f"{_PLAIN[self.type]} of {self.low} to {self.high}{unit}")
        return value


def known(names: dict[str, Any] | Sequence[str] | Callable[[], Any]) -> Callable[[Any], Any]:
    """The kind of texts that are among `names`, or those it returns; of a dict, each becomes what it stands for."""

    def meaning(value: Any) -> Any:
        now = cast("dict[str, Any] | Sequence[str]", names() if callable(names) else names)
        meanings = now if isinstance(now, dict) else {x: x for x in now}
        if TEXT(value) not in meanings:
            got = f"{_short.repr(value)}{did_you_mean(value, [*meanings])}"
            raise Refusal(got, f"one of {', '.join(meanings)}")
        return meanings[value]

    return meaning


COUNT, CHECKSUM, TEXT = Within(int, 0, MAX_INT), Within(int, 0, 2**32 - 1), Within(str, 1, 1000)
Count: TypeAlias = Annotated[int, COUNT]
Checksum: TypeAlias = Annotated[int, CHECKSUM]
Text: TypeAlias = Annotated[str, TEXT]
_PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    str: "a text",
}


def of_kind(value: Any, kind: Any) -> Any:
    """`value`, if it is of a kind; for functions that are kinds. Raises Refusal."""
    if isinstance(kind, list):
        inner, values = cast("list[Any]", kind)[0], of_kind(value, list)
        if inner is CHECKSUM and all(type(x) is int and 0 <= x <= CHECKSUM.high for x in values):
            return tuple(values)  # there may be millions of them
        return tuple(_inside(f"[{n}]", x, inner) for n, x in enumerate(values))
    if isinstance(kind, tuple):
        kinds, values = cast("tuple[Any, ...]", kind), of_kind(value, list)
        if len(values) != len(kinds):
            raise Refusal(f"a list of {len(values)}", f"one of {len(kinds)}")
        return tuple(_inside(f"[{n}]", x, kinds[n]) for n, x in enumerate(values))
    if isinstance(kind, dict):
        return _object(of_kind(value, dict), cast("dict[Any, Any]", kind))
    if kind in _PLAIN and type(value) is not kind and (kind, type(value)) != (float, int):
        raise Refusal(_short.repr(value), _PLAIN[kind])
    if isinstance(kind, type) and has(kind):
        return made(kind, _object(of_kind(value, dict), kinds_of(kind)))
    return kind(value)


def made(cls: type, named: Mapping[str, Any], expected: str = "") -> Any:
    """`cls(**named)`. Raises Refusal, of what was `expected`, for values that the class refuses."""
    try:
        return cls(**named)
    except (ValueError, TypeError) as error:
        raise Refusal(
            _short.repr(str(*error.args[:1])), expected or f"the fields of a {cls.__name__}"
        ) from error


@cache
def kinds_of(cls: type) -> dict[str, Any]:
    """The kinds of the fields of an attrs class that a file has, by their aliases, from the annotations.

    One with a default may be missing. `Annotated[T, kind]` is a T in memory, and of that kind in a file; a field
    with the metadata IN_MEMORY is not in a file at all.
    """
    hints = get_type_hints(cls, include_extras=True)
    return {
        f"{x.alias}{'?' * (x.default is not NOTHING)}": _kind(hints[x.name])
        for x in fields(cls)
        if x.metadata != IN_MEMORY
    }


def _kind(hint: Any) -> Any:
    origin, of = get_origin(hint), [x for x in get_args(hint) if x is not NoneType]
    if origin is Annotated:
        return of[1]
    if origin is tuple:
        return [_kind(of[0])] if of[1:] == [...] else tuple(map(_kind, of))
    if origin is Mapping:
        return dict if of[1] is Any else {str: _kind(of[1])}
    return _kind(of[0]) if of else hint


def to_plain(value: Any) -> Any:
    """A value of an attrs class as JSON's own types, which reads back equal as of that class; None is left out."""
    cls: Any = value.__class__
    if has(cls):
        own = [x for x in fields(cls) if x.metadata != IN_MEMORY]
        named = ((x.alias, getattr(value, x.name)) for x in own)
        return {name: to_plain(x) for name, x in named if x is not None}
    if isinstance(value, Mapping):
        return {name: to_plain(x) for name, x in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        values = cast("Sequence[Any]", value)
        return (
            [*values] if values and type(values[0]) is int else [*map(to_plain, values)]
        )  # of checksums: millions
    return value


def _object(given: dict[str, Any], kind: Mapping[Any, Any]) -> dict[str, Any]:
    if str in kind:
        return {name: _inside(f".{name:.80}", x, kind[str]) for name, x in given.items()}
    kinds: dict[str, Any] = {name.rstrip("?"): x for name, x in kind.items()}
    for name in (x for x in given if x not in kinds):
        hint = did_you_mean(name, list(kinds)) if len(name) < 100 else ""
        raise Refusal(f"a field {_short.repr(name)}{hint}", f"only {', '.join(kinds)}")
    for name in (x for x in kinds if x in kind and x not in given):
        raise Refusal("none", f"a field named {name!r}")
    return {name: _inside(f".{name:.80}", x, kinds[name]) for name, x in given.items()}


def _inside(place: str, value: Any, kind: Any) -> Any:
    try:
        return of_kind(value, kind)
    except Refusal as error:
        error.place = place + error.place
        raise


@frozen
class JsonNode:
    """A value of a parsed file and its place in it, which errors name."""

    value: Any
    where: str

    def refuse(self, expected: str, got: str = "", place: str = "") -> NoReturn:
        """Raise CheckpointError for this value, or for what is at a `place` in it, with what was `got` there."""
        raise CheckpointError(
            f"{self.where}{place}: got {got or _short.repr(self.value)}, expected {expected}: the file is damaged "
            f"or not one of zfunc's; {USE_ANOTHER}"
        )

    def read(self, kind: Any) -> Any:
        """The value, if it is of a kind. Raises CheckpointError, with the place in the file, if not.

        Kinds are a type of JSON; `[kind]`, a list of any length; `(kind, kind)`, a list of that length;
        `{str: kind}`, any names; `{"name": kind, "name?": kind}`, these names, of which the second may be missing;
        an attrs class, an object of its fields, which becomes one of the class; and a function that returns the
        value, or another in its place, or raises Refusal.

        >>> JsonNode({"at": [1, 2.5]}, "x").read({"at": (COUNT, float), "name?": TEXT})
        {'at': (1, 2.5)}
        """
        try:
            return of_kind(self.value, kind)
        except Refusal as error:
            got, expected, place = error.got, error.expected, error.place
        return self.refuse(expected, got, place)

    def of_version(self, version: int) -> "JsonNode":
        """An object of this version, without it. Raises CheckpointError for another one."""
        found = self.entries().get("version")
        if found is None or found.read(int) != version:
            got = "no version" if found is None else f"version {found.value}"
            self.refuse(f"version {version}, the one that this zfunc reads", got)
        return JsonNode({name: x for name, x in self.value.items() if name != "version"}, self.where)

    def entries(self) -> "dict[str, JsonNode]":
        """The values of an object, by name."""
        return {k: JsonNode(x, f"{self.where}.{k:.80}") for k, x in self.read(dict).items()}
