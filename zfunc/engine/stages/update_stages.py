"""The stages that update parameters: the optimizer on host or device, and the new parameters to every device.

A bucket's state, gradient and decision determine the bits of its update, whichever stage makes it.

Muon's updates need whole matrices, of which a rank's slice may have parts. The ranks gather the directions, and
each orthogonalizes the matrices that its own slice has a part of: equal inputs, so equal bits.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op
from zfunc.core.layout import LEFT, Bucket
from zfunc.core.optimizer_state import HIGH_HALF, state_slice
from zfunc.core.spec import GRADIENT, PARAMS
from zfunc.engine.stages.stage_context import Memory, StepContext, gaps, named_like_verbs
from zfunc.engine.state.memory import Flat
from zfunc.optim.formats import master_weights, unpack_weights
from zfunc.optim.updates import average_
from zfunc.runtime.accelerator import on_accelerator


def update(op: Op, mem: Memory, step: StepContext) -> None:
    """Update this rank's slice of a bucket on the host: optimizer state, and new parameters for the device."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    copy = mem[op.write("copy")] if op.touches("copy") else _own_slice(op, mem, step)
    _update_once(op, mem, step, decision, copy)


def update_on_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Update this rank's slice of a bucket on the device: its optimizer state and its parameters."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    params, high = _own_slice(op, mem, step), state_of(op, mem).get(HIGH_HALF)
    if params is None or high is None or params.dtype != high.dtype:
        _update_once(op, mem, step, decision, params)
    else:
        _update_once(op, mem, step, decision, None)
        params.copy_(high)  # as `to_device` would send it


def average(op: Op, mem: Memory, step: StepContext) -> None:
    """Move the moving average of a bucket's weights towards the new weights, unless the step is skipped."""
    (b,) = op.index
    if not mem[op.read("decision")].skip and b not in step.averaged:
        assert step.spec.settings.ema is not None
        average_(mem[op.write("ema")], state_of(op, mem), step.spec.settings.ema)


def _update_once(op: Op, mem: Memory, step: StepContext, decision: StepDecision, copy: Tensor | None) -> None:
    """Update a bucket's optimizer state with the gradient that `op` reads, and set `copy` to the new parameters; if
    a step that failed made this update already, only set `copy`."""
    (b,) = op.index
    optimizer, shard = step.optimizer, step.slice_of(b)
    state, numel = state_of(op, mem), shard.stop - shard.start
    copy = state.pop(PARAMS, copy)
    if b in step.updated:
        if copy is not None:
            copy[:numel].copy_(master_weights(state, 0, numel))
        return
    grad = gradient_of(op, mem, shard)
    apply = optimizer.device_update if on_accelerator(grad.device) else optimizer.host_update
    bucket, by_parameter = step.spec.layout.buckets[b], step.spec.places[b].by_parameter
    unused = {*decision.unused}
    parts = (_parameters if by_parameter else _runs)(bucket, shard, unused)
    for start, stop, given in parts:
        own = state_slice(bucket.state_format, state, start, stop)
        out = None if copy is None else copy[start:stop]
        if given["group"] != LEFT:
            apply(own, grad[start:stop], decision, out=out, **given)
        elif out is not None:  # of a slot, which had another bucket before
            out.copy_(unpack_weights(own))
    if by_parameter and copy is not None:  # the padding behind parameters
        covered = ((first, last) for first, last, _ in bucket.spans_within(shard.start, shard.stop))
        for start, stop in gaps(shard.start, shard.stop, covered):
            copy[start - shard.start : stop - shard.start].zero_()


def _runs(bucket: Bucket, shard: slice, unused: Collection[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The runs of one parameter group in this rank's slice: start, stop (elements), the optimizer's arguments."""
    for start, stop, group in bucket.runs_within(shard.start, shard.stop, unused):
        yield start - shard.start, stop - shard.start, {"group": group}


def _parameters(
    bucket: Bucket, shard: slice, unused: Collection[str]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The runs of single parameters in this rank's slice: start, stop (elements), the optimizer's arguments."""
    for start, stop, span in bucket.spans_within(shard.start, shard.stop):
        group = LEFT if span.name in unused else span.group
        yield start - shard.start, stop - shard.start, {"group": group, "shape": span.shape}


def momentum(op: Op, mem: Memory, step: StepContext) -> None:
    """Update the momentum of this rank's slice of a bucket for Muon, and write the update's direction in bf16."""
    (b,) = op.index
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip or b in step.updated:
        return
    shard, bucket, optimizer = step.slice_of(b), step.spec.layout.buckets[b], step.optimizer
    grad, state, out = gradient_of(op, mem, shard), state_of(op, mem), mem[op.write("grad_shard")]
    for start, stop, given in _runs(bucket, shard, decision.unused):
        slices = state_slice(bucket.state_format, state, start, stop)
        if given["group"] != LEFT:
            optimizer.direction(slices, grad[start:stop], decision, out=out[start:stop], **given)  # pyright: ignore


def gather_direction(op: Op, mem: Memory, step: StepContext) -> None:
    """Gather a bucket's direction, which Muon orthogonalizes, from the slices of all ranks: a collective."""
    shard = step.slice_of(op.index[0])
    whole = mem[op.write("direction_slot")][: step.spec.layout.buckets[op.index[0]].numel]
    step.ranks.all_gather(whole, mem[op.read("direction_shard")][: shard.stop - shard.start])


def orthogonalize(op: Op, mem: Memory, step: StepContext) -> None:
    """Orthogonalize the directions of whole matrices that this rank's slice has parts of, and keep these parts."""
    (b,) = op.index
    if mem[op.read("decision")].skip:
        return
    bucket, optimizer = step.spec.layout.buckets[b], step.optimizer
    own = mem[op.write("direction_shard")]
    whole = mem[op.write("direction_slot")] if op.touches("direction_slot") else own  # of one rank
    shard = step.slice_of(b)
    for start, stop, span in bucket.spans_within(shard.start, shard.stop):
        first = span.start - bucket.start
        direction = whole[first : first + span.numel].view(span.shape)
        matrix = optimizer.orthogonalize(direction, group=span.group)  # pyright: ignore
        own[start - shard.start : stop - shard.start].copy_(matrix.reshape(-1)[start - first : stop - first])


def gradient_of(op: Op, mem: Memory, shard: slice) -> Tensor:
    """This rank's slice of the bucket's gradient that operation `op` reads; a slot's memory may be longer."""
    if op.touches("grad"):
        return mem[op.read("grad")][shard]
    alone = [r for r in op.reads if r.role == "grad_shard"]
    return mem[alone[0]] if alone else mem[op.read("update_slot")].views[GRADIENT]


def state_of(op: Op, mem: Memory) -> dict[str, Tensor]:
    """The optimizer state of the bucket that `op` touches, by name: in memory, and in the slot it is paged to."""
    state = {r.buffer: mem[r] for r in op.operands("state")}
    for r in op.operands("paged"):
        state |= mem[r].views
    return state


def _own_slice(op: Op, mem: Memory, step: StepContext) -> Tensor | None:
    """This rank's slice of the parameters that operation `op` writes; None where it writes none."""
    (b,) = op.index
    if not op.touches("params"):
        return None
    return step.ranks.own_slice(step.spec.layout.all_buckets[b], mem[op.write("params")].flat)


def all_gather(op: Op, mem: Memory, step: StepContext) -> None:
    """Gather a bucket's parameters from the slices of all ranks; in a skipped step, the old parameters."""
    (b,) = op.index
    params: Flat = mem[op.write("params")]
    step.ranks.all_gather(params.flat, params.flat[step.slice_of(b)])


UPDATE_STAGES = {
    **named_like_verbs(update, update_on_device, average, all_gather),
    **named_like_verbs(momentum, gather_direction, orthogonalize),
    "momentum_on_device": momentum,
}
