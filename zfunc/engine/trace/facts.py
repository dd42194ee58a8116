"""What a segment's behavior depends on beside its arguments, as values to compare: attributes of its module, and
what its functions read from closures and globals. A step compares them with those of the step before."""

import dis
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.autograd import Function

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
    """The key by which `x` is compared: of a function what it computes, else `x` if it is hashable and no tensor,
    else the object's identity."""
    if isinstance(x, FunctionType):
        given = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        given += tuple(content_of(cell) for cell in x.__closure__ or ())
        return _computes(x.__code__), [repr(v) if _is_plain(v) else id(v) for v in given]
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


@define(eq=False)
class Outside:
    """What traces depend on beside arguments and attributes of a module: what the code of `module` and `function`
    reads from closures, globals and classes; as `facts` at the time of the traces, None before the first."""

    module: nn.Module | None
    function: Any
    facts: Facts | None = None

    def now(self) -> Facts:
        """What the code reads now."""
        return read_outside(self.module, self.function, plain=False)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which a trace is made: what the trace itself changes (a cache, a counter) is no later
        change."""
        known, before = self.facts or {}, self.now()
        yield
        self.facts = {x: known[x] if x in known and before.get(x) == v else v for x, v in self.now().items()}


def read_outside(module: nn.Module | None, function: Any, *, plain: bool = True) -> Facts:
    """The plain values, by name, that a module's code, `function`, and the user's functions called there read from
    closures, globals and modules of Python. Unless `plain`, also class attributes, and other values: of containers,
    objects and classes what is in them under names that the code has."""
    found, rest, places, names = Facts(), Facts(), dict[str, int](), set[str]()
    own = [*module.modules()] if module else []
    for kind in () if plain else dict.fromkeys(x for m in own for x in type(m).__mro__ if not _of_library(x)):
        values = {f"class attribute {kind.__name__}.{k}": x for k, x in vars(kind).items() if k[:2] != "__"}
        found |= {name: (repr(x),) for name, x in values.items() if _is_plain(x)}
    left: list[tuple[Any, Any]] = [(function, None), *(x for m in own for x in _code_of(m))]
    seen: dict[int, Any] = {id(m): m for m in own}
    while left:
        f, owner = left.pop()
        if id(f) in seen:
            continue
        seen[id(f)] = f  # which keeps its identity
        left += _code_in(f, owner)
        called = f.__self__ if isinstance(f, MethodType) else f
        if isinstance(f, type) and issubclass(f, Function):
            rest[f"an attribute of {f.__name__}"] = f
        elif isinstance(f, partial) or (
            _is_open(called, called=True) and (called is f or id(called) not in seen)
        ):
            rest[f"an attribute of {type(called).__name__}"] = called
        if not isinstance(f, FunctionType) or _of_library(f):
            continue
        said = _said_in(f.__code__)
        names |= said
        left += _methods(owner, said)
        for name, place, x in _read_by(f, said):
            name = name if places.setdefault(name, place) == place else f"{name} of {f.__qualname__}"
            if _is_plain(x):
                found[name] = _compared(x, type, 0)
            elif id(x) not in seen:  # as a part of the module is
                rest[name] = x
                left += [(x, None)] if callable(x) else []
                left += _methods(x if isinstance(x, type) else type(x), said)
    return found if plain else found | {name: _compared(x, _itself, 0, names) for name, x in rest.items()}


def _code_in(f: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a call of `f` runs, each with the class whose methods it calls: for a method, `owner`."""
    yield getattr(f, "__wrapped__", None), owner
    if isinstance(f, nn.Module):
        yield from (x for m in f.modules() for x in _code_of(m))
    elif isinstance(f, MethodType):
        yield f.__func__, f.__self__ if isinstance(f.__self__, type) else type(f.__self__)
        yield f.__self__, None
    elif isinstance(f, type) and issubclass(f, Function):
        yield from ((getattr(f, x), f) for x in ("forward", "setup_context", "backward"))
    elif isinstance(f, partial):
        yield from ((x, None) for x in (f.func, *f.args, *f.keywords.values()) if callable(x))
    elif isinstance(f, property):
        yield f.fget, owner
    elif _is_open(f, called=True):
        yield getattr(type(f), "__call__", None), type(f)  # noqa: B004 - of the class


def _code_of(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield what a call of `module` may run, each with the class whose methods it calls: its forward, its hooks,
    and what its attributes hold."""
    kind, own = type(module), vars(module)
    yield own.get("forward", kind.forward), kind
    yield from ((x, None) for x in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
    for x in () if _of_library(kind) else own.values():
        yield from ((y, None) for y in (x if isinstance(x, tuple | list) else (x,)) if callable(y))


def _methods(kind: Any, names: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the methods and properties under `names` of the class `kind`, with the class, if that is the user's."""
    if kind is not None and not _of_library(kind):
        found = ((getattr(kind, name, None), kind) for name in names)
        yield from (x for x in found if callable(x[0]) or isinstance(x[0], property))


def _read_by(f: FunctionType, said: Iterable[str]) -> Iterator[tuple[str, int, Any]]:
    """Yield what the function `f` reads from closures and globals: name, place, and value. Of the user's modules of
    Python these are their attributes in `said`."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    left = [(f"closure variable {name}", id(cell), content_of(cell)) for name, cell in cells]
    given = f.__globals__
    left += [(f"global {x}", id(given), given[x]) for x in _globals_in(f.__code__) if x in given]
    while left:
        name, place, x = left.pop()
        if not isinstance(x, ModuleType):
            yield name, place, x
        elif x.__name__.partition(".")[0] not in LIBRARIES:
            left += [(f"{name}.{k}", id(x), vars(x)[k]) for k in said if k in vars(x)]


def content_of(cell: CellType) -> Any:
    """The content of a cell of a closure; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def _globals_in(code: CodeType) -> frozenset[str]:
    """The names of the globals that `code`, and functions made in it, read."""
    own = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    return frozenset(own).union(*(_globals_in(x) for x in code.co_consts if isinstance(x, CodeType)))


@cache
def _said_in(code: CodeType) -> frozenset[str]:
    """The names of attributes, and the texts, in `code` and in functions made in it."""
    found, left = {*code.co_names}, [*code.co_consts]
    while left:
        x = left.pop()
        left += x if isinstance(x, tuple | frozenset) else ()
        found |= _said_in(x) if isinstance(x, CodeType) else {x} if isinstance(x, str) else set()
    return frozenset(found)


@cache
def _computes(code: CodeType) -> Any:
    """A key of what `code` computes, wherever it stands."""
    consts = [_computes(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return code.co_code, code.co_names, consts


def _of_library(x: Any) -> bool:
    """Whether a function or class belongs to Python, torch or another library, not to the user's model."""
    return str(x.__module__).partition(".")[0] in LIBRARIES


def _is_plain(x: Any) -> bool:
    return isinstance(x, PLAIN) or (isinstance(x, tuple) and all(map(_is_plain, x)))


def _is_open(x: Any, *, called: bool = False) -> bool:
    """Whether `x` is an object whose attributes are compared: of a class of the user's, and, unless `called`, none
    that can be called; or a namespace."""
    own = hasattr(x, "__dict__") and not isinstance(x, FunctionType | type | nn.Module)
    mine = own and not _of_library(type(x)) and (called or not callable(x))
    return mine or isinstance(x, Namespace | SimpleNamespace)


def _compared(value: Any, by: Callable[[Any], Any], depth: int, names: Container[str] | None = None) -> Any:
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
        return _compared((value.func, value.args, value.keywords), by, depth + 1, names)
    own: Any = vars(value) if _is_open(value, called=names is not None) else value
    if isinstance(own, Mapping | list | tuple | set | frozenset) and names is not None and len(own) > MOST:
        return by(value)
    if isinstance(own, Mapping):
        said = {k: x for k, x in [*own.items()] if names is None or k in names}
        given = said if said or own is not value else own
        return type(value), [(repr(key), _compared(x, by, depth + 1, names)) for key, x in [*given.items()]]
    if isinstance(own, list | tuple | set | frozenset):
        return type(value), [_compared(x, by, depth + 1, names) for x in [*own]]
    if names is not None and isinstance(value, FunctionType | type) and not _of_library(value):
        plain = {k: repr(x) for k, x in [*vars(value).items()] if k in names and _is_plain(x)}
        return by(value), plain
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
    inside: dict[int, Any] = {}
    for m in modules:
        for x in vars(m).values():
            _enter(x, inside, 0)
    full = [*map(vars, modules), *(x for x in inside.values() if 0 < len(x) <= MOST)]
    spaces = [x.values if isinstance(x, dict) else x.__iter__ for x in full]
    buffers = [t for m in modules for t in m._buffers.values() if t is not None]
    return Watched(spaces, [x for x in inside.values() if not x], buffers, parameters).look()


def _enter(x: Any, inside: dict[int, Any], depth: int) -> None:
    """Enter in `inside`, by identity, the dicts and lists in `x`, those of the attributes of objects too."""
    own = x if isinstance(x, dict | list) else vars(x) if _is_open(x) else None
    if own is None or id(own) in inside or depth == MAX_DEPTH:
        return
    inside[id(own)] = own
    if len(own) <= MOST:
        for y in [*own.values()] if isinstance(own, dict) else own:
            _enter(y, inside, depth + 1)
