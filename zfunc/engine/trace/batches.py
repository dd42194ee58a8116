"""Batches of training, `(inputs, targets)` as trees of tensors or a dict with labels, and their micro-batches."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from attrs import evolve, field, frozen, validators
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from zfunc.core.display import counted
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.traced_values import ByValue
from zfunc.errors import refuse

LABELS = "labels"
CONSTANTS = (bool, int, float, type(None))  # what a tree may have beside tensors
Batch = tuple[Any, ...]


@frozen(eq=False)
class Whole:
    """Marks a tensor of a batch that has no rows, such as a table of positions: it is not split, and every
    micro-batch gets all of it.

    >>> import torch
    >>> split_batch((torch.ones(4, 2), Whole(torch.ones(3, 3))), 2)[1][1].shape
    torch.Size([3, 3])
    """

    tensor: Tensor = field(validator=validators.instance_of(Tensor))


def unmarked(tree: Any) -> Any:
    """A copy of a pytree with each `Whole` replaced by its tensor, and each `ByValue` by its `Values`."""
    return tree_map_only((Whole, ByValue), lambda x: x.read() if isinstance(x, ByValue) else x.tensor, tree)


def unpacked(batch: Any, last: Segment) -> Batch:
    """A batch as a tuple `(inputs, targets, ...)`; all elements after the inputs are arguments of the `last`
    segment.

    `last.read_batch`, if given, does this for any batch. Else a dict is read by `last.read_dict`, or without
    it has the targets under "labels" and the inputs under the other names. Raises TypeError or ValueError for
    other batches.
    """
    several = isinstance(batch, tuple | list) and all(isinstance(x, Mapping) and LABELS in x for x in batch)
    if (several and batch) or isinstance(batch, Iterator):
        got = f"{len(batch)} batches" if several else f"a {type(batch).__name__}"
        raise TypeError(f"batch: got {got}, expected one batch: call it for each")
    if isinstance(batch, tuple | list) and not batch:
        got = f"an empty {type(batch).__name__}"
        raise TypeError(f"batch: got {got}, expected inputs and targets in it: pass them")
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
    """A key of a batch: pytree structure, shapes, dtypes, constants. Batches of equal keys share a plan."""
    leaves, structure = tree_flatten(batch)
    return structure, tuple((t.shape, t.dtype) if isinstance(t, Tensor) else (type(t), t) for t in leaves)


def traced_kinds(batch: Batch, micro_batches: Sequence[Batch]) -> tuple[dict[Any, Batch], Any]:
    """Those of the `micro_batches` of `batch` that are traced, by `layout_of_leaves`: the first, or one of each
    layout where values in `batch` decide shapes; and the layout of `batch` without these values, else None."""
    if not any(isinstance(t, ByValue) for t in tree_leaves(batch)):
        return {layout_of_leaves(micro_batches[0]): micro_batches[0]}, None
    without = layout_of_leaves(tree_map_only(ByValue, lambda x: x.tensor, batch))
    return {layout_of_leaves(x): x for x in micro_batches}, without


def check_leaves(name: str, batch: Any) -> list[Any]:
    """The leaves of a batch that an error calls `name`. Raises TypeError for leaves of an unknown type, and for
    sparse and nested tensors."""
    leaves = tree_leaves(batch)
    known = Tensor, Whole, ByValue, *CONSTANTS
    if others := {type(t).__name__ for t in leaves if not isinstance(t, known)}:
        ways = {"DataLoader": "pass next(iter(loader))", "ndarray": "use torch.from_numpy"}
        general = "pass tensors, and leave out what is for people"
        do = next((ways[x] for x in sorted(others) if x in ways), general)
        raise TypeError(f"{name}: got {sorted(others)} in it, expected tensors, numbers and None: {do}")
    layouts = {t.layout for t in leaves if isinstance(t, Tensor)} - {torch.strided}
    if layouts or any(t.is_nested for t in leaves if isinstance(t, Tensor)):
        got = f"a tensor of layout {layouts.pop()}" if layouts else "a nested tensor"
        raise TypeError(f"{name}: got {got}, expected dense ones: pad rows, or pass to_dense() of it")
    return leaves


def check_has_values(batch: Any) -> list[Tensor]:
    """The tensors of `batch`. Raises ValueError for one on the device "meta", where tensors have shapes alone."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        refuse("batch", "a tensor on the device 'meta'", "one with values", "make it on the CPU or another")
    return tensors


def rows_in(batch: Batch) -> int:
    """The number of rows of a batch. TypeError for leaves of an unknown type, ValueError for no or unequal rows."""
    leaves = [t.tensor if isinstance(t, ByValue) and not t.whole else t for t in check_leaves("batch", batch)]
    sizes = {t.shape[0] for t in leaves if isinstance(t, Tensor) and t.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"batch: got tensors of {sorted(sizes)} rows, expected one number above 0: give every tensor of "
            "inputs and targets the batch as its first dimension, but for a zfunc.Whole(tensor)"
        )
    return sizes.pop()


def split_batch(batch: Batch, micro_batches: int) -> list[Batch]:
    """Split `batch` into `micro_batches` equal parts along the first dimension of every tensor, as views.

    Scalar tensors, `Whole` tensors, numbers and None go to every part. Raises TypeError or ValueError for bad rows.
    """
    rows = rows_in(batch)
    if rows % micro_batches:
        raise ValueError(
            f"batch: got {counted(rows, 'row')} for {micro_batches} micro-batches, expected a multiple: give "
            f"{rows - rows % micro_batches or micro_batches} rows, or another micro_batches"
        )
    size = rows // micro_batches

    def part(m: int, t: Any) -> Any:
        if isinstance(t, ByValue):
            return t if t.whole else evolve(t, tensor=part(m, t.tensor))
        return t[m * size : (m + 1) * size] if t.dim() else t

    return [
        unmarked(tree_map_only((Tensor, ByValue), partial(part, m), tuple(batch)))
        for m in range(micro_batches)
    ]
