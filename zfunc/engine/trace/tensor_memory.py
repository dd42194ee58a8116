"""Where a tensor lies in memory: its storage, the range from its first element to its last, and its strides."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Tree = Any
"""A pytree: a tensor, another leaf, or nested containers of them, as a user's segment takes and returns."""
Leaves = list[Any]  # of a pytree, in its order: tensors, and values that a trace holds constant
Values = dict[str, Tensor]  # of a segment: parameters, buffers or gradients by short name, each in its shape


def storage_of(t: Tensor) -> int:
    """The identity of the storage of `t`: equal for tensors that may share memory."""
    return t.untyped_storage()._cdata


def extent(t: Tensor) -> int:
    """The number of elements in memory from the first of `t` to its last; 0 for an empty tensor.

    >>> import torch
    >>> extent(torch.ones(3, 4)[:, :2]), extent(torch.ones(1).expand(9)), extent(torch.ones(0))
    (10, 1, 0)
    """
    steps = zip(t.shape, t.stride(), strict=True)
    return 1 + sum((n - 1) * stride for n, stride in steps) if t.numel() else 0


def own_part(shard: slice, flat: Tensor) -> Tensor:
    """The elements `shard`, a rank's, of a bucket's buffer `flat`; `flat` itself if it has these alone."""
    return flat if flat.numel() == shard.stop - shard.start else flat[shard]


def fills_storage(t: Tensor) -> bool:
    """Whether the elements of `t` take as many bytes as its storage has, so that `t` alone keeps no more."""
    return t.untyped_storage().nbytes() <= t.nbytes


def in_own_memory(t: Tensor) -> Tensor:
    """The output `t`, or a copy of `t` if `t` lies in memory of more bytes, as the result of `F.mse_loss` and
    views do: an output is kept for the rest of the step, and alone is planned."""
    return t if fills_storage(t) else t.clone()


def byte_range(t: Tensor) -> tuple[int, int]:
    """The byte offsets in its storage where `t` begins, and where `t` ends (the one after its last byte)."""
    start = t.storage_offset() * t.element_size()
    return start, start + extent(t) * t.element_size()


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a cotangent of `x`: those of `x` if its elements fill their memory, else dense ones.

    So the trace and the cost of a segment do not depend on the segment above it.
    """
    return torch.empty_like(x, device="meta").stride()


def empty_like_strided(tree: Tree, device: torch.device | str | None = None) -> Tree:
    """A pytree like `tree` of empty tensors with the same shapes, strides and dtypes, which a trace depends on."""
    empty = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device or t.device)  # noqa: E731
    return tree_map_only(Tensor, empty, tree)


def layouts(leaves: Leaves) -> tuple[Any, ...]:
    """The key of a trace: shape, strides, dtype and device of tensor leaves, type and value of other leaves. Not
    which leaves share a storage: a trace has each in a storage of its own, and plans count storages between
    segments, so they are never too low."""
    return tuple(
        [(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else (type(t), t) for t in leaves]
    )
