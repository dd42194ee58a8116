"""Checks that a segment is a pure function: calls on one input run the same operations and change no value.

So backward recomputes what forward computed, and a trace of one call stands for all calls. Two calls are compared
by their operations, and by the `facts` before and after: the attributes of the module, and the plain values
(numbers, texts, tuples of such) that the segment's functions read from closures and globals.
"""

import pickle
import random
import sys
import threading
from collections.abc import Callable, Container
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from zfunc.engine.trace.facts import MAX_HASHED, Facts, attributes, first_change, held
from zfunc.engine.trace.graph_cuts import mutates, written_by
from zfunc.engine.trace.operation_flops import decomposed
from zfunc.engine.trace.operation_kernels import allocated_by
from zfunc.engine.trace.outside import read_outside
from zfunc.engine.trace.tensor_memory import storage_of
from zfunc.runtime.torch_dtypes import byte_view

T = TypeVar("T")
ADVICE = "Make it part of the input, or set it once, before zfunc.segment"
SEEDED = "those are seeded the same for forward and for its recomputation"
DEVICE_OF = torch.ops.prim.device.default  # what a mode of fake tensors asks, more in a first call
REASON = "forward and its recomputation in backward would differ"


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
        if func is DEVICE_OF:
            return func(*args, **kwargs)
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
            opaque = isinstance(x, torch.ScriptObject)  # of record_function, which compares with nothing
            return repr(x) if isinstance(x, float) else type(x) if opaque else x
        if id(x) in self._results:
            return self._results[id(x)]
        self._alive.append(x)
        x = x.constant if isinstance(x, FakeTensor) and x.constant is not None else x  # torch.tensor(2.0)
        if isinstance(x, FakeTensor) or x.is_meta or x.layout is not torch.strided or x.nbytes > MAX_HASHED:
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


class Changes(NamedTuple):
    """What changes from a call of a function to the next, as text, "" for nothing: a Python `value`; where a tensor
    is kept from call to call (`state`); the first `operation` that differs."""

    value: str = ""
    state: str = ""
    operation: str = ""


class _Repeated(_Log):
    """A mode that records the operations of a call, pure or not, each with what `place` returns. Tensors without
    values that no operation made are all alike; `read` and `written` say, by storage, where those that the call did
    not make are read and written."""

    def __init__(self, place: Callable[[], str]) -> None:
        super().__init__()
        self._place, self._here = place, ""
        self.read, self.written = dict[int, str](), dict[int, str]()
        self.outside: list[Tensor] = []  # what the call reads, and none of its operations returned
        self._unknown = set[int]()  # storages of tensors without values, such as parameters and inputs
        self.dependent = set[int]()  # and of results that depend on these
        self.computing = list[tuple[str, str]]()  # the operations that make them, and where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        given, made = (
            [storage_of(t) for t in tree_leaves(x) if isinstance(t, Tensor) and t.layout is torch.strided]
            for x in ((args, kwargs), out)
        )
        shaped = any(x in str(func) for x in ("_like", "new_"))  # which read no values
        if (
            func is not DEVICE_OF
            and not shaped
            and any(x in self.dependent or x in self._unknown for x in given)
        ):
            self.dependent |= {*made}
            self.computing.append((str(func), self._here))
        return out

    def since_first(self, first: "_Repeated") -> Changes:
        """What differs from the `first` call, which may have kept constants alone."""
        state = (place for x, place in self.read.items() if x in first.dependent & first._own)
        pairs = zip_longest(first.computing, self.computing, fillvalue=("none", "there"))
        other = next((f"{' '.join(a)}, then {' '.join(b)}" for a, b in pairs if a[0] != b[0]), "")
        return Changes("", next(state, ""), other and f"another operation ({other})")

    def record(self, func: Any, arguments: Any) -> list[Any]:
        self._here = self._place()
        return super().record(f"{func} {self._here}", arguments)

    def state(self, before: "_Repeated") -> str:
        """Where this call reads a tensor that the call `before` made, or writes one that both write; else ""."""
        reads = (place for x, place in self.read.items() if x in before._own)
        both = (place for x, place in self.written.items() if x in before.written)
        return next(iter((*reads, *both)), "")

    def _token(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.layout is torch.strided and storage_of(x) not in self._own:
            self.read.setdefault(storage_of(x), self._here)
            self.outside += [x] if id(x) not in self._results else []
        token = super()._token(x)
        if isinstance(token, tuple) and token[0] == "outside" and x.layout is torch.strided:
            self._unknown.add(storage_of(x))
        if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
            return type(x)
        return "outside" if isinstance(x, Tensor) and token[0] == "outside" else token

    def _check_pure(self, func: Any, args: Any, kwargs: Any, *_: Any) -> None:
        for t in written_by(func, args, kwargs) if mutates(func) else ():
            if isinstance(t, Tensor) and storage_of(t) not in self._own:
                self.written.setdefault(storage_of(t), self._here)


def changes_from_call_to_call(
    call: Callable[[], T], place: Callable[[], str], values: Callable[[], Facts]
) -> tuple[T, Changes]:
    """What the last of two calls of `call` returns, and what changes from the first to it. A third call follows two
    that differ: the first may initialize, and the second read what the first kept, as a mode of fake tensors does,
    if all that depends on tensors without values is computed in both. `values()` are the Python values that are
    compared; what `place()` returns says where an operation is called."""
    logs, changes, lost = list[_Repeated](), Changes(), Changes()
    while True:
        before = values()
        with _Repeated(place) as log:
            y = call()
        lost = log.since_first(logs[0]) if len(logs) == 1 else lost
        if logs:
            last = logs[-1]
            changes = Changes(first_change(before, values()), log.state(last), _difference(last, log))
        logs.append(log)
        if len(logs) == 3 or (len(logs) == 2 and not any((*changes, *lost))):
            return y, changes if any(changes) else lost


def result_and_reads(call: Callable[[], Any]) -> tuple[Any, list[Tensor], bool]:
    """What `call()` returns, the tensors that the call reads and did not make, and whether it writes into such."""
    with _Repeated(str) as log:
        y = call()
    return y, log.outside, bool(log.written)


def check_deterministic(
    module: nn.Module | None,
    function: Callable[..., Any],
    params: dict[str, Tensor],
    inputs: tuple[Any, ...],
    constants: Container[str] = (),
) -> Any:
    """Check, by two calls, that a segment's `function` is pure. Returns its output.

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
        got = f"{change}, which changes from call to call"
        raise ValueError(f"got {got}, expected a pure function: {REASON}. {ADVICE}")
    # 2. Their operations. The first call may initialize: then the second and the third are compared.
    if _difference(first, second):
        y, third = _logged(call)
        if difference := _difference(second, third):
            tensors = held(module)
            call()
            stored = first_change(tensors, held(module))
            difference += f", perhaps what a call keeps in {stored}," if stored else ""
            got = f"{difference} when called again"
            raise ValueError(f"got {got}, expected a pure function: {REASON}. {ADVICE}")
    return y


def _named(
    func: Any, tensor: Tensor, module: nn.Module | None, params: dict[str, Tensor], constants: Container[str]
) -> ValueError:
    """The error for a tensor that operation `func` writes into: names it, and says what to use instead."""
    shape, instead = tuple(tensor.shape), "return a new tensor instead (of a module, with inplace=False)"
    kinds = "a parameter, input, buffer or captured tensor"
    name = f"a tensor of shape {shape} made outside the function ({kinds})"
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
                what = "another tensor" if isinstance(x, tuple) else f"another number ({x}, then {y})"
                return f"{what} in operation number {n} ({a[0]})"
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
