"""What an option means on the command line, and the checks of its value. No torch here: help answers at once.

The invariant: a check raises ValueError with the flag, what was got, what was expected and what to type instead; it
returns for any value that can be run. What one may choose from is said once: the check, the help of the command and
the shell's completion read it.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import attrs
from attrs import field, frozen

from zfunc.errors import did_you_mean

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
    """

    group: str
    help: str
    check: Callable[[str, Any], None]
    metavar: str = ""
    positional: bool = False
    words: Collection[str] = field(kw_only=True)

    @words.default
    def _choices(self) -> Collection[str]:
        return self.check.names if isinstance(self.check, OneOf) else ()


def flag(name: str) -> str:
    """The flag of a field.

    >>> flag("num_layers")
    '--num-layers'
    """
    return "--" + name.replace("_", "-")


def count(name: str, value: Any, *, lowest: int = 1) -> None:
    """A whole number, `lowest` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(
            f"{flag(name)}: got {value}, expected a whole number of at least {lowest}: pass {lowest} or more"
        )


zero_or_more = partial(count, lowest=0)


def positive(name: str, value: Any) -> None:
    """A finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(
            f"{flag(name)}: got {value:g}, expected a finite number above 0: leave it out for its default"
        )


def not_negative(name: str, value: Any) -> None:
    """A finite number, 0 or above."""
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{flag(name)}: got {value:g}, expected a finite number, 0 or above: pass 0 to go without"
        )


def probability(name: str, value: Any) -> None:
    """0 or above and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{flag(name)}: got {value:g}, expected 0 or above and below 1: pass 0 for none")


@frozen
class OneOf:
    """A check that the value is one of `names`, the nearest of which is told otherwise."""

    names: Collection[str]

    def __call__(self, name: str, value: Any) -> None:
        """Raises ValueError for another value."""
        if value not in self.names:
            hint = did_you_mean(str(value), list(self.names)) or ": choose one of them"
            raise ValueError(f"{flag(name)}: got {value!r}, expected one of {', '.join(self.names)}{hint}")


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
            f"{flag(name)}: got {value}, expected 0 (nothing is on the host) to 1 (all of the optimizer's "
            f"state is), or {AUTO}: pass such as 0.75"
        )


def share(told: str) -> float | Literal["auto"]:
    """What was told as a ratio."""
    return AUTO if told == AUTO else float(told)


def path(name: str, value: Any) -> None:
    """A path that names a file or a folder."""
    if value.exists() and not value.name:  # "", "." and "/"
        raise ValueError(f"{flag(name)}: got {str(value)!r}, expected the path of a file or folder: name it")


def anything(_name: str, _value: Any) -> None:
    """Nothing to check."""


def check_each(settings: Any, options: Mapping[str, Option]) -> None:
    """Check every field of `settings` that is not None by its option."""
    for f in attrs.fields(type(settings)):
        value = getattr(settings, f.name)
        if value is not None:
            options[f.name].check(f.name, value)


def multiple(name: str, value: int, of: str, parts: int) -> None:
    """Whether `value` of field `name` is a multiple of `parts`, the value of field `of`."""
    if value % parts:
        near = [n for n in (value // parts * parts, (value // parts + 1) * parts) if n]
        raise ValueError(
            f"{flag(name)}: got {value} with {flag(of)} {parts}, expected a multiple of it: try {flag(name)} "
            f"{' or '.join(map(str, near))}, or other {flag(of)}"
        )
