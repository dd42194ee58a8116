"""Running a plan on a State, and making the update that the last step left.

`flush` applies the pending gradient of delayed updates, which makes another State. A deferred update is one that a
State counts as made already: the next step makes it, or in place whoever reads the State before.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import evolve

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Region
from zfunc.core.recipes import flush_recipe
from zfunc.engine.program import Program, ShapedProgram, check_state, lock_staging, staging_buffers
from zfunc.engine.specialize import specialize_without_batch
from zfunc.engine.stage_context import StepContext
from zfunc.engine.state import Buffers, State, refuse_global_modes, refuse_inference_mode
from zfunc.errors import AbandonedCalls, LaneTimeout
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
    """Run the plan with `state` donated. After a failure it can be used again, unless an update had begun.

    A deferred update has to have ended for that: what is left of it is made later.
    """
    buffers, started = state.buffers, dict[int, bool]()
    if donated:
        buffers.generation += 1
        buffers.lost = f"{name} did not finish"
    try:
        run = program.executor.run(shaped.prepared, mem, step, options, started)
    except (LaneTimeout, AbandonedCalls) as error:
        buffers.lost = f"{name} was given up while a lane was still busy ({error})"
        raise
    except BaseException as error:
        updates = _begun_updates(buffers, shaped, started)
        if updates:
            buffers.lost = (
                f"{name} failed after {updates[0].name} had begun to update it ({type(error).__name__}: "
                f"{error}). {_way_on(program)}"
            )
        else:
            buffers.generation -= donated
            buffers.lost = ""
        raise
    buffers.lost, buffers.deferred, buffers.updated, buffers.averaged = "", None, frozenset(), frozenset()
    return run


def _way_on(program: Program) -> str:
    if program.spec.swaps:
        return f"Go on from the last commit, with load({str(program.settings.swap[0])!r}, program)"
    return "Go on from an earlier copy of the parameters, with init(program, params=...)"


def _begun_updates(buffers: Buffers, shaped: ShapedProgram, started: Mapping[int, bool]) -> list[Op]:
    """The updates after which a State cannot be used again; and record which deferred ones were made.

    Of a deferred update only that of the optimizer's state counts, and only if it has not ended: the copies to the
    devices are made again.
    """
    ops = shaped.plan.graph.ops
    begun = sorted(i for i in started if any(r.trained for r in ops[i].writes))
    if not shaped.spec.deferred:
        return [ops[i] for i in begun]
    decide = next((i for i, op in enumerate(ops) if op.writes == (Region("decision"),)), len(ops))
    of_this_step = [i for i in begun if i > decide]
    if buffers.deferred is None:
        return [ops[i] for i in of_this_step]
    by_bucket: dict[tuple[str, int], list[int]] = {}  # an update, and what writes its result to the disk
    for i in range(decide):
        for role in {r.role for r in ops[i].writes} & {"state", "ema"}:
            by_bucket.setdefault((role, ops[i].index[0]), []).append(i)
    begun = {key: own for key, own in by_bucket.items() if any(i in started for i in own)}
    ended = {key for key, own in begun.items() if all(started.get(i) for i in own)}
    buffers.updated |= {b for role, b in ended if role == "state"}
    buffers.averaged |= {b for role, b in ended if role == "ema"}
    unfinished = [i for key in begun.keys() - ended for i in begun[key] if i in started]
    return [ops[i] for i in (*sorted(unfinished), *of_this_step)]


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
        clip_norm=program.settings.clip_norm,
        ema=program.settings.ema,
        skip_overflow=program.settings.precision == "fp16",
        micro_batches=program.settings.micro_batches,
        dtype=program.dtype,
        device=program.device,
        randomness=randomness,
        ranks=ranks,
        sync_buffers=program.settings.sync_buffers,
        applies_pending=state.pending is not None,
        updated=state.buffers.updated,
        averaged=state.buffers.averaged,
        patience=program.executor.patience,
        aux=shaped.spec.aux,
    )


def state_memory(program: Program, state: State) -> dict[Region, Any]:
    """The kept regions that a State has: its buffers, the program's staging, the decision of the step before."""
    state.buffers.close()
    decision = state.pending or state.buffers.deferred or NO_UPDATE
    return {**staging_buffers(program), **state.buffers.memory, Region("decision"): decision}


def flush(program: Program, state: State) -> State:
    """Apply the pending gradient after the last delayed step; a state without one is returned as it is.

    `state` is donated if it has one. All ranks have to call this together. Training can continue from the result:
    the next step finds no pending gradient. A deferred update is made too, in place. Raises DonatedStateError for a
    used state.
    """
    refuse_inference_mode("flush")
    check_state(program, state, "flush")
    refuse_global_modes("flush", program.device)
    make_deferred_update(program, state, "flush")
    if state.pending is None:
        return state
    with lock_staging(
        program, "flush", "got a program that is in a step, expected none: call it after the step"
    ):
        program.ranks.agree("flush", "what is to be applied", f"step {state.step}, {state.pending}")
        shaped = specialize_without_batch(program, flush_recipe, pending=True)
        step = step_context(program, shaped, state, state.pending.number)
        try:
            name = f"flush after step {state.step}"
            run_on_state(program, shaped, state, state_memory(program, state), step, RunOptions(), name)
        except BaseException as error:
            program.ranks.leave(f"flush failed with {type(error).__name__}: {error}")
            raise
        return evolve(state, generation=state.buffers.generation, pending=None)


def make_deferred_update(program: Program, state: State, action: str) -> None:
    """Make the deferred update that is left, for `action`, which reads the state. The state stays valid.

    All ranks have to call this together if there is one, which all of them have then.
    """
    buffers = state.buffers
    if buffers.deferred is None:
        return
    refusal = "got a program that is in a step, expected none: call it after the step"
    with (
        lock_staging(program, action, refusal, patience=program.executor.patience),
        torch.inference_mode(False),
    ):
        if (decision := buffers.deferred) is None:  # made for another thread in the meantime
            return
        program.ranks.agree(action, "what is deferred", f"step {state.step}, {decision}")
        shaped = specialize_without_batch(program, flush_recipe, pending=True)
        step, mem = step_context(program, shaped, state, decision.number), state_memory(program, state)
        name = f"{action} after step {state.step}"
        try:
            run_on_state(program, shaped, state, mem, step, RunOptions(), name, donated=False)
        except BaseException as error:
            program.ranks.leave(f"{action} failed with {type(error).__name__}: {error}")
            raise
