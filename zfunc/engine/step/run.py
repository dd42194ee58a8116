"""What a call on a State begins with, and running a plan on the State's memory."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region
from zfunc.engine.program.program import Program, ShapedProgram, check_owner, staging_buffers, warn_once
from zfunc.engine.stages.stage_context import StepContext
from zfunc.engine.state.state import State
from zfunc.engine.step.release import take_back
from zfunc.errors import NonFiniteError
from zfunc.runtime.executor import RunOptions, StepRun
from zfunc.runtime.rng import fold_seed, seeded

NO_UPDATE = StepDecision(skip=True, grad_scale=1.0, number=0, factors={})


def check_state(program: Any, state: Any, action: str) -> None:
    """Raise TypeError, ValueError or DonatedStateError, for the call `action`, unless `program` may use `state`.

    A released State is brought back to the device; if it does not fit, OutOfMemory is raised and it stays released.
    """
    check_owner(program, state, action)
    if state.buffers.released or program.cache.released or not program.cache.constants:
        take_back(program, state, action)


def run_on_state(
    program: Program,
    shaped: ShapedProgram,
    state: State,
    number: int,
    regions: Mapping[Region, Any],
    options: RunOptions,
    name: str,
    *,
    donated: bool = True,
) -> tuple[StepRun, dict[Region, Any]]:
    """Run a plan, that of update `number`, on the memory of `state` and of the step's own `regions`. The memory
    is donated to the next State, or changed in place unless `donated`. If it fails, other ranks are told.
    Returns the run, and all regions with what the plan wrote."""
    step, mem = prepare_step(program, shaped, state, number, debug=options.debug)
    mem |= regions
    owner, ops = state.buffers.owner, shaped.plan.graph.ops
    try:
        with owner.running(
            name, ops, defers=shaped.spec.deferred, donated=donated, resume_hint=resume_hint(program)
        ) as started:
            return program.executor.run(shaped.prepared, mem, step, options, started), mem
    except NonFiniteError:  # raised by `decide` on all ranks alike, with no collective under way
        raise
    except BaseException as error:
        program.ranks.leave(f"{name} failed with {type(error).__name__}: {error}")
        raise


def resume_hint(program: Program) -> str:
    """Advice on how to resume training, for the message of an error after which a State is lost."""
    if program.spec.swaps:
        return f"Go on from the last commit, with load({str(program.settings.swap[0])!r}, program)"
    return "Go on from an earlier copy of the parameters, with init(program, params=...)"


def prepare_step(
    program: Program, shaped: ShapedProgram, state: State, number: int, *, debug: bool = False
) -> tuple[StepContext, dict[Region, Any]]:
    """What the step that makes update `number` starts from: its constants, and memory by region (the State's,
    the program's staging buffers, the decision of the step before). With `debug`, buffers are checked in
    every update."""
    ranks, owner, settings = program.ranks, state.buffers.owner, program.settings
    cuts_batch = settings.micro_batches * ranks.world > 1 and settings.tiles == 1

    def randomness(m: int, s: int) -> AbstractContextManager[None]:
        if s not in shaped.random:
            return nullcontext()
        rank = (ranks.rank,) if ranks.rank else ()
        return seeded(fold_seed(state.seed, state.batches, m, s, *rank))

    context = StepContext(
        spec=shaped.spec,
        calls=program.calls,
        constants=program.cache.constants,
        optimizer=program.optimizer,
        number=number,
        factors=program.optimizer.factors(number),
        loss_scale=state.loss_scale.scale,
        dtype=program.dtype,
        devices=program.devices,
        randomness=randomness,
        ranks=ranks,
        shards=program.shards,
        updated=owner.updated,
        averaged=owner.averaged,
        patience=program.executor.patience,
        warn=partial(warn_once, program) if cuts_batch and not program.cache.compared_loss else None,
        # In debug mode buffers are checked in each step.
        prepared={} if debug else program.cache.prepared.setdefault(state.buffers, {}),
    )
    if state.buffers.on_disk:  # what a call since the last step has read from there
        state.buffers.close()
    decision = Region("decision")
    return context, {
        **staging_buffers(program, shaped),
        **state.buffers.memory,
        decision: owner.deferred or NO_UPDATE,
    }
