"""The user's code, neither torch's nor zfunc's, in a stack of calls: where it is, and whether it checks a value."""

import ast
import linecache
import os
import traceback
from pathlib import Path

import torch

_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "concurrent")


def place_of_error(error: Exception) -> str:
    """The file and line of the user's code that raised `error`, as text."""
    return place_in(traceback.extract_tb(error.__traceback__))


def place_in(stack: traceback.StackSummary) -> str:
    """The file and line of the user's code that is called last in `stack`, as text."""
    frame = _last_in(stack)
    return f"at {frame.filename}:{frame.lineno}" if frame else "in forward"


def in_a_check() -> bool:
    """Whether the user's code evaluates the condition of an `assert`, or of an `if` that raises an error."""
    frame = _last_in(traceback.extract_stack())
    if frame is None or frame.lineno is None:
        return False
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except SyntaxError:  # a file that is not Python's
        return False
    checks = (
        x.test
        for x in ast.walk(tree)
        if isinstance(x, ast.Assert) or (isinstance(x, ast.If) and isinstance(x.body[0], ast.Raise))
    )
    return any(x.lineno <= frame.lineno <= (x.end_lineno or x.lineno) for x in checks)


def _last_in(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    return next((f for f in reversed(stack) if not any(x in f.filename for x in _LIBRARIES)), None)
