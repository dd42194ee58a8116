"""A batch whose ignored labels weigh right however it is cut.

The invariant: the loss of a batch is the mean over all its tokens that count. A mean over micro-batches of their
own means is another number where they hold unequally many, so every row has a weight that knows of the whole batch.
"""

import torch
from torch import Tensor

from zfunc.data import IGNORED

Batch = tuple[Tensor, tuple[Tensor, Tensor]]


def batch(input_ids: Tensor, labels: Tensor, *, tokens_per_row: float | None = None) -> Batch:
    """`(input_ids, (labels, weights))` for `train_step` and `evaluate`, with any number of micro-batches.

    `input_ids` and `labels` are int64 [batch, seq]; `labels[:, t]` is the token that follows `input_ids[:, t]`, or
    -100 where none is to be predicted. Pad at the end: positions count from the first token, and no token sees what
    comes after it. A row's weight is rows over tokens that count: the mean over rows of weight times the sum of
    losses is the mean over tokens then, and the mean over micro-batches of those means is it again.

    Several ranks: call it with the whole batch and give each rank its rows, or with a rank's rows and
    `tokens_per_row` of the whole batch: its tokens that count, over all ranks, divided by its rows. Else each rank
    weighs its own tokens, and the loss is the mean of the ranks' means.

    Raises ValueError for shapes that differ, and where no token counts.

    >>> ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    >>> _, (_, weights) = batch(ids, torch.tensor([[6, 7, 2], [2, -100, -100]]))
    >>> weights
    tensor([0.5000, 0.5000])
    """
    if input_ids.dim() != 2 or input_ids.shape != labels.shape:
        raise ValueError(
            f"batch: got input_ids of shape {tuple(input_ids.shape)} and labels of {tuple(labels.shape)}, expected "
            "one [batch, seq] for both: labels[:, t] is the token that follows input_ids[:, t]"
        )
    rows = labels.shape[0]
    per_row = int((labels != IGNORED).sum()) / rows if tokens_per_row is None else float(tokens_per_row)
    if not per_row > 0:
        raise ValueError(
            f"batch: got no token that counts (labels are all {IGNORED}), expected at least one: leave it out"
        )
    return input_ids, (labels, torch.full((rows,), 1 / per_row, dtype=torch.float32))
