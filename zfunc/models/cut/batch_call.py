"""A whole batch as what the first segment of a model gets: the call of the model, and the targets of its loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import keystr, tree_map_with_path

from zfunc.engine.trace.batches import LABELS, Whole
from zfunc.engine.trace.traced_values import ByValue


class BatchCall(NamedTuple):
    """A whole batch as the input of the first segment: the model's inputs, and the targets for a loss."""

    inputs: Any
    targets: tuple[Any, ...] = ()


def mark_values(call: BatchCall, names: Mapping[str, bool]) -> BatchCall:
    """Wrap tensors of `call` in `ByValue`, which makes a trace depend on their values: those at pytree paths
    in `names`; True in `names` means that only the number of elements a mask selects matters."""

    def mark(path: Any, t: Any) -> Any:
        if (name := keystr(path)) not in names or not isinstance(t, Tensor | Whole):
            return t
        whole = isinstance(t, Whole)
        return ByValue(t.tensor if whole else t, whole, names[name])

    return tree_map_with_path(mark, call)


def call_of(batch: Any, has_loss: bool, by_value: Mapping[str, bool] | None = None) -> tuple[BatchCall, None]:
    """A batch as `(inputs, targets)` of segments: a BatchCall of the whole batch for the first segment, and None.

    A dict has the model's arguments by name; if `has_loss`, its "labels" are the targets. The first of a tuple is
    the model's input, a tuple of inputs or a dict; the rest are targets, or, without a loss, further arguments.
    A trace depends on the values of the tensors named in `by_value`, as in `mark_values`.
    """
    call = _call_of(batch, has_loss)
    return (mark_values(call, by_value) if by_value else call), None


def _call_of(batch: Any, has_loss: bool) -> BatchCall:
    if not isinstance(batch, Mapping):
        inputs, *targets = batch if isinstance(batch, tuple | list) else (batch,)
        while targets and targets[-1] is None:
            targets.pop()
        return BatchCall(dict(inputs) if isinstance(inputs, Mapping) else inputs, tuple(targets))
    if not has_loss:
        return BatchCall(dict(batch))
    if LABELS not in batch:
        raise ValueError(
            f"batch: got a dict of {sorted(batch)} for a loss of (output, targets), expected {LABELS!r} in it: "
            "pass (inputs, targets), or leave loss out if the model returns it"
        )
    return BatchCall({name: x for name, x in batch.items() if name != LABELS}, (batch[LABELS],))
