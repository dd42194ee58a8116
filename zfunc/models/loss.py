"""The loss of next-token prediction, with labels that do not count and weights that make batches exact.

The loss of a batch is the mean over all its tokens that count. A mean over micro-batches of their own means is
another number where they hold unequally many, so `weighted_batch` gives every row a weight that knows of the whole
batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # the label of a token that is not predicted; torch's name and value for it

Batch = tuple[Tensor, tuple[Tensor, Tensor]]


def next_token_loss(logits: Tensor, targets: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of `logits` [batch, seq, vocab], where labels [batch, seq] of -100 do not count.

    `targets` is the labels, each the token that follows: then it is the mean over those of this micro-batch that
    count. Or it is the labels and weights [batch], as `weighted_batch` makes them: then it is the mean over rows of
    weight times the sum of a row's losses.

    >>> logits, labels = torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [4, -100, -100]])
    >>> weighted = next_token_loss(logits, (labels, torch.full((2,), 2 / 4)))
    >>> torch.isclose(next_token_loss(logits, labels), weighted)
    tensor(True)
    """
    labels, weights = targets if isinstance(targets, (tuple, list)) else (targets, None)
    flat, reduction = logits.flatten(0, -2), "mean" if weights is None else "none"
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
    return losses if weights is None else (losses.view(labels.shape).sum(1) * weights).mean()


def weighted_batch(input_ids: Tensor, labels: Tensor, *, tokens_per_row: float | None = None) -> Batch:
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
    >>> _, (_, weights) = weighted_batch(ids, torch.tensor([[6, 7, 2], [2, -100, -100]]))
    >>> weights
    tensor([0.5000, 0.5000])
    """
    if input_ids.dim() != 2 or input_ids.shape != labels.shape:
        raise ValueError(
            f"batch: got input_ids of shape {tuple(input_ids.shape)} and labels of {tuple(labels.shape)}, expected "
            "one [batch, seq] for both: labels[:, t] is the token that follows input_ids[:, t]"
        )
    rows = labels.shape[0]
    per_row = int((labels != IGNORE_INDEX).sum()) / rows if tokens_per_row is None else float(tokens_per_row)
    if not per_row > 0:
        raise ValueError(
            f"batch: got no token that counts (labels are all {IGNORE_INDEX}), expected at least one: leave it out"
        )
    return input_ids, (labels, torch.full((rows,), 1 / per_row, dtype=torch.float32))
