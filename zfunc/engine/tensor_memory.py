"""Where a tensor lies in memory: its storage, and the part of that from its first element to its last."""

from torch import Tensor


def storage_of(t: Tensor) -> int:
    """The identity of its storage: equal for tensors that may share memory."""
    return t.untyped_storage()._cdata


def extent(t: Tensor) -> int:
    """Elements from the first of `t` to its last, in memory; 0 if it has none.

    >>> import torch
    >>> extent(torch.ones(3, 4)[:, :2]), extent(torch.ones(1).expand(9)), extent(torch.ones(0))
    (10, 1, 0)
    """
    return (
        1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    )


def byte_range(t: Tensor) -> tuple[int, int]:
    """The bytes of its storage that `t` lies in: the first, and the one after the last."""
    start = t.storage_offset() * t.element_size()
    return start, start + extent(t) * t.element_size()
