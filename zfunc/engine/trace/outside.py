"""What a segment's functions read from closures, globals and classes, as facts to be compared with later ones."""

import dis
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from attrs import define
from torch import nn
from torch.autograd import Function

from zfunc.engine.trace.facts import (
    LIBRARIES,
    Facts,
    compared,
    content_of,
    is_open,
    is_plain,
    itself,
    of_library,
)


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
    for kind in () if plain else dict.fromkeys(x for m in own for x in type(m).__mro__ if not of_library(x)):
        values = {f"class attribute {kind.__name__}.{k}": x for k, x in vars(kind).items() if k[:2] != "__"}
        found |= {name: (repr(x),) for name, x in values.items() if is_plain(x)}
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
            is_open(called, called=True) and (called is f or id(called) not in seen)
        ):
            rest[f"an attribute of {type(called).__name__}"] = called
        if not isinstance(f, FunctionType) or of_library(f):
            continue
        said = _said_in(f.__code__)
        names |= said
        left += _methods(owner, said)
        for name, place, x in _read_by(f, said):
            name = name if places.setdefault(name, place) == place else f"{name} of {f.__qualname__}"
            if is_plain(x):
                found[name] = compared(x, type, 0)
            elif id(x) not in seen:  # as a part of the module is
                rest[name] = x
                left += [(x, None)] if callable(x) else []
                left += _methods(x if isinstance(x, type) else type(x), said)
    return found if plain else found | {name: compared(x, itself, 0, names) for name, x in rest.items()}


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
    elif is_open(f, called=True):
        yield getattr(type(f), "__call__", None), type(f)  # noqa: B004 - of the class


def _code_of(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield what a call of `module` may run, each with the class whose methods it calls: its forward, its hooks,
    and what its attributes hold."""
    kind, own = type(module), vars(module)
    yield own.get("forward", kind.forward), kind
    yield from ((x, None) for x in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
    for x in () if of_library(kind) else own.values():
        yield from ((y, None) for y in (x if isinstance(x, tuple | list) else (x,)) if callable(y))


def _methods(kind: Any, names: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the methods and properties under `names` of the class `kind`, with the class, if that is the user's."""
    if kind is not None and not of_library(kind):
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
