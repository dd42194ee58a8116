"""The user's code, neither torch's nor zfunc's, in a stack of calls: where it is, and whether it checks a value."""

import ast
import concurrent.futures
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

_ZFUNC = Path(__file__).parents[2]
_FOLDERS = (Path(torch.__file__).parent, Path(concurrent.futures.__file__).parent)
_FOLDERS += (_ZFUNC / "engine", _ZFUNC / "models" / "cut", _ZFUNC / "models" / "hf")
LIBRARIES = (*(f"{x}{os.sep}" for x in _FOLDERS), threading.__file__)
"""The beginnings of the names of files that are not the user's code. Models of zfunc itself count as the user's."""


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
    return next((x for x in found if not x[0].startswith(LIBRARIES)), None)


def _text(place: tuple[str, int] | None) -> str:
    return f"at {place[0]}:{place[1]}" if place else "in forward"
