"""Sequences of whole documents: which of them are in a sequence, and the batch of some sequences.

A sequence is filled with documents in the order of the data until the next one does not fit; the rest is padding. A
document longer than a sequence is cut into pieces, each like a document of its own. So a sequence is a range of the
packed tokens, and a batch stays a pure function of seed and position (`zfunc.train.data.corpus`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from zfunc.models.loss import IGNORE_INDEX


@frozen(eq=False)
class DocumentRows:
    """The documents, or pieces of them, between `bounds` [pieces + 1] in the tokens; sequence r has those from
    `firsts[r]` up to `firsts[r + 1]`. Both are int64.

    >>> rows = document_rows(np.array([3, 5, 12, 13]), seq_length=5)  # of 3, 2, 7 and 1 tokens
    >>> rows.bounds.tolist(), rows.firsts.tolist()
    ([0, 3, 5, 10, 12, 13], [0, 2, 3, 5])
    """

    seq_length: int
    bounds: np.ndarray
    firsts: np.ndarray

    def __len__(self) -> int:
        return len(self.firsts) - 1


def document_rows(ends: np.ndarray, seq_length: int) -> DocumentRows:
    """The sequences of documents that end at `ends` [documents], ascending."""
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    counts = -(-(ends - starts) // seq_length)  # of pieces
    pieces = np.arange(counts.sum()) - np.repeat(
        np.cumsum(counts) - counts, counts
    )  # each one's number in its document
    bounds = np.minimum(np.repeat(starts, counts) + (pieces + 1) * seq_length, np.repeat(ends, counts))
    bounds = np.concatenate([[0], bounds]).astype(np.int64)
    following = (np.searchsorted(bounds, bounds[:-1] + seq_length, side="right") - 1).tolist()
    firsts = [0]
    while firsts[-1] < len(following):
        firsts.append(following[firsts[-1]])
    return DocumentRows(seq_length, bounds, np.array(firsts, np.int64))


def document_batch(
    tokens: np.ndarray, rows: DocumentRows, numbers: Sequence[int], loss_mask: np.ndarray | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The sequences of these numbers: `input_ids` and `position_ids`, and labels, each int64 [batch, seq].

    Positions start at 0 in each document. The label of a token is the next one of its document; -100 at its end, in
    the padding, and where the next token is 0 in `loss_mask`.
    """
    shape = (len(numbers), rows.seq_length)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    positions = np.zeros(shape, np.int64)
    for n, row in enumerate(numbers):
        bounds = rows.bounds[rows.firsts[row] : rows.firsts[row + 1] + 1]
        first, last = bounds[0], bounds[-1]
        size = last - first
        ids[n, :size] = tokens[first:last]
        labels[n, : size - 1] = tokens[first + 1 : last]
        if loss_mask is not None:
            labels[n, : size - 1][loss_mask[first + 1 : last] == 0] = IGNORE_INDEX
        labels[n, bounds[1:] - first - 1] = IGNORE_INDEX
        lengths = np.append(np.diff(bounds), rows.seq_length - size)  # the padding is like another document
        starts = np.append(bounds - first, size)[: len(lengths)]
        positions[n] = np.arange(rows.seq_length) - np.repeat(starts, lengths)
    inputs = {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions)}
    return inputs, torch.from_numpy(labels)
