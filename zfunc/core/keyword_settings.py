"""The settings of a step as keyword arguments: functions that take them list each in signature and docstring."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from textwrap import fill
from typing import Any, TypeVar

from attrs import evolve, fields, fields_dict

from zfunc.core.settings import GONE, HELP, StepSettings
from zfunc.errors import did_you_mean
from zfunc.values import of_type

Function = TypeVar("Function", bound=Callable[..., Any])
WIDTH = 116  # columns of a docstring


def settings_with(settings: StepSettings | None, changes: Mapping[str, Any]) -> StepSettings:
    """`settings`, or the defaults, with `changes` by name. Raises TypeError for an unknown name."""
    settings = StepSettings() if settings is None else settings
    of_type(
        "settings",
        settings,
        StepSettings,
        "a zfunc.core.settings.StepSettings: pass one, or pass settings by name",
    )
    known = list(fields_dict(StepSettings))
    for name in changes:
        if name in GONE:
            raise TypeError(f"{name}: got a setting that is gone: {GONE[name]}")
        if name not in known:
            raise TypeError(
                f"{name}: got an unknown setting, expected one of {', '.join(known)}{did_you_mean(name, known)}"
            )
    return evolve(settings, **changes)


def takes_settings(**defaults: Any) -> Callable[[Function], Function]:
    """A decorator that lists every setting in the signature and docstring of a function with `**changes`.

    `defaults` are the function's own defaults. The list replaces `{settings}` in the docstring.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        settings = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=f.type)
            for f in fields(StepSettings)
            for default in (defaults.get(f.name, f.default),)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
        function.__doc__ = (function.__doc__ or "").replace("{settings}", "\n".join(_list(defaults)).strip())
        return function

    return decorate


def _list(defaults: Mapping[str, Any]) -> Iterator[str]:
    for f in fields(StepSettings):
        default = defaults.get(f.name, f.default)
        text = f"{default:,}" if type(default) is int else repr(default)
        yield fill(
            f"- `{f.name}` (default {text}): {f.metadata[HELP]}",
            WIDTH,
            initial_indent="    ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        )
