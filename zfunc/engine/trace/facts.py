"""What a segment's behavior depends on beside its arguments, as values to compare: attributes of its module, and
what its functions read from closures and globals. A step compares them with those of the step before."""

import dis
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from operator import is_
from types import CodeType
from typing import Any

import numpy as np
import torch
from attrs import frozen
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


def _itself(x: Any) -> Any:
    """The key by which `x` is compared: `x` if it is hashable and no tensor, else the object's identity."""
    return _Same(x) if isinstance(x, Tensor) or type(x).__hash__ is None else x


def attributes(module: nn.Module | None, *, tensors: bool) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the types and attributes of a module and its submodules; with `tensors` also
    parameters and buffers."""
    for path, m in module.named_modules() if module is not None else ():
        yield f"attribute {path}" if path else "the module", type(m)
        slots = {**m._parameters, **m._buffers} if tensors else {}
        own = {k: v for k, v in vars(m).items() if k not in ("_parameters", "_buffers", "_modules")}
        for name, value in {**own, **slots}.items():
            yield f"attribute {path}.{name}" if path else f"attribute {name}", value


def held(module: nn.Module | None, *, tensors: bool = True, by: Callable[[Any], Any] = _itself) -> Facts:
    """What the behavior of a module depends on, by name, to be compared: attributes of it and its submodules;
    with `tensors` also parameters and buffers. Tensors, functions and other values that are not plain are
    represented by `by(value)`, by default their identity."""
    return {name: _compared(value, by, 0) for name, value in attributes(module, tensors=tensors)}


def read_outside(module: nn.Module | None, function: Callable[..., Any], *, plain: bool = True) -> Facts:
    """The plain values, by name, that a module's forward (or `function`, without a module), and the user's
    functions called there, read from closures and globals. Unless `plain`, also class attributes, and of
    other values the identity and the plain values directly in them."""
    found: Facts = {}
    classes = {*map(type, module.modules())} if module else set[Any]()
    for own in (x for c in classes for x in c.__mro__ if not (plain or _of_library(x))):
        values = {f"class attribute {own.__name__}.{k}": x for k, x in vars(own).items() if k[:2] != "__"}
        found |= {name: _glimpse(x) for name, x in values.items() if _is_plain(x)}
    left, seen = [(c.forward, c) for c in classes] or [(function, None)], set[Any]()
    while left:
        f, owner = left.pop()
        f = inspect.unwrap(f)
        if not inspect.isfunction(f) or _of_library(f) or f in seen:
            continue
        seen.add(f)
        read = inspect.getclosurevars(f)
        named = {f"closure variable {x}": value for x, value in read.nonlocals.items()}
        own = _globals_in(f.__code__)
        named |= {f"global {x}": value for x, value in read.globals.items() if x in own}
        left += [(x, owner) for x in named.values() if inspect.isfunction(x)]
        left += [(getattr(owner, x, None), owner) for x in f.__code__.co_names]
        found |= {name: _compared(x, type, 0) for name, x in named.items() if _is_plain(x)}
        if not plain:
            found |= {name: _glimpse(x) for name, x in named.items() if not _is_plain(x)}
    return found


@cache
def _globals_in(code: CodeType) -> frozenset[str]:
    """The names of the globals that `code` reads, for which `inspect` takes those of attributes, too."""
    return frozenset(x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")


def _glimpse(x: Any) -> Any:
    """A cheap key of `x` for comparisons: its identity and the plain values directly in it."""
    kind = x if isinstance(x, type) else type(x)
    own = {} if (callable(x) and kind is not x) or _of_library(kind) else getattr(x, "__dict__", {})
    inside = x if isinstance(x, dict) else dict(enumerate(x)) if isinstance(x, list) else own
    plain = [(k, repr(y)) for k, y in inside.items() if isinstance(y, PLAIN)] if len(inside) <= MOST else []
    return _itself(x), plain


def _of_library(x: Any) -> bool:
    """Whether a function or class belongs to Python, torch or another library, not to the user's model."""
    return str(x.__module__).partition(".")[0] in LIBRARIES


def _is_plain(x: Any) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, tuple) and all(map(_is_plain, x)))


def _compared(value: Any, by: Callable[[Any], Any], depth: int) -> Any:
    """A key to compare `value` by, which is `depth` levels inside another value: plain values count
    themselves; others, and all at level six, by `by(x)`."""
    if isinstance(value, PLAIN):
        return repr(value)  # so that a NaN equals itself, and 1 is not True
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_HASHED and not value.dtype.hasobject
        return value.shape, value.dtype, hash(value.tobytes()) if small else id(value)
    if depth == MAX_DEPTH or isinstance(value, Tensor):
        return by(value)
    if isinstance(value, Mapping):
        return type(value), [(repr(key), _compared(x, by, depth + 1)) for key, x in [*value.items()]]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [_compared(x, by, depth + 1) for x in [*value]]
    if isinstance(value, partial):
        return _compared((value.func, value.args, value.keywords), by, depth + 1)
    if hasattr(value, "__dict__") and not _of_library(type(value)) and not callable(value):
        return type(value), _compared(vars(value), by, depth + 1)
    return by(value)


def first_change(before: Facts, after: Facts) -> str:
    """Text on the first fact, by name, in which `after` differs from `before`; "" if they are equal."""
    for name in {**before, **after}:
        values = [x.get(name, "absent") for x in (before, after)]
        if values[0] != values[1]:
            return f"{name} ({', then '.join(values)})" if all(isinstance(x, str) for x in values) else name
    return ""


# --- a look at a module before each step ---------------------------------------------------------------------


@frozen(eq=False)
class Look:
    """A snapshot of a module, cheap to make, to see whether it has changed, made by `of`. `shown`: attributes and
    values in containers, compared by identity; `numbers`: how often buffers were written in place, and whether
    containers are empty; `values`: how often parameters were, and whether they are trained, by description."""

    of: "Watched"
    shown: list[Any]
    numbers: list[int]
    values: dict[str, int]

    def holds(self) -> bool:
        """Whether another snapshot, taken now of the same, shows no change."""
        other = self.of.look()
        alike = self.numbers == other.numbers and self.values == other.values
        return alike and len(self.shown) == len(other.shown) and all(map(is_, self.shown, other.shown))


@frozen(eq=False)
class Watched:
    """What a look at a module compares: functions that return the values of attributes and containers; the
    containers that are empty; the buffers; the parameters, by full name."""

    spaces: list[Callable[[], Iterable[Any]]]
    empty: list[Any]
    buffers: list[Tensor]
    parameters: Mapping[str, Tensor]

    def look(self) -> Look:
        """A snapshot of the module."""
        values = {f"the values of {x}": version_of(p) for x, p in self.parameters.items()}
        values |= {f"requires_grad of {x}": p.requires_grad for x, p in self.parameters.items()}
        shown = [x for space in self.spaces for x in space()]
        return Look(self, shown, [any(self.empty), *map(version_of, self.buffers)], values)


def look(module: nn.Module | None, parameters: Mapping[str, Tensor]) -> Look:
    """A snapshot of `module`, with `parameters` by full name; of nothing but these if it is None."""
    modules = [] if module is None else [*module.modules()]
    inside = [x for m in modules for x in vars(m).values() if isinstance(x, dict | list)]
    full = [*map(vars, modules), *(x for x in inside if 0 < len(x) <= MOST)]
    spaces = [x.values if isinstance(x, dict) else x.__iter__ for x in full]
    buffers = [t for m in modules for t in m._buffers.values() if t is not None]
    return Watched(spaces, [x for x in inside if not x], buffers, parameters).look()
