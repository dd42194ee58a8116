"""Ranks compare their step before it begins: the same call, plan, settings, weights and kind of batch."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.engine.program.program import Program, ShapedProgram, on_compute_stream
from zfunc.engine.state.state import State
from zfunc.engine.trace.batches import Batch, Whole, unmarked
from zfunc.engine.trace.traced_values import ByValue
from zfunc.errors import RankError
from zfunc.runtime.torch_dtypes import byte_view

PIECE = 1 << 20  # elements that a checksum widens at a time
ROWS_FIRST, ROWS_EVERY = 3, 100  # so many steps of each so many compare the rows of pipeline stages


def check_ranks_agree(
    program: Program, shaped: ShapedProgram, state: State, batch: Batch, shortage: str
) -> None:
    """Raise RankError, on every rank, unless all ranks are about to make the same step. One small collective.

    Weights that all ranks have are compared by checksum, once after `init` or `load`. A rank that lacks
    memory for the step passes a description, `shortage`, and all ranks raise OutOfMemory.
    """
    ranks = program.ranks
    if shortage:
        ranks.agree("train_step", shortage=shortage)
        return
    facts, weights = _step_facts(program, shaped, state, batch), ""
    if not state.buffers.compared:
        common = (x.flat for b, x in state.buffers.weights.items() if not program.spec.places[b].sharded)
        checksum = _checksum(program, common)
        if not program.spec.mesh.over_ranks or not ranks.same(checksum):  # those of a stage
            weights = f"weights of checksum {checksum}: equal seeds or params make them equal"
    ranks.agree(
        "train_step",
        "what the next step does",
        "\n".join([*facts, shaped.whole.digest, weights]),
        lambda: "\n".join([*facts, *_deciding(batch), shaped.whole.text(), weights]),
    )
    if program.spec.mesh.over_ranks and (
        not state.buffers.compared or state.batches % ROWS_EVERY < ROWS_FIRST
    ):
        _check_rows(program, batch)
    state.buffers.compared = True


def _deciding(batch: Batch) -> list[str]:
    """Sentences for the error that ranks have different plans, about values in `batch` that decide shapes."""
    values = [x.tensor.tolist() for x in tree_leaves(batch) if isinstance(x, ByValue)]
    do = "group rows by these values, and let all ranks take rows of one group in a step"
    return [f"values of the batch that decide shapes, {values!s:.100}: {do}"] if values else []


def _check_rows(program: Program, batch: Batch) -> None:
    """Raise RankError, on every rank, unless rank n of each pipeline stage has the same batch rows."""
    ranks, digest = program.ranks, hashlib.blake2b(digest_size=16)
    leaves = [t.tensor if isinstance(t, ByValue | Whole) else t for t in tree_leaves(batch)]
    for t in (t for t in leaves if isinstance(t, Tensor)):
        digest.update(byte_view(t.detach().cpu()).numpy())
    of_all, world = ranks.texts(digest.hexdigest()), ranks.world
    if apart := [n for n, own in enumerate(of_all) if own != of_all[n % world]]:
        one, other = (ranks.job.members[n] for n in (apart[0], apart[0] % world))
        raise RankError(
            f"train_step: got other rows on rank {one} than on rank {other}, expected the same, because they are "
            "stages of one pipeline: one takes the inputs, the other the targets. Nothing was done. Number data by "
            f"pipelines, on this rank with DistributedSampler(data, num_replicas={world}, rank={ranks.rank}), "
            f"which is its number of all modulo {world}; and draw what is random in them from equal seeds"
        )


def _step_facts(program: Program, shaped: ShapedProgram, state: State, batch: Batch) -> list[str]:
    optimizer, settings, number = program.optimizer, program.settings, state.step + 1
    shapes = [(*t.shape,) for t in tree_leaves(unmarked(batch)) if isinstance(t, Tensor)]
    named = ("micro_batches", "clip_norm", "ema", "precision", "recompute")
    return [
        f"step {state.step}, {state.sequences} sequences, seed {state.seed}, {state.loss_scale}, "
        f"deferred {state.buffers.owner.deferred}",
        f"batch of shapes {shapes}, auxiliary outputs {(*shaped.spec.aux, *shaped.spec.aux_rows)}",
        f"optimizer {type(optimizer).__name__}, {optimizer.factors(number)}, {optimizer.describe()}",
        *(f"{name} {getattr(settings, name)}" for name in named),
    ]


def _checksum(program: Program, params: Iterable[Tensor]) -> int:
    """A checksum of the bits of the flat tensors `params`, each element weighted by its position."""
    total = 0
    with on_compute_stream(program):
        for flat in params:
            bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
            for start in range(0, bits.numel(), PIECE):
                piece = bits[start : start + PIECE].to(torch.int64)
                position = torch.arange(1, piece.numel() + 1, device=piece.device) % 65521
                total = (total * 31 + int((piece * position).sum())) % (1 << 61)
    return total
