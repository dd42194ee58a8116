"""`train_step`: from a State to the next.

`train_step` is a function of (program, state, batch). All randomness derives from the State's seed, and from where
in the step numbers are drawn. A step that raises before its first update leaves the State as it was.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from zfunc.checkpoint.writer import Save, SaveResult
from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region
from zfunc.engine.program.program import (
    Program,
    left_to_allocate,
    lock_staging,
    memory_shortage,
    warn_once,
)
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages.metrics import Metrics
from zfunc.engine.state.state import State
from zfunc.engine.step.agreement import check_ranks_agree
from zfunc.engine.step.run import check_state, run_on_state
from zfunc.engine.step.save_load import begin_save
from zfunc.engine.step.swap_state import commit_metadata
from zfunc.engine.trace.batches import Batch, check_has_values, rows_in, split_batch, unpacked
from zfunc.engine.trace.segment import IDLE
from zfunc.engine.trace.thread_modes import refuse_global_modes, refuse_inference_mode
from zfunc.errors import Message, NonFiniteError, OutOfMemory
from zfunc.runtime.executor import RunOptions
from zfunc.runtime.fault_injection import Fault, Jitter, check_faults, faults_at
from zfunc.values import of_type


def train_step(
    program: Program,
    state: State,
    batch: Batch | Mapping[str, Any],
    *,
    trace: bool = False,
    debug: bool = False,
    jitter: Jitter | None = None,
    save: Save | str | os.PathLike[str] | None = None,
    faults: Sequence[Fault] = (),
) -> tuple[State, Metrics]:
    """Make one step on `batch = (inputs, targets)`; returns the next State and its metrics. `state` is donated.

    The first dimension of every tensor is split into `micro_batches` equal parts; the gradient is the mean over the
    whole batch. Inputs and targets may be trees of dicts and tuples; tensors without dimensions, a
    `zfunc.Whole(tensor)`, numbers and None are the same in every part. Batch elements after the targets go to the
    last segment as well. A batch may be a dict: its "labels" are the targets.

    - `trace` times every operation. `debug` gives each stage only the regions it declared. `jitter` delays every
      operation at random (`zfunc.runtime.fault_injection.Jitter`).
    - `save`, a folder or a `Save`, writes a checkpoint of `state`, from before this step, during the step; it is
      complete on return. A disk that fails meanwhile is reported in the metrics; a folder that cannot be written
      raises CheckpointError before the step. A folder of the program's swap space makes the step commit, whatever
      `commit_every`: the State after the step, or with `defer` the State before.
    - `faults` are injected failures; those of this rank and step happen (`zfunc.runtime.fault_injection`).

    Raises ValueError for a batch that cannot be split or run, DonatedStateError for a used state, NonFiniteError
    for a non-finite loss or gradient without loss scaling, and ExecutionError if a stage fails. If nothing was
    updated, `state` can be used again: always after a non-finite loss, and after a non-finite gradient if clipping
    makes the updates wait for its norm.

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
    refuse_global_modes("train_step", program.device)
    of_type("train_step: jitter", jitter, Jitter | None, "a fault_injection.Jitter or None: pass one")
    of_type("train_step: faults", faults, Sequence, "a list of faults: pass [Fault(...), ...]")
    options = RunOptions(jitter, debug, trace, tuple(faults))
    save = save if save is None or isinstance(save, Save) else Save(save)
    with lock_staging(program, "train_step"):
        return _train_step(program, state, unpacked(batch, program.segments[-1]), options, save)


def _train_step(
    program: Program, state: State, batch: Batch, options: RunOptions, save: Save | None
) -> tuple[State, Metrics]:
    # 1. What this step does, which all ranks have to do.
    number, ranks, owner = state.step + 1, program.ranks, state.buffers.owner
    # A save into a folder of the swap space is a commit.
    swaps = save is not None and save.folder.absolute() in program.swap_folders
    committed, save = (save, None) if swaps else (None, save)
    commit = program.commits(state.step) or committed is not None
    tensors = check_has_values(batch)
    micro = split_batch(batch, program.settings.micro_batches)
    shaped = specialize(program, batch, micro, save=save is not None, commit=commit)
    if unused := shaped.spec.unused:
        warn_once(program, IDLE, unused)
    if grad_fns := [type(x.grad_fn).__name__ for x in tensors if x.grad_fn]:
        cut = f"batch: got a tensor with a grad_fn, {grad_fns[0]}, and no gradient goes to what made it"
        warn_once(program, f"{cut}: call that in the model, or detach() the tensor")
    if options.faults:  # those of all ranks are checked: they refuse together
        check_faults((f for f in options.faults if f.step == number), shaped.whole)
        options = evolve(options, faults=faults_at(options.faults, ranks.job.rank, number))
    needed = left_to_allocate(program, shaped)
    shortage = memory_shortage(program, shaped.memory, needed, action="train_step")
    if ranks.several:
        options = evolve(options, watch=ranks.watch)
        check_ranks_agree(program, shaped, state, batch, shortage)
    elif shortage:
        raise OutOfMemory(Message(shortage))

    # 2. The regions that are this step's own: micro-batches, what it commits, where it saves.
    regions: dict[Region, Any] = {Region("batch", (m,)): x for m, x in enumerate(micro)}

    def commit_record(decision: StepDecision) -> dict[str, Any] | None:
        """The metadata of this step's commit, given its decision; None if an overflow at the smallest loss
        scale ends the training."""
        try:
            now = state if shaped.spec.deferred else _after(program, state, batch, decision)
        except NonFiniteError:
            return None
        return commit_metadata(program, now, {} if committed is None else committed.extra)

    regions[Region("position")] = state.buffers.swap, commit_record
    regions[Region("checkpoint")] = writer = None if save is None else begin_save(program, state, save)

    # 3. The run, and what has become of the State.
    sent = ranks.sent
    try:
        run, mem = run_on_state(program, shaped, state, number, regions, options, f"step {number}")
    finally:
        if writer is not None:
            writer.abandon()  # no effect on a published checkpoint
    program.cache.compared_loss = True
    decision: StepDecision = mem[Region("decision")]
    norm: float = mem[Region("norm")]
    owner.settle(
        f"step {number}", decision, norm, defers=shaped.spec.deferred and bool(shaped.spec.offloaded)
    )
    try:
        after = _after(program, state, batch, decision)
    except NonFiniteError:  # an overflow at the smallest loss scale
        owner.undo_donation()  # the step was skipped
        raise
    if program.settings.ema is not None and not decision.skip:
        state.buffers.averages_left *= program.settings.ema

    # 4. What the step reports.
    names = [span.name for span in program.layout.spans]
    metrics = Metrics(
        loss=decision.loss,
        grad_norm=norm,
        lr=decision.factors["lr"],
        skipped=decision.skip,
        loss_scale=state.loss_scale.scale,
        step=number,
        seconds=run.seconds,
        host_seconds=run.host_seconds,
        sent_bytes=ranks.sent - sent,
        aux={**decision.aux, **mem.get(Region("all_rows"), {})},
        norms=dict(zip(names, mem.get(Region("norms"), ()), strict=False)),
        timeline=run.timeline,
        plan=shaped.plan if options.trace else None,
        saved=mem.get(Region("published")) if committed is None else SaveResult(committed.folder),
    )
    return after, metrics


def _after(program: Program, state: State, batch: Batch, decision: StepDecision) -> State:
    """The State after a step of `state` on `batch`, with its counters and loss scale. Raises NonFiniteError
    for an overflow at the smallest loss scale."""
    return evolve(
        state,
        generation=state.buffers.owner.generation,
        step=state.step + (not decision.skip),
        batches=state.batches + 1,
        sequences=state.sequences + rows_in(batch) * program.ranks.world,
        loss_scale=state.loss_scale.update(overflow=decision.skip),
    )
