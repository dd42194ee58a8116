"""Running a plan on a State, and making the update that the last step deferred.

A State counts a deferred update as made already: the next step makes it, or whoever reads the State before.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region
from zfunc.core.recipes import flush_recipe
from zfunc.engine.compile.program import Program, ShapedProgram, check_state, lock_staging, staging_buffers
from zfunc.engine.compile.specialize import specialize_without_batch
from zfunc.engine.state.state import State, refuse_global_modes, refuse_inference_mode
from zfunc.engine.step.stage_context import StepContext
from zfunc.errors import NonFiniteError
from zfunc.runtime.executor import RunOptions, StepRun
from zfunc.runtime.rng import fold_seed, seeded

NO_UPDATE = StepDecision(skip=True, grad_scale=1.0, number=0, factors={})


def run_on_state(
    program: Program,
    shaped: ShapedProgram,
    state: State,
    mem: dict[Region, Any],
    step: StepContext,
    options: RunOptions,
    name: str,
    *,
    donated: bool = True,
) -> StepRun:
    """Run the plan on the memory of `state`, which is donated or changed in place; ranks that wait are told of a
    failure."""
    way_on = "Go on from an earlier copy of the parameters, with init(program, params=...)"
    if program.spec.swaps:
        way_on = f"Go on from the last commit, with load({str(program.settings.swap[0])!r}, program)"
    owner, ops = state.buffers.owner, shaped.plan.graph.ops
    try:
        with owner.running(name, ops, defers=shaped.spec.deferred, donated=donated, way_on=way_on) as started:
            return program.executor.run(shaped.prepared, mem, step, options, started)
    except NonFiniteError:  # raised by `decide` on all ranks alike, with no collective under way
        raise
    except BaseException as error:
        program.ranks.leave(f"{name} failed with {type(error).__name__}: {error}")
        raise


def step_context(program: Program, shaped: ShapedProgram, state: State, number: int) -> StepContext:
    """The constants of the step that makes update `number`."""
    ranks = program.ranks

    def randomness(m: int, s: int) -> AbstractContextManager[None]:
        if s not in shaped.random:
            return nullcontext()
        rank = (ranks.rank,) if ranks.rank else ()
        return seeded(fold_seed(state.seed, state.batches, m, s, *rank))

    return StepContext(
        layout=program.layout,
        calls=program.calls,
        optimizer=program.optimizer,
        number=number,
        factors=program.optimizer.factors(number),
        loss_scale=state.loss_scale.scale,
        settings=program.settings,
        dtype=program.dtype,
        device=program.device,
        randomness=randomness,
        ranks=ranks,
        updated=state.buffers.owner.updated,
        averaged=state.buffers.owner.averaged,
        patience=program.executor.patience,
        aux=shaped.spec.aux,
    )


def state_memory(program: Program, state: State) -> dict[Region, Any]:
    """The kept regions that a State has: its buffers, the program's staging, the decision of the step before."""
    state.buffers.close()
    decision = state.buffers.owner.deferred or NO_UPDATE
    return {**staging_buffers(program), **state.buffers.memory, Region("decision"): decision}


def flush(program: Program, state: State) -> State:
    """Make the deferred update of the last step now, in place, and return `state`.

    The next step, and whoever reads a State, makes it as well. All ranks have to call this together. Raises
    DonatedStateError for a used state.
    """
    refuse_inference_mode("flush")
    check_state(program, state, "flush")
    refuse_global_modes("flush", program.device)
    make_deferred_update(program, state, "flush")
    return state


def make_deferred_update(program: Program, state: State, action: str) -> None:
    """Make the deferred update that is left, for `action`, which reads the state. The state stays valid.

    All ranks have to call this together if there is one, which all of them have then.
    """
    owner = state.buffers.owner
    if owner.deferred is None:
        return
    refusal = "got a program that is in a step, expected none: call it after the step"
    with (
        lock_staging(program, action, refusal, patience=program.executor.patience),
        torch.inference_mode(False),
    ):
        if (decision := owner.deferred) is None:  # made for another thread in the meantime
            return
        program.ranks.agree(action, "what is deferred", f"step {state.step}, {decision}")
        shaped = specialize_without_batch(program, flush_recipe)
        step, mem = step_context(program, shaped, state, decision.number), state_memory(program, state)
        name = f"{action} after step {state.step}"
        run_on_state(program, shaped, state, mem, step, RunOptions(), name, donated=False)
