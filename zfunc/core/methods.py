"""What core calls of modules above: methods of plans and timelines (simulate, verify, draw), orders by their names.

A module that calls such a function imports nothing from above; `zfunc` says where each is.
"""

from importlib import import_module
from typing import Any

FUNCTIONS: dict[str, str] = {}
"""The module of each function, by the name of the function."""


def above(name: str) -> Any:
    """The function `name` of a package that imports core, such as viz; it is imported at the call."""
    return getattr(import_module(FUNCTIONS[name]), name)


def in_notebook(kind: str, value: Any) -> str:
    """HTML for a notebook with a diagram of `value`, a Plan (`kind` "plan") or a Timeline ("timeline")."""
    return above(f"{kind}_html")(value)
