"""Checks that a segment is a pure function: two calls on one input run the same operations and change no state.

So backward recomputes what forward computed, as long as the Python values that the segment depends on stay. Those
outside the module are compared again before every step.
"""

import random
import sys
import threading
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from zfunc.engine.compile.closure_facts import MAX_HASHED, CapturedFacts, captured, path_of
from zfunc.engine.compile.cost_trace import AllocationTracker, InPlaceError
from zfunc.engine.compile.segment import Segment

ADVICE = "Make it part of the input, or set it once, before zfunc.segment"
SEEDED = "those are seeded the same for forward and for its recomputation"
REASON = "forward and its recomputation in backward would differ"


class _Log(AllocationTracker):
    """Records the operations of a call, each with its arguments."""

    def __init__(self) -> None:
        super().__init__(pure=True)
        self.ops: list[tuple[str, list[Any], Any]] = []
        self._results: dict[int, tuple[Any, ...]] = {}
        self._alive: list[Any] = []  # ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record(str(func), (args, kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for n, t in enumerate(tree_leaves(out)):
            self._alive.append(t)
            self._results[id(t)] = "result", len(self.ops), n
        return out

    def record(self, name: str, arguments: Any) -> None:
        leaves, structure = tree_flatten(arguments)
        self.ops.append((name, [self._token(x) for x in leaves], structure))

    def _token(self, x: Any) -> Any:
        """What is compared of an argument: what made it, else its values, or its identity if it is large."""
        if not isinstance(x, Tensor):
            return repr(x) if isinstance(x, float) else x
        if id(x) in self._results:
            return self._results[id(x)]
        self._alive.append(x)
        if isinstance(x, FakeTensor) or x.is_meta or x.nbytes > MAX_HASHED or x.layout is not torch.strided:
            return "outside", id(x)
        with _disable_current_modes():
            values = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
            return tuple(x.shape), x.dtype, hash(values.flatten().view(torch.uint8).numpy().tobytes())


def check_deterministic(
    segment: Segment, params: dict[str, Tensor], inputs: tuple[Any, ...]
) -> tuple[Any, CapturedFacts]:
    """The segment's output, and the Python values that it depends on.

    Raises ValueError, with the name of what changes, if it writes into an argument, if two calls differ, or if a
    call changes a value.
    """
    root = segment.module or segment.function
    try:
        return _called_twice(root, lambda: segment.function(params, *inputs))
    except InPlaceError as error:
        raise _named(error, segment, params, root) from None


def _called_twice(root: Any, call: Callable[[], Any]) -> tuple[Any, CapturedFacts]:
    python_state, generator = random.getstate(), np.random.get_bit_generator()
    numpy_state = repr(generator.state)
    _, first = _logged(call)
    before = captured(root)
    y, second = _logged(call)
    if random.getstate() != python_state and _draws_from_random(call):
        raise ValueError(f"got random numbers from Python's random module, expected torch's: {SEEDED}")
    if numpy_state != repr(generator.state) and _draws_from_numpy(call, generator):
        raise ValueError(f"got random numbers from numpy.random, expected torch's: {SEEDED}")
    if change := before.change(captured(root)):
        raise ValueError(
            f"got {change}, which changes from call to call, expected a pure function: {REASON}. {ADVICE}"
        )
    if _difference(first, second):  # the first call may initialize: compare the second and third
        y, third = _logged(call)
        if difference := _difference(second, third):
            difference += _leaks(root, call)
            raise ValueError(
                f"got {difference} when called again, expected a pure function: {REASON}. {ADVICE}"
            )
    return y, before


def _named(error: InPlaceError, segment: Segment, params: dict[str, Tensor], root: Any) -> ValueError:
    """The error with the name of the tensor that was written, and what to use instead."""
    short = next((name for name, t in params.items() if t is error.tensor), "")
    if not short or segment.module is None:
        name = repr(short) if short else path_of(root, error.tensor)
        return InPlaceError(error.func, error.tensor, name)
    owner = short.rpartition(".")[0]
    module = segment.module.get_submodule(owner)
    name = (
        f"{short.removeprefix(owner).lstrip('.')!r} of the {type(module).__name__}{owner and f' {owner!r}'}"
    )
    instead = "construct a zfunc.Segment with buffers=, whose function returns (y, buffers)"
    return InPlaceError(error.func, error.tensor, name, instead if short in segment.constants else "")


def _logged(call: Callable[[], Any]) -> tuple[Any, _Log]:
    with _Log() as log:
        y = call()
        log.record("what it returns", y)
    return y, log


def _difference(one: _Log, other: _Log) -> str:
    """A description of the first operation that differs, or ""."""
    nothing = "nothing", list[Any](), None
    for n, (a, b) in enumerate(zip_longest(one.ops, other.ops, fillvalue=nothing)):
        if (a[0], a[2]) != (b[0], b[2]):
            return f"another operation number {n} ({a[0]}, then {b[0]})"
        for x, y in zip(a[1], b[1], strict=True):
            if x != y:
                number = f"another number ({x}, then {y})"
                return (
                    f"{'another tensor' if isinstance(x, tuple) else number} in operation number {n} ({a[0]})"
                )
    return ""


def _leaks(root: Any, call: Callable[[], Any]) -> str:
    """A description of where a call leaves tensors for the next, or ""."""
    before = captured(root, tensors=True)
    call()
    change = before.change(captured(root, tensors=True))
    return f", perhaps what a call keeps in {change}," if change else ""


def _draws_from_random(call: Callable[[], Any]) -> bool:
    """Whether the call, and not another thread, draws from Python's generator."""
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
    """Whether the call, and not another thread, draws from NumPy's global generator, which has a lock."""
    if not isinstance(generator.lock, type(threading.RLock())):
        return True  # the call would deadlock on a lock that is not reentrant
    with generator.lock:
        before = repr(generator.state)
        call()
        return before != repr(generator.state)
