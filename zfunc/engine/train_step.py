"""`train_step`, and `flush` after the last of those that are delayed: from a State to the next.

The invariant: `train_step` is a function of (program, state, batch). Randomness comes from the state's seed and
the place it is used at; a step that raises before its first update leaves the state as it was.
"""

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attrs import evolve, frozen
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zfunc.checkpoint.writer import Save, SaveResult
from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region, Tier
from zfunc.core.plan import Plan
from zfunc.core.recipes import Recipe, delayed, flush_recipe, steadily_delayed, zero_offload
from zfunc.core.timeline import Timeline
from zfunc.engine.program import (
    Program,
    ShapedProgram,
    check_memory,
    check_state,
    lock_staging,
    specialize,
    specialize_without_batch,
    split_batch,
    staging_buffers,
)
from zfunc.engine.rank_agreement import check_ranks_agree
from zfunc.engine.save_load import begin_save
from zfunc.engine.stage_context import StepContext
from zfunc.engine.state import Buffers, State, refuse_inference_mode
from zfunc.errors import LaneTimeout, NonFiniteError
from zfunc.optim.loss_scale import UNHARMED, LossScale
from zfunc.runtime.executor import Jitter, RunOptions
from zfunc.runtime.fault_injection import Fault, check_faults, faults_at
from zfunc.runtime.rng import fold_seed, seeded
from zfunc.values import of_type, truth


@frozen
class Metrics:
    """What one step reports.

    The mean `loss`; `grad_norm` before clipping, unscaled; the `lr` used; the number of the `step`, from 1; whether
    it was `skipped` for an overflow, at which `loss_scale`. `seconds` in all, of which `host_seconds` in host
    operations; `sent_bytes` to other ranks (see `zfunc.runtime.collectives`). `redone` counts buckets whose
    speculated update was made again, because the gradient was clipped. `timeline` and the `plan` it is of only with
    `trace=True`, and `saved`, the checkpoint or why there is none, only with `save=`.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float
    step: int
    seconds: float
    host_seconds: float
    sent_bytes: int = 0
    redone: int = 0
    timeline: Timeline | None = None
    plan: Plan | None = None
    saved: SaveResult | None = None


def train_step(
    program: Program,
    state: State,
    batch: tuple[Any, Any],
    *,
    trace: bool = False,
    debug: bool = False,
    jitter: Jitter | None = None,
    save: Save | str | os.PathLike[str] | None = None,
    faults: Sequence[Fault] = (),
) -> tuple[State, Metrics]:
    """One step on `batch = (inputs, targets)`. Returns the next State, and what happened; `state` is donated.

    Every tensor's first dimension is split into `micro_batches` equal parts; the gradient is the mean over all
    of it. `trace` times every operation; `debug` hands each stage only the regions it declared; `jitter`
    delays every operation at random. `save` is a folder, or a `Save`, for a checkpoint of `state`, the one before
    this step: it is written while the step goes on, and complete when it returns. What the disk refuses then is
    told in the metrics; a folder that cannot be written at all is a CheckpointError before anything is done.
    `faults` are failures on purpose; those of this rank and step happen (see `zfunc.runtime.fault_injection`).

    Raises ValueError for a batch that cannot be split or run, DonatedStateError for a used state,
    NonFiniteError for a non-finite loss or gradient without loss scaling, ExecutionError if a stage fails.
    Where nothing had been updated, `state` can be used again: always for a loss, for a gradient if clipping
    makes the updates wait for its norm. With delayed updates the one before has been made by then; the error's
    `state` is the one to go on from.

    >>> import torch, zfunc
    >>> class Loss(torch.nn.Linear):
    ...     def forward(self, x, targets):
    ...         return torch.nn.functional.mse_loss(super().forward(x), targets)
    >>> program = zfunc.compile([zfunc.segment("loss", Loss(4, 1))], precision="fp32", device="cpu")
    >>> batch = torch.ones(2, 4), torch.ones(2, 1)
    >>> state, metrics = zfunc.train_step(program, zfunc.init(program), batch)
    >>> metrics.step, zfunc.evaluate(program, state, batch) < metrics.loss
    (1, True)
    """
    refuse_inference_mode("train_step")
    check_state(program, state, "train_step")
    truth("train_step: trace", trace)
    truth("train_step: debug", debug)
    of_type(
        "train_step: jitter", jitter, Jitter | None, "a zfunc.Jitter or None: pass zfunc.Jitter(seed=...)"
    )
    of_type(
        "train_step: faults",
        faults,
        Sequence,
        "a list of zfunc.runtime.fault_injection.Fault: pass [Fault(...), ...]",
    )
    faults = tuple(faults)
    for fault in faults:
        of_type(
            "train_step: faults",
            fault,
            Fault,
            "a zfunc.runtime.fault_injection.Fault: pass Fault(rank=..., step=..., ...)",
        )
    refusal = (
        "got a program that is in a step already, expected one step at a time: its staging "
        "buffers are shared. Compile a second program for a second thread"
    )
    with lock_staging(program, "train_step", refusal):
        return _train_step(program, state, batch, RunOptions(jitter, debug, trace, faults), _save(save))


def _train_step(
    program: Program, state: State, batch: tuple[Any, Any], options: RunOptions, save: Save | None
) -> tuple[State, Metrics]:
    number = state.step + 1
    special = specialize(program, batch, save=save is not None, recipe=_recipe(program, state))
    options = _checked(program, special, state, batch, options)
    buffers = state.buffers
    step = _step(program, special, state, number)
    mem = _memory(program, state, split_batch(batch, program.settings.micro_batches))
    saving = None if save is None else begin_save(program, state, save)
    mem[Region("checkpoint")] = saving
    buffers.generation += 1
    buffers.lost = f"step {number} did not finish"  # until it has
    started: set[int] = set()
    sent = program.ranks.sent
    try:
        ran = program.executor.run(special.prepared, mem, step, options, started)
    except BaseException as error:
        _settle(special, buffers, started, number, error)
        _leave(program, state, batch, error)
        raise
    finally:
        if saving is not None:
            saving.abandon()  # unless it is published
    buffers.lost = ""
    buffers.settle(mem)
    decision: StepDecision = mem[Region("decision")]
    norm: float = mem[Region("norm")]
    if not math.isfinite(norm) and not decision.skip:
        raise _seen_too_late(buffers, number, norm, decision.loss)
    scale = _next_scale(program, state, batch, decision)
    after = evolve(
        state,
        generation=buffers.generation,
        step=state.step if decision.skip else number,
        batches=state.batches + 1,
        sequences=state.sequences + _rows(batch) * program.ranks.world,
        loss_scale=scale,
        pending=decision if _delays(program, state) else None,
    )
    clipped_nothing = decision.grad_scale == 1 / step.loss_scale
    metrics = Metrics(
        loss=decision.loss,
        grad_norm=norm,
        lr=step.factors["lr"],
        skipped=decision.skip,
        loss_scale=state.loss_scale.scale,
        step=number,
        seconds=ran.seconds,
        host_seconds=ran.host_seconds,
        sent_bytes=program.ranks.sent - sent,
        redone=0 if decision.skip or clipped_nothing else len(special.spec.shadowed),
        timeline=ran.timeline if options.trace else None,
        plan=special.plan if options.trace else None,
        saved=mem.get(Region("published")),
    )
    return after, metrics


def _checked(
    program: Program, special: ShapedProgram, state: State, batch: tuple[Any, Any], options: RunOptions
) -> RunOptions:
    """The options of this rank's step, for which there is room, and which all ranks are about to make."""
    number = state.step + 1
    check_faults(
        (f for f in options.faults if f.step == number), special.plan
    )  # of all ranks: they refuse together
    held: dict[Tier, int] = {tier: peak.kept for tier, peak in special.memory.items()}
    check_memory(program, special.memory, held=held, action="train_step")
    check_ranks_agree(program, special, state, batch)
    watch = program.ranks.watch if program.ranks.world > 1 else None
    return evolve(options, faults=faults_at(options.faults, program.ranks.rank, number), watch=watch)


def _leave(program: Program, state: State, batch: tuple[Any, Any], error: BaseException) -> None:
    """After a failed step: tell the other ranks, unless all of them have failed alike and may go on together."""
    refused = isinstance(error, NonFiniteError)
    if refused and state.pending is not None:  # told by `decide`, after all else
        state.buffers.lost = ""
        error.state = _dropped(state, state.buffers, batch, program)
    if not refused:  # at the decision no collective is under way
        program.ranks.leave(f"step {state.step + 1} failed with {type(error).__name__}: {error}")


def _seen_too_late(buffers: Buffers, number: int, norm: float, loss: float) -> NonFiniteError:
    buffers.lost = f"step {number} had a gradient norm of {norm}, seen only after the updates"
    return NonFiniteError(
        f"step {number}: got a gradient norm of {norm} with a loss of {loss}, expected finite numbers; "
        "without clipping the updates do not wait for the norm, so this state is gone. Go on from an "
        "earlier copy of the parameters, with clip_norm: then such a step is refused unharmed"
    )


def _next_scale(program: Program, state: State, batch: tuple[Any, Any], decision: StepDecision) -> LossScale:
    """The loss scale after this step. Raises NonFiniteError where an overflow has no lower one to go to."""
    try:
        return state.loss_scale.update(overflow=decision.skip)
    except NonFiniteError as error:
        if state.pending is None:
            state.buffers.generation -= 1  # the step was skipped, so the state is what it was
        else:
            error.state = _dropped(state, state.buffers, batch, program)
            made = str(error).replace(UNHARMED, "with the delayed update made, go on from its .state")
            error.args = (made,)
        raise


def flush(program: Program, state: State) -> State:
    """Apply the gradient that waits, at the end of delayed updates; a state without one is returned as it is.

    `state` is donated. With several ranks all of them have to call this. Training can go on from what is returned:
    the next step finds no gradient that waits.
    """
    refuse_inference_mode("flush")
    check_state(program, state, "flush")
    if state.pending is None:
        return state
    with lock_staging(
        program, "flush", "got a program that is in a step, expected none: call it after the step"
    ):
        program.ranks.agree("flush", "what is to be applied", f"step {state.step}, {state.pending}")
        special = specialize_without_batch(program, flush_recipe, pending=True)
        started: set[int] = set()
        mem, buffers = _memory(program, state, []), state.buffers
        buffers.generation += 1
        try:
            step = _step(program, special, state, state.pending.number)
            program.executor.run(special.prepared, mem, step, RunOptions(), started)
        except BaseException as error:
            _settle(special, buffers, started, state.step, error, what="flush after step")
            program.ranks.leave(f"flush failed with {type(error).__name__}: {error}")
            raise
        return evolve(state, generation=buffers.generation, pending=None)


def _step(program: Program, special: ShapedProgram, state: State, number: int) -> StepContext:
    def randomness(m: int, s: int) -> AbstractContextManager[None]:
        if s not in special.random:
            return nullcontext()
        rank = (ranks.rank,) if ranks.rank else ()
        return seeded(fold_seed(state.seed, state.batches, m, s, *rank))

    ranks = program.ranks

    return StepContext(
        layout=program.layout,
        calls=program.calls,
        optimizer=program.optimizer,
        number=number,
        factors=program.optimizer.factors(number),
        loss_scale=state.loss_scale.scale,
        clip_norm=program.settings.clip_norm,
        skip_overflow=program.settings.precision == "fp16",
        micro_batches=program.settings.micro_batches,
        dtype=program.dtype,
        device=program.device,
        randomness=randomness,
        ranks=ranks,
        applies_pending=state.pending is not None,
        patience=program.executor.patience,
    )


def _dropped(state: State, buffers: Buffers, batch: tuple[Any, Any], program: Program) -> State:
    """After a delayed step whose own gradient is not finite: the update before it is made, and nothing waits."""
    return evolve(
        state,
        generation=buffers.generation,
        batches=state.batches + 1,
        sequences=state.sequences + _rows(batch) * program.ranks.world,
        pending=None,
    )


def _delays(program: Program, state: State) -> bool:
    """Whether the next step's gradient waits for the step after it; once some do, all do."""
    if not program.spec.offloaded:
        return False
    begun = program.settings.delay_from is not None and state.step + 1 >= program.settings.delay_from
    return begun or state.pending is not None


def _recipe(program: Program, state: State) -> Recipe:
    if not _delays(program, state):
        return (
            program.recipe
            if program.settings.delay_from is None or not program.spec.offloaded
            else zero_offload
        )
    return delayed if state.pending is None else steadily_delayed


def _memory(program: Program, state: State, micro: list[tuple[Any, Any]]) -> dict[Region, Any]:
    """Where every kept region is: views of the state's buffers, the program's staging, the batch."""
    mem = {
        **staging_buffers(program),
        **state.buffers.memory,
        Region("decision"): state.pending,
    }
    for m, part in enumerate(micro):
        mem[Region("batch", (m,))] = part
    return mem


def _settle(
    special: ShapedProgram,
    buffers: Buffers,
    started: set[int],
    number: int,
    error: BaseException,
    what: str = "step",
) -> None:
    """After a failed step: the state is as it was if no operation that writes it had started; else it is lost."""
    ops = special.plan.graph.ops
    if isinstance(error, LaneTimeout):
        buffers.lost = f"{what} {number} was given up while a lane was still busy ({error})"
        return
    touched = sorted(i for i in started if any(r.trained for r in ops[i].writes))
    if touched:
        buffers.lost = (
            f"{what} {number} failed after {ops[touched[0]].name} had begun to update it ({type(error).__name__}: "
            f"{error}). Go on from an earlier copy of the parameters, with init(program, params=...)"
        )
    else:
        buffers.generation -= 1
        buffers.lost = ""


def _save(save: Save | str | os.PathLike[str] | None) -> Save | None:
    return save if save is None or isinstance(save, Save) else Save(save)


def _rows(batch: tuple[Any, Any]) -> int:
    return next(t.shape[0] for t in tree_leaves(batch) if isinstance(t, Tensor))
