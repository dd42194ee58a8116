"""The types of values that keys.toml names."""

import math
from collections.abc import Callable
from typing import Any, cast

from attrs import frozen


@frozen
class ValueType:
    """`expected` describes it in errors; `read` normalizes a value, or returns None for one of another type."""

    expected: str
    read: Callable[[Any], Any]


def value_type(text: str | list[Any]) -> ValueType:
    """The type that keys.toml writes as `text`: a name in PLAIN, int or float with bounds, or a list of choices.

    >>> value_type("int 1..").read(5e8), value_type("int 1..").read(0.5), value_type("int 1..").read(0)
    (500000000, None, None)
    >>> value_type("float 0..1").read(1), value_type("float 0..").read(float("nan"))
    (1.0, None)
    >>> value_type(["cpu", "nvme"]).read("CPU")
    'cpu'
    """
    if isinstance(text, list):
        return _choice(text)
    kind, _, bounds = text.partition(" ")
    if kind not in ("int", "float"):
        return PLAIN[text]
    low, _, high = bounds.partition("..")
    return _bounded(kind, float(low or "-inf"), float(high or "inf"))


def _to_float(value: Any) -> float | None:
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if numeric else None


def _to_int(value: Any) -> int | None:
    return None if _to_float(value) is None or value != int(value) else int(value)


def _bounded(kind: str, low: float, high: float) -> ValueType:
    convert, noun = (_to_int, "a whole number") if kind == "int" else (_to_float, "a number")

    def read(value: Any) -> float | None:
        x = convert(value)
        return x if x is not None and low <= x <= high else None

    if high < math.inf:
        return ValueType(f"{noun} from {low:g} to {high:g}", read)
    return ValueType(noun if low == -math.inf else f"{noun} of at least {low:g}", read)


def _choice(choices: list[Any]) -> ValueType:
    """One of a few values; texts match in any case."""
    folded = {x.lower() if isinstance(x, str) else x: x for x in choices}

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return folded.get(value.lower())
        return folded.get(_to_int(value)) if isinstance(value, int | float) else None

    return ValueType(", ".join(str(x) for x in choices), read)


def _beta(value: Any) -> float | None:
    x = _to_float(value)
    return x if x is not None and 0 <= x < 1 else None


def _betas(value: Any) -> tuple[float, ...] | None:
    pair = tuple(beta for x in _list(value) or () if (beta := _beta(x)) is not None)
    return pair if len(pair) == 2 == len(value) else None


def _list(value: Any) -> list[Any] | None:
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else None


def _object(value: Any) -> Any:
    return cast("Any", value) if isinstance(value, dict | bool) else None


OBJECT = ValueType("an object", _object)
PLAIN = {
    "bool": ValueType("true or false", lambda x: x if isinstance(x, bool) else None),
    "text": ValueType("a text", lambda x: x if isinstance(x, str) else None),
    "list": ValueType("a list", _list),
    "beta": ValueType("a number, 0 or above and below 1", _beta),
    "betas": ValueType("two numbers, 0 or above and below 1", _betas),
    "object": OBJECT,
    "any": ValueType("anything", lambda x: x),
}
