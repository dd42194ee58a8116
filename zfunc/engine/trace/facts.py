"""What a segment's behavior depends on beside its arguments, as values to compare: the attributes of its module. A
step compares them with those of the step before."""

import dis
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Container, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 6  # of containers and objects in each other
MOST = 256  # values in one that are looked at before each step
MAX_HASHED = 1 << 22  # bytes; a larger array is compared by identity
PLAIN = bool | int | float | complex | str | bytes | None | Enum | range | slice | np.generic
PLAIN = PLAIN | torch.dtype | torch.device | torch.Size
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "peft", "zfunc"} - {"__main__"}
Facts = dict[str, Any]  # what is compared of a value, by a name that the user knows


class _Same:
    """A wrapper of an object that equals only another wrapper of the same object. A tensor is held weakly,
    and must also have the same requires_grad and, unless it is a parameter, the same number of in-place
    writes."""

    def __init__(self, x: Any) -> None:
        self.ref, self.state = (lambda: x), ()
        if isinstance(x, Tensor):
            version = 0 if isinstance(x, nn.Parameter) else version_of(x)  # a parameter's values may change
            self.ref, self.state = weakref.ref(x), (version, x.requires_grad)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.ref() is other.ref() and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


def version_of(t: Tensor) -> int:
    """How often a tensor was written in place; 0 for an inference tensor, of which torch counts no writes."""
    return 0 if t.is_inference() else t._version


def itself(x: Any) -> Any:
    """The key by which `x` is compared: of a function what it computes, else `x` if it is hashable and no tensor,
    else the object's identity."""
    if isinstance(x, FunctionType):
        values = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        values += tuple(content_of(cell) for cell in x.__closure__ or ())
        return _computes(x.__code__), [repr(v) if is_plain(v) else id(v) for v in values]
    return _Same(x) if isinstance(x, Tensor) or type(x).__hash__ is None else x


def attributes(module: nn.Module | None, *, tensors: bool) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the types and attributes of a module and its submodules; with `tensors` also
    parameters and buffers."""
    for path, m in module.named_modules() if module is not None else ():
        yield f"attribute {path}" if path else "the module", type(m)
        slots = {**m._parameters, **m._buffers} if tensors else {}
        plain = {k: v for k, v in vars(m).items() if k not in ("_parameters", "_buffers", "_modules")}
        for name, value in {**plain, **slots}.items():
            yield f"attribute {path}.{name}" if path else f"attribute {name}", value


def held(module: nn.Module | None, *, tensors: bool = True, by: Callable[[Any], Any] = itself) -> Facts:
    """What the behavior of a module depends on, by name, to be compared: attributes of it and its submodules;
    with `tensors` also parameters and buffers. Tensors, functions and other values that are not plain are
    represented by `by(value)`, by default their identity."""
    named = [*attributes(module, tensors=tensors)]
    keys = {i: compared(x, by, 0) for i, x in {id(x): x for _, x in named}.items()}  # modules share a config
    return {name: keys[id(x)] for name, x in named}


def content_of(cell: CellType) -> Any:
    """The content of a cell of a closure; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def globals_in(code: CodeType) -> frozenset[str]:
    """The names of the globals that `code`, and functions made in it, read."""
    loaded = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    return frozenset(loaded).union(*(globals_in(x) for x in code.co_consts if isinstance(x, CodeType)))


@cache
def _computes(code: CodeType) -> Any:
    """A key of what `code` computes, wherever it stands."""
    consts = [_computes(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return code.co_code, code.co_names, consts


def of_library(x: Any) -> bool:
    """Whether a function or class belongs to Python, torch or another library, not to the user's model."""
    return str(x.__module__).partition(".")[0] in LIBRARIES


def is_plain(x: Any) -> bool:
    """Whether `x` is a number, a text, a dtype or such, or a tuple of these, which `repr` compares."""
    return isinstance(x, PLAIN) or (isinstance(x, tuple) and all(map(is_plain, x)))


def is_open(x: Any, *, called: bool = False) -> bool:
    """Whether `x` is an object whose attributes are compared: of a class of the user's, and, unless `called`, none
    that can be called; a namespace; or the config of a model of transformers."""
    has_attributes = hasattr(x, "__dict__") and not isinstance(x, FunctionType | type | nn.Module)
    mine = has_attributes and not of_library(type(x)) and (called or not callable(x))
    of_transformers = has_attributes and hasattr(type(x), "model_type")
    return mine or of_transformers or isinstance(x, Namespace | SimpleNamespace)


def compared(value: Any, by: Callable[[Any], Any], depth: int, names: Container[str] | None = None) -> Any:
    """A key to compare `value` by, which is `depth` levels inside another value: plain values count
    themselves; others, and all at level six, by `by(x)`. With `names`, of what is in an object, and in a dict that
    has some of these, only that under `names` counts."""
    if isinstance(value, PLAIN):
        return repr(value)  # so that a NaN equals itself, and 1 is not True
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_HASHED and not value.dtype.hasobject
        return value.shape, value.dtype, hash(value.tobytes()) if small else id(value)
    if depth == MAX_DEPTH or isinstance(value, Tensor):
        return by(value)
    if names is not None and isinstance(value, nn.Module):
        return held(value)
    if isinstance(value, partial):
        return compared((value.func, value.args, value.keywords), by, depth + 1, names)
    content: Any = vars(value) if is_open(value, called=names is not None) else value
    several = isinstance(content, Mapping | list | tuple | set | frozenset)
    if several and names is not None and len(content) > MOST:
        return by(value)
    if isinstance(content, Mapping):
        said = {k: x for k, x in [*content.items()] if names is None or k in names}
        items = said if said or content is not value else content
        return type(value), [(repr(key), compared(x, by, depth + 1, names)) for key, x in [*items.items()]]
    if isinstance(content, list | tuple | set | frozenset):
        return type(value), [compared(x, by, depth + 1, names) for x in [*content]]
    if names is not None and isinstance(value, FunctionType | type) and not of_library(value):
        plain = {k: repr(x) for k, x in [*vars(value).items()] if k in names and is_plain(x)}
        return by(value), plain
    return by(value)


def first_change(before: Facts, after: Facts) -> str:
    """Text on the first fact, by name, in which `after` differs from `before`; "" if they are equal."""
    for name in {**before, **after}:
        values = [x.get(name, "absent") for x in (before, after)]
        if values[0] != values[1]:
            return f"{name} ({', then '.join(values)})" if all(isinstance(x, str) for x in values) else name
    return ""
