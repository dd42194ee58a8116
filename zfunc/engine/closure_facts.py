"""The Python values that a function or a module can reach: attributes, closures, globals, random generators.

The walk changes nothing and calls no code of the user. Equal facts mean equal values.
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

MAX_FACTS = 20_000  # of one walk; values beyond are ignored
MAX_DEPTH = 40
MAX_HASHED = 1 << 22  # bytes; a larger array is compared by identity
_PLAIN = (bool, int, complex, str, bytes, type(None), Enum, range, slice)
_PLAIN = (*_PLAIN, torch.dtype, torch.device, torch.Size)
_EXACT = frozenset(_PLAIN)  # looked up faster
_NUMBERS = (float, np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState)
_CONTAINERS: Any = (dict, list, tuple, deque, Mapping)
_LIBRARIES = {"torch", "numpy", "functorch", "attr", "attrs", *sys.stdlib_module_names} - {"__main__"}


@define(eq=False)
class CapturedFacts:
    """The values of a walk, by names that the user knows.

    `reads` has a function to look up each value outside of the module (closures, globals, classes) again, which
    checks in microseconds that nothing has changed.
    """

    values: dict[str, Any] = field(factory=dict[str, Any])
    reads: list[tuple[str, Callable[[], Any], Any]] = field(factory=list[tuple[str, Callable[[], Any], Any]])

    def change(self, after: "CapturedFacts") -> str:
        """A description of the first difference to a later walk, or ""."""
        for name in {**self.values, **after.values}:
            old, new = (x.values.get(name, _Absent) for x in (self, after))
            if old != new:
                return _describe(name, old, new)
        return ""

    def moved(self) -> str:
        """A description of the first of `reads` that has changed, or ""."""
        for name, read, old in self.reads:
            try:
                new = read()
            except (LookupError, ValueError, AttributeError):  # a key, or a closure's value, is gone
                new = _Absent
            if new is not old and not (isinstance(old, _PLAIN) and new == old):
                return _describe(name, old, new)
        return ""


class _Absent:
    """Stands for a missing value."""


@define
class _Hidden:
    """A value that is compared but not shown."""

    value: Any


class _Same:
    """A weak reference to a tensor, equal while it is the same tensor with the same requires_grad and version. (The
    version of a parameter does not count.)"""

    def __init__(self, t: Tensor) -> None:
        unversioned = isinstance(t, nn.Parameter) or t.is_inference()  # a parameter's values may change
        self.ref, self.state = weakref.ref(t), (0 if unversioned else t._version, t.requires_grad)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.ref() is other.ref() and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


def captured(root: Any, *, tensors: bool = False) -> CapturedFacts:
    """All plain values that `root`, a module or a function, can reach; with `tensors` also the tensors."""
    walk = _Walk(tensors)
    walk.visit(root, "", 0)
    return walk.facts


def held(module: nn.Module) -> CapturedFacts:
    """The values and tensors of a module that a copy has for itself: none of classes, closures and globals."""
    walk = _Walk(tensors=True, code=False)
    walk.visit(module, "", 0)
    return walk.facts


def path_of(root: Any, t: Tensor) -> str:
    """The name of a tensor that `root` can reach, or ""."""
    facts = captured(root, tensors=True).values
    return next((name for name, x in facts.items() if isinstance(x, _Same) and x.ref() is t), "")


class _Walk:
    def __init__(self, tensors: bool, code: bool = True) -> None:
        self.facts = CapturedFacts()
        self._tensors, self._code = tensors, code
        self._seen: dict[int, Any] = {}  # holds the values, so that ids stay unique
        self._classes: set[type] = set()

    def visit(self, value: Any, path: str, depth: int) -> None:
        """Record a plain value, or visit the parts of any other, each once."""
        values = self.facts.values
        if type(value) in _EXACT or isinstance(value, _PLAIN):
            values[path] = value
        elif isinstance(value, _NUMBERS):
            values[path] = repr(value)  # so that a NaN equals itself
        elif isinstance(value, Tensor):
            if self._tensors:
                values[path] = _Same(value)
        elif id(value) not in self._seen and depth < MAX_DEPTH and len(values) < MAX_FACTS:
            self._seen[id(value)] = value
            self._visit_parts(value, path, depth + 1)

    def _visit_parts(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, types.FunctionType):  # most are functions or containers
            self.facts.values[path] = _Hidden(value.__code__)
            if self._code:
                self._visit_function(value, path, depth)
        elif isinstance(value, nn.Module):
            self._visit_module(value, path, depth)
        elif isinstance(value, _CONTAINERS):
            self._visit_container(value, path, depth)
        elif isinstance(value, np.ndarray):
            by_value = value.nbytes <= MAX_HASHED and not value.dtype.hasobject
            self.facts.values[path] = _Hidden((value.shape, hash(value.tobytes()) if by_value else id(value)))
        elif isinstance(value, random.Random):
            self.facts.values[path] = _Hidden(hash(value.getstate()))
        elif isinstance(value, np.random.BitGenerator):
            self.visit(value.state, path, depth)
        elif isinstance(value, _GENERATORS):
            self.visit(getattr(value, "bit_generator", None) or value._bit_generator, path, depth)
        elif isinstance(value, types.BuiltinFunctionType):
            self.facts.values[path] = value.__qualname__
        elif isinstance(value, types.MethodType):
            self._visit_all([("", value.__func__), ("", value.__self__)], path, depth)
        elif isinstance(value, functools.partial):
            parts = [("", value.func), *_items(value.args), *_items(value.keywords)]
            self._visit_all(parts, path, depth)
        elif isinstance(value, (set, frozenset)):
            self.facts.values[path] = _Hidden(frozenset(x for x in value if isinstance(x, _PLAIN)))
        elif isinstance(value, types.GeneratorType):
            self.visit(inspect.getgeneratorlocals(value), path, depth)
        elif isinstance(value, itertools.count):
            self.facts.values[path] = repr(value)
        elif isinstance(value, Iterator):
            self.facts.values[path] = operator.length_hint(value, -1)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif not _is_library(type(value)) and not isinstance(value, types.ModuleType):
            self._visit_class(type(value), depth)
            self._visit_all(_attributes(value), path, depth)

    def _visit_all(self, parts: Iterable[tuple[str, Any]], path: str, depth: int) -> None:
        for name, part in parts:
            self.visit(part, _joined(path, name), depth)

    def _visit_container(self, value: Any, path: str, depth: int) -> None:
        if len(value) > MAX_FACTS:
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
        for base in kind.__mro__ if self._code else ():
            if _is_library(base) or base in self._classes:
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
        if _is_library(f):
            return
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if _filled(cell):
                read = functools.partial(getattr, cell, "cell_contents")
                self._watch(read, cell.cell_contents, f"closure variable {name}", depth)
        for defaults in filter(None, (f.__defaults__, f.__kwdefaults__)):
            self.visit(defaults, path, depth)
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
        """Visit the values that a function uses from another file of the user."""
        if _is_library(module):
            return
        for name in _names(f.__code__):
            value = vars(module).get(name, module)
            if isinstance(value, _DATA):
                read = functools.partial(operator.getitem, vars(module), name)
                self._watch(read, value, f"global {module.__name__}.{name}", depth)

    def _watch(self, read: Callable[[], Any], value: Any, path: str, depth: int) -> None:
        self.facts.reads.append((path, read, value))
        self.visit(value, path, depth)
        if isinstance(value, (list, dict)) and len(value) <= MAX_FACTS:  # its items can change too
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
    return [(f"[{repr(key) if type(key) is int else reprlib.repr(key)}]", item) for key, item in [*pairs]]


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
    """The global names that a function and its inner functions use."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return [*code.co_names, *(name for x in inner for name in _names(x))]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _Absent
    except ValueError:  # not assigned yet
        return False


def _is_library(x: Any) -> bool:
    """Whether `x` belongs to torch, NumPy or Python, whose values are no part of a model."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or ""
    return name.partition(".")[0] in _LIBRARIES


def _describe(name: str, *values: Any) -> str:
    if any(isinstance(x, (*_PLAIN, float)) for x in values):
        return f"{name} ({', then '.join(map(_shown, values))})"
    return name


def _shown(value: Any) -> str:
    if value is _Absent:
        return "absent"
    return value if isinstance(value, str) and len(value) < 40 else reprlib.repr(value)
