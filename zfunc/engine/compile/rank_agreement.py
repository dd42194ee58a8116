"""Ranks compare their step before it begins: either all have one plan, equal shapes and weights, or all raise."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.engine.compile.program import Program, ShapedProgram, on_compute_stream
from zfunc.engine.state.state import State
from zfunc.engine.step.batches import Batch

PIECE = 1 << 20  # elements that the checksum widens at a time


def check_ranks_agree(
    program: Program, shaped: ShapedProgram, state: State, batch: Batch, shortage: str = ""
) -> None:
    """Raise RankError, on every rank, unless all are about to make the same step. One small collective.

    The weights that every rank has are compared by checksum, once after `init` or `load`. If one has not enough
    memory for the step, which it says in `shortage`, all raise OutOfMemory.
    """
    ranks = program.ranks
    if ranks.world == 1 or shortage:
        ranks.agree("train_step", shortage=shortage)
        return
    facts, weights = _step_facts(program, shaped, state, batch), ""
    if not state.buffers.compared:
        common = (x.flat for b, x in state.buffers.weights.items() if not program.spec.sharded(b))
        checksum = _checksum(program, common)
        weights = f"weights of checksum {checksum}: equal seeds or params make them equal"
    ranks.agree(
        "train_step",
        "what the next step does",
        "\n".join([*facts, shaped.plan.digest, weights]),
        lambda: "\n".join([*facts, shaped.plan.text(), weights]),
    )
    state.buffers.compared = True


def _step_facts(program: Program, shaped: ShapedProgram, state: State, batch: Batch) -> list[str]:
    optimizer, number = program.optimizer, state.step + 1
    shapes = [(*t.shape,) for t in tree_leaves(batch) if isinstance(t, Tensor)]
    return [
        f"step {state.step}, {state.sequences} sequences, seed {state.seed}, {state.loss_scale}, "
        f"deferred {state.buffers.owner.deferred}",
        f"batch of shapes {shapes}, {program.settings.micro_batches} micro-batches",
        f"optimizer {type(optimizer).__name__}, {optimizer.factors(number)}, {optimizer.describe()}",
        f"clip_norm {program.settings.clip_norm}",
        f"ema {program.settings.ema}, sync_buffers {program.settings.sync_buffers}",
        f"auxiliary outputs {shaped.spec.aux}",
        f"precision {program.settings.precision}, recompute {program.settings.recompute}",
    ]


def _checksum(program: Program, params: Iterable[Tensor]) -> int:
    """A checksum of the bits of these parameters, weighted by position."""
    total = 0
    with on_compute_stream(program):
        for flat in params:
            bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
            for start in range(0, bits.numel(), PIECE):
                piece = bits[start : start + PIECE].to(torch.int64)
                position = torch.arange(1, piece.numel() + 1, device=piece.device) % 65521
                total = (total * 31 + int((piece * position).sum())) % (1 << 61)
    return total
