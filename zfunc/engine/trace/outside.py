"""What a segment's functions read from closures, globals and classes, as facts to be compared with later ones."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, count
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
    globals_in,
    is_open,
    is_plain,
    itself,
    of_library,
)
from zfunc.engine.trace.user_caches import without_traced
from zfunc.errors import refuse

Code = tuple[Any, Any]  # what is called, and the class whose methods it calls by name, or None
Read = tuple[str, int, Any]  # a name that the user knows, the id of the scope that has it, and the value


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
        """A context in which a trace is made: what the trace itself changes (a cache, a counter) is no change."""
        known, before = self.facts or {}, self.now()
        named = [(name, x) for *_, found in _reached(self.module, self.function) for name, _, x in found]
        for name in (name for name, x in named if isinstance(x, threading.local) and vars(x)):
            do = (
                "pass its values in the batch, or as attributes of the model, or use a contextvars.ContextVar"
            )
            refuse("model", f"{name}, a threading.local", "values that all threads see", do)
        reads = (x for _, x in named)
        kinds = (x for m in _modules(self.module) for x in type(m).__mro__)
        with without_traced((*reads, *kinds)):
            yield
        self.facts = {x: known[x] if x in known and before.get(x) == v else v for x, v in self.now().items()}


def read_outside(module: nn.Module | None, function: Any, *, plain: bool = True) -> Facts:
    """The plain values, by name, that a module's code, `function`, and the user's functions called there read from
    closures, globals and modules of Python. Unless `plain`, also class attributes, and other values: of containers,
    objects and classes what is in them under names that the code has."""
    facts, objects, texts, scopes = Facts(), dict[str, Any](), set[str](), dict[str, int]()

    def distinct(name: str, of: str, scope: int) -> str:
        """A name that no other scope has taken."""
        longer = f"{name} of {of}" if of else name
        names = chain((name, longer), (f"{longer} ({n})" for n in count(2)))
        return next(y for y in names if scopes.setdefault(y, scope) == scope)

    for name, kind, x in () if plain else _class_attributes(module):
        facts[distinct(f"class attribute {kind.__name__}.{name}", kind.__module__, id(kind))] = (repr(x),)
    for reader, texts_in_code, reads in _reached(module, function):
        texts |= texts_in_code
        for short, scope, x in reads:
            name = distinct(short, reader, scope)
            if is_plain(x):
                facts[name] = compared(x, type, 0)
            else:
                objects[name] = x
    return facts if plain else facts | {x: compared(y, itself, 0, texts) for x, y in objects.items()}


def _class_attributes(module: nn.Module | None) -> Iterator[tuple[str, type, Any]]:
    """Yield (name, class, value) for plain attributes of the user's classes of `module` and the modules in it."""
    kinds = dict.fromkeys(x for m in _modules(module) for x in type(m).__mro__ if not of_library(x))
    values = ((k, kind, x) for kind in kinds for k, x in vars(kind).items() if k[:2] != "__")
    yield from (x for x in values if is_plain(x[2]))


def _modules(module: nn.Module | None) -> list[nn.Module]:
    return [*module.modules()] if module else []


def _reached(module: nn.Module | None, function: Any) -> Iterator[tuple[str, frozenset[str], list[Read]]]:
    """Follow the user's code that calls of `module` and `function` may run. Yield (name, names and texts in its
    code, reads) for each function reached, without reads of parts of `module`; and for each object that is called,
    or whose method is called, ("", nothing, the object as the only read)."""
    seen: dict[int, Any] = {id(m): m for m in _modules(module)}  # keeps them: a freed one's id is used again
    queue: list[Code] = [(function, None), *(x for m in seen.values() for x in _code_of(m))]
    while queue:
        f, owner = queue.pop()
        if id(f) in seen:
            continue
        seen[id(f)] = f
        queue += _code_in(f, owner)
        called = _object_of(f)
        if called is not None and (called is f or id(called) not in seen):
            kind = called if isinstance(called, type) else type(called)
            yield "", frozenset(), [(f"an attribute of {kind.__name__}", id(called), called)]
        if isinstance(f, FunctionType) and not of_library(f):
            texts = _texts_in(f.__code__)
            queue += _methods(owner, texts)
            reads = [x for x in _reads(f, texts) if is_plain(x[2]) or id(x[2]) not in seen]
            yield f.__qualname__, texts, reads
            for x in (x for *_, x in reads if not is_plain(x)):
                queue += [(x, None)] if callable(x) else []
                queue += _methods(x if isinstance(x, type) else type(x), texts)


def _object_of(f: Any) -> Any:
    """The object whose attributes a call of `f` reads: of a method its own, of an autograd function the class."""
    if isinstance(f, partial) or (isinstance(f, type) and issubclass(f, Function)):
        return f
    x = f.__self__ if isinstance(f, MethodType) else f
    return x if is_open(x, called=True) else None


def _code_in(f: Any, owner: Any) -> Iterator[Code]:
    """Yield what a call of `f`, a method of the class `owner` if that is not None, runs."""
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


def _code_of(module: nn.Module) -> Iterator[Code]:
    """Yield what a call of `module` may run: its forward, its hooks, and what its attributes hold."""
    kind, attributes = type(module), vars(module)
    yield attributes.get("forward", kind.forward), kind
    yield from ((x, None) for x in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
    for x in () if of_library(kind) else attributes.values():
        yield from ((y, None) for y in (x if isinstance(x, tuple | list) else (x,)) if callable(y))


def _methods(kind: Any, names: Iterable[str]) -> Iterator[Code]:
    """Yield the methods and properties under `names` of the class `kind`, if that is the user's."""
    if kind is not None and not of_library(kind):
        attributes = (getattr(kind, name, None) for name in names)
        yield from ((x, kind) for x in attributes if callable(x) or isinstance(x, property))


def _reads(f: FunctionType, names: Iterable[str]) -> Iterator[Read]:
    """Yield what the function `f` reads from closures and globals. Of the user's modules of Python these are their
    attributes in `names`."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    queue = [(f"closure variable {name}", id(cell), content_of(cell)) for name, cell in cells]
    space = f.__globals__
    queue += [(f"global {x}", id(space), space[x]) for x in globals_in(f.__code__) if x in space]
    modules = set[int]()  # of Python, which may import each other
    while queue:
        name, place, x = queue.pop()
        if not isinstance(x, ModuleType):
            yield name, place, x
        elif id(x) not in modules and x.__name__.partition(".")[0] not in LIBRARIES:
            modules.add(id(x))
            queue += [(f"{name}.{k}", id(x), vars(x)[k]) for k in names if k in vars(x)]


@cache
def _texts_in(code: CodeType) -> frozenset[str]:
    """The names of attributes, and the texts, in `code` and in functions made in it."""
    texts, queue = {*code.co_names}, [*code.co_consts]
    while queue:
        x = queue.pop()
        queue += x if isinstance(x, tuple | frozenset) else ()
        texts |= _texts_in(x) if isinstance(x, CodeType) else {x} if isinstance(x, str) else set()
    return frozenset(texts)
