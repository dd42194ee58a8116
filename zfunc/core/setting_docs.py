"""The settings of a step in the signature and the docstring of a function that takes them by name."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from textwrap import fill
from typing import Any, TypeVar

from zfunc.core.setting_values import HELP
from zfunc.core.settings import named_settings

Function = TypeVar("Function", bound=Callable[..., Any])

DOCSTRING_WIDTH = 116  # columns


def takes_settings(**defaults: Any) -> Callable[[Function], Function]:
    """A decorator that lists every setting in the signature and docstring of a function with `**changes`.

    `defaults` are the function's own defaults. The list replaces `{settings}` in the docstring.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        settings = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=f.type)
            for f in named_settings().values()
            for default in (defaults.get(f.name, f.default),)
        ]
        function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
        function.__doc__ = (function.__doc__ or "").replace("{settings}", "\n".join(_list(defaults)).strip())
        return function

    return decorate


def _list(defaults: Mapping[str, Any]) -> Iterator[str]:
    for f in named_settings().values():
        default = defaults.get(f.name, f.default)
        text = f"{default:,}" if type(default) is int else repr(default)
        yield fill(
            f"- `{f.name}` (default {text}): {f.metadata[HELP]}",
            DOCSTRING_WIDTH,
            initial_indent="    ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        )
