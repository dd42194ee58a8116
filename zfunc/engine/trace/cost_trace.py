"""The cost of a segment, traced on fake tensors: shapes, FLOPs, peak memory, whether a pass draws random numbers.

The code of training runs on tensors without data, and their allocations are counted, so the memory of a plan is
known before the plan runs.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zfunc.core.layout import round_up
from zfunc.core.pipeline import PASSES, B, F, I, R, W
from zfunc.core.spec import ALLOCATION, PassCost, SegmentCost
from zfunc.core.traffic import Traffic
from zfunc.engine.trace.fake_tensors import COUNTED, FakeTensors
from zfunc.engine.trace.graph_cuts import Paths
from zfunc.engine.trace.host_keys import HostMemory, keys_in
from zfunc.engine.trace.operation_flops import attention_flops, decomposed, flops_of, formula
from zfunc.engine.trace.operation_kernels import (
    allocated_by,
    cpu_kernel_bytes,
    cuda_kernel_bytes,
    is_launched,
    memory_bytes,
)
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import Inputs, SegmentVJP, SegmentWeights, differentiated
from zfunc.engine.trace.tensor_memory import Tree, empty_like_strided, storage_of
from zfunc.runtime.rng import is_draw

LOOKED_UP = {  # operations that read only some rows or elements of their first argument
    torch.ops.aten.embedding,
    torch.ops.aten.gather,
    torch.ops.aten.index,
    torch.ops.aten.index_select,
    torch.ops.aten.nll_loss_forward,
}
UNFUSED = {  # operations that a compiler does not fuse with their neighbours, beside products
    torch.ops.aten.cumsum,
    torch.ops.aten.embedding_dense_backward,
    torch.ops.aten.histc,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten.sort,
    torch.ops.aten.topk,
}


class AllocationTracker(TorchDispatchMode):
    """A mode that counts what operations cost: FLOPs, kernel launches, and bytes of the memory that they
    allocate, alive now (`live`) and at most (`peak`).

    `random` records whether an operation drew random numbers. `peak` includes the workspace of kernels:
    CUDA's `of_accelerator`, else the CPU's. If the pass is `compiled`, kernels that can be fused count as
    one. `host` counts bytes of keys and values in host memory.
    """

    def __init__(self, *, of_accelerator: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.live = self.peak = self.flops = self.attention_flops = self.launches = 0
        self.random = False
        self.host = HostMemory()
        self._compiled, self._traffic = compiled, Traffic(compiled)
        self._of_accelerator = of_accelerator
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (made_of := decomposed(func)) is not None:
            with self:
                return made_of(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        times = COUNTED.get()
        flops = times * flops_of(func, args, kwargs or {}, out)
        self.flops += flops
        self.attention_flops += flops if formula(func._overloadpacket) is attention_flops else 0
        self.launches += times * is_launched(func)
        self.random = self.random or is_draw(func, args, kwargs or {})
        for t in allocated_by(func, out):
            self._count(t, memory_bytes(func, args, t))
        if is_launched(func):
            before = self._traffic.nbytes
            self._move(func, (args, kwargs), out)
            self._traffic.nbytes += (times - 1) * (self._traffic.nbytes - before)
        on_device = self._of_accelerator
        workspace = cuda_kernel_bytes(func, args) if on_device else cpu_kernel_bytes(func, args, out)
        self.peak = max(self.peak, self.live + workspace)
        return out

    def cost(self, kept_bytes: int = 0) -> PassCost:
        """The cost traced so far; its workspace is the peak in bytes less `kept_bytes`, from before."""
        return PassCost(
            self.flops,
            self._traffic.total_bytes(self._sizes),
            max(0, self.peak - kept_bytes),
            0 if self._compiled else self.launches,  # unknown of compiled passes
            self.attention_flops,
            self.host.copied_bytes,
        )

    def _move(self, func: Any, inputs: Any, out: Any) -> None:
        reads, writes = ([_moved(t) for t in tree_leaves(x) if isinstance(t, Tensor)] for x in (inputs, out))
        packet = func._overloadpacket
        if packet in LOOKED_UP:  # of the first argument as many bytes as the result has
            reads[0] = (reads[0][0], min(reads[0][1], writes[0][1]))
        self._traffic.add(reads, writes, fusable=formula(packet) is None and packet not in UNFUSED)

    def _count(self, t: Tensor, nbytes: int) -> None:
        """Count the memory of the new tensor `t`, which has `nbytes` bytes."""
        if (key := storage_of(t)) in self._sizes:
            return
        self._sizes[key] = size = round_up(nbytes, ALLOCATION)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(t.untyped_storage(), self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._traffic.freed(key)

    def holds(self, t: Tensor) -> bool:
        """Whether an operation under this tracker allocated the memory of `t`, which is still alive."""
        return storage_of(t) in self._sizes

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the memory of `tensors`, what several share once. Raises KeyError for a tensor that this tracker
        does not hold (`holds`)."""
        return sum(self._sizes[key] for key in {*map(storage_of, tensors)})


Storages = dict[int, tuple[int, int]]


@frozen
class Trace:
    """The traced costs of a segment's passes for one micro-batch, and its output `out`, on the meta device.

    `paths` has, for each output, the weights and input leaves that it depends on. `memory` maps the number of
    an output leaf to (origin, bytes of its storage), where the origin is the number of the input leaf in this
    storage, or negative. `gradients` has so the gradients of the input, by number, which may lie in those of the
    output. `tensors` maps the number of an output leaf to that of the input leaf that is the same tensor, or to a
    negative number; `alone[n]` are the bytes that an offloaded input saves without leaf `n`. `cost.input_bytes`
    is 0 here; the workspace of backward includes the gradients that it returns.
    """

    out: Tree
    cost: SegmentCost
    random: bool  # whether a pass draws random numbers
    paths: Paths
    memory: Storages
    gradients: Storages
    tensors: dict[int, int]
    alone: list[int]


def trace(
    passes: SegmentVJP,
    options: PassOptions,
    weights: SegmentWeights,
    inputs: Inputs,
    *,
    device: torch.device,
    guess: Callable[[SegmentWeights, Inputs], Tree] = lambda *_: None,
    buffers: Mapping[str, Tensor] | None = None,
    of_accelerator: bool = False,
    fake: FakeTensors | None = None,
) -> Trace:
    """Trace a segment's `passes`, made with `options`: forward, and, if anything is differentiated, backward.
    Of the tensors only shape, strides and dtype matter. If `guess(weights, inputs)` returns the output,
    graphs are traced once, before the run whose costs are counted.

    `buffers` are the module buffers that forward changes; backward reads their old values. `of_accelerator`:
    a trace on the CPU stands for an accelerator. Traces that share graphs share the mode `fake`.
    """
    pulled, compiled = options.wrt_input or bool(weights.trained), bool(options.compiled)
    ways = (F, *(R,) * options.ahead, *(B,) * pulled, *(I, W) * options.split)
    trackers = {x: AllocationTracker(of_accelerator=of_accelerator, compiled=compiled) for x in ways}
    with fake or FakeTensors(allow_non_fake_inputs=True), torch.no_grad():
        # 1. Graphs, of tensors without memory.
        trees = empty_like_strided((weights.trained, weights.fixed, inputs), device)
        weights, inputs = SegmentWeights(*trees[:2]), trees[2]
        paths = passes.prepare(weights, inputs, guess(weights, inputs))
        # 2. Forward: its cost, its output, and what it leaves for backward.
        first = trackers.pop(F)
        with first, keys_in(first.host if options.keys_on_host else None):
            y, residuals = passes.forward(weights, inputs)
            y = y[0] if buffers else y
            allocated = [t for t in tree_leaves(y) if isinstance(t, Tensor) and first.holds(t)]
            allocated_bytes = _storage_bytes(allocated)  # not what is passed on, which was there before
            # More than these where a loss lies in the memory of many, which the step leaves.
            held = first.bytes_of(allocated)
            residual_bytes = max(0, first.live - held) if passes.keeps else 0
            costs: dict[str, Any] = {"forward": first.cost(allocated_bytes + residual_bytes)}
            out = empty_like_strided(y, "meta")
            cotangents = [torch.empty_like(t) for t in differentiated(y)]
            leaves, results = numbered(inputs[0]), numbered(y)
            memory, tensors = _storages(leaves, results), _origins(_view_of, leaves, results)
            # A part of the output that is a residual, too, outlives the output.
            before = first.live
            del y, allocated, results
            keeps_output = before - first.live < held
        stash_bytes, read = _storage_bytes((inputs[0], residuals)), nbytes(buffers)
        without, gradients = _storage_bytes(residuals), Storages()
        alone = [_storage_bytes((x, residuals)) - without for x in tree_leaves(inputs[0])]
        # 3. The other passes, in order: each gets what the one before it leaves.
        for way, tracker in trackers.items():
            with tracker, keys_in(tracker.host if options.keys_on_host else None):
                outputs = passes.run(way, weights, inputs, residuals, cotangents)
                left = 0  # bytes for the passes behind it
                if way == R:
                    left, residuals = tracker.live, outputs
                    costs["recomputed_bytes"] = left
                elif way == I:
                    residuals = outputs[1]
                    left = costs["pending_bytes"] = _storage_bytes(residuals[1])
                if way in (B, I):
                    gradients = _storages(*(dict(enumerate(x)) for x in (cotangents, outputs[way == B])))
                costs[PASSES[way].verb] = tracker.cost(left)
                del outputs
        cost = SegmentCost(
            **costs,
            residual_bytes=residual_bytes + read,
            stash_bytes=stash_bytes + read,
            keeps_output=passes.keeps and keeps_output,
            key_bytes=max(x.host.nbytes for x in (first, *trackers.values())),
        )
        random = any(x.random for x in (first, *trackers.values()))
        return Trace(out, cost, random, paths, memory, gradients, tensors, alone)


def numbered(tree: Tree) -> dict[int, Tensor]:
    """The tensors of a pytree by their number among its leaves."""
    return {n: t for n, t in enumerate(tree_leaves(tree)) if isinstance(t, Tensor)}


def _origins(
    key: Callable[[Tensor], Any], inputs: Mapping[int, Tensor], results: Mapping[int, Tensor]
) -> dict[int, int]:
    """For each of `results`, the number of one of `inputs` with an equal `key`; if none has, a negative number, the
    same for results with an equal key."""
    known = {key(t): n for n, t in inputs.items()}
    return {n: known.setdefault(key(t), -1 - n) for n, t in results.items()}


def _storages(inputs: Mapping[int, Tensor], results: Mapping[int, Tensor]) -> Storages:
    """For each of `results`, the number of one of `inputs` in its storage, or a negative one, and its bytes."""
    origins = _origins(storage_of, inputs, results)
    return {n: (origins[n], _storage_bytes(t)) for n, t in results.items()}


def _view_of(t: Tensor) -> tuple[Any, ...]:
    """A key of tensor `t`; equal for tensors that are the same elements of the same storage."""
    return storage_of(t), t.dtype, t.storage_offset(), tuple(t.shape), t.stride(), t.is_conj(), t.is_neg()


def _moved(t: Tensor) -> tuple[int, int]:
    """(identity of the storage of `t`, bytes that a kernel moves for `t`, at most the storage's)."""
    return storage_of(t), min(t.numel() * t.dtype.itemsize, t.untyped_storage().nbytes())


def _storage_bytes(tree: Tree) -> int:
    held = (t for t in tree_leaves(tree) if isinstance(t, Tensor))
    storages = {storage_of(t): t.untyped_storage().nbytes() for t in held}
    return sum(round_up(n, ALLOCATION) for n in storages.values())


def nbytes(tree: Tree) -> int:
    """The bytes of the tensors of a pytree, each rounded up to 512, as CUDA's allocator does."""
    leaves = [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    return sum(round_up(t.numel() * t.dtype.itemsize, ALLOCATION) for t in leaves)
