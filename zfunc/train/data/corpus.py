"""Corpora and batches: where tokens come from and the order in which they are trained on.

A corpus is a memory map, so the disk bounds its size and not memory. A batch is a pure function of (seed,
position): nothing is iterated, so a checkpoint needs one integer. Position counts sequences since the start of
training, not steps, so a run resumed with another batch size or number of ranks continues where it stopped.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.document_rows import DocumentRows, document_rows

_CHUNK = 1 << 20  # tokens of the held-out data in which a prompt is looked for
_ROUNDS = 3  # of the Feistel network; each mixes both halves


@attrs.frozen(eq=False)
class Corpus:
    """Tokens to train on and tokens held out, both memory-mapped, and a description of what was read."""

    name: str
    train: np.ndarray  # [tokens] uint8, uint16 or uint32
    held_out: np.ndarray  # [tokens] of the same dtype
    vocab_size: int
    description: tuple[str, ...]  # lines for the log: counts, what is held out and how, what is left out
    held_out_name: str = ""  # where that is other data
    loss_mask: np.ndarray | None = None  # [tokens of `train`]: 0 where no loss counts; None: all 1
    held_out_loss_mask: np.ndarray | None = None
    ends: np.ndarray | None = None  # [documents] of `train`, where each ends; None where that is not known
    held_out_ends: np.ndarray | None = None
    rows: DocumentRows | None = None  # sequences of whole documents; None: windows of the tokens
    held_out_rows: DocumentRows | None = None

    def __str__(self) -> str:
        return "\n".join(self.description)

    def sample_prompt(self, seq_length: int) -> list[int]:
        """Tokens to continue in a sample: the first prompt of the held-out data that leaves a quarter of a sequence
        free, or the end of the first one; without prompts, the beginning.
        """
        mask = None if self.held_out_loss_mask is None else self.held_out_loss_mask[:_CHUNK] != 0
        if mask is None or mask.all() or not mask.any():
            return self.held_out[: (seq_length + 1) // 2].tolist()
        before = np.append(True, mask[:-1])
        starts, ends = np.flatnonzero(before & ~mask), np.flatnonzero(~before & mask)
        prompts = [self.held_out[a:b] for a, b in zip(starts, ends, strict=False)]
        fitting = (x for x in prompts if 4 * len(x) <= 3 * seq_length)
        return next(fitting, prompts[0][-((seq_length + 1) // 2) :]).tolist()

    def of_whole_documents(self, seq_length: int) -> "Corpus":
        """With sequences of whole documents."""
        assert self.ends is not None
        assert self.held_out_ends is not None
        rows, held_out = document_rows(self.ends, seq_length), document_rows(self.held_out_ends, seq_length)
        padding = 1 - len(self.train) / (len(rows) * seq_length)
        line = f"sequences: {len(rows):,} of {seq_length} tokens, of whole documents, {padding:.0%} padding"
        return attrs.evolve(self, rows=rows, held_out_rows=held_out, description=(*self.description, line))

    def sequences_per_epoch(self, seq_length: int) -> int:
        """How many sequences there are."""
        return num_windows(len(self.train), seq_length) if self.rows is None else len(self.rows)


def batch_at(
    tokens: np.ndarray,
    position: int,
    *,
    batch_size: int,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    loss_mask: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """The `batch_size` sequences from `position` on: inputs and targets, int64 [batch, seq].

    The target of a token that is 0 in `loss_mask` is -100. An epoch visits all non-overlapping windows once; each
    has its own order and its own offset of the windows. Rank r of n reads its part of a batch at `position + r *
    batch_size // n`. Raises ValueError for data shorter than `seq_length + 1` and for a token of `vocab_size` or
    more.

    >>> tokens = np.arange(1000, dtype=np.uint16)
    >>> inputs, targets = batch_at(tokens, 10, batch_size=4, seq_length=8, seed=0)
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([4, 8]), True)
    >>> bool((batch_at(tokens, 12, batch_size=1, seq_length=8, seed=0)[0] == inputs[2]).all())
    True
    """
    _check_request(tokens, batch_size, seq_length)
    if position < 0:
        raise ValueError(
            f"got position={position}; expected 0 or more; count sequences since the start of training"
        )
    starts = [_start(len(tokens), p, seq_length, seed) for p in range(position, position + batch_size)]
    return _read(tokens, starts, seq_length, vocab_size, loss_mask)


def held_out_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    seq_length: int,
    limit: int,
    vocab_size: int | None = None,
    loss_mask: np.ndarray | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """At most `limit` evenly spaced windows, in batches like those of `batch_at`.

    The windows are the same for any `batch_size`, so held-out losses compare across batch sizes. The last batch may
    be smaller: weight losses by rows. Raises what `batch_at` raises.

    >>> [len(x) for x, _ in held_out_batches(np.zeros(100, np.uint8), batch_size=4, seq_length=9, limit=10)]
    [4, 4, 2]
    """
    _check_request(tokens, batch_size, seq_length)
    if limit < 1:
        raise ValueError(f"got limit={limit} windows; expected 1 or more; pass the most to read")
    windows = (len(tokens) - 1) // seq_length
    count = min(limit, windows)
    starts = [index * windows // count * seq_length for index in range(count)]
    chunks = (starts[first : first + batch_size] for first in range(0, count, batch_size))
    return (_read(tokens, chunk, seq_length, vocab_size, loss_mask) for chunk in chunks)


def _check_request(tokens: np.ndarray, batch_size: int, seq_length: int) -> None:
    if batch_size < 1 or seq_length < 1:
        raise ValueError(
            f"got batch_size={batch_size}, seq_length={seq_length}; expected 1 or more of each; "
            "pass positive numbers"
        )
    if len(tokens) <= seq_length:
        raise ValueError(
            f"got {len(tokens):,} tokens for seq_length={seq_length}, expected at least {seq_length + 1:,} (inputs "
            "and targets are one apart): use more data or shorter sequences"
        )


def numbers_at(sequences: int, position: int, batch_size: int, seed: int) -> list[int]:
    """The numbers, below `sequences`, of the `batch_size` sequences from `position` on. An epoch has each once."""
    places = (divmod(p, sequences) for p in range(position, position + batch_size))
    return [_permute(index, sequences, seed, epoch) for epoch, index in places]


def num_windows(num_tokens: int, seq_length: int) -> int:
    """How many sequences `batch_at` makes of so many tokens in one epoch.

    One window fewer than fits (where two do): then every offset leaves room for the same number of windows, and the
    epoch of a position is a plain division.
    """
    return max(1, (num_tokens - seq_length) // seq_length)


def _start(num_tokens: int, position: int, seq_length: int, seed: int) -> int:
    windows = num_windows(num_tokens, seq_length)
    epoch, index = divmod(position, windows)
    room = min(seq_length, num_tokens - windows * seq_length)
    return _draw(seed, epoch) % room + _permute(index, windows, seed, epoch) * seq_length


def _permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Map range(size) onto itself: a Feistel network on a rectangle barely larger, walked until inside."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(_ROUNDS):
            row = (row + _draw(seed, epoch, turn, 0, column)) % rows
            column = (column + _draw(seed, epoch, turn, 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _draw(*key: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def _read(
    tokens: np.ndarray,
    starts: Sequence[int],
    seq_length: int,
    vocab_size: int | None,
    loss_mask: np.ndarray | None,
) -> tuple[Tensor, Tensor]:
    rows = np.array([tokens[start : start + seq_length + 1] for start in starts], np.int64)
    if vocab_size is not None and rows.max() >= vocab_size:
        row, column = np.argwhere(rows >= vocab_size)[0]
        raise ValueError(
            f"got token {rows[row, column]} at position {starts[row] + column:,} of the data, expected tokens "
            f"below {vocab_size:,}: pass the `vocab_size` and the `dtype` that the file was written with"
        )
    block = torch.from_numpy(rows)  # [batch, seq + 1]
    inputs, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
    if loss_mask is not None:
        kept = np.array([loss_mask[start + 1 : start + seq_length + 1] for start in starts])
        # Not in place: of one row, inputs and targets are the same memory.
        targets = targets.masked_fill(torch.from_numpy(kept == 0), IGNORE_INDEX)
    return inputs, targets
