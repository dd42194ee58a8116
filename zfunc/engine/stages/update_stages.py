"""The stages that update parameters: the optimizer on host or device, and the new parameters to every device.

A bucket's state, gradient and decision determine the bits of its update, whichever stage makes it.

Muon's updates need whole matrices, of which a rank's slice may have parts. The ranks gather the directions, and
each orthogonalizes the matrices that its own slice has a part of: equal inputs, so equal bits.
"""

from collections.abc import Collection, Iterator, Mapping
from operator import is_
from typing import Any

from attrs import frozen
from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op
from zfunc.core.layout import LEFT, Bucket
from zfunc.core.optimizer_state import GRADIENT, HIGH_HALF, PARAMS, state_slice
from zfunc.engine.stages.stage_context import Memory, StepContext, gaps, named_like_verbs
from zfunc.engine.state.memory import Flat
from zfunc.engine.trace.tensor_memory import own_part
from zfunc.optim.base import gathers_calls
from zfunc.optim.formats import master_weights, unpack_weights
from zfunc.optim.updates import CheckedState, KernelCalls, average_
from zfunc.runtime.accelerator import on_accelerator

KEPT = "program", "state"  # lifetimes of regions that an update may hold on to


def update(op: Op, mem: Memory, step: StepContext) -> None:
    """Run the optimizer on the host for this rank's slice of a bucket: updates its optimizer state, and
    writes the new parameters for the device."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    copy = mem[op.write("copy")] if op.touches("copy") else _params(op, mem)
    _update_once(op, mem, step, decision, copy)


def update_on_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Run the optimizer on the device for this rank's slice of a bucket: optimizer state and parameters."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    params, high = _params(op, mem), state_of(op, mem).get(HIGH_HALF)
    if params is None or high is None or params.dtype != high.dtype:
        _update_once(op, mem, step, decision, params)
    else:
        _update_once(op, mem, step, decision, None)
        # As `to_device` would send it.
        own_part(step.shards[op.index[0]], params).copy_(high)


def average(op: Op, mem: Memory, step: StepContext) -> None:
    """Move the moving average of a bucket's weights towards the new weights, unless the step is skipped."""
    (b,) = op.index
    if not mem[op.read("decision")].skip and b not in step.averaged:
        assert step.spec.settings.ema is not None
        average_(mem[op.write("ema")], state_of(op, mem), step.spec.settings.ema)


def _update_once(op: Op, mem: Memory, step: StepContext, decision: StepDecision, copy: Tensor | None) -> None:
    """Update a bucket's optimizer state with the gradient that `op` reads, and write the new parameters to
    `copy`. If a failed step has already made this deferred update, only `copy` is written."""
    (b,) = op.index
    optimizer, state = step.optimizer, state_of(op, mem)
    copy = state.pop(PARAMS, copy)
    if b in step.updated:
        if copy is not None:
            shard, copy = step.shards[b], _shard_of(op, step, copy)
            copy[: shard.stop - shard.start].copy_(master_weights(state, 0, shard.stop - shard.start))
        return
    by_parameter = step.spec.places[b].by_parameter
    update = _prepared_update(op, mem, step, decision.unused, state, copy, by_parameter=by_parameter)
    on_host, calls, several = update.on_host, KernelCalls(), len(update.runs) > 1
    apply = optimizer.host_update if on_host else optimizer.device_update
    for run in update.runs:
        if (group := run.arguments["group"]) != LEFT:
            gathered = {"calls": calls} if on_host and several and gathers_calls(optimizer, group) else {}
            apply(run.state, run.grad, decision, out=run.out, **run.arguments, **gathered)
        elif run.out is not None:  # of a slot, which had another bucket before
            run.out.copy_(unpack_weights(run.state))
    for kernel, calls_of_it in calls.items():
        kernel.update_runs(calls_of_it)
    for padding in update.padding:
        padding.zero_()


@frozen(eq=False)
class UpdateRun:
    """One call of the optimizer in the update of a bucket: slices of buffers, and the other arguments."""

    state: CheckedState
    grad: Tensor
    out: Tensor | None
    arguments: dict[str, Any]  # group, and shape where a run is a parameter


@frozen(eq=False)
class PreparedUpdate:
    """The optimizer calls that update one bucket. Its buffers are sliced when this is made, and checked in
    the first run only."""

    made_of: tuple[Any, ...]  # the tensors that were cut, and the parameters that the loss does not reach
    on_host: bool
    runs: list[UpdateRun]
    padding: list[Tensor]  # of the copy, behind parameters


def _prepared_update(
    op: Op,
    mem: Memory,
    step: StepContext,
    unused: Collection[str],
    state: Mapping[str, Tensor],
    out: Tensor | None,
    *,
    by_parameter: bool,
) -> PreparedUpdate:
    """The optimizer calls that update a bucket's `state` and write new parameters to `out`: one for each
    range of parameters of one group, or, `by_parameter`, for each parameter; parameters in `unused` are left
    out.

    The last step's calls are returned if all tensors are the same objects. New ones are kept for the next
    step, unless some memory is of this step alone.
    """
    made_of = (*state.values(), _gradient_memory(op, mem), out, unused)
    last = step.prepared.get((op.verb, op.index))
    if last is not None and len(last.made_of) == len(made_of) and all(map(is_, last.made_of, made_of)):
        return last
    (b,) = op.index
    bucket, shard = step.spec.layout.buckets[b], step.shards[b]
    grad, runs, padding = gradient_of(op, mem, shard), list[UpdateRun](), list[Tensor]()
    out = None if out is None else _shard_of(op, step, out)
    for start, stop, arguments in (_parameters if by_parameter else _runs)(bucket, shard, {*unused}):
        part = CheckedState(state_slice(bucket.state_format, state, start, stop))
        runs.append(UpdateRun(part, grad[start:stop], None if out is None else out[start:stop], arguments))
    if by_parameter and out is not None:
        covered = ((first, last) for first, last, _ in bucket.spans_within(shard.start, shard.stop))
        between = gaps(shard.start, shard.stop, covered)
        padding = [out[start - shard.start : stop - shard.start] for start, stop in between]
    update = PreparedUpdate(made_of, not on_accelerator(grad.device), runs, padding)
    if all(r.lifetime in KEPT or r.buffer == "decision" for r in op.regions):
        step.prepared[op.verb, op.index] = update
    return update


def _runs(bucket: Bucket, shard: slice, unused: Collection[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (start, stop, optimizer arguments) for each range of parameters of one group in this rank's slice
    `shard`, without those in `unused`."""
    for start, stop, group in bucket.runs_within(shard.start, shard.stop, unused):
        yield start - shard.start, stop - shard.start, {"group": group}


def _parameters(
    bucket: Bucket, shard: slice, unused: Collection[str]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (start, stop, optimizer arguments) of each parameter in slice `shard` that is not in `unused`."""
    for start, stop, span in bucket.spans_within(shard.start, shard.stop):
        group = LEFT if span.name in unused else span.group
        yield start - shard.start, stop - shard.start, {"group": group, "shape": span.shape}


def momentum(op: Op, mem: Memory, step: StepContext) -> None:
    """Update the momentum of this rank's slice of a bucket for Muon, and write the update's direction in bf16."""
    (b,) = op.index
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip or b in step.updated:
        return
    out, optimizer = mem[op.write("grad_shard")], step.optimizer
    update = _prepared_update(op, mem, step, decision.unused, state_of(op, mem), out, by_parameter=False)
    for run in update.runs:
        if run.arguments["group"] != LEFT:
            optimizer.direction(run.state, run.grad, decision, out=run.out, **run.arguments)  # pyright: ignore


def gather_direction(op: Op, mem: Memory, step: StepContext) -> None:
    """Gather a bucket's direction, which Muon orthogonalizes, from the slices of all ranks: a collective."""
    shard = step.shards[op.index[0]]
    whole = mem[op.write("direction_slot")][: step.spec.layout.buckets[op.index[0]].numel]
    step.ranks.all_gather(whole, mem[op.read("direction_shard")][: shard.stop - shard.start])


def orthogonalize(op: Op, mem: Memory, step: StepContext) -> None:
    """For Muon: orthogonalize the update directions of all matrices of which this rank's slice of a bucket
    has a part; those parts are kept."""
    (b,) = op.index
    if mem[op.read("decision")].skip:
        return
    bucket, optimizer = step.spec.layout.buckets[b], step.optimizer
    own = mem[op.write("direction_shard")]
    whole = mem[op.write("direction_slot")] if op.touches("direction_slot") else own  # of one rank
    shard = step.shards[b]
    for start, stop, span in bucket.spans_within(shard.start, shard.stop):
        first = span.start - bucket.start
        direction = whole[first : first + span.numel].view(span.shape)
        matrix = optimizer.orthogonalize(direction, group=span.group)  # pyright: ignore
        own[start - shard.start : stop - shard.start].copy_(matrix.reshape(-1)[start - first : stop - first])


def gradient_of(op: Op, mem: Memory, shard: slice) -> Tensor:
    """This rank's slice of the bucket's gradient that `op` reads: elements `shard` of a whole gradient, or
    the start of a slot."""
    memory = _gradient_memory(op, mem)
    return memory[shard] if op.touches("grad") else memory


def _gradient_memory(op: Op, mem: Memory) -> Tensor:
    if op.touches("grad"):
        return mem[op.read("grad")]
    alone = [r for r in op.reads if r.role == "grad_shard"]
    return mem[alone[0]] if alone else mem[op.read("update_slot")].views[GRADIENT]


def state_of(op: Op, mem: Memory) -> dict[str, Tensor]:
    """The optimizer state, by buffer name, of the bucket that `op` works on: in memory and in its slot."""
    state = {r.buffer: mem[r] for r in op.operands("state")}
    for r in op.operands("paged"):
        state |= mem[r].views
    return state


def _params(op: Op, mem: Memory) -> Tensor | None:
    """The parameters that operation `op` writes; None where it writes none."""
    return mem[op.write("params")].flat if op.touches("params") else None


def _shard_of(op: Op, step: StepContext, out: Tensor) -> Tensor:
    """This rank's slice of `out` if `op` writes whole parameters; `out` itself if it is the slice."""
    return own_part(step.shards[op.index[0]], out) if op.touches("params") else out


def all_gather(op: Op, mem: Memory, step: StepContext) -> None:
    """All-gather a bucket's parameters from the ranks' slices; in a skipped step the old ones."""
    (b,) = op.index
    params: Flat = mem[op.write("params")]
    step.ranks.all_gather(params.flat, params.flat[step.shards[b]])


UPDATE_STAGES = {
    **named_like_verbs(update, update_on_device, average, all_gather),
    **named_like_verbs(momentum, gather_direction, orthogonalize),
    "momentum_on_device": momentum,
}
