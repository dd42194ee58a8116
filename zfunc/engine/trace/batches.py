"""A batch: `(inputs, targets)` as trees of tensors, or a dict with labels; and its equal parts."""

from collections.abc import Mapping
from typing import Any, cast

import torch  # noqa: F401  # of the example
from attrs import field, frozen, validators
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from zfunc.engine.trace.segment import Segment

LABELS = "labels"
CONSTANTS = (bool, int, float, type(None))  # what a tree may have beside tensors
Batch = tuple[Any, ...]


@frozen(eq=False)
class Whole:
    """A tensor of a batch that has no rows, such as a table of positions: every micro-batch gets all of it.

    >>> import torch
    >>> split_batch((torch.ones(4, 2), Whole(torch.ones(3, 3))), 2)[1][1].shape
    torch.Size([3, 3])
    """

    tensor: Tensor = field(validator=validators.instance_of(Tensor))


def unmarked(tree: Any) -> Any:
    """The tree with the tensors that are `Whole` in it."""
    return tree_map_only(Whole, lambda x: x.tensor, tree)


def unpacked(batch: Any, last: Segment) -> Batch:
    """A batch as `(inputs, targets, ...)`: what is behind the inputs goes to the `last` segment.

    One that has `read_batch` reads it. A dict is unpacked by its `read_dict`, or into what is not "labels" and
    these. Raises TypeError or ValueError for anything else.
    """
    if last.read_batch is not None:
        return last.read_batch(batch)
    if isinstance(batch, Mapping):
        batch = (last.read_dict or _labels_apart)(cast("Mapping[str, Any]", batch))
    if not isinstance(batch, tuple | list) or len(cast("Batch", batch)) < 2:
        raise TypeError(
            f"batch: got {type(batch).__name__}, expected a pair (inputs, targets), or a dict with {LABELS!r}: "
            "pass one; what follows the targets goes to the last segment as well"
        )
    return tuple({**x} if isinstance(x, Mapping) else x for x in cast("Batch", batch))


def _labels_apart(batch: Mapping[str, Any]) -> Batch:
    if LABELS not in batch:
        raise ValueError(
            f"batch: got a dict of {sorted(batch)}, expected {LABELS!r} in it: pass (inputs, targets), or, for a "
            "loss without targets, (batch, None)"
        )
    return {name: x for name, x in batch.items() if name != LABELS}, batch[LABELS]


def layout_of_leaves(batch: Batch) -> Any:
    """The structure, shapes and dtypes of a batch, and its constants: batches with equal ones share a plan."""
    leaves, structure = tree_flatten(batch)
    return structure, tuple((t.shape, t.dtype) if isinstance(t, Tensor) else (type(t), t) for t in leaves)


def rows_in(batch: Batch) -> int:
    """The number of rows. Raises TypeError or ValueError for a batch that has none, or several numbers of them."""
    leaves = tree_leaves(batch)
    if others := {type(t).__name__ for t in leaves if not isinstance(t, (Tensor, Whole, *CONSTANTS))}:
        raise TypeError(
            f"batch: got {sorted(others)} in it, expected tensors, numbers and None: use torch.from_numpy, say"
        )
    sizes = {t.shape[0] for t in leaves if isinstance(t, Tensor) and t.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"batch: got tensors of {sorted(sizes)} rows, expected one number above 0: give every tensor of "
            "inputs and targets the batch as its first dimension, but for a zfunc.Whole(tensor)"
        )
    return sizes.pop()


def split_batch(batch: Batch, micro_batches: int) -> list[Batch]:
    """`batch` in equal parts along the first dimension of every tensor, as views; TypeError or ValueError.

    Each part has tensors without dimensions, those that are `Whole`, numbers and None as they are.
    """
    rows = rows_in(batch)
    if rows % micro_batches:
        raise ValueError(
            f"batch: got {rows} rows for {micro_batches} micro-batches, expected a multiple: give "
            f"{rows - rows % micro_batches or micro_batches} rows, or another micro_batches"
        )
    size = rows // micro_batches
    return [
        unmarked(
            tree_map_only(Tensor, lambda t, m=m: t[m * size : (m + 1) * size] if t.dim() else t, tuple(batch))
        )
        for m in range(micro_batches)
    ]
