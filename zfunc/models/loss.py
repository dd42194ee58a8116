"""The loss of next-token prediction, with ignored labels, and row weights that make it exact over micro-batches.

The loss of a batch is the mean over all its tokens that count. The mean over the means of micro-batches differs if
they have unequally many, so `weighted_batch` weights every row by what counts in the whole batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # the label of a token that does not count, as in torch

Batch = tuple[Tensor, tuple[Tensor, Tensor]]


def next_token_loss(logits: Tensor, targets: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of `logits` [batch, seq, vocab], where labels [batch, seq] of -100 do not count.

    `targets` are labels, each the token that follows: the result is the mean over those that count. Or labels and
    weights [batch], as `weighted_batch` makes them: the mean over rows of weight times the sum of the row's losses.

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
    -100 if it does not count. Pad at the end: positions count from the first token, and attention is causal. The
    weight is rows over tokens that count, so the mean over rows, and over micro-batches, is the mean over tokens.

    On several ranks, call it with the whole batch and give each rank its rows; or call it with a rank's rows and
    the `tokens_per_row` of the whole batch (tokens that count over all ranks, divided by all rows). Otherwise the
    loss is the mean of the ranks' means.

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
    return input_ids, (labels, torch.full((rows,), 1 / per_row, dtype=torch.float32, device=labels.device))
