"""The user's code, neither torch's nor zfunc's, in a stack of calls: where it is, and whether it checks a value."""

import ast
import concurrent.futures
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
LIBRARIES = (*(f"{x}{os.sep}" for x in _FOLDERS), threading.__file__)
"""The beginnings of the names of files that are not the user's code. Models of zfunc itself count as the user's."""


def place_of_error(error: Exception) -> str:
    """The file and line of the user's code that raised `error`, as text."""
    return _text(_first_of(reversed([*traceback.walk_tb(error.__traceback__)])))


def place_here() -> str:
    """The file and line of the user's code that is called last, as text."""
    return _text(_first_of(traceback.walk_stack(sys._getframe())))


def in_a_check() -> bool:
    """Whether code, the user's or torch's, evaluates the condition of an `assert`, or of an `if` that raises an
    error."""
    return _check_at(_asking()) is not None


def passing_check() -> tuple[bool, str] | None:
    """Where code, the user's or torch's, evaluates a value in such a condition: the value with which nothing is
    raised, and the place if the code is the user's, else ""."""
    place = _asking()
    if place is None or (check := _check_at(place)) is None:
        return None
    operands = [*_operands(check[0], check[1])]
    computed = [value for x, value in operands if not isinstance(x, ast.Name | ast.Attribute)]
    wanted = {*(computed or (value for _, value in operands))}
    where = "" if place[0].startswith(LIBRARIES) else _text(place)
    return (wanted.pop(), where) if len(wanted) == 1 else None


def _asking() -> tuple[str, int] | None:
    """The file and line of the code, the user's or torch's, that asks for a value."""
    machinery = *(str(x) for x in _FOLDERS[2:]), torch.overrides.__file__, torch._tensor.__file__
    return _first_of(traceback.walk_stack(sys._getframe()), machinery)


def _operands(condition: ast.expr, raises: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the operands of a condition that may be values of tensors, each with the value for which the condition
    is not `raises`."""
    if isinstance(condition, ast.BoolOp):
        yield from (y for x in condition.values for y in _operands(x, raises))
    elif isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        yield from _operands(condition.operand, not raises)
    elif not (isinstance(condition, ast.Compare) and isinstance(condition.ops[0], ast.Is | ast.IsNot)):
        yield condition, not raises


def _check_at(place: tuple[str, int] | None) -> tuple[ast.expr, bool] | None:
    """The condition of a check at a file and line, and whether an error is raised if it is true; None if there is
    none."""
    file, line = place or ("", 0)
    checks = (x for x in _checks_in(file, len(linecache.getlines(file))) if x[0].lineno <= line <= x[1])
    test = next(checks, None)
    return None if test is None else (test[0], test[2])


@cache
def _checks_in(file: str, _: int) -> list[tuple[ast.expr, int, bool]]:
    """The conditions of the checks in a file with so many lines: each with its last line, and whether an error is
    raised if it is true."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a file that is not Python's
        return []
    checks = (
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.Assert) or (isinstance(x, ast.If) and isinstance(x.body[0], ast.Raise))
    )
    return [(x.test, x.test.end_lineno or x.test.lineno, isinstance(x, ast.If)) for x in checks]


def _first_of(
    frames: Iterable[tuple[FrameType, int]], others: tuple[str, ...] = LIBRARIES
) -> tuple[str, int] | None:
    """File and line of the first of `frames`, innermost first, that is the user's, or in none of `others`."""
    places = ((f.f_code.co_filename, line) for f, line in frames)
    return next((x for x in places if not x[0].startswith(others)), None)


def _text(place: tuple[str, int] | None) -> str:
    return f"at {place[0]}:{place[1]}" if place else "in forward"
