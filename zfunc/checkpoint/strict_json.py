"""Strict JSON with typed access, safe for untrusted files.

Whatever the bytes are, parsing is fast, takes memory in proportion to them, and gives checked values or a
CheckpointError that names the place. Keys are unique, numbers are finite and fit in 64 bits, text can be encoded.
"""

import json
import math
import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any, NoReturn, cast

from attrs import frozen

from zfunc.errors import USE_ANOTHER, CheckpointError, did_you_mean

MAX_INT = 2**63 - 1
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


class DuplicateKeyError(ValueError):
    """An object has `key` twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the name {_short.repr(key)} twice in one object")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A parser's `object_pairs_hook`. Raises DuplicateKeyError.

    >>> json.loads('{"a": 1, "a": 2}', object_pairs_hook=unique_keys)
    Traceback (most recent call last):
    zfunc.checkpoint.strict_json.DuplicateKeyError: the name 'a' twice in one object
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DuplicateKeyError(key)
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


@frozen
class JsonNode:
    """A value of a parsed file and its place in it. Accessors check the type and name the place in errors."""

    value: object
    where: str

    def refuse(self, expected: str, got: str = "") -> NoReturn:
        """Raise CheckpointError for this value, or with `got`, a description of what is wrong with it."""
        raise CheckpointError(
            f"{self.where}: got {got or _short.repr(self.value)}, expected {expected}: the file is damaged or not "
            f"one of zfunc's; {USE_ANOTHER}"
        )

    def fields(self, *names: str) -> "tuple[JsonNode, ...]":
        """The values of an object that has exactly these names, in the order of the names."""
        entries = self.entries()
        for name in entries:
            if name not in names:
                hint = did_you_mean(name, list(names)) if len(name) < 100 else ""
                self.refuse(f"only {', '.join(names)}", f"a field {_short.repr(name)}{hint}")
        for name in names:
            if name not in entries:
                self.refuse(f"a field named {name!r}", "none")
        return tuple(entries[name] for name in names)

    def entries(self) -> "dict[str, JsonNode]":
        """The values of an object, by name."""
        value = self.value
        if not isinstance(value, dict):
            self.refuse("an object")
        result = cast("dict[str, object]", value)
        return {name: JsonNode(x, f"{self.where}.{name:.80}") for name, x in result.items()}

    def items(self) -> "list[JsonNode]":
        """The values of a list."""
        return [JsonNode(x, f"{self.where}[{n}]") for n, x in enumerate(self._list())]

    def _list(self) -> list[object]:
        value = self.value
        if not isinstance(value, list):
            self.refuse("a list")
        return cast("list[object]", value)

    def integer(self, low: int = 0, high: int = MAX_INT) -> int:
        """An integer of low to high, not a boolean."""
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(f"an integer of {low} to {high}")
        return value

    def integers(self, high: int = MAX_INT) -> tuple[int, ...]:
        """A list of integers of 0 to high."""
        values = self._list()
        for n, x in enumerate(values):
            if type(x) is not int or not 0 <= x <= high:
                JsonNode(x, f"{self.where}[{n}]").refuse(f"an integer of 0 to {high}")
        return tuple(cast("list[int]", values))

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def number(self, low: float = -math.inf) -> float:
        """A finite number of at least `low`, an integer or a float, as a float."""
        value = self.value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < low:
            self.refuse("a number" if low == -math.inf else f"a number of at least {low:g}")
        return float(value)

    def text(self, low: int = 1, high: int = 1000) -> str:
        """A text of low to high characters."""
        value = self.value
        if not isinstance(value, str) or not low <= len(value) <= high:
            self.refuse(f"a text of {low} to {high} characters")
        return value

    def choice(self, known: tuple[str, ...]) -> str:
        """One of the known values."""
        value = self.text()
        if value not in known:
            self.refuse(
                f"one of {', '.join(known)}", f"{_short.repr(value)}{did_you_mean(value, list(known))}"
            )
        return value
