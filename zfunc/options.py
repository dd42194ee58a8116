"""What an option means on the command line, and the checks of its value. No torch here: help answers at once.

The invariant: a check takes the name of a setting, or its flag, and a value, and raises ValueError with the name,
what was got, what was expected and what to give instead. What one may choose from is said once: the check, the help
of the command and the shell's completion read it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import attrs
from attrs import evolve, field, frozen

from zfunc.errors import did_you_mean
from zfunc.values import whole

Check = Callable[[str, Any], Any]
AUTO: Literal["auto"] = "auto"
GROUPS = (  # of options, in the order in which help shows them: what is chosen first, and by most, comes first
    *(
        "run",
        "shell",
        "data",
        "model",
        "step",
        "how long",
        "run folder",
        "hardware",
        "how it runs",
        "offload",
    ),
    *("measurement", "log", "picture", "file", "page", "screen", "output", "configuration"),
)


@frozen
class Option:
    """What a field means on the command line: its group, its help with the unit, and a check that raises.

    `metavar` stands for its value in the help; "" is that of its type. What of it is not in capitals is typed as it
    is: `PATH|auto`. A `positional` one has no flag. `words` are those there are to choose from, if there are.
    `alone` is the value of its flag without one, if that may be. `name` is the flag's, where it is not the field's;
    `read` makes the field's value of what is typed.
    """

    group: str
    help: str
    check: Check
    metavar: str = ""
    positional: bool = False
    name: str = field(default="", kw_only=True)
    alone: str = field(default="", kw_only=True)
    read: Callable[[Any], Any] = field(default=lambda typed: typed, kw_only=True)
    words: Collection[str] = field(kw_only=True)

    @words.default
    def _choices(self) -> Collection[str]:
        return self.check.names if isinstance(self.check, OneOf) else ()

    def offering(self, words: Collection[str], note: str = "") -> "Option":
        """The same with other words to choose from, which its help lists, and a note on them.

        >>> Option("picture", "its format: text, svg", one_of(("text", "svg"))).offering(("text", "html")).help
        'its format: text, html'
        """
        old, new = ", ".join(self.words), ", ".join(words)
        text = self.help.replace(old, new) if old else f"{self.help}: {new}"
        check = evolve(self.check, names=words) if isinstance(self.check, OneOf) else one_of(words)
        return evolve(self, help=text + note, check=check, words=words)


def flag(name: str) -> str:
    """The flag of a field.

    >>> flag("num_layers"), flag("with_")
    ('--num-layers', '--with')
    """
    return "--" + name.rstrip("_").replace("_", "-")


count = partial(whole, least=1)
zero_or_more = partial(whole, least=0)


def positive(name: str, value: Any) -> None:
    """A finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(
            f"{name}: got {value:g}, expected a finite number above 0: leave it out for its default"
        )


def not_negative(name: str, value: Any) -> None:
    """A finite number, 0 or above."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: got {value:g}, expected a finite number, 0 or above: pass 0 to go without")


def probability(name: str, value: Any) -> None:
    """0 or above and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}: got {value:g}, expected 0 or above and below 1: pass 0 for none")


@frozen
class OneOf:
    """A check that the value is one of `names`; the error suggests the nearest."""

    names: Collection[str]

    def __call__(self, name: str, value: Any) -> Any:
        """The value; raises ValueError for another."""
        if value not in self.names:
            hint = did_you_mean(str(value), list(self.names)) or ": choose one of them"
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(self.names)}{hint}")
        return value


@frozen
class SeveralOf(OneOf):
    """A check that the value is one of `names`, or several joined by commas, or as a sequence; "auto" is alone.

    >>> SeveralOf(("device", "host"))("activations_on", ["host", "device"])
    'host,device'
    """

    def __call__(self, name: str, value: Any) -> Any:
        """The value, several as a text; raises ValueError for another."""
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            parts = [value]
        for part in parts:
            super().__call__(name, part)
        if len(parts) > 1 and AUTO in parts:
            raise ValueError(f"{name}: got {value!r}, expected {AUTO!r} alone: leave the others out")
        return ",".join(parts)


def one_of(names: Collection[str]) -> OneOf:
    """A check that the value is one of `names`.

    >>> Option("picture", "its format", one_of(("text", "svg"))).words
    ('text', 'svg')
    """
    return OneOf(names)


def ratio(name: str, value: Any) -> None:
    """A share, 0 to 1, or "auto"."""
    try:
        good = value == AUTO or 0 <= float(value) <= 1
    except ValueError:
        good = False
    if not good:
        raise ValueError(
            f"{name}: got {value}, expected 0 (nothing is on the host) to 1 (all of the optimizer's "
            f"state is), or {AUTO}: pass such as 0.75"
        )


def read_ratio(typed: str) -> float | Literal["auto"]:
    """The value of a ratio as typed."""
    return AUTO if typed == AUTO else float(typed)


def path(name: str, value: Any) -> None:
    """A path that names a file or a folder."""
    if value.exists() and not value.name:  # "", "." and "/"
        raise ValueError(f"{name}: got {str(value)!r}, expected the path of a file or folder: name it")


def anything(_name: str, _value: Any) -> None:
    """Nothing to check."""


def options_of(settings: type[Any], *, without: Collection[str] = ()) -> dict[str, Option]:
    """The options that `settings` have as metadata of their fields, by the names of the flags."""
    named = (
        (option.name or f.name, option)
        for f in attrs.fields(settings)
        if (option := f.metadata["option"]).group
    )
    return {name: option for name, option in named if name not in without}


def flag_fields(
    settings: type[Any], base: type[Any], *, without: Collection[str] = (), **defaults: Any
) -> type[Any]:
    """A class for a command to extend: the fields of `base`, and those of `settings` that have a flag, as typed.

    `defaults` are the command's own. What is a number or a word, or a word among several, is typed as a text.
    """
    own: dict[str, Any] = {}
    for f in attrs.fields(settings):
        name = f.metadata["option"].name or f.name
        if name in options_of(settings, without=without):
            typed: Any = (
                f.type if f.type in (int, bool, float, int | None, float | None, tuple[str, ...]) else str
            )
            default = defaults.get(name, f.default)
            if typed is str and isinstance(default, int | float):
                default = f"{default:g}"
            converter: Any = {str: str, tuple[str, ...]: tuple}.get(typed)
            own[name] = attrs.field(default=default, type=typed, converter=converter)
    name = f"{settings.__name__}Flags"
    return attrs.make_class(name, own, bases=(base,), frozen=True, kw_only=True)


def values_of_flags(settings: type[Any], flags: Any) -> dict[str, Any]:
    """The values of `settings` that the fields of `flags` give, by their names in `settings`."""
    values: dict[str, Any] = {}
    for f in attrs.fields(settings):
        option: Option = f.metadata["option"]
        name = option.name or f.name
        if option.group and hasattr(flags, name):
            values[f.name] = option.read(getattr(flags, name))
    return values


def check_each(settings: Any, options: Mapping[str, Option]) -> None:
    """Check every field of `settings` that is not None by its option."""
    for f in attrs.fields(type(settings)):
        value = getattr(settings, f.name)
        if value is not None:
            options[f.name].check(flag(f.name), value)


def multiple(name: str, value: int, of: str, parts: int) -> None:
    """Whether `value` of field `name` is a multiple of `parts`, the value of field `of`."""
    if value % parts:
        near = [n for n in (value // parts * parts, (value // parts + 1) * parts) if n]
        raise ValueError(
            f"{flag(name)}: got {value} with {flag(of)} {parts}, expected a multiple of it: try {flag(name)} "
            f"{' or '.join(map(str, near))}, or other {flag(of)}"
        )
