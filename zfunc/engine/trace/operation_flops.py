"""The FLOPs of an operation: torch's formulas, and those of this file for what torch lacks or counts otherwise."""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


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
    if count in (attention_flops, _recurrent_flops):
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
        return attention_flops
    if name.startswith(RECURRENT):
        return _recurrent_flops
    functional = getattr(torch.ops.aten, name.rstrip("_"), packet)  # of an operation in place
    return OWN_FLOPS.get(functional) or flop_registry.get(functional) or flop_registry.get(packet)


def attention_flops(func: Any, arguments: Mapping[str, Any]) -> int:
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
