"""The user's code, neither torch's nor zfunc's, in a stack of calls: where it is, and whether it checks a value."""

import ast
import linecache
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "concurrent")


def place_of_error(error: Exception) -> str:
    """The file and line of the user's code that raised `error`, as text."""
    return _text(_first_of(reversed([*traceback.walk_tb(error.__traceback__)])))


def place_here() -> str:
    """The file and line of the user's code that is called last, as text."""
    return _text(_first_of(traceback.walk_stack(sys._getframe())))


def in_a_check() -> bool:
    """Whether the user's code evaluates the condition of an `assert`, or of an `if` that raises an error."""
    file, line = _first_of(traceback.walk_stack(sys._getframe())) or ("", 0)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a file that is not Python's
        return False
    checks = (
        x.test
        for x in ast.walk(tree)
        if isinstance(x, ast.Assert) or (isinstance(x, ast.If) and isinstance(x.body[0], ast.Raise))
    )
    return any(x.lineno <= line <= (x.end_lineno or x.lineno) for x in checks)


def _first_of(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, int] | None:
    """File and line of the first of `frames`, innermost first, that is the user's."""
    found = ((f.f_code.co_filename, line) for f, line in frames)
    return next((x for x in found if not any(library in x[0] for library in _LIBRARIES)), None)


def _text(place: tuple[str, int] | None) -> str:
    return f"at {place[0]}:{place[1]}" if place else "in forward"
