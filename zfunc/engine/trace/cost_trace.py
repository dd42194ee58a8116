"""The cost of a segment, traced on fake tensors: shapes, FLOPs, peak memory, whether a pass draws random numbers.

The code of training runs on tensors without data, and their allocations are counted, so the memory of a plan is
known before the plan runs.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zfunc.core.layout import round_up
from zfunc.core.pipeline import PASSES, B, F, I, R, W
from zfunc.core.spec import ALLOCATION, PassCost, SegmentCost
from zfunc.core.traffic import Traffic
from zfunc.engine.trace.graph_cuts import Paths
from zfunc.engine.trace.host_keys import HostMemory, keys_in
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import Inputs, SegmentVJP, SegmentWeights, differentiated
from zfunc.engine.trace.tensor_memory import COUNTED, FakeTensors, Tree, empty_like_strided, storage_of
from zfunc.runtime.rng import is_draw

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
# Operations that launch no kernel: they allocate, or view memory in another shape; schemas do not say so.
UNLAUNCHED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    UNSAFE_VIEW.overloadpacket,
}
PRODUCTS = {  # matrix products, and the index of the argument that is their first factor
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}


LOOKED_UP = {  # operations that read only some rows or elements of their first argument
    torch.ops.aten.embedding,
    torch.ops.aten.gather,
    torch.ops.aten.index,
    torch.ops.aten.index_select,
    torch.ops.aten.nll_loss_forward,
}
ATTENTION_BACKWARDS = {
    torch.ops.aten._flash_attention_backward,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
}
# Losses whose kernels make the losses of all elements, and return their mean or sum in that memory.
REDUCED_IN_PLACE = {
    torch.ops.aten.binary_cross_entropy,
    torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss,
    torch.ops.aten.soft_margin_loss,
}
MULTIPROCESSORS = 160  # at most, of a GPU that this machine does not have
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
        self.attention_flops += flops if formula(func._overloadpacket) is _attention_flops else 0
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


def memory_bytes(func: Any, args: Any, result: Tensor) -> int:
    """Bytes of the memory that operation `func` of `args` allocates for `result`, one of its own: its storage;
    if the operation is one of REDUCED_IN_PLACE, the losses of all elements of predictions and targets."""
    if func._overloadpacket not in REDUCED_IN_PLACE:
        return result.untyped_storage().nbytes()
    predictions, targets = args[:2]
    return math.prod(torch.broadcast_shapes(predictions.shape, targets.shape)) * result.itemsize


def allocated_by(func: Any, out: Any) -> list[Tensor]:
    """The tensors in `out`, the result of a call of operation `func`, whose memory the call allocated."""
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)] if _allocates(func) else []


@cache
def _allocates(func: Any) -> bool:
    """Whether an operation returns new memory: a view, or an argument returned, is none; of UNSAFE_VIEW the
    schema does not say so."""
    return func is not UNSAFE_VIEW and not any(r.alias_info for r in func._schema.returns)


def cpu_kernel_bytes(func: Any, args: Any, out: Any) -> int:
    """Bytes of workspace that the CPU's kernel of an operation allocates beside its result.

    A product of 16-bit matrices whose first factor is transposed is summed in fp32 (`gemm_transb_impl` in torch's
    ATen/native/cpu/BlasKernel.cpp), the products of a batch one after the other. Backward of an embedding copies a
    gradient and indices that are not contiguous (ATen/native/Embedding.cpp).

    >>> x = torch.ones(2, 3, dtype=torch.bfloat16)
    >>> [cpu_kernel_bytes(torch.ops.aten.mm.default, (a, a.mT), a @ a.mT) for a in (x, x.mT)]
    [0, 36]
    """
    if func._overloadpacket is torch.ops.aten.embedding_dense_backward:
        return _copied_bytes(*args[:2])
    factor = PRODUCTS.get(func._overloadpacket)
    if factor is None or out.device.type != "cpu" or out.dtype not in (torch.bfloat16, torch.float16):
        return 0
    rows, columns = args[factor].stride()[-2:]  # of [..., rows, columns]
    return 4 * out.shape[-2] * out.shape[-1] if rows == 1 and columns != 1 else 0


def cuda_kernel_bytes(func: Any, args: Any) -> int:
    """Bytes of workspace that CUDA's kernel of an operation allocates beside its results; 0 except for the
    backward of attention and of embeddings.

    In its backward, flash attention sums dq in fp32, padded to whole blocks of heads, and keeps one number
    for each row; a range of tokens has 128 rows more. Deterministic kernels make as many sums of dq as keep
    all multiprocessors busy. Where query heads share keys, flash attention and cuDNN make dk and dv for each
    query head. Flash attention also copies arguments that are not contiguous (`mha_bwd`, `mha_varlen_bwd` in
    torch's flash_attn/flash_api.cpp). Memory-efficient attention sums dq in fp32, in whole tiles of 64 or 128; of
    16-bit heads of more than 128 numbers dk and dv too, for 64 keys at a time, of all heads for 200 such parts or
    one each. It has a number for each row, which in fp32 is the sum of a product as large as the result
    (mem_eff_attention/kernel_backward.h, attention_backward.cu).

    The gradient of an embedding is summed in fp32, ten tokens of a kind at a time, if there are more than 3,072 or
    their counts scale it (EmbeddingBackwardKernel.cu): a row for each such sum, at most, and indices of tokens and
    rows. It is copied if it is not contiguous, as that of a sum over tokens, and so are indices (Embedding.cu).
    """
    if (packet := func._overloadpacket) is torch.ops.aten.embedding_dense_backward:
        (*_, width), tokens, scaled = args[0].shape, args[1].numel(), args[4]
        kinds = min(tokens, args[2])
        rows = tokens // 10 + kinds
        indices = 8 * ((3 + scaled) * tokens + 2 * kinds + rows)
        sums = rows * width * max(4, args[0].itemsize) + indices if tokens > 3072 or scaled else 0
        return sums + _copied_bytes(*args[:2])
    if packet is torch.ops.aten._scaled_dot_product_efficient_attention_backward:
        (*batch, tokens, size), (*_, keys, _), (*_, width) = (x.shape for x in args[1:4])
        heads, widest, half = math.prod(batch), max(size, width), args[1].itemsize == 2
        tile = 64 if widest <= 64 else 128, 128 if 64 < widest <= 128 and half else 64
        sums = heads * -(-tokens // tile[0]) * -(-size // tile[1]) * (4 * math.prod(tile) + 16)
        if half and widest > 128:
            several = not torch.are_deterministic_algorithms_enabled()
            parts = max(1, min(-(-keys // 64), 200 // heads)) if several else 1
            sums += 4 * heads * parts * 64 * (round_up(size, 128) + round_up(width, 128))
        rows = 4 * heads * tokens
        return max(sums + rows, 0 if half else args[0].nbytes + 2 * rows)
    if packet not in ATTENTION_BACKWARDS:
        return 0
    of_ranges = packet is torch.ops.aten._flash_attention_backward
    grad, q, k, _, out = (x if of_ranges else x.transpose(1, 2) for x in args[:5])
    heads, size = q.shape[-2:]  # of q [batch, tokens, heads, size], of ranges [tokens, heads, size]
    every = 2 * k.nbytes // k.shape[-2] * heads if k.shape[-2] < heads else 0
    if packet is torch.ops.aten._scaled_dot_product_cudnn_attention_backward:
        return every
    if of_ranges and args[6] is not None:
        count = len(args[6]) - 1  # ranges, of their ends [count + 1]
        rows = len(q) + 128 * count
    else:
        count = len(q)
        rows = count * round_up(q.shape[1], 128)
    splits = -(-_multiprocessors(q) // (count * heads)) if torch.are_deterministic_algorithms_enabled() else 1
    sums = 4 * rows * heads * (1 + splits * round_up(size, 32 if size <= 128 else 64))
    return sums + every + _copied_bytes(grad, out)


def _copied_bytes(*tensors: Tensor) -> int:
    """Bytes of copies that a kernel makes of those of `tensors` that are not contiguous."""
    return sum(x.nbytes for x in tensors if not x.is_contiguous())


def _multiprocessors(t: Tensor) -> int:
    return torch.cuda.get_device_properties(t.device).multi_processor_count if t.is_cuda else MULTIPROCESSORS


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The FLOPs of the matrix products of an operation; element-wise arithmetic counts as none.

    >>> q = torch.ones(1, 2, 8, 4)
    >>> attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    >>> [flops_of(attend, (q, q, q, 0.0, causal), {}, ()) for causal in (False, True)]
    [2048, 1024]
    """
    count = formula(func._overloadpacket)
    if count is None:
        return 0
    if count in (_attention_flops, _recurrent_flops):
        return count(func, {x.name: y for x, y in zip(func._schema.arguments, args, strict=False)} | kwargs)
    return count(*args, **kwargs, out_val=out)


@cache
def formula(packet: Any) -> Callable[..., int] | None:
    """The function that counts the FLOPs of the operator `packet`; None if it multiplies no matrices.

    Formulas of this file come before those of torch's registry, which lacks some, and counts causal attention
    as if it were full.
    """
    name = packet.__name__
    if name.startswith(("_scaled_dot_product_", "_flash_attention_")):
        return _attention_flops
    if name.startswith(RECURRENT):
        return _recurrent_flops
    functional = getattr(torch.ops.aten, name.rstrip("_"), packet)  # of an operation in place
    return OWN_FLOPS.get(functional) or flop_registry.get(functional) or flop_registry.get(packet)


def _attention_flops(func: Any, arguments: Mapping[str, Any]) -> int:
    """FLOPs of attention: two matrix products in forward, five in backward, which computes the scores again.
    Keys hidden by causality or a window are not counted, those hidden by a mask are. Ranges count as one
    document."""
    q, k, v = (arguments[x] for x in ("query", "key", "value"))  # [batch, heads, tokens, size]
    ranges = func.name().startswith("aten::_flash_attention_")  # then [..., tokens, heads, size]
    (*batch, tokens, size) = q.transpose(-3, -2).shape if ranges else q.shape
    seen = arguments["max_k"] if ranges else k.shape[-2]
    pairs = 2 * tokens * seen
    if arguments.get("is_causal"):
        pairs -= tokens * tokens if ranges else tokens * seen
    if (left := arguments.get("window_size_left")) is not None:
        pairs = min(pairs, 2 * tokens * (left + 1))
    backward = func._schema.arguments[0].name.startswith("grad")
    return math.prod(batch) * pairs * (3 * size + 2 * v.shape[-1] if backward else size + v.shape[-1])


def _recurrent_flops(func: Any, arguments: Mapping[str, Any]) -> int:
    """FLOPs of a recurrent layer: each input row times every weight matrix; in backward twice as many."""
    rows = arguments["input"].shape[:-1]  # of [tokens, batch, features]
    matrices = [w.shape for name, x in arguments.items() if "weight" in name for w in tree_leaves(x)]
    times = 2 if "backward" in func._overloadpacket.__name__ else 1
    return times * 2 * math.prod(rows) * sum(math.prod(shape) for shape in matrices if len(shape) == 2)


def _vector_flops(*tensors: Any, **_: Any) -> int:
    """FLOPs of a matrix or vector times a vector: two for each element of the largest of the `tensors`."""
    return 2 * max(t.numel() for t in tensors if isinstance(t, Tensor))


def _grouped_flops(rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of torch's grouped_mm: of groups of `rows` times one of `matrices` each, of groups of columns
    times rows, or of pairs of matrices."""
    pairs = len(rows) if rows.dim() == matrices.dim() == 3 else 1
    return 2 * pairs * math.prod(rows.shape[-2:]) * matrices.shape[-1]


RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
MADE_OF: dict[Any, Callable[..., Any]] = {}  # by operation of zfunc, the function that is counted instead
OWN_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.aten.mv: _vector_flops,
    torch.ops.aten.dot: _vector_flops,
    torch.ops.aten.vdot: _vector_flops,
    torch.ops.aten.addmv: _vector_flops,
}


@cache
def decomposed(func: Any) -> Callable[..., Any] | None:
    """The function whose operations are counted in place of `func`, a composite operation; None for
    others."""
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    composite = func.namespace == "aten" and has("CompositeImplicitAutograd") and not has("CPU")
    return MADE_OF.get(func, func.decompose if composite else None)


@cache
def is_launched(func: Any) -> bool:
    """Whether an accelerator launches a kernel for an operation: not for views, allocations, or queries of shape or
    device.

    >>> [is_launched(f) for f in (torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.add_.Tensor)]
    [True, False, True]
    """
    tensors = any("Tensor" in str(r.type) for r in func._schema.returns) or func._schema.is_mutable
    return tensors and not func.is_view and func._overloadpacket not in UNLAUNCHED


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
