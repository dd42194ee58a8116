"""The Python values that a function or a module can reach: attributes, closures, globals, random generators.

The invariant: walking changes nothing and calls nothing of the user's; equal facts mean equal values.
"""

import functools
import inspect
import itertools
import operator
import random
import reprlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor, nn

MOST = 20_000  # facts of one walk; what lies beyond is not looked at
DEPTH = 40
HASHED = 1 << 22  # bytes of an array that are compared by value
_PLAIN = (
    bool,
    int,
    complex,
    str,
    bytes,
    type(None),
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    range,
    slice,
)
_OTHERS = {"torch", "numpy", "functorch", "attr", "attrs", *sys.stdlib_module_names} - {"__main__"}


@define(eq=False)
class CapturedFacts:
    """What was reached, by a name a user knows it by.

    `reads` has, for what is outside the module itself (closures, globals, classes), how to look it up again: that
    tells in microseconds that nothing has changed.
    """

    values: dict[str, Any] = field(factory=dict[str, Any])
    reads: list[tuple[str, Callable[[], Any], Any]] = field(factory=list[tuple[str, Callable[[], Any], Any]])

    def change(self, after: "CapturedFacts") -> str:
        """The first difference to a later walk, in words, or nothing."""
        for name in {**self.values, **after.values}:
            old, new = (x.values.get(name, _Absent) for x in (self, after))
            if old != new:
                return _told(name, old, new)
        return ""

    def moved(self) -> str:
        """What of `reads` is not what it was, in words, or nothing."""
        for name, read, old in self.reads:
            try:
                new = read()
            except (LookupError, ValueError, AttributeError):  # a key, or a closure's value, is gone
                new = _Absent
            if new is not old and not (isinstance(old, _PLAIN) and new == old):
                return _told(name, old, new)
        return ""


class _Absent:
    """In the place of a value that is not there."""


@define
class _Hidden:
    """A value that is compared, but too long or of no use to be shown."""

    value: Any


class _Same:
    """A tensor, equal to itself; a parameter as long as it is trained or not, others as long as nothing is written
    into them. It is not kept alive."""

    def __init__(self, t: Tensor) -> None:
        values = isinstance(t, nn.Parameter) or t.is_inference()  # a parameter's values are free to change
        self.ref, self.state = weakref.ref(t), (0 if values else t._version, t.requires_grad)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.ref() is other.ref() and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


def captured(root: Any, *, tensors: bool = False) -> CapturedFacts:
    """All plain values that `root`, a module or a function, can reach; with `tensors` the identity and version of
    each tensor too, and whether it is trained."""
    walk = _Walk(tensors)
    walk.visit(root, "", 0)
    return walk.facts


def path_of(root: Any, t: Tensor) -> str:
    """The name of a tensor that `root` can reach, or nothing."""
    facts = captured(root, tensors=True).values
    return next((name for name, x in facts.items() if isinstance(x, _Same) and x.ref() is t), "")


class _Walk:
    def __init__(self, tensors: bool) -> None:
        self.facts = CapturedFacts()
        self._tensors = tensors
        self._seen: dict[int, Any] = {}  # the values too, so that no id is used twice
        self._classes: set[type] = set()

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Take down a plain value, or what there is in any other; each once."""
        values = self.facts.values
        if isinstance(value, _PLAIN):
            values[path] = value
        elif isinstance(value, float | np.generic):
            values[path] = repr(value)  # a NaN is equal to itself
        elif isinstance(value, Tensor):
            if self._tensors:
                values[path] = _Same(value)
        elif id(value) not in self._seen and depth < DEPTH and len(values) < MOST:
            self._seen[id(value)] = value
            self._visit_parts(value, path, depth + 1)

    def _visit_parts(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, np.ndarray):
            known = value.nbytes <= HASHED and not value.dtype.hasobject
            self.facts.values[path] = _Hidden((value.shape, hash(value.tobytes()) if known else id(value)))
        elif isinstance(value, random.Random):
            self.facts.values[path] = _Hidden(hash(value.getstate()))
        elif isinstance(value, np.random.BitGenerator):
            self.visit(value.state, path, depth)
        elif isinstance(value, np.random.Generator | np.random.RandomState):
            self.visit(getattr(value, "bit_generator", None) or value._bit_generator, path, depth)
        elif isinstance(value, nn.Module):
            self._visit_module(value, path, depth)
        elif isinstance(value, types.FunctionType):
            self.facts.values[path] = _Hidden(value.__code__)
            self._visit_function(value, path, depth)
        elif isinstance(value, types.BuiltinFunctionType):
            self.facts.values[path] = value.__qualname__
        elif isinstance(value, types.MethodType):
            self._visit_all([("", value.__func__), ("", value.__self__)], path, depth)
        elif isinstance(value, functools.partial):
            parts = [("", value.func), *_items(value.args), *_items(value.keywords)]
            self._visit_all(parts, path, depth)
        elif isinstance(value, Mapping | list | tuple | deque):
            self._visit_container(value, path, depth)
        elif isinstance(value, set | frozenset):
            self.facts.values[path] = _Hidden(frozenset(x for x in value if isinstance(x, _PLAIN)))
        elif isinstance(value, types.GeneratorType):
            self.visit(inspect.getgeneratorlocals(value), path, depth)
        elif isinstance(value, itertools.count):
            self.facts.values[path] = repr(value)
        elif isinstance(value, Iterator):
            self.facts.values[path] = operator.length_hint(value, -1)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif not _others(type(value)) and not isinstance(value, types.ModuleType):
            self._visit_class(type(value), depth)
            self._visit_all(_attributes(value), path, depth)

    def _visit_all(self, parts: Iterable[tuple[str, Any]], path: str, depth: int) -> None:
        for name, part in parts:
            self.visit(part, _joined(path, name), depth)

    def _visit_container(self, value: Any, path: str, depth: int) -> None:
        if len(value) > MOST:
            self.facts.values[path] = f"{len(value)} items"
            return
        self._visit_all(_items(value), path, depth)

    def _visit_module(self, module: nn.Module, path: str, depth: int) -> None:
        kinds = ("_parameters", "_buffers", "_modules")
        self.facts.values[f"{path} (its type)" if path else "the module's type"] = type(module)
        own = [(name, x) for name, x in vars(module).items() if name not in kinds]
        self._visit_all(own, path, depth)
        for kind in kinds:
            self._visit_all(getattr(module, kind).items(), path, depth)
        self._visit_class(type(module), depth)

    def _visit_class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if _others(base) or base in self._classes:
                continue
            self._classes.add(base)
            for name, value in [*vars(base).items()]:
                value = getattr(value, "__func__", value)  # of a static or class method
                path = f"class attribute {base.__name__}.{name}"
                if isinstance(value, types.FunctionType):
                    self.visit(value, path, depth)
                elif not name.startswith("__") and isinstance(value, _DATA):
                    self._watch(functools.partial(getattr, base, name), value, path, depth)

    def _visit_function(self, f: types.FunctionType, path: str, depth: int) -> None:
        if _others(f):
            return
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if _filled(cell):
                read = functools.partial(getattr, cell, "cell_contents")
                self._watch(read, cell.cell_contents, f"closure variable {name}", depth)
        self._visit_all([("", f.__defaults__ or ()), ("", f.__kwdefaults__ or {})], path, depth)
        scope = f.__globals__
        for name in _names(f.__code__):
            if name not in scope:
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                self._visit_named(f, value, depth)
            elif isinstance(value, _DATA) or getattr(value, "__module__", None) == f.__module__:
                self._watch(functools.partial(operator.getitem, scope, name), value, f"global {name}", depth)

    def _visit_named(self, f: types.FunctionType, module: types.ModuleType, depth: int) -> None:
        """Of another file of the user's: the values that a function names."""
        if _others(module):
            return
        for name in _names(f.__code__):
            value = vars(module).get(name, module)
            if isinstance(value, _DATA):
                read = functools.partial(operator.getitem, vars(module), name)
                self._watch(read, value, f"global {module.__name__}.{name}", depth)

    def _watch(self, read: Callable[[], Any], value: Any, path: str, depth: int) -> None:
        self.facts.reads.append((path, read, value))
        self.visit(value, path, depth)
        if isinstance(value, list | dict) and len(value) <= MOST:  # what is in it can change too
            keys = range(len(value)) if isinstance(value, list) else [*value]
            for key, (name, item) in zip(keys, _items(value), strict=True):
                if isinstance(item, (*_PLAIN, float)):
                    self.facts.reads.append(
                        (path + name, functools.partial(operator.getitem, value, key), item)
                    )


_DATA = (*_PLAIN, float, np.generic, np.ndarray, Tensor, list, tuple, dict, set, deque, Iterator)
_DATA = (*_DATA, random.Random, np.random.Generator, np.random.RandomState, functools.partial)


def _joined(path: str, name: str) -> str:
    if not name:
        return path
    if name.startswith("["):
        return path + name
    return f"{path}.{name}" if path else f"attribute {name}"


def _items(value: Any) -> list[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [(f"[{reprlib.repr(key)}]", item) for key, item in [*pairs]]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    slots = [
        (name, getattr(value, name))
        for kind in type(value).__mro__
        for name in _listed(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    return [*getattr(value, "__dict__", {}).items(), *slots]


def _listed(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _names(code: types.CodeType) -> list[str]:
    """The names that a function, or one inside it, looks up outside."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return [*code.co_names, *(name for x in inner for name in _names(x))]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _Absent
    except ValueError:  # not yet
        return False


def _others(x: Any) -> bool:
    """Whether something is of torch, NumPy or Python itself: what that keeps is no part of a model."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or ""
    return name.partition(".")[0] in _OTHERS


def _told(name: str, *values: Any) -> str:
    if any(isinstance(x, (*_PLAIN, float)) for x in values):
        return f"{name} ({', then '.join(map(_shown, values))})"
    return name


def _shown(value: Any) -> str:
    if value is _Absent:
        return "absent"
    return value if isinstance(value, str) and len(value) < 40 else reprlib.repr(value)
