"""Strict JSON, read by what it should be; safe for untrusted files.

Whatever the bytes are, parsing is fast, takes memory in proportion to them, and gives checked values or a
CheckpointError that names the place. Keys are unique, numbers are finite and fit in 64 bits, text can be encoded.

What a file holds is said once, by annotations: `JsonNode.read` makes values of them, `to_plain` takes them back.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from reprlib import Repr
from typing import Annotated, Any, NoReturn, TypeAlias, cast, get_args, get_origin, get_type_hints

from attrs import NOTHING, define, fields, frozen, has

from zfunc.errors import SETTING_ERRORS, USE_ANOTHER, CheckpointError, did_you_mean

MAX_INT = 2**63 - 1
IN_MEMORY = {"in a file": False}  # metadata of an attrs class's fields
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_short = Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 80, 80


def parse_json(raw: bytes, where: str) -> "JsonNode":
    """Parse a JSON text, called `where` in errors. Raises CheckpointError for anything but strict JSON."""
    try:
        value = _loads(raw.decode(), object_pairs_hook=unique_keys)
        if _SURROGATE.search(raw):  # an escaped lone surrogate cannot be encoded in a file name or a log
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        JsonNode(None, where).refuse("strict JSON", _reason(error), cause=error)
    return JsonNode(value, where)


def render(value: Mapping[str, Any]) -> bytes:
    """Strict JSON of a dict of JSON's own types. Raises ValueError for NaN and inf, TypeError for other types."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON ({error})"
    if isinstance(error, RecursionError):
        return "a value nested too deep"
    return "text that is not UTF-8" if isinstance(error, UnicodeError) else str(error)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json.loads: returns the pairs of an object as a dict, or raises ValueError
    for a name that occurs twice.

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


_loads = partial(json.loads, parse_int=_integer, parse_float=_number, parse_constant=_constant)


@define
class Refusal(Exception):  # noqa: N818
    """Raised by a decoder for a JSON value that it does not accept; the decoders of the enclosing objects add
    where in the file the value is."""

    got: str
    expected: str
    place: str = ""


@frozen
class Within:
    """A decoder of numbers of `type` from `low` to `high`, or of texts with as many characters."""

    type: type[int] | type[float] | type[str]
    low: float
    high: float

    def __call__(self, value: Any) -> Any:
        """Return `value` if it is within the bounds. Raises Refusal otherwise."""
        value = float(value) if self.type is float and type(value) is int else value
        size: Any = len(value) if type(value) is str else value
        if type(value) is not self.type or not self.low <= size <= self.high:
            unit = " characters" * (self.type is str)
            raise Refusal(_short.repr(value), f"{_PLAIN[self.type]} of {self.low} to {self.high}{unit}")
        return value


def known(
    names: Callable[[], Mapping[str, Any]], former: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """A decoder of JSON texts, which are keys of the dict that `names()` returns: it returns the text's
    value. `names` is called for each text.

    Raises Refusal for any other text. `former` maps texts of older versions to what the error says of them.
    """

    def meaning(value: Any) -> Any:
        now = names()
        if TEXT(value) not in now:
            hint = f", {was}" if (was := (former or {}).get(value)) else did_you_mean(value, [*now])
            raise Refusal(f"{_short.repr(value)}{hint}", f"one of {', '.join(now)}")
        return now[value]

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


def decoded(value: Any, hint: Any) -> Any:
    """Decode the JSON `value` into the type of annotation `hint`, by the rules of `JsonNode.read`. Raises
    Refusal for any other value."""
    origin, of = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return of[1](value)
    if origin is tuple:
        values = decoded(value, list)
        if of[1:] == (...,):
            if of[0] is Checksum and all(type(x) is int and 0 <= x <= CHECKSUM.high for x in values):
                return tuple(values)  # there may be millions of them
            of = of[:1] * len(values)
        if len(values) != len(of):
            raise Refusal(f"a list of {len(values)}", f"one of {len(of)}")
        return tuple(_inside(f"[{n}]", x, own) for n, (x, own) in enumerate(zip(values, of, strict=True)))
    if origin is Mapping:
        return {name: _inside(f".{name:.80}", x, of[1]) for name, x in decoded(value, dict).items()}
    if origin is not None:  # T | None
        return decoded(value, of[0])
    if hint in _PLAIN and type(value) is not hint and (hint, type(value)) != (float, int):
        raise Refusal(_short.repr(value), _PLAIN[hint])
    return _object(decoded(value, dict), hint) if has(hint) else value


def _inside(place: str, value: Any, hint: Any) -> Any:
    try:
        return decoded(value, hint)
    except Refusal as error:
        error.place = place + error.place
        raise


def _object(given: dict[str, Any], cls: Any) -> Any:
    known = _fields(cls)
    for name in (x for x in given if x not in known):
        hint = did_you_mean(name, [*known]) if len(name) < 100 else ""
        raise Refusal(f"a field {_short.repr(name)}{hint}", f"only {', '.join(known)}")
    for name in (x for x, (_, required) in known.items() if required and x not in given):
        raise Refusal("none", f"a field named {name!r}")
    named = {name: _inside(f".{name:.80}", x, known[name][0]) for name, x in given.items()}
    try:
        return cls(**named)
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        fields = isinstance(error, SETTING_ERRORS)
        said = str(error) if fields else str(*error.args[:1])  # attrs has more arguments behind its sentence
        raise Refusal(_short.repr(said), f"the fields of a {cls.__name__}") from error


@cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Those fields of attrs class `cls` that are stored in files, by their name there: (type annotation,
    whether the field must be present)."""
    hints = get_type_hints(cls, include_extras=True)
    own = [x for x in fields(cls) if x.metadata != IN_MEMORY]
    return {x.alias: (hints[x.name], x.default is NOTHING) for x in own}


def to_plain(value: Any) -> Any:
    """Convert an attrs instance to JSON's own types, without fields that are None; `decoded` reverts it."""
    cls: Any = value.__class__
    if has(cls):
        own = [x for x in fields(cls) if x.metadata != IN_MEMORY]
        named = ((x.alias, getattr(value, x.name)) for x in own)
        return {name: to_plain(x) for name, x in named if x is not None}
    if isinstance(value, Mapping):
        return {name: to_plain(x) for name, x in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        values = cast("Sequence[Any]", value)
        plain = values and type(values[0]) is int  # checksums: millions
        return [*values] if plain else [*map(to_plain, values)]
    return value


@frozen
class JsonNode:
    """A value parsed from a JSON file, together with `where` in the file it is, for error messages."""

    value: Any
    where: str

    def refuse(
        self, expected: str, got: str = "", place: str = "", cause: Exception | None = None
    ) -> NoReturn:
        """Raise CheckpointError, from `cause`, with the message that `expected` was expected, but this value
        was read, or the value `got` at `place` inside it."""
        found, do = (
            got or _short.repr(self.value),
            f"the file is damaged or not one of zfunc's; {USE_ANOTHER}",
        )
        raise CheckpointError(f"{self.where}{place}: got {found}, expected {expected}: {do}") from cause

    def read(self, hint: Any) -> Any:
        """Decode this JSON value as annotation `hint` says. Raises CheckpointError, with the place in the file, for
        another.

        Annotations are a type of JSON (an integer may stand for a float); `tuple[T, ...]`; `tuple[T, U]`, a list of
        that length; `Mapping[str, T]`, an object of any names; an attrs class, an object of its fields: those with
        a default may be missing, those marked as never in a file are; `Annotated[T, function]`, the result of
        `function(value)`, which may raise Refusal.

        >>> JsonNode({"a": [1, 2.5]}, "x").read(Mapping[str, tuple[Count, float]])
        {'a': (1, 2.5)}
        """
        try:
            return decoded(self.value, hint)
        except Refusal as error:
            got, expected, place = error.got, error.expected, error.place
        except CheckpointError as error:  # what a class says of its parts
            raise CheckpointError(f"{self.where}: {error}") from error
        return self.refuse(expected, got, place)

    def of_version(self, version: int) -> "JsonNode":
        """This JSON object without its field "version". Raises CheckpointError unless that field is `version`."""
        found = self.entries().get("version")
        if found is None or found.read(int) != version:
            got = "no version" if found is None else f"version {found.value}"
            self.refuse(f"version {version}, the one that this zfunc reads", got)
        return JsonNode({name: x for name, x in self.value.items() if name != "version"}, self.where)

    def entries(self) -> "dict[str, JsonNode]":
        """The values of this JSON object by name, each with its place in the file."""
        return {k: JsonNode(x, f"{self.where}.{k:.80}") for k, x in self.read(dict).items()}
