"""Whether forward of a module may read other tensors in eval mode: who asks for `training`, and what for."""

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

from torch import nn

from zfunc.engine.trace.facts import Facts, first_change, held

_DROPOUT = inspect.getfile(nn.Dropout)  # whose modules return their input in eval mode
_OWN = "training", "__getattribute__", "__setattr__"  # of nn.Module, or reads may not be seen


class TrainingReads:
    """Stands for the attribute `training` of every nn.Module while `module` runs. `matter`: whether a module in
    training mode was asked for it by code that may read other tensors in eval mode."""

    def __init__(self, module: nn.Module) -> None:
        self.asked, self.matter = {id(m) for m in module.modules() if m.training}, False

    def __get__(self, m: Any, kind: Any = None) -> Any:
        if m is None:
            return self
        if "training" not in vars(m):  # as in a ScriptModule
            raise AttributeError("training")
        if not self.matter and id(m) in self.asked:
            self.matter = not _same_in_eval(sys._getframe(1))
        return vars(m)["training"]

    def __set__(self, m: Any, mode: bool) -> None:
        vars(m)["training"] = mode


@contextmanager
def training_reads(module: nn.Module) -> Iterator[TrainingReads]:
    """A context in which reads of `training` of `module` and its submodules are looked at; no other thread runs
    modules meanwhile."""
    reads = TrainingReads(module)
    with patch.object(nn.Module, "training", reads, create=True):
        reads.matter = any(
            getattr(type(m), x) is not getattr(nn.Module, x) for m in module.modules() for x in _OWN
        )
        yield reads


def changes_in_eval(module: nn.Module) -> bool:
    """Whether `module`, which is in eval mode then, has other attributes there than `training`."""
    before = _facts(module)
    module.eval()
    return bool(first_change(before, _facts(module)))


def _facts(module: nn.Module) -> Facts:
    return {name: x for name, x in held(module).items() if not re.search(r"[ .]training$", name)}


def _same_in_eval(frame: FrameType) -> bool:
    """Whether the code at `frame`, which reads `training`, reads no other tensors in eval mode: a dropout of torch,
    or `a if module.training else b` of equal numbers."""
    if frame.f_code.co_filename == _DROPOUT:
        return True
    with suppress(
        Exception
    ):  # the other mode's value may be missing now, and a file be edited since it was read
        if either := _either(frame.f_code, frame.f_lasti):
            first, other = (eval(x, frame.f_globals, frame.f_locals) for x in either)
            return isinstance(first, int | float) and type(first) is type(other) and first == other
    return False


@cache
def _either(code: CodeType, instruction: int) -> tuple[CodeType, CodeType] | None:
    """Both values of the conditional expression whose test is what `code` reads at `instruction`, if they are
    numbers, names and attributes."""
    lines = "".join(linecache.getlines(code.co_filename))
    position = [*code.co_positions()][instruction // 2]
    for x in ast.walk(ast.parse(lines)):
        if not isinstance(x, ast.IfExp):
            continue
        test = (
            x.test.operand if isinstance(x.test, ast.UnaryOp) and isinstance(x.test.op, ast.Not) else x.test
        )
        if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == position:
            parts = [n for value in (x.body, x.orelse) for n in ast.walk(value)]
            plain = all(isinstance(n, ast.Constant | ast.Name | ast.Attribute | ast.Load) for n in parts)
            names = [compile(ast.Expression(v), code.co_filename, "eval") for v in (x.body, x.orelse)]
            return (names[0], names[1]) if plain else None
    return None
