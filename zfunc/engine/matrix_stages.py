"""The stages of an update of whole matrices, up to their orthogonal direction; `adam` moves the weights along it.

A matrix lies in the slices of several ranks, so each gathers the direction of the bucket, and makes the matrices
orthogonal that its own slice has a part of: equal inputs, so equal bits.
"""

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op
from zfunc.core.optimizer_state import state_slice
from zfunc.engine.stage_context import Memory, StepContext
from zfunc.engine.update_stages import gradient_of, state_of
from zfunc.runtime.accelerator import on_accelerator


def momentum(op: Op, mem: Memory, step: StepContext) -> None:
    """Update the momentum of this rank's slice of a bucket, and write its direction in bf16."""
    (b,) = op.index
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip or b in step.updated:
        return
    shard, bucket = step.slice_of(b), step.layout.buckets[b]
    grad, state, out = gradient_of(op, mem, shard), state_of(op, mem), mem[op.write("grad_shard")]
    on_device = on_accelerator(grad.device)
    direct = step.matrices.device_direction if on_device else step.matrices.host_direction
    for first, last, group in bucket.runs_within(shard.start, shard.stop):
        start, stop = first - shard.start, last - shard.start
        slices = state_slice(bucket.state_format, state, start, stop)
        direct(slices, grad[start:stop], decision, group=group, out=out[start:stop])


def direction_to_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy this rank's slice of a direction to the device."""
    _copy(op, mem, step)


def direction_to_host(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy this rank's slice of an orthogonal direction to the host."""
    _copy(op, mem, step)


def _copy(op: Op, mem: Memory, step: StepContext) -> None:
    (source,), target = op.reads, op.write("grad_shard")
    shard = step.slice_of(op.index[0])
    numel = shard.stop - shard.start
    mem[target][:numel].copy_(mem[source][:numel], non_blocking=True)


def gather_direction(op: Op, mem: Memory, step: StepContext) -> None:
    """Gather a direction from the slices of all ranks."""
    shard = step.slice_of(op.index[0])
    whole = mem[op.write("direction_slot")][: step.layout.buckets[op.index[0]].numel]
    step.ranks.all_gather(whole, mem[op.read("direction_shard")][: shard.stop - shard.start])


def orthogonalize(op: Op, mem: Memory, step: StepContext) -> None:
    """Make the matrices orthogonal that this rank's slice has a part of, whole, and keep the part."""
    (b,) = op.index
    if mem[op.read("decision")].skip:
        return
    bucket, shard = step.layout.buckets[b], step.slice_of(b)
    whole, own = mem[op.write("direction_slot")], mem[op.write("grad_shard")]
    for span in bucket.spans:
        first, last = span.start - bucket.start, span.stop - bucket.start
        start, stop = max(first, shard.start), min(last, shard.stop)
        if start < stop:
            direction = whole[first:last].view(span.shape)
            matrix = step.matrices.orthogonalize(direction, group=span.group)
            part = matrix.reshape(-1)[start - first : stop - first]
            own[start - shard.start : stop - shard.start].copy_(part)
