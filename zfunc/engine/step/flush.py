"""Running a plan on a State, and making the update that the last step deferred.

A State counts a deferred update as made already: the next step, or a call that reads the State before, makes it.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from zfunc.checkpoint.strict_json import to_plain
from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region
from zfunc.core.recipes import flush_recipe
from zfunc.engine.program.program import Program, ShapedProgram, lock_staging, staging_buffers, warn_once
from zfunc.engine.program.specialize import specialize_without_batch
from zfunc.engine.stages.stage_context import StepContext
from zfunc.engine.state.state import State
from zfunc.engine.step.release import check_state
from zfunc.engine.step.swap_state import commit_again
from zfunc.engine.trace.thread_modes import refuse_global_modes, refuse_inference_mode
from zfunc.errors import NonFiniteError
from zfunc.runtime.executor import RunOptions, StepRun
from zfunc.runtime.rng import fold_seed, seeded

NO_UPDATE = StepDecision(skip=True, grad_scale=1.0, number=0, factors={})


def run_on_state(
    program: Program,
    shaped: ShapedProgram,
    state: State,
    number: int,
    own: Mapping[Region, Any],
    options: RunOptions,
    name: str,
    *,
    donated: bool = True,
) -> tuple[StepRun, dict[Region, Any]]:
    """Run a plan, that of update `number`, on the memory of `state` and the step's `own` regions. The memory
    is donated to the next State, or changed in place unless `donated`. If it fails, other ranks are told.
    Returns the run, and all regions with what the plan wrote."""
    step, mem = step_on(program, shaped, state, number, debug=options.debug)
    mem |= own
    owner, ops = state.buffers.owner, shaped.plan.graph.ops
    try:
        with owner.running(
            name, ops, defers=shaped.spec.deferred, donated=donated, way_on=way_on(program)
        ) as started:
            return program.executor.run(shaped.prepared, mem, step, options, started), mem
    except NonFiniteError:  # raised by `decide` on all ranks alike, with no collective under way
        raise
    except BaseException as error:
        program.ranks.leave(f"{name} failed with {type(error).__name__}: {error}")
        raise


def way_on(program: Program) -> str:
    """Advice on how to resume training, for the message of an error after which a State is lost."""
    if program.spec.swaps:
        return f"Go on from the last commit, with load({str(program.settings.swap[0])!r}, program)"
    return "Go on from an earlier copy of the parameters, with init(program, params=...)"


def step_on(
    program: Program, shaped: ShapedProgram, state: State, number: int, *, debug: bool = False
) -> tuple[StepContext, dict[Region, Any]]:
    """What the step that makes update `number` starts from: its constants, and memory by region (the State's,
    the program's staging buffers, the decision of the step before). With `debug`, buffers are checked in
    every update."""
    ranks, owner = program.ranks, state.buffers.owner

    def randomness(m: int, s: int) -> AbstractContextManager[None]:
        if s not in shaped.random:
            return nullcontext()
        rank = (ranks.rank,) if ranks.rank else ()
        return seeded(fold_seed(state.seed, state.batches, m, s, *rank))

    context = StepContext(
        spec=shaped.spec,
        calls=program.calls,
        optimizer=program.optimizer,
        number=number,
        factors=program.optimizer.factors(number),
        loss_scale=state.loss_scale.scale,
        dtype=program.dtype,
        devices=program.devices,
        randomness=randomness,
        ranks=ranks,
        updated=owner.updated,
        averaged=owner.averaged,
        patience=program.executor.patience,
        warn=partial(warn_once, program) if program.cache.compares_loss else None,
        # In debug mode buffers are checked in each step.
        prepared={} if debug else program.cache.prepared.setdefault(state.buffers, {}),
    )
    state.buffers.close()
    decision = Region("decision")
    return context, {
        **staging_buffers(program),
        **state.buffers.memory,
        decision: owner.deferred or NO_UPDATE,
    }


def flush(program: Program, state: State) -> State:
    """Make the update that the last step deferred (setting `defer`) now, in place, and return `state`.

    Without this call the next step makes the update, or any call that reads the State. A swap space gets the
    commit that the next step would make of this State by `commit_every`, with the last commit's `extra`. All
    ranks have to call this together. Raises DonatedStateError for a used state, CheckpointError or DiskError
    where a commit fails.
    """
    refuse_inference_mode("flush")
    check_state(program, state, "flush")
    refuse_global_modes("flush", program.device)
    make_deferred_update(program, state, "flush")
    swap = state.buffers.swap
    if swap is None or not program.spec.deferred or state.step % program.settings.commit_every:
        return state
    last = swap.record()
    if last is None or last["position"] != to_plain(state.position):
        with lock_staging(program, "flush", patience=program.executor.patience):
            commit_again(program, state)
    return state


def make_deferred_update(program: Program, state: State, action: str) -> None:
    """Make the deferred update of `state`, if one is left, because the call `action` reads the State, which
    stays valid.

    If one rank has a deferred update, all have, and all ranks have to call this together.
    """
    owner = state.buffers.owner
    if owner.deferred is None:
        return
    with lock_staging(program, action, patience=program.executor.patience), torch.inference_mode(False):
        if (decision := owner.deferred) is None:  # made for another thread in the meantime
            return
        program.ranks.agree(action, "what is deferred", f"step {state.step}, {decision}")
        shaped = specialize_without_batch(program, flush_recipe)
        name = f"{action} after step {state.step}"
        run_on_state(program, shaped, state, decision.number, {}, RunOptions(), name, donated=False)
