"""What a key's value may be, in words and as a function that gives it in one form.

The invariant: what is given back is of the type said, and finite; anything else is None.
"""

import math
from collections.abc import Callable
from typing import Any, cast

from attrs import frozen


@frozen
class Takes:
    """`told` says it; `read` gives the value in one form, or None for what it cannot be."""

    told: str
    read: Callable[[Any], Any]


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or number != int(number) else int(number)


def whole(lowest: int = 0, highest: int | None = None) -> Takes:
    """A whole number; 5e8 is one.

    >>> whole().read(5e8), whole().read(0.5), whole(1).read(0)
    (500000000, None, None)
    """

    def read(value: Any) -> int | None:
        n = _whole(value)
        return None if n is None or n < lowest or (highest is not None and n > highest) else n

    upto = "" if highest is None else f", at most {highest}"
    return Takes(f"a whole number of at least {lowest}{upto}", read)


def number(lowest: float = 0.0, highest: float = math.inf) -> Takes:
    """A finite number within bounds, both of them allowed.

    >>> number().read(1), number().read(float("nan")), number(0, 1).read(2)
    (1.0, None, None)
    """

    def read(value: Any) -> float | None:
        x = _number(value)
        return None if x is None or not lowest <= x <= highest else float(x)

    if highest == math.inf:
        return Takes("a number" if lowest == -math.inf else f"a number of at least {lowest:g}", read)
    return Takes(f"a number from {lowest:g} to {highest:g}", read)


def one_of(*known: Any) -> Takes:
    """One of a few values; texts in any case.

    >>> one_of("cpu", "nvme").read("CPU")
    'cpu'
    """
    folded = {x.lower() if isinstance(x, str) else x: x for x in known}

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return folded.get(value.lower())
        return folded.get(_whole(value)) if isinstance(value, int | float) else None

    return Takes(", ".join(str(x) for x in known), read)


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


FLAG = Takes("true or false", lambda v: v if isinstance(v, bool) else None)
TEXT = Takes("a text", lambda v: v if isinstance(v, str) else None)
LIST = Takes("a list", _list)
MOMENTUM = Takes("a number, 0 or above and below 1", _momentum)
PAIR = Takes("two numbers, 0 or above and below 1", _betas)
BLOCK = Takes("an object", _block)
ANYTHING = Takes("anything", lambda v: v)
COUNT, SIZE, NUMBER, SHARE = whole(1), whole(), number(), number(0.0, 1.0)
