"""Checks that a segment is a pure function: calls on one input run the same operations and change no value.

So backward recomputes what forward computed, and a trace of one call stands for all calls. Two calls are compared
by their operations, the attributes of the module, and the plain values (numbers, texts, tuples of such) that the
segment's functions read from closures and globals. Plain values are compared again before every step.
"""

import inspect
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from zfunc.engine.trace.cost_trace import allocated_by, decomposed
from zfunc.engine.trace.graph_cuts import mutates, written_by
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.runtime.torch_dtypes import byte_view

MAX_DEPTH = 6  # of containers and objects in each other
MOST = 256  # values in one that are looked at before each step
MAX_HASHED = 1 << 22  # bytes; a larger array is compared by identity
PLAIN = bool | int | float | complex | str | bytes | None | Enum | range | slice | np.generic
PLAIN = PLAIN | torch.dtype | torch.device | torch.Size
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "peft", "zfunc"} - {"__main__"}
ADVICE = "Make it part of the input, or set it once, before zfunc.segment"
SEEDED = "those are seeded the same for forward and for its recomputation"
REASON = "forward and its recomputation in backward would differ"
Facts = dict[str, Any]  # what is compared of a value, by a name that the user knows


# --- Python values -----------------------------------------------------------------------------------------------


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
        named |= {f"global {x}": value for x, value in read.globals.items()}
        left += [(x, owner) for x in named.values() if inspect.isfunction(x)]
        left += [(getattr(owner, x, None), owner) for x in f.__code__.co_names]
        found |= {name: _compared(x, type, 0) for name, x in named.items() if _is_plain(x)}
        if not plain:
            found |= {name: _glimpse(x) for name, x in named.items() if not _is_plain(x)}
    return found


def _glimpse(x: Any) -> Any:
    """A cheap key of `x` for comparisons: its identity and the plain values directly in it."""
    own = {} if callable(x) or _of_library(type(x)) else getattr(x, "__dict__", {})
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


# --- two calls ---------------------------------------------------------------------------------------------------


class _InPlaceError(Exception):
    """Raised for an operation that writes into a tensor it was given; `args`: the operation, the tensor."""


class _Log(TorchDispatchMode):
    """A mode that records the operations of a call, with their arguments. Raises ValueError or _InPlaceError
    for an impure one."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, list[Any], Any]] = []
        self._results: dict[int, tuple[Any, ...]] = {}
        self._alive: list[Any] = []  # ids stay unique
        self._own = set[int]()  # storages that the call allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check_pure(func, args, kwargs, self.record(func, (args, kwargs)))
        if (made_of := decomposed(func)) is not None:
            with self:
                out = made_of(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
            self._own |= {storage_of(t) for t in allocated_by(func, out)}
        for n, t in enumerate(tree_leaves(out)):
            self._alive.append(t)
            self._results[id(t)] = "result", len(self.ops), n
        return out

    def record(self, func: Any, arguments: Any) -> list[Any]:
        """Record a call of `func`, or what its name says; returns the leaves of its arguments."""
        leaves, structure = tree_flatten(arguments)
        self.ops.append((func, [self._token(x) for x in leaves], structure))
        return leaves

    def _token(self, x: Any) -> Any:
        """A key of the argument `x` of an operation, to compare two calls: where it comes from, its values,
        or, if it is large, its identity."""
        if not isinstance(x, Tensor):
            return repr(x) if isinstance(x, float) else x
        if id(x) in self._results:
            return self._results[id(x)]
        self._alive.append(x)
        x = x.constant if isinstance(x, FakeTensor) and x.constant is not None else x  # torch.tensor(2.0)
        if isinstance(x, FakeTensor) or x.is_meta or x.nbytes > MAX_HASHED or x.layout is not torch.strided:
            return "outside", id(x)
        with _disable_current_modes():
            values = x.detach().cpu().resolve_conj().resolve_neg()
            return tuple(x.shape), x.dtype, hash(byte_view(values).numpy().tobytes())

    def _check_pure(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        if any(isinstance(t, torch.nn.Parameter) for t in leaves):
            raise ValueError(
                f"got an nn.Parameter the function captured (in {func}), expected it to use the parameters it is "
                "passed: a captured one would never be trained"
            )
        if kwargs.get("generator") is not None:
            raise ValueError(
                f"got a generator of the function's own (in {func}), expected the default one, which is seeded the "
                "same for the forward and for recomputing it"
            )
        for t in written_by(func, args, kwargs) if mutates(func) else ():
            if isinstance(t, Tensor) and storage_of(t) not in self._own:
                raise _InPlaceError(func, t)


def check_deterministic(
    module: nn.Module | None,
    function: Callable[..., Any],
    params: dict[str, Tensor],
    inputs: tuple[Any, ...],
    constants: Container[str] = (),
) -> tuple[Any, Facts]:
    """Check, by two calls, that a segment's `function` is pure. Returns its output, and the values that it
    reads outside of `module`.

    `constants` are the names of the `params` that are never trained. Raises ValueError, with the name of what
    changes, if the function writes into an argument, if two calls differ, or if a call changes a value.
    """

    def call() -> Any:
        return function(params, *inputs)

    def values() -> Facts:
        return held(module, tensors=False, by=type) | read_outside(module, function)

    # 1. Two calls, and what Python keeps of them.
    python_state, generator = random.getstate(), np.random.get_bit_generator()
    numpy_state = pickle.dumps(generator.state)  # many times faster than its text
    try:
        _, first = _logged(call)
        before = values()
        y, second = _logged(call)
    except _InPlaceError as error:
        raise _named(*error.args, module, params, constants) from None
    if random.getstate() != python_state and _draws_from_random(call):
        raise ValueError(f"got random numbers from Python's random module, expected torch's: {SEEDED}")
    if numpy_state != pickle.dumps(generator.state) and _draws_from_numpy(call, generator):
        raise ValueError(f"got random numbers from numpy.random, expected torch's: {SEEDED}")
    if change := first_change(before, values()):
        raise ValueError(
            f"got {change}, which changes from call to call, expected a pure function: {REASON}. {ADVICE}"
        )
    # 2. Their operations. The first call may initialize: then the second and the third are compared.
    if _difference(first, second):
        y, third = _logged(call)
        if difference := _difference(second, third):
            tensors = held(module)
            call()
            kept = first_change(tensors, held(module))
            difference += f", perhaps what a call keeps in {kept}," if kept else ""
            raise ValueError(
                f"got {difference} when called again, expected a pure function: {REASON}. {ADVICE}"
            )
    return y, read_outside(module, function, plain=False)


def _named(
    func: Any, tensor: Tensor, module: nn.Module | None, params: dict[str, Tensor], constants: Container[str]
) -> ValueError:
    """The error for a tensor that operation `func` writes into: names it, and says what to use instead."""
    shape, instead = tuple(tensor.shape), "return a new tensor instead (of a module, with inplace=False)"
    name = (
        f"a tensor of shape {shape} made outside the function (a parameter, input, buffer or captured tensor)"
    )
    short = next((x for x, t in params.items() if t is tensor), "")
    if short and module is not None:
        owner = short.rpartition(".")[0]
        kind = type(module.get_submodule(owner)).__name__
        name = f"{short.removeprefix(owner).lstrip('.')!r} of the {kind}{owner and f' {owner!r}'}"
        if short in constants:
            instead = "construct a zfunc.Segment with buffers=, whose function returns (y, buffers)"
    elif short:
        name = repr(short)
    elif module is not None:
        name = next((x for x, t in attributes(module, tensors=True) if t is tensor), name)
    if func is torch.ops.aten.embedding_renorm_.default:
        instead = "leave out max_norm, which scales the weight in place"
    return ValueError(f"got an in-place change ({func}) of {name}, expected a pure function: {instead}")


def _logged(call: Callable[[], Any]) -> tuple[Any, _Log]:
    with _Log() as log:
        y = call()
        log.record("what it returns", y)
    return y, log


def _difference(one: _Log, other: _Log) -> str:
    """Text on the first operation in which two recorded calls of a function differ; "" if they are equal."""
    nothing = "nothing", list[Any](), None
    for n, (a, b) in enumerate(zip_longest(one.ops, other.ops, fillvalue=nothing)):
        if a[0] != b[0]:
            return f"another operation number {n} ({a[0]}, then {b[0]})"
        if a[2] != b[2]:
            return f"other arguments in operation number {n} ({a[0]})"
        for x, y in zip(a[1], b[1], strict=True):
            if x != y:
                number = f"another number ({x}, then {y})"
                return (
                    f"{'another tensor' if isinstance(x, tuple) else number} in operation number {n} ({a[0]})"
                )
    return ""


def _draws_from_random(call: Callable[[], Any]) -> bool:
    """Whether `call`, and not another thread, draws from the generator of Python's module `random`."""
    generator, calls = random.random.__self__, list[Any]()  # type: ignore[attr-defined]

    def watch(_: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is generator:
            calls.append(function)

    before = sys.getprofile()
    sys.setprofile(watch)  # in this thread alone
    try:
        call()
    finally:
        sys.setprofile(before)
    return bool(calls)


def _draws_from_numpy(call: Callable[[], Any], generator: Any) -> bool:
    """Whether `call`, and not another thread, draws from NumPy's global generator, whose lock is held meanwhile."""
    if not isinstance(generator.lock, type(threading.RLock())):
        return True  # the call would deadlock on a lock that is not reentrant
    with generator.lock:
        before = pickle.dumps(generator.state)
        call()
        return before != pickle.dumps(generator.state)
