"""The Python values that a function or a module depends on: attributes, closures, globals, random generators.

Looking at them changes nothing and calls no code of the user. Equal facts mean equal values.
"""

import functools
import operator
import random
import reprlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor, nn

MAX_ITEMS = 20_000  # of a container; those beyond are ignored
MAX_DEPTH = 6  # of containers and objects in each other
MAX_HASHED = 1 << 22  # bytes; a larger array is compared by identity
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, range, slice, np.generic)
_PLAIN = (*_PLAIN, torch.dtype, torch.device, torch.Size)
_FIXED = (*_PLAIN, Tensor, types.FunctionType, type)  # compared by identity
_DATA = (*_PLAIN, np.ndarray, Tensor, list, tuple, dict, set, deque, count, functools.partial)
_DATA = (*_DATA, random.Random, np.random.Generator, np.random.RandomState)
_LIBRARIES = {"torch", "numpy", "functorch", "attr", "attrs", "transformers", "peft"}
_LIBRARIES |= {*sys.stdlib_module_names} - {"__main__"}
_TENSORS = "_parameters", "_buffers"  # attributes of a module
_ABSENT = object()
Read = Callable[[], Any]


class _Same:
    """A weak reference to a tensor, equal while it is the same tensor with the same requires_grad and version. (The
    version of a parameter does not count.)"""

    def __init__(self, t: Tensor) -> None:
        unversioned = isinstance(t, nn.Parameter) or t.is_inference()  # a parameter's values may change
        self.ref, self.state = weakref.ref(t), (0 if unversioned else t._version, t.requires_grad)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.ref() is other.ref() and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


@define(eq=False)
class CapturedFacts:
    """Values by names that the user knows, each with what looks it up again; `outside` are those of no module."""

    reads: dict[str, Read]
    values: dict[str, Any]
    outside: dict[str, tuple[Any, Any]] = field(factory=dict[str, tuple[Any, Any]])

    def change(self, after: "CapturedFacts") -> str:
        """A description of the first difference to later facts, or ""."""
        names = {**self.values, **after.values}
        return _difference((x, self.values.get(x, _ABSENT), after.values.get(x, _ABSENT)) for x in names)

    def moved(self) -> str:
        """A description of the first value outside of modules that is another one now, or ""."""
        # What cannot change while it is the same object is most of them.
        moved = (
            x
            for x, (was, _) in self.outside.items()
            if not isinstance(was, _FIXED) or was is not _of(self.reads[x])
        )
        return _difference((x, self.outside[x][1], _fact(self.reads[x], id)) for x in moved)


def captured(root: Any, *, tensors: bool = False) -> CapturedFacts:
    """What `root`, a module or a function, depends on; with `tensors` which tensors, too."""
    reads = dict(_found(root, "", {}))
    own = {x: read for x, read in reads.items() if not x.startswith("attribute ")}
    outside = {x: (_of(read), _fact(read, id)) for x, read in own.items()}
    return CapturedFacts(
        reads, {x: _fact(read, _Same if tensors else type) for x, read in reads.items()}, outside
    )


def held(module: nn.Module) -> CapturedFacts:
    """The values and tensors of a module that a copy has for itself: none of classes, closures and globals."""
    reads = dict(_attributes(module, tensors=True))
    return CapturedFacts(reads, {x: _fact(read, _Same) for x, read in reads.items()})


def path_of(root: Any, t: Tensor) -> str:
    """The name of a tensor that `root` can reach, or ""."""
    found = chain(
        _attributes(root, tensors=True) if isinstance(root, nn.Module) else (), _found(root, "", {})
    )
    for name, read in found:
        with suppress(LookupError, ValueError, AttributeError):
            if read() is t:
                return name
    return ""


def _of(read: Read) -> Any:
    try:
        return read()
    except (LookupError, ValueError, AttributeError):  # a key, or a closure's value, is gone
        return _ABSENT


def _fact(read: Read, of_tensor: Callable[[Tensor], Any]) -> Any:
    """What is compared of a value that is looked up."""
    value = _of(read)
    return value if value is _ABSENT else _compared(value, of_tensor, 0)


def _compared(value: Any, of_tensor: Callable[[Tensor], Any], depth: int) -> Any:
    of = functools.partial(_compared, of_tensor=of_tensor, depth=depth + 1)
    if isinstance(value, float | np.generic):
        return repr(value)  # so that a NaN equals itself
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_HASHED and not value.dtype.hasobject
        return value.shape, hash(value.tobytes()) if small else id(value)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return of(getattr(value, "bit_generator", None) or value._bit_generator)
    if isinstance(value, np.random.BitGenerator | count):
        return repr(getattr(value, "state", value))
    if depth == MAX_DEPTH:
        return type(value)
    if isinstance(value, functools.partial):
        return of((value.args, value.keywords))
    if isinstance(value, Mapping):
        return [(repr(key), of(x)) for key, x in islice([*value.items()], MAX_ITEMS)]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [of(x) for x in islice([*value], MAX_ITEMS)]
    if hasattr(value, "__dict__") and not _is_library(type(value)) and not callable(value):
        return of(vars(value))
    return type(value)


def _attributes(module: nn.Module, *, tensors: bool) -> Iterator[tuple[str, Read]]:
    """The attributes of a module and of those in it, and the type of each."""
    for path, m in module.named_modules():
        yield f"attribute {path}" if path else "the module", lambda m=m: type(m).__qualname__
        before = f"attribute {path}." if path else "attribute "
        for name in vars(m):
            if name not in (*_TENSORS, "_modules"):
                yield before + name, functools.partial(operator.getitem, vars(m), name)
        for name, t in chain(*(vars(m)[kind].items() for kind in _TENSORS)) if tensors else ():
            yield before + name, lambda t=t: t


def _found(x: Any, name: str, seen: dict[int, Any]) -> Iterator[tuple[str, Read]]:
    """What a function, a module or an object depends on, by name."""
    if id(x) in seen or (_is_library(x) and not isinstance(x, types.MethodType | functools.partial)):
        return
    seen[id(x)] = x
    if isinstance(x, types.MethodType):
        yield from chain(_found(x.__func__, name, seen), _found(x.__self__, name, seen))
    elif isinstance(x, functools.partial):
        yield from _found(x.func, name, seen)
    elif isinstance(x, types.FunctionType):
        for name, read in _used(x):
            yield name, read
            with suppress(ValueError, LookupError):
                yield from _found(read(), name, seen)
    elif isinstance(x, type):
        for base, (name, value) in (
            (b, pair) for b in x.__mro__ if not _is_library(b) for pair in [*vars(b).items()]
        ):
            value = getattr(value, "__func__", value)  # of a static or class method
            if isinstance(value, types.FunctionType):
                yield from _found(value, name, seen)
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                yield f"class attribute {base.__name__}.{name}", functools.partial(getattr, base, name)
    elif isinstance(x, nn.Module):
        yield from _attributes(x, tensors=False)
        for kind in dict.fromkeys(type(m) for m in x.modules()):
            yield from _found(kind, name, seen)
    elif callable(x):
        yield from _found(type(x), name, seen)


def _used(f: types.FunctionType) -> Iterator[tuple[str, Read]]:
    """What a function uses of its closure, its file, and the user's other files."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield f"closure variable {name}", functools.partial(getattr, cell, "cell_contents")
    names = _names(f.__code__)
    for name in (x for x in names if x in f.__globals__):
        value = f.__globals__[name]
        if isinstance(value, _DATA) or getattr(value, "__module__", None) == f.__module__:
            yield f"global {name}", functools.partial(operator.getitem, f.__globals__, name)
        elif isinstance(value, types.ModuleType) and not _is_library(value):
            for x in (x for x in names if isinstance(vars(value).get(x, value), _DATA)):
                yield f"global {name}.{x}", functools.partial(operator.getitem, vars(value), x)


def _names(code: types.CodeType) -> list[str]:
    """The global names that a function and its inner functions use."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return [*code.co_names, *(name for x in inner for name in _names(x))]


def _is_library(x: Any) -> bool:
    """Whether `x` belongs to torch, transformers or Python, whose values are no part of a model."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or ""
    return str(name).partition(".")[0] in _LIBRARIES  # not always a text: psutil's constants have a module


def _difference(pairs: Iterable[tuple[str, Any, Any]]) -> str:
    name, *values = next((x for x in pairs if x[1] != x[2]), ("",))
    plain = any(isinstance(x, _PLAIN) for x in values)
    shown = ("absent" if x is _ABSENT else x if isinstance(x, str) else reprlib.repr(x) for x in values)
    return f"{name} ({', then '.join(shown)})" if plain else name
