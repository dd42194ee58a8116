"""Corpora and batches: where tokens come from, in which order they are trained on, and a rank's rows of a batch.

A corpus is a memory map, so the disk bounds its size and not memory. A batch is a pure function of settings, data
and position: nothing is iterated, so a checkpoint needs one integer. Position counts sequences since the start of
training, not steps, so a run resumed with another batch size or number of ranks continues where it stopped. The
loss of a batch is the mean over all its tokens that count, on any number of ranks and micro-batches.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from zfunc.core.display import counted
from zfunc.errors import refuse, setting
from zfunc.models.loss import IGNORE_INDEX, Preferences, weighted_batch
from zfunc.runtime.collectives import RankGroup
from zfunc.train.data.stream import StreamedBatches
from zfunc.train.settings import TrainSettings

Batch = tuple[Any, Any]  # inputs, and targets or what `weighted_batch` makes of them
HELD_OUT_TOKENS = 32_768  # in one evaluation, at most, or one sequence if that is longer
EVAL_DATA_TOKENS = 1 << 20  # the same, of data that is given for it
_CHUNK = 1 << 20  # tokens of the held-out data in which a prompt is looked for
_ROUNDS = 3  # of the Feistel network; each mixes both halves


@frozen(eq=False)
class TokenStream:
    """A memory-mapped stream of tokens. A sequence is a window of the stream, or as many whole documents in
    the order of the data as fit, the rest padding.

    A document longer than a sequence is cut into pieces, each treated as a document, or dropped, or its end is
    kept. Pieces without a label are left out. With the pieces joined together, `bounds` [pieces + 1] are the edges
    between them; `starts` [pieces] are the beginnings of pieces in `tokens`; sequence r has the pieces from
    `firsts[r]` up to `firsts[r + 1]`. The place of a sequence is the position of its window, or its number r.

    >>> stream = TokenStream(np.arange(1000, dtype=np.uint16))
    >>> inputs, targets = stream.read(stream.order(10, 4, seq_length=8, seed=0), seq_length=8)
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([4, 8]), True)
    >>> stream.order(12, 1, seq_length=8, seed=0) == [inputs[2, 0]]
    True
    >>> packed = stream.of_whole_documents(np.array([3, 5, 12, 13]), seq_length=5)  # of 3, 2, 7 and 1 tokens
    >>> packed.bounds.tolist(), packed.firsts.tolist()
    ([0, 3, 5, 10, 12], [0, 2, 3, 4])
    """

    tokens: np.ndarray  # [tokens] uint8, uint16 or uint32
    loss_mask: np.ndarray | None = None  # [tokens]: false where no loss counts; None: true everywhere
    name: str = "the data"  # as errors call it
    bounds: np.ndarray | None = None  # int64, as starts and firsts; None for windows
    starts: np.ndarray | None = None
    firsts: np.ndarray | None = None
    pairs: bool = False  # whether rows are a chosen and a rejected answer in turn, one document each
    reference: np.ndarray | None = (
        None  # [rows] fp32: their log-probabilities under the reference model, if known
    )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weighted(self) -> bool:
        """Whether the stream's sequences may differ in the number of tokens that count in the loss."""
        return not self.pairs and (self.loss_mask is not None or self.firsts is not None)

    @property
    def digest(self) -> str:
        """A hash of the stream's tokens, of its loss mask, and of how documents are cut into sequences."""
        parts = (self.tokens, self.loss_mask, self.bounds, self.starts)
        found = hashlib.blake2b(digest_size=16)
        for part in (x for x in parts if x is not None):
            found.update(np.ascontiguousarray(part).view(np.uint8))
        return found.hexdigest()

    def of_whole_documents(
        self, ends: np.ndarray, seq_length: int, long: str = "cut", pairs: bool = False
    ) -> "TokenStream":
        """A copy of the stream with sequences of whole documents, which end at `ends` [documents], ascending. One
        longer than `seq_length` is treated by `long`: "cut", "drop", "keep-end", or "refuse" (ValueError). With
        `pairs`, a document is a row; "cut" keeps its beginning; a pair is left out if either row has no label."""
        starts = np.concatenate([[0], ends])[:-1].astype(np.int64)
        fits = ends - starts <= seq_length
        if long == "refuse" and not fits.all():
            got = (
                f"{np.count_nonzero(~fits):,} of {counted(len(ends), 'document')} longer than "
                f"{setting('seq_length', seq_length)} (the longest has {(ends - starts).max():,} tokens)"
            )
            refuse(self.name, got, "none", "raise `seq_length`, or let `long_documents` drop or cut them")
        if pairs:
            stops = ends if long == "keep-end" else np.minimum(ends, starts + seq_length)
            starts = np.maximum(starts, ends - seq_length) if long == "keep-end" else starts
            kept = self._labels(starts, stops) > 0
            kept &= fits if long == "drop" else True
            kept = np.repeat(kept.reshape(-1, 2).all(1), 2)
            starts, stops = starts[kept], stops[kept]
            bounds = np.concatenate([[0], np.cumsum(stops - starts)])
            rows = np.arange(len(starts) + 1)
            return evolve(self, bounds=bounds, starts=starts, firsts=rows, pairs=True)
        if long == "drop":
            starts, ends = starts[fits], ends[fits]
        elif long == "keep-end":
            starts = np.maximum(starts, ends - seq_length)
        counts = -(-(ends - starts) // seq_length)  # of pieces
        # The number of each piece in its document, where it begins, and where it ends
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(starts, counts) + number * seq_length
        stops = np.minimum(starts + seq_length, np.repeat(ends, counts)).astype(np.int64)
        learned = self._labels(starts, stops) > 0
        starts, stops = starts[learned], stops[learned]
        bounds = np.concatenate([[0], np.cumsum(stops - starts)])
        # The first piece that no longer fits into a sequence that begins with each
        following = (np.searchsorted(bounds, bounds[:-1] + seq_length, side="right") - 1).tolist()
        firsts = [0]
        while firsts[-1] < len(following):
            firsts.append(following[firsts[-1]])
        return evolve(self, bounds=bounds, starts=starts, firsts=np.array(firsts, np.int64))

    def _labels(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The number of tokens that have a loss in each piece from `starts` to `stops`: never a piece's first."""
        if self.loss_mask is None or not len(starts):
            return stops - starts - 1
        edges = np.stack([starts, stops], axis=1).ravel()[:-1]
        sums = np.add.reduceat(self.loss_mask[: stops[-1]], edges, dtype=np.int64)[::2]
        return sums - self.loss_mask[starts]

    def unlearned(self, seq_length: int) -> int:
        """The number of windows in an epoch without a label, so with nothing to learn; 0 for whole documents."""
        if self.loss_mask is None or self.firsts is not None:
            return 0
        starts = np.arange(self.num_sequences(seq_length)) * seq_length
        return int((self._labels(starts, starts + seq_length + 1) == 0).sum())

    def num_sequences(self, seq_length: int) -> int:
        """The number of sequences in an epoch. Raises ValueError if no window has `seq_length + 1` tokens.

        Where two windows or more fit, one is left out, so that the rest fit at every offset and each epoch
        has the same number of sequences: the epoch of a sequence is its number divided by this one.
        """
        if self.firsts is not None:
            return len(self.firsts) - 1
        if len(self) <= seq_length:
            got = f"{counted(len(self), 'token')} for {setting('seq_length', seq_length)}"
            expected = f"at least {seq_length + 1:,} (inputs and targets are one apart)"
            refuse(self.name, got, expected, "use more data or shorter sequences")
        return max(1, (len(self) - seq_length) // seq_length)

    def order(self, position: int, count: int, *, seq_length: int, seed: int) -> list[int]:
        """The places of `count` sequences from `position` on, which counts sequences since the start of training.

        An epoch visits each sequence once; each epoch has its own order, and its own offset of the windows. Raises
        ValueError for too few tokens."""
        total, places = self.num_sequences(seq_length), list[int]()
        if self.pairs:
            total //= 2
            for p in range(position, position + count):
                epoch, index = divmod(p // 2, total)
                places.append(2 * permute(index, total, seed, epoch) + p % 2)
            return places
        for epoch, index in (divmod(p, total) for p in range(position, position + count)):
            place = permute(index, total, seed, epoch)
            if self.firsts is None:
                room = min(seq_length, len(self) - total * seq_length)
                place = _draw(seed, epoch) % room + place * seq_length
            places.append(place)
        return places

    def spread(self, limit: int, *, seq_length: int) -> list[int]:
        """The places of up to `limit` sequences, evenly spaced. Raises ValueError if the stream is too short."""
        total, unit = self.num_sequences(seq_length), 1
        if self.firsts is None:
            total, unit = (len(self) - 1) // seq_length, seq_length
        if self.pairs:
            total //= 2
            count = min(max(1, limit // 2), total)
            return [2 * (n * total // count) + k for n in range(count) for k in (0, 1)]
        count = min(limit, total)
        return [n * total // count * unit for n in range(count)]

    def read(
        self, places: Sequence[int], *, seq_length: int, vocab_size: int | None = None
    ) -> tuple[Any, Tensor]:
        """Inputs and labels of the sequences at `places`, int64 [sequences, seq]; -100 where no loss counts.

        Inputs of whole documents have `position_ids` too, which start at 0 in each. Raises ValueError for a token
        of `vocab_size` or more."""
        if self.bounds is not None and self.starts is not None and self.firsts is not None:
            return self._documents(places, seq_length, self.bounds, self.starts, self.firsts)
        rows = np.array([self.tokens[start : start + seq_length + 1] for start in places], np.int64)
        if vocab_size is not None and rows.max() >= vocab_size:
            row, column = np.argwhere(rows >= vocab_size)[0]
            got = f"token {rows[row, column]} at position {places[row] + column:,} of it"
            do = "pass the `vocab_size` and the `dtype` that the file was written with"
            refuse(self.name, got, f"tokens below {vocab_size:,}", do)
        block = torch.from_numpy(rows)  # [batch, seq + 1]
        inputs, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        if self.loss_mask is not None:
            kept = np.array([self.loss_mask[start + 1 : start + seq_length + 1] for start in places])
            # Not in place: of one row, inputs and targets are the same memory.
            targets = targets.masked_fill(torch.from_numpy(kept == 0), IGNORE_INDEX)
        return inputs, targets

    def _documents(
        self,
        numbers: Sequence[int],
        seq_length: int,
        bounds: np.ndarray,
        starts: np.ndarray,
        firsts: np.ndarray,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and labels of whole-document sequences `numbers`, arrays as in TokenStream; no label crosses
        from one document to the next."""
        shape = (len(numbers), seq_length)
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions = np.zeros(shape, np.int64)
        for n, row in enumerate(numbers):
            pieces = slice(firsts[row], firsts[row + 1])  # of this sequence
            own = np.append(bounds[pieces], bounds[pieces.stop])
            first, size = own[0], own[-1] - own[0]
            at = np.arange(first, own[-1]) + np.repeat(starts[pieces] - own[:-1], np.diff(own))
            ids[n, :size] = self.tokens[at]
            labels[n, : size - 1] = ids[n, 1:size]
            if self.loss_mask is not None:
                labels[n, : size - 1][self.loss_mask[at[1:]] == 0] = IGNORE_INDEX
            labels[n, own[1:] - first - 1] = IGNORE_INDEX
            lengths = np.append(np.diff(own), seq_length - size)  # the padding is like another document
            begins = np.append(own - first, size)[: len(lengths)]
            positions[n] = np.arange(seq_length) - np.repeat(begins, lengths)
        if self.pairs:  # padding follows, which no token attends to
            return torch.from_numpy(ids), torch.from_numpy(labels)
        inputs = {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions)}
        return inputs, torch.from_numpy(labels)

    def first_prompt(self, seq_length: int) -> list[int]:
        """Tokens for a sample to continue: the first prompt of the data, at most three quarters of a sequence;
        without prompts in the data, its first tokens.
        """
        mask = np.ones(1, bool) if self.loss_mask is None else self.loss_mask[:_CHUNK] != 0
        if mask.all() or not mask.any():
            return self.tokens[: (seq_length + 1) // 2].tolist()
        start = int(mask.argmin())
        end = start + (int(mask[start:].argmax()) or len(mask) - start)
        return self.tokens[max(start, end - 3 * seq_length // 4) : end].tolist()


def permute(index: int, size: int, *key: int) -> int:
    """The image of `index` in a permutation of range(`size`) drawn by `key` (a cycle-walking Feistel
    network)."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(_ROUNDS):
            row = (row + _draw(*key, turn, 0, column)) % rows
            column = (column + _draw(*key, turn, 1, row)) % columns
        index = row * columns + column
        if index < size:
            return index


def _draw(*key: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


# --- a corpus ---------------------------------------------------------------------------------------------


@frozen(eq=False)
class Corpus:
    """Tokens to train on and held-out tokens of some data, and a description of what was read."""

    name: str
    train: TokenStream
    held_out: TokenStream
    vocab_size: int
    description: tuple[str, ...]  # lines for the log: counts, what is held out and how, what is left out
    held_out_tokens: int = HELD_OUT_TOKENS  # of an evaluation, at most
    stream: StreamedBatches | None = None  # of tokens that are trained on as they are read

    def __str__(self) -> str:
        return "\n".join(self.description)

    @property
    def unit(self) -> str:
        """The word for one token of this corpus: "byte" or "token"."""
        return "byte" if self.train.tokens.dtype.itemsize == 1 else "token"

    def evaluated_on(self, other: "Corpus") -> "Corpus":
        """This corpus, with the tokens of `other` (of its held-out split, if it has one) as held-out tokens."""
        if self.unit != other.unit:
            got = f"{other.name}, which is read as {other.unit}s, with `data` that is {self.unit}s"
            refuse("eval_data", got, "the same of both", "give both as text, or both as tokens")
        return evolve(
            self,
            held_out=evolve(other.held_out if len(other.held_out) else other.train, name=other.name),
            held_out_tokens=EVAL_DATA_TOKENS,
            description=(*self.description, "held out:", *(f"  {line}" for line in other.description)),
        )


def two_streams(
    name: str, tokens: Iterable[np.ndarray], masks: Iterable[Any] = (None, None)
) -> list[TokenStream]:
    """The TokenStreams of training and of held-out `tokens`, each with its loss mask, named after `name`."""
    names = (name, f"the held-out part of {name}")
    return [TokenStream(*part) for part in zip(tokens, masks, names, strict=True)]


def rank_batch(settings: TrainSettings, corpus: Corpus, position: int, ranks: RankGroup) -> Batch:
    """The rows of the batch at `position` (sequences since the start of training) that this rank trains on."""
    stream, rows = corpus.train, settings.batch_size // ranks.world
    own = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    if corpus.stream is not None:
        inputs, labels = corpus.stream.at(position)
        return weighted_batch(inputs[own], labels[own], tokens_per_row=_tokens_per_row([labels]))
    # Weights are relative to the whole batch, which every rank reads for them.
    first, count = (0, settings.batch_size) if stream.weighted else (own.start, rows)
    places = stream.order(position + first, count, seq_length=settings.seq_length, seed=settings.seed)
    inputs, labels = stream.read(places, seq_length=settings.seq_length, vocab_size=corpus.vocab_size)
    if stream.pairs:
        return inputs, preferences(settings, stream, places, labels)
    if not stream.weighted:
        return inputs, labels
    inputs = {k: t[own] for k, t in inputs.items()} if isinstance(inputs, dict) else inputs[own]
    return weighted_batch(inputs, labels[own], tokens_per_row=_tokens_per_row([labels]))


def preferences(
    settings: TrainSettings, stream: TokenStream, places: Sequence[int], labels: Tensor
) -> Preferences:
    """The DPO targets of the rows `places` of a stream of pairs; unknown reference log-probabilities are zeros."""
    known = np.zeros(len(places), np.float32) if stream.reference is None else stream.reference[places]
    return Preferences(labels, torch.from_numpy(known), settings.beta, settings.dpo_type == "ipo")


def held_out_parts(settings: TrainSettings, corpus: Corpus, ranks: RankGroup) -> tuple[Batch, ...]:
    """The held-out sequences of an evaluation as batches of one micro-batch each, the same sequences for any
    batch size, micro-batches and ranks.

    So an evaluation fits in memory where training does. The last batch may be smaller: losses are weighted by rows.
    """
    stream, rows = corpus.held_out, settings.batch_size // (settings.micro_batches * ranks.world)
    sizes, places = {"seq_length": settings.seq_length}, held_out_places(settings, corpus)
    parts = tuple(
        stream.read(places[n : n + rows], vocab_size=corpus.vocab_size, **sizes)
        for n in range(0, len(places), rows)
    )
    if stream.pairs:
        if not parts:
            got = "no preference that can be held out"
            refuse(stream.name, got, "one at least", "use more data, or pass `eval_data`")
        starts = range(0, len(places), rows)
        return tuple(
            (x, preferences(settings, stream, places[n : n + rows], y))
            for n, (x, y) in zip(starts, parts, strict=True)
        )
    if not stream.weighted:
        return parts
    if all((labels == IGNORE_INDEX).all() for _, labels in parts):
        got = f"no label to predict in windows of {setting('seq_length', settings.seq_length)}"
        refuse(stream.name, got, "one at least", "use more data")
    per_row = _tokens_per_row([labels for _, labels in parts])
    return tuple(weighted_batch(inputs, labels, tokens_per_row=per_row) for inputs, labels in parts)


def held_out_places(settings: TrainSettings, corpus: Corpus) -> list[int]:
    """The places in the held-out stream of the sequences that an evaluation reads."""
    most = max(1, corpus.held_out_tokens // settings.seq_length)
    return corpus.held_out.spread(most, seq_length=settings.seq_length)


def _tokens_per_row(labels: Sequence[Tensor]) -> float:
    """Mean count of labels per row of `labels`; infinite if there is no label, so that no row weighs anything."""
    count = sum(int((x != IGNORE_INDEX).sum()) for x in labels)
    return count / sum(len(x) for x in labels) or math.inf


def without_labels(batch: Batch) -> bool:
    """Whether `batch` has no label in the rows of any rank: its weights, set from all ranks' rows, are all 0."""
    weighted = isinstance(batch[1], tuple) and not isinstance(batch[1], Preferences)
    return weighted and not batch[1][1].any()
