"""The batches of a job: which rows a rank reads, and what their tokens weigh where some are not learned.

The invariant: the loss of a batch is the mean over all its tokens that are learned, on however many ranks and in
however many micro-batches; and a batch is a pure function of settings, data and position.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zfunc.models.hf import batch as weighed
from zfunc.models.loss import IGNORE_INDEX
from zfunc.runtime.collectives import RankGroup
from zfunc.train.data.corpus import Corpus, batch_at, held_out_batches
from zfunc.train.settings import TrainSettings

HELD_OUT_TOKENS = 32_768  # that one evaluation reads, at most, but for one sequence that is longer

Batch = tuple[Tensor, Any]  # inputs, and targets or what `zfunc.hf.batch` makes of them


def rank_batch(settings: TrainSettings, corpus: Corpus, position: int, ranks: RankGroup) -> Batch:
    """This rank's rows of the batch at `position`, in sequences since the start."""
    rows = settings.batch_size // ranks.world
    first = ranks.rank * rows
    given: dict[str, Any] = {
        "seq_length": settings.seq_length,
        "seed": settings.seed,
        "vocab_size": corpus.vocab_size,
    }
    if corpus.loss_mask is None:
        return batch_at(corpus.train, position + first, batch_size=rows, **given)
    inputs, labels = batch_at(
        corpus.train, position, batch_size=settings.batch_size, loss_mask=corpus.loss_mask, **given
    )
    mine = slice(first, first + rows)  # weighed by what the batch of all ranks holds
    return weighed(inputs[mine], labels[mine], tokens_per_row=_tokens_per_row([labels]))


def _tokens_per_row(labels: Sequence[Tensor]) -> float:
    """Of all these rows; above 0, so that where nothing is learned loss and gradient are 0."""
    counted = sum(int((x != IGNORE_INDEX).sum()) for x in labels)
    return max(1, counted) / sum(len(x) for x in labels)


def held_out_parts(settings: TrainSettings, corpus: Corpus, ranks: RankGroup) -> tuple[Batch, ...]:
    """The same windows for any batch size, micro-batches and ranks; the last of these batches may be smaller.

    They are as small as a micro-batch: what fits in training has to fit here.
    """
    rows = settings.batch_size // (settings.micro_batches * ranks.world)
    try:
        batches = held_out_batches(
            corpus.held_out,
            batch_size=rows,
            seq_length=settings.seq_length,
            limit=max(1, HELD_OUT_TOKENS // settings.seq_length),
            vocab_size=corpus.vocab_size,
            loss_mask=corpus.held_out_loss_mask,
        )
        found = tuple(batches)
    except ValueError as error:
        raise ValueError(f"the held-out part of {corpus.name}: {error}") from error
    if corpus.held_out_loss_mask is None:
        return found
    if all((labels == IGNORE_INDEX).all() for _, labels in found):
        raise ValueError(
            f"the held-out part of {corpus.name}: got no token that is learned in the windows of "
            f"--seq-length {settings.seq_length}, expected one: give more data"
        )
    per_row = _tokens_per_row([labels for _, labels in found])
    return tuple(weighed(inputs, labels, tokens_per_row=per_row) for inputs, labels in found)
