"""Device graphs: a segment's forward or backward recorded once, and then launched as a whole.

A graph repeats addresses. Weights never move. Whatever else a pass takes is copied into one buffer before each
replay, and what it returns is copied out of that buffer after it. All graphs share this buffer, and one pool for
what a pass allocates, so one pass may run at a time: its operation writes the region "graphs", and every plan keeps
the order of operations that do.

The invariant: results have the bits and the memory layout that the pass has without a graph.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from zfunc.core.layout import round_up
from zfunc.core.spec import ALLOCATION
from zfunc.engine.tensor_memory import byte_range, extent, storage_of
from zfunc.runtime.accelerator import GraphPool

log = logging.getLogger("zfunc")
Function = Callable[..., Sequence[Any]]  # tensors in, tensors out, and no state


def storages_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The identities of the tensors' storages, as long as these exist."""
    return frozenset(storage_of(t) for t in tensors)


@frozen
class ReturnedTensor:
    """A result as a view: of argument `source`, or of storage `source` of those that the pass returns."""

    of_argument: bool
    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements, from the argument's first or from the storage's

    def view(self, arguments: Sequence[Tensor], storages: Sequence[Tensor]) -> Tensor:
        """The result of a call with these arguments, which returned these storages."""
        base = (arguments if self.of_argument else storages)[self.source]
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


@frozen
class PassLayout:
    """What a graph of a pass copies in and out, from one call of it.

    `moved` are the arguments that are elsewhere in each step, with their extents in elements. `storages` are those
    that the call allocated and returned: the first result in each, and their elements.
    """

    moved: tuple[tuple[int, int], ...]
    storages: tuple[tuple[int, int], ...]
    results: tuple[ReturnedTensor, ...]
    nbytes: int


def layout_of(constants: Collection[int], arguments: Sequence[Tensor], results: Sequence[Any]) -> PassLayout:
    """The layout of one call; arguments in storages of `constants` do not move. Raises ValueError where a graph
    cannot return such results."""
    tensors = [(i, t) for i, t in enumerate(arguments) if isinstance(t, Tensor)]  # others are constants
    moved = tuple((i, extent(t)) for i, t in tensors if storage_of(t) not in constants)
    nbytes = sum(_rounded(n * arguments[i].element_size()) for i, n in moved)
    found: dict[int, int] = {}  # storage -> its number
    storages: list[tuple[int, int]] = []
    returned: list[ReturnedTensor] = []
    for j, t in enumerate(results):
        if not isinstance(t, Tensor):
            raise ValueError(f"got a {type(t).__name__} among its results, expected tensors")
        source = next((i for i, x in tensors if _within(t, x)), None)
        offset = t.storage_offset()
        if source is not None:
            base, offset = arguments[source], offset - arguments[source].storage_offset()
        else:
            if storage_of(t) not in found:
                size = t.untyped_storage().nbytes()
                found[storage_of(t)] = len(storages)
                storages.append((j, size // t.element_size()))
                nbytes += _rounded(size)
            number = found[storage_of(t)]
            base = results[storages[number][0]]
        if base.dtype != t.dtype:
            raise ValueError(f"got {t.dtype} and {base.dtype} in the same memory, expected one of them")
        shape, strides = tuple(t.shape), t.stride()
        where = (False, found[storage_of(t)]) if source is None else (True, source)
        returned.append(ReturnedTensor(*where, shape, strides, offset))
    return PassLayout(moved, tuple(storages), tuple(returned), nbytes)


def _within(t: Tensor, x: Tensor) -> bool:
    """Whether `t` is a view of a part of `x`."""
    (start, stop), (first, last) = byte_range(t), byte_range(x)
    return storage_of(t) == storage_of(x) and first <= start and stop <= last


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, ALLOCATION)


class CopiedBytes:
    """Calls the passes of a segment, and notes what graphs of them would copy."""

    def __init__(self) -> None:
        self._each: list[int] = []

    @property
    def most(self) -> int:
        """The bytes that a graph of one pass copies in and out, at most; 0 if there can be none."""
        return max(self._each) if self._each and all(self._each) else 0

    def launcher(
        self, *constants: Mapping[str, Tensor]
    ) -> Callable[[Function, Sequence[Tensor]], Sequence[Any]]:
        """What calls a pass with these tensors where they always are."""
        storages = storages_of(t for tensors in constants for t in tensors.values())

        def call(function: Function, arguments: Sequence[Tensor]) -> Sequence[Any]:
            results = function(*arguments)
            with suppress(ValueError):
                self._each.append(layout_of(storages, arguments, results).nbytes)
            return results

        return call


@frozen(eq=False)
class GraphedPass:
    """A captured pass, and the places of its arguments and results in the buffer."""

    layout: PassLayout
    inputs: list[Tensor]
    outputs: list[Tensor]
    graph: Any

    def replay(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The results of the pass for these arguments, in new memory: two copies and one launch."""
        if self.inputs:
            torch._foreach_copy_(self.inputs, [_flat(arguments[i], n) for i, n in self.layout.moved])
        self.graph.replay()
        fresh = [torch.empty_like(x) for x in self.outputs]
        if fresh:
            torch._foreach_copy_(fresh, self.outputs)
        return [r.view(arguments, fresh) for r in self.layout.results]


def _flat(t: Tensor, numel: int, offset: int | None = None) -> Tensor:
    """So many elements of memory from the first of `t` on, or from this offset of its storage."""
    return t.as_strided((numel,), (1,), offset)


class DeviceGraphs:
    """The graphs of a program, for batches of one set of shapes and one State's weights.

    `constants` are the storages that do not move; `nbytes` is the size of the buffer. A pass runs as it is in the
    first step, in which libraries load what they must not load during a capture, and is captured in the next.
    """

    def __init__(self, device: torch.device, constants: frozenset[int], nbytes: int) -> None:
        self.warm = False  # whether a step has been made
        self._device, self._constants, self._nbytes = device, constants, nbytes
        self._pool = GraphPool(device)
        self._buffer: Tensor | None = None  # [nbytes] uint8
        self._layouts: dict[Any, PassLayout] = {}
        self._passes: dict[Any, GraphedPass] = {}
        self._refused: set[Function] = set()

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffer that are allocated by now."""
        return 0 if self._buffer is None else self._nbytes

    def launcher(self, verb: str, s: int, name: str) -> Callable[[Function, Sequence[Tensor]], Sequence[Any]]:
        """What calls the function of one pass of segment `s`, as a graph if it can be one."""
        return partial(self._call, (verb, s), name)

    def _call(
        self, key: tuple[str, int], name: str, function: Function, arguments: Sequence[Tensor]
    ) -> Sequence[Any]:
        captured = self._passes.get(key)
        if captured is None and self.warm and key in self._layouts and function not in self._refused:
            captured = self._captured(key, name, function, arguments)
        if captured is not None:
            return captured.replay(arguments)
        results = function(*arguments)
        if key not in self._layouts and function not in self._refused:
            try:
                self._layouts[key] = layout_of(self._constants, arguments, results)
            except ValueError as error:
                self._refuse(key, name, function, error)
        return results

    def _captured(
        self, key: tuple[str, int], name: str, function: Function, arguments: Sequence[Tensor]
    ) -> GraphedPass | None:
        try:
            self._passes[key] = self._capture(self._layouts[key], function, arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(key, name, function, error)
        return self._passes.get(key)

    def _refuse(self, key: tuple[str, int], name: str, function: Function, error: Exception) -> None:
        self._refused.add(function)  # which equal segments share
        log.warning(
            "segment %r runs %s without a device graph, because it cannot be captured: %s",
            name,
            key[0],
            str(error).partition("\n")[0],
        )

    def _capture(self, layout: PassLayout, function: Function, arguments: Sequence[Tensor]) -> GraphedPass:
        if layout.nbytes > self._nbytes:
            raise ValueError(
                f"got {layout.nbytes:,} bytes to copy, expected the {self._nbytes:,} of the plan"
            )
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        buffer, used = self._buffer, 0

        def place(numel: int, dtype: torch.dtype) -> Tensor:
            nonlocal used
            start, used = used, used + _rounded(numel * dtype.itemsize)
            return buffer[start : start + numel * dtype.itemsize].view(dtype)

        fixed, outputs = list(arguments), list[Tensor]()
        inputs = [place(n, arguments[i].dtype) for i, n in layout.moved]
        for (i, _), x in zip(layout.moved, inputs, strict=True):
            fixed[i] = x.as_strided(arguments[i].shape, arguments[i].stride())

        def work() -> None:
            results = function(*fixed)
            memory = [_flat(results[j], n, 0) for j, n in layout.storages]
            outputs.extend(place(x.numel(), x.dtype) for x in memory)
            if memory:
                torch._foreach_copy_(outputs, memory)

        return GraphedPass(layout, inputs, outputs, self._pool.record(work))
