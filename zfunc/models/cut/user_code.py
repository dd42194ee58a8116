"""The user's code, neither torch's nor zfunc's, in a stack of calls: where it is, and whether it checks a value."""

import ast
import concurrent.futures
import contextlib
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_ZFUNC = Path(__file__).parents[2]
_FOLDERS = (Path(torch.__file__).parent, Path(concurrent.futures.__file__).parent)
_FOLDERS += (_ZFUNC / "engine", _ZFUNC / "models" / "cut", _ZFUNC / "models" / "hf")
LIBRARIES = (*(f"{x}{os.sep}" for x in _FOLDERS), threading.__file__, contextlib.__file__)
"""The beginnings of the names of files that are not the user's code. Models of zfunc itself count as the user's."""
Span = tuple[tuple[int, int], tuple[int, int]]  # lines and columns where code begins and ends


def place_of_error(error: Exception) -> str:
    """The file and line of the user's code that raised `error`, as text."""
    return _text(_first_of(reversed([*traceback.walk_tb(error.__traceback__)])))


def place_here() -> str:
    """The file and line of the user's code that is called last, as text."""
    return _text(_first_of(traceback.walk_stack(sys._getframe())))


def in_a_check() -> bool:
    """Whether code, the user's or torch's, evaluates the condition of an `assert`, or of an `if` that raises an
    error."""
    frame = _asking()
    return frame is not None and _check_at(frame) is not None


def passing_check() -> tuple[bool, str] | None:
    """Where code, the user's or torch's, evaluates a value in such a condition: the value with which nothing is
    raised, and the place if the code is the user's, else ""."""
    frame = _asking()
    if frame is None or (check := _check_at(frame)) is None:
        return None
    asked, operands = _asked_in(frame, check[0]), ((_span(x), value) for x, value in _operands(*check))
    wanted = {value for x, value in operands if not asked or _within(asked, x) or _within(x, asked)}
    place = frame.f_code.co_filename, frame.f_lineno
    return (
        (wanted.pop(), "" if place[0].startswith(LIBRARIES) else _text(place)) if len(wanted) == 1 else None
    )


def asked_by_user() -> bool:
    """Whether the user's code, not torch's, asks for a value."""
    frame = _asking()
    return frame is not None and not frame.f_code.co_filename.startswith(LIBRARIES)


def _asking() -> FrameType | None:
    """The frame of the code, the user's or torch's, that asks for a value."""
    machinery = *(str(x) for x in _FOLDERS[2:]), torch.overrides.__file__, torch._tensor.__file__
    frames = (f for f, _ in traceback.walk_stack(sys._getframe()))
    return next((f for f in frames if not f.f_code.co_filename.startswith(machinery)), None)


def _operands(condition: ast.expr, raises: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the operands of a condition, each with the value for which the condition is not `raises`."""
    if isinstance(condition, ast.BoolOp):
        yield from (y for x in condition.values for y in _operands(x, raises))
    elif isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _operands(condition.operand, not raises)
    else:
        yield condition, not raises


def _asked_in(frame: FrameType, condition: ast.expr) -> Span | None:
    """The span in `condition` of the expression whose value `frame` asks for, or that negates it; None if Python
    runs without columns. A jump has the span of its statement, so that of the instruction before it counts."""
    before = [*frame.f_code.co_positions()][: frame.f_lasti // 2 + 1]
    spans = (((line, column), (end, last)) for line, end, column, last in reversed(before) if last)
    return next((x for x in spans if _within(x, _span(condition))), None)  # pyright: ignore


def _span(x: ast.expr) -> Span:
    return (x.lineno, x.col_offset), (x.end_lineno or 0, x.end_col_offset or 0)


def _within(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _check_at(frame: FrameType) -> tuple[ast.expr, bool] | None:
    """The condition of the check that `frame` evaluates, and whether an error is raised if it is true; None if it
    evaluates none."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    found = (x for x in _checks_in(file, len(linecache.getlines(file))) if x[0] <= line <= x[1])
    return next((x[2:] for x in found), None)


@cache
def _checks_in(file: str, _: int) -> list[tuple[int, int, ast.expr, bool]]:
    """The checks in a file with so many lines: the first and last line of each condition, the condition, and
    whether an error is raised if it is true."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a file that is not Python's
        return []
    checks = (
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.Assert) or (isinstance(x, ast.If) and isinstance(x.body[0], ast.Raise))
    )
    return [(x.lineno, x.test.end_lineno or x.lineno, x.test, isinstance(x, ast.If)) for x in checks]


def _first_of(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, int] | None:
    """File and line of the first of `frames`, innermost first, that is the user's."""
    found = ((f.f_code.co_filename, line) for f, line in frames)
    return next((x for x in found if not x[0].startswith(LIBRARIES)), None)


def _text(place: tuple[str, int] | None) -> str:
    return f"at {place[0]}:{place[1]}" if place else "in forward"
