"""What a key's value may be, in words and as a function that gives it in one form.

The invariant: what is given back is of the type said, and finite; anything else is None.
"""

import math
from collections.abc import Callable
from typing import Any, cast

from attrs import frozen


@frozen
class ValueType:
    """`told` says it; `read` gives the value in one form, or None for what it cannot be."""

    told: str
    read: Callable[[Any], Any]


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or number != int(number) else int(number)


def whole_number(lowest: int = 0, highest: int | None = None) -> ValueType:
    """A whole number; 5e8 is one.

    >>> whole_number().read(5e8), whole_number().read(0.5), whole_number(1).read(0)
    (500000000, None, None)
    """

    def read(value: Any) -> int | None:
        n = _whole(value)
        return None if n is None or n < lowest or (highest is not None and n > highest) else n

    upto = "" if highest is None else f", at most {highest}"
    return ValueType(f"a whole number of at least {lowest}{upto}", read)


def finite_between(lowest: float = 0.0, highest: float = math.inf) -> ValueType:
    """A finite number within bounds, both of them allowed.

    >>> finite_between().read(1), finite_between().read(float("nan")), finite_between(0, 1).read(2)
    (1.0, None, None)
    """

    def read(value: Any) -> float | None:
        x = _number(value)
        return None if x is None or not lowest <= x <= highest else float(x)

    if highest == math.inf:
        return ValueType("a number" if lowest == -math.inf else f"a number of at least {lowest:g}", read)
    return ValueType(f"a number from {lowest:g} to {highest:g}", read)


def choice_of(*known: Any) -> ValueType:
    """One of a few values; texts in any case.

    >>> choice_of("cpu", "nvme").read("CPU")
    'cpu'
    """
    folded = {x.lower() if isinstance(x, str) else x: x for x in known}

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return folded.get(value.lower())
        return folded.get(_whole(value)) if isinstance(value, int | float) else None

    return ValueType(", ".join(str(x) for x in known), read)


def _momentum(value: Any) -> float | None:
    x = _number(value)
    return None if x is None or not 0 <= x < 1 else float(x)


def _betas(value: Any) -> tuple[float, ...] | None:
    pair = tuple(beta for x in _list(value) or () if (beta := _momentum(x)) is not None)
    return pair if len(pair) == 2 == len(value) else None


def _list(value: Any) -> list[Any] | None:
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else None


def _block(value: Any) -> Any:
    return cast("Any", value) if isinstance(value, dict | bool) else None


FLAG = ValueType("true or false", lambda v: v if isinstance(v, bool) else None)
TEXT = ValueType("a text", lambda v: v if isinstance(v, str) else None)
LIST = ValueType("a list", _list)
MOMENTUM = ValueType("a number, 0 or above and below 1", _momentum)
PAIR = ValueType("two numbers, 0 or above and below 1", _betas)
BLOCK = ValueType("an object", _block)
ANYTHING = ValueType("anything", lambda v: v)
COUNT, SIZE, NUMBER, SHARE = whole_number(1), whole_number(), finite_between(), finite_between(0.0, 1.0)
