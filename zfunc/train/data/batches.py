"""The batches of a job: which rows a rank reads, and their weights where the loss of some tokens does not count.

The loss of a batch is the mean over all its tokens that count, on any number of ranks and micro-batches; a batch is
a pure function of settings, data and position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zfunc.models.loss import IGNORE_INDEX, weighted_batch
from zfunc.runtime.collectives import RankGroup
from zfunc.train.data.corpus import Corpus, batch_at, held_out_batches, numbers_at
from zfunc.train.data.document_rows import DocumentRows, document_batch
from zfunc.train.settings import TrainSettings

HELD_OUT_TOKENS = 32_768  # in one evaluation, at most, or one sequence if that is longer
EVAL_DATA_TOKENS = 1 << 20  # the same, of data that is given for it

Batch = tuple[Any, Any]  # inputs, and targets or what `weighted_batch` makes of them


def rank_batch(settings: TrainSettings, corpus: Corpus, position: int, ranks: RankGroup) -> Batch:
    """This rank's rows of the batch at `position`, in sequences since the start."""
    rows = settings.batch_size // ranks.world
    first = ranks.rank * rows
    common: dict[str, Any] = {
        "seq_length": settings.seq_length,
        "seed": settings.seed,
        "vocab_size": corpus.vocab_size,
    }
    with _errors_naming(corpus.name):
        if corpus.rows is not None:
            numbers = numbers_at(len(corpus.rows), position, settings.batch_size, settings.seed)
            inputs, labels = document_batch(corpus.train, corpus.rows, numbers, corpus.loss_mask)
        elif corpus.loss_mask is None:
            return batch_at(corpus.train, position + first, batch_size=rows, **common)
        else:
            inputs, labels = batch_at(
                corpus.train, position, batch_size=settings.batch_size, loss_mask=corpus.loss_mask, **common
            )
    own = slice(first, first + rows)
    inputs = {k: t[own] for k, t in inputs.items()} if isinstance(inputs, dict) else inputs[own]
    return weighted_batch(inputs, labels[own], tokens_per_row=_tokens_per_row([labels]))


@contextmanager
def _errors_naming(data: str) -> Iterator[None]:
    """A context in which a ValueError names the data."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{data}: {error}") from error


def _tokens_per_row(labels: Sequence[Tensor]) -> float:
    """Tokens that count in a row, on average; above 0, so that a batch without any has loss and gradient 0."""
    count = sum(int((x != IGNORE_INDEX).sum()) for x in labels)
    return max(1, count) / sum(len(x) for x in labels)


def held_out_parts(settings: TrainSettings, corpus: Corpus, ranks: RankGroup) -> tuple[Batch, ...]:
    """The held-out windows, the same for any batch size, micro-batches and ranks, in batches of micro-batch size.

    What fits in training fits here. The last batch may be smaller.
    """
    rows = settings.batch_size // (settings.micro_batches * ranks.world)
    name = corpus.held_out_name or f"the held-out part of {corpus.name}"
    most = EVAL_DATA_TOKENS if corpus.held_out_name else HELD_OUT_TOKENS
    limit = max(1, most // settings.seq_length)
    with _errors_naming(name):
        batches: Iterator[Any] = (
            held_out_batches(
                corpus.held_out,
                batch_size=rows,
                seq_length=settings.seq_length,
                limit=limit,
                vocab_size=corpus.vocab_size,
                loss_mask=corpus.held_out_loss_mask,
            )
            if corpus.held_out_rows is None
            else _document_batches(corpus, corpus.held_out_rows, rows, limit)
        )
        windows = tuple(batches)
    if corpus.held_out_loss_mask is None and corpus.held_out_rows is None:
        return windows
    if all((labels == IGNORE_INDEX).all() for _, labels in windows):
        raise ValueError(
            f"{name}: got no label to predict in windows of "
            f"seq_length={settings.seq_length}, expected one at least: use more data"
        )
    per_row = _tokens_per_row([labels for _, labels in windows])
    return tuple(weighted_batch(inputs, labels, tokens_per_row=per_row) for inputs, labels in windows)


def _document_batches(corpus: Corpus, rows: DocumentRows, batch_size: int, limit: int) -> Iterator[Batch]:
    """At most `limit` evenly spaced sequences of held-out documents."""
    count = min(limit, len(rows))
    numbers = [n * len(rows) // count for n in range(count)]
    for first in range(0, count, batch_size):
        some = numbers[first : first + batch_size]
        yield document_batch(corpus.held_out, rows, some, corpus.held_out_loss_mask)
