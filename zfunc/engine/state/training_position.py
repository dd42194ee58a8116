"""What a checkpoint says of a State beside its bytes: its counters, and the optimizer's settings."""

from collections.abc import Mapping
from typing import Any

from zfunc.checkpoint.manifest import TrainingPosition
from zfunc.checkpoint.strict_json import to_plain
from zfunc.engine.compile.program import Program
from zfunc.engine.state.state import Buffers, State
from zfunc.optim.loss_scale import UNSCALED, LossScale


def position_of(state: State) -> TrainingPosition:
    """The counters of a State."""
    return TrainingPosition(state.step, state.batches, state.sequences, state.seed, state.loss_scale)


def state_at(
    position: TrainingPosition, saved: Mapping[str, Any], buffers: Buffers, program: Program
) -> State:
    """The State that was at this position, with these saved `optimizer_settings`.

    An update that is pending there, of the delayed updates of earlier versions, is a deferred one here.
    """
    buffers.owner.deferred = position.pending
    scale, scaled = position.loss_scale, program.settings.precision == "fp16"
    if scaled != (saved.get("precision") == "fp16"):
        scale = LossScale() if scaled else UNSCALED
    return State(
        buffers,
        program.identity,
        buffers.owner.generation,
        step=position.step,
        batches=position.batches,
        sequences=position.sequences,
        loss_scale=scale,
        seed=position.seed,
    )


def optimizer_settings(program: Program, step: int) -> dict[str, Any]:
    """The optimizer's settings, in JSON's own types, with the factors of the last update, or of the first."""
    optimizer, update = program.optimizer, max(1, step)
    return {
        **to_plain(optimizer.factors(update)),
        **optimizer.describe(),
        "clip_norm": program.settings.clip_norm,
        "precision": program.settings.precision,
        "micro_batches": program.settings.micro_batches,
    }
