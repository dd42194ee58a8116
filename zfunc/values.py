"""Checks of plain values, made when a settings object is created. Each returns the value as a plain Python one, or
raises TypeError or ValueError with the value got, the values expected and what to do."""

import math
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, ClassVar, NoReturn, Self

from zfunc.errors import SettingError, SettingTypeError, refuse, refuse_unknown

FLOAT32_MAX = 3.4028234663852886e38


class NamedSettings:
    """Base class of settings. One by a name that `__init__` does not take is refused by `refuse_name`, which gets
    this name and the known ones: a SettingTypeError."""

    __slots__ = ()
    refuse_name: ClassVar[Callable[[str, list[str]], NoReturn]] = staticmethod(refuse_unknown)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Settings without values, which `__init__` gives them."""
        known, takes_any = _arguments(cls)
        for name in (x for x in given if not takes_any and x not in known):
            cls.refuse_name(name, [*known])
        return super().__new__(cls)


@cache
def _arguments(cls: type[Any]) -> tuple[tuple[str, ...], bool]:
    """The names that `cls` is made with, and whether it takes any."""
    _, *arguments = signature(cls.__init__).parameters.values()
    return tuple(x.name for x in arguments), any(x.kind == x.VAR_KEYWORD for x in arguments)


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    positive: bool = False,
    most: float = FLOAT32_MAX,
    below: float = math.inf,
    computed: bool = False,
    hint: str = "pass a float in this range",
) -> float:
    """Setting `name` as a finite float from `least` to `most`, below `below`, above 0 if `positive`. The value
    is an int, float or NumPy scalar, no bool. If it was `computed` for this call it may be a tensor or array of one
    element; as a setting, which is read once, its later changes would be ignored. An error ends with `hint`.

    >>> number("clip_norm", 1, positive=True)
    1.0
    """
    plain = value
    if type(value) is not float and type(value) is not int:
        try:
            plain = value.detach() if hasattr(value, "detach") else value
            plain = plain.item() if hasattr(plain, "item") else plain
        except (RuntimeError, ValueError):  # of several elements, or without values
            plain = None
    known = isinstance(plain, int | float) and not isinstance(plain, bool)
    if known and hasattr(value, "__setitem__") and not computed:
        expected = "a plain number, which is read once"
        refuse(name, f"{value!r:.60}", expected, "pass float() of it", SettingTypeError)
    if known and max(least, -FLOAT32_MAX) <= plain <= most and plain < below and (plain > 0 or not positive):
        return float(plain)
    kind = SettingError if known else SettingTypeError
    refuse(name, repr(value), _range(least, positive, most, below), hint, kind)


def _range(least: float, positive: bool, most: float, below: float) -> str:
    low = " above 0" if positive else "" if least == -math.inf else f" of at least {least:g}"
    high = f" and below {below:g}" if below < math.inf else f" and at most {most:g}" * (most < FLOAT32_MAX)
    return f"a finite number{low}{high}"


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Setting `name` as an int from `least` to `most`, both included; a bool raises ValueError.

    >>> whole("keep", 2, least=1)
    2
    """
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or (least is not None and value < least) or (most is not None and value > most):
        low = "" if least is None else f" of at least {least}"
        high = "" if most is None else f"{' and' if low else ' of'} at most {most}"
        below = least is not None and good and value < least
        hint = f"pass {least} or more" if below else f"pass {most} or less" if good else "pass an int"
        refuse(name, repr(value), f"a whole number{low}{high}", hint)
    return value


def truth(name: str, value: Any) -> bool:
    """Setting `name` as a bool; every other type, 0 and 1 included, raises TypeError."""
    if not isinstance(value, bool):
        refuse(name, repr(value), "True or False", "pass one of them", SettingTypeError)
    return value


def of_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise SettingTypeError about setting `name` unless `value` is an instance of `kind`. `expected` is text on
    what the value should be and, behind a colon, what to do."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        expected, _, do = expected.partition(": ")
        called = f"call it, as {value.__name__}(...)" if isinstance(value, type) else "pass one"
        refuse(name, got, expected, do or called, SettingTypeError)
