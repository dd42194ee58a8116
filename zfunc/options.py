"""What an option means on the command line, and the checks of its value. No torch here: help answers at once.

The invariant: a check takes the name of a setting, or its flag, and a value, and raises ValueError with the name,
the value got, the values expected and what to give instead. The words to choose from are listed once: the check,
the help of the command and the shell's completion read that list.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import evolve, field, frozen

from zfunc.errors import did_you_mean, refuse, setting
from zfunc.values import number, whole

Check = Callable[[str, Any], Any]
AUTO: Literal["auto"] = "auto"
# Of options, in the order in which help shows them: what is chosen first, and by most, comes first.
GROUPS = (
    *("run", "shell", "data", "model", "step", "how long", "run folder", "hardware", "how it runs"),
    *("offload", "measurement", "log", "picture", "file", "page", "output", "configuration"),
    "buffers",  # for experts: zfunc plan chooses them
)


@frozen
class Option:
    """A field of settings on the command line: its group, its help with the unit, and a check that raises.

    `metavar` stands for the value in the help; "" means the one of the field's type. Parts in small letters are
    typed literally: `PATH|auto`. A `positional` option has no flag. `words` are the values to choose from, empty if
    any value may be typed. `alone` is the value of a flag that is typed without a value, "" if a value is required.
    `name` is the flag's name where it is not the field's. A `common` option is in the short help.
    """

    group: str
    help: str
    check: Check
    metavar: str = ""
    positional: bool = False
    name: str = field(default="", kw_only=True)
    alone: str = field(default="", kw_only=True)
    common: bool = field(default=False, kw_only=True)
    words: Collection[str] = field(kw_only=True)

    @words.default
    def _choices(self) -> Collection[str]:
        return self.check.names if isinstance(self.check, OneOf) else ()

    def offering(self, words: Collection[str], note: str = "") -> "Option":
        """A copy of this option with `words` to choose from; its help lists these and ends with `note`."""
        old, new = ", ".join(self.words), ", ".join(words)
        text = self.help.replace(old, new) if old else f"{self.help}: {new}"
        check = evolve(self.check, names=words) if isinstance(self.check, OneOf) else one_of(words)
        return evolve(self, help=text + note, check=check, words=words)


Options = Mapping[str, Option]


def flag(name: str) -> str:
    """The command-line flag of the settings field `name`.

    >>> flag("num_layers"), flag("with_")
    ('--num-layers', '--with')
    """
    return "--" + name.rstrip("_").replace("_", "-")


def as_flag(name: str, value: Any) -> str:
    """The settings field `name` with its value, as typed on the command line.

    >>> as_flag("clip", 0.5), as_flag("max", True)
    ('--clip 0.5', '--max')
    """
    if value is True:
        return flag(name)
    return f"{flag(name)} {f'{value:g}' if isinstance(value, float) else value}"


count = partial(whole, least=1)
zero_or_more = partial(whole, least=0)
positive = partial(number, positive=True, hint="leave it out for its default")
not_negative = partial(number, least=0, hint="pass 0 to go without")
probability = partial(number, least=0, below=1, hint="pass 0 for none")


@frozen
class OneOf:
    """A check that a setting's value is one of `names`; the error suggests the nearest name."""

    names: Collection[str]

    def __call__(self, name: str, value: Any) -> Any:
        """Return `value` if it is an allowed name; raises ValueError otherwise. `name` is the setting's name."""
        if value not in self.names:
            similar = did_you_mean(str(value), list(self.names))
            refuse(name, repr(value), f"one of {', '.join(self.names)}{similar}", "choose one of them")
        return value


one_of = OneOf


def path(name: str, value: Any) -> None:
    """Check that the path `value` of setting `name` names a file or folder: "", "." and "/" raise ValueError."""
    if value.exists() and not value.name:  # "", "." and "/"
        refuse(name, repr(str(value)), "the path of a file or folder", "name it by its whole path")


def json_object(name: str, value: Any) -> None:
    """Check that `value` of setting `name` is the text of a JSON object; raises ValueError otherwise."""
    try:
        if not isinstance(json.loads(value), dict):
            raise ValueError("not an object")
    except ValueError as error:
        refuse(name, f"{value!r:.60} ({error})", "a JSON object", "write it so")


def file_to_write(*suffixes: str) -> Check:
    """A check that a path is an old or new file in an existing folder, with one of `suffixes` ("": no suffix)."""

    def check(name: str, value: Any) -> None:
        path(name, value)
        if value.is_dir() or not value.parent.is_dir():
            refuse(name, str(value), "a file in a folder that exists", "name another")
        if value.exists() and not value.is_file():  # a device or pipe is written to, a file is replaced
            written, what = value, "which"
        else:
            written, what = Path(os.path.realpath(value)).parent, "whose folder"
        if not os.access(written, os.W_OK):
            refuse(name, f"{value}, {what} cannot be written", "one in a folder that can", "name another")
        if suffixes and value.suffix not in suffixes:
            ends = " or ".join(filter(None, suffixes))
            refuse(name, str(value), f"a name that ends in {ends}", "name it so")

    return check


def anything(_name: str, _value: Any) -> None:
    """A check of a setting that accepts every value."""


def option(
    default: Any, help: str, check: Check = anything, metavar: str = "", *, group: str, **more: Any
) -> Any:
    """An attrs field of a command's settings, with its Option in the metadata. `more` are further arguments
    of the Option; `converter` among them goes to the attrs field."""
    converter = more.pop("converter", None)
    return _field(Option(group, help, check, metavar, **more), default=default, converter=converter)


def _field(option: Option, **more: Any) -> Any:
    return attrs.field(validator=_checked, metadata={"option": option}, **more)


def _checked(_settings: Any, field: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None:
        field.metadata["option"].check(field.name, value)


def options_of(settings: type[Any], *, without: Collection[str] = ()) -> dict[str, Option]:
    """The Option of each field of the attrs class `settings` that has one, by flag name, except `without`."""
    options = ((f.name, f.metadata["option"]) for f in attrs.fields(settings) if "option" in f.metadata)
    named = {x.name or name: x for name, x in options if x.group}
    return {name: x for name, x in named.items() if name not in without}


def flag_fields(
    settings: type[Any], base: type[Any], changed: Options, *, without: Collection[str] = (), **defaults: Any
) -> type[Any]:
    """Make an attrs class of a command's flags, derived from `base`: a field for each field of `settings`
    that has a flag not in `without`.

    `changed` has options that replace those of `settings`, `defaults` the command's own default values, both by
    flag name. Fields that may be a number or a word have the type str.
    """
    own: dict[str, Any] = {}
    for f in attrs.fields(settings):
        name = f.metadata["option"].name or f.name
        if name in options_of(settings, without=without):
            declared = bool if isinstance(f.default, bool) else f.type
            known = (int, bool, float, int | None, float | None, tuple[str, ...])
            typed: Any = declared if declared in known else str
            default = defaults.get(name, f.default)
            if typed is str and isinstance(default, int | float):
                default = f"{default:g}"
            converter: Any = {str: str, tuple[str, ...]: tuple}.get(typed)
            given = changed.get(name, f.metadata["option"])
            own[name] = _field(given, default=default, type=typed, converter=converter)
    name = f"{settings.__name__}Flags"
    return attrs.make_class(name, own, bases=(base,), frozen=True, kw_only=True)


def values_of_flags(settings: type[Any], flags: Any) -> dict[str, Any]:
    """The values that the parsed command line `flags` gives to fields of `settings`, by field name."""
    options = {f.name: f.metadata["option"] for f in attrs.fields(settings)}
    named = {name: x.name or name for name, x in options.items() if x.group}
    return {name: getattr(flags, flag) for name, flag in named.items() if hasattr(flags, flag)}


def multiple(name: str, value: int, of: str, parts: int) -> None:
    """Raise ValueError unless `value` of setting `name` is a multiple of `parts`, the value of setting `of`."""
    if value % parts:
        near = max(parts, value // parts * parts)
        refuse(name, f"{value} with {setting(of, parts)}", "a multiple of it", f"try {setting(name, near)}")
