"""`flush`: the update that the last step deferred.

A State counts a deferred update as made already: the next step, or a call that reads the State before, makes it.
"""

import torch

from zfunc.checkpoint.strict_json import to_plain
from zfunc.core.recipes import flush_recipe
from zfunc.engine.program.program import Program, lock_staging
from zfunc.engine.program.specialize import specialize_without_batch
from zfunc.engine.state.state import State
from zfunc.engine.step.run import check_state, run_on_state
from zfunc.engine.step.swap_state import commit_again
from zfunc.engine.trace.thread_modes import refuse_global_modes, refuse_inference_mode
from zfunc.runtime.executor import RunOptions


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
