"""What the kernels of an operation do beside computing: launches, the memory of results, and workspace."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.core.layout import round_up

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


@cache
def is_launched(func: Any) -> bool:
    """Whether an accelerator launches a kernel for an operation: not for views, allocations, or queries of shape or
    device.

    >>> [is_launched(f) for f in (torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.add_.Tensor)]
    [True, False, True]
    """
    tensors = any("Tensor" in str(r.type) for r in func._schema.returns) or func._schema.is_mutable
    return tensors and not func.is_view and func._overloadpacket not in UNLAUNCHED


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
