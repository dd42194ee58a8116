"""The stage functions: `STAGES[verb]` executes an operation on the memory of its regions.

A stage accesses `mem[region]` for the regions of its own operation and no other mutable state; in debug mode `mem`
has no others. A stage returns nothing: it writes the regions that its operation writes.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zfunc.checkpoint.manifest import BUFFER
from zfunc.checkpoint.writer import CheckpointWriter
from zfunc.core.graph import Op, Region
from zfunc.core.layout import Bucket
from zfunc.core.optimizer_state import EMA, FROZEN
from zfunc.core.region_table import SUM_PARTS
from zfunc.engine.stages.clipping_stages import CLIPPING_STAGES, wait_for_device
from zfunc.engine.stages.move_stages import MOVE_STAGES, weights_in_page
from zfunc.engine.stages.outputs import aux_names, aux_rows, check_aux_names, loss_and_aux
from zfunc.engine.stages.stage_context import (
    Memory,
    Stage,
    StepContext,
    gaps,
    named_like_verbs,
)
from zfunc.engine.stages.update_stages import UPDATE_STAGES, state_of
from zfunc.engine.state.memory import ActivationSlot, Squares
from zfunc.engine.trace.host_keys import HostMemory, keys_in
from zfunc.engine.trace.module_buffers import buffer_views, clone_buffers, copy_buffers
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.tensor_memory import in_own_memory, own_part
from zfunc.optim.updates import accumulate_, square_sum
from zfunc.runtime.accelerator import on_accelerator


def load(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy a micro-batch's inputs, targets or both to the device; casts float inputs to the compute dtype."""

    def to_device(t: Tensor, *, cast: bool) -> Tensor:
        dtype = step.dtype if cast and t.is_floating_point() else t.dtype
        device = step.devices[op.device]
        dense = t.to(device, dtype, non_blocking=True).contiguous()  # the strides it was traced with
        return dense.view(t.shape)  # of one row, too, which is contiguous in any strides

    inputs, *targets = mem[op.read("batch")]
    if op.touches("act"):
        mem[op.write("act")] = tree_map_only(Tensor, partial(to_device, cast=True), inputs)
    if op.touches("targets"):
        mem[op.write("targets")] = tree_map_only(Tensor, partial(to_device, cast=False), tuple(targets))


def forward(op: Op, mem: Memory, step: StepContext) -> None:
    """Run the forward of one segment on a micro-batch, with random numbers seeded by micro-batch and segment."""
    m, s = op.index
    call = step.calls[s]
    if step.warn is not None and m == 0 and op.touches("loss"):
        _compare_loss(op, mem, step, step.warn)
    with step.randomness(m, s), _memory_of_rows(op, mem, step):
        x = mem[_input(op)]
        before = (
            clone_buffers(buffer_views(mem[op.read("module_buffers")], call.buffers)) if call.buffers else {}
        )
        weights = _weights(op, mem, step, before)
        y, residuals = call.passes.forward(weights, _with_targets(x, op, mem))
        if call.buffers:
            y, after = y
            copy_buffers(buffer_views(mem[op.write("module_buffers")], call.buffers), after.tensors)
    if op.touches("loss"):
        loss, *aux = (y,) if isinstance(y, Tensor) else y
        mem[op.write("loss")] = in_own_memory(loss)
        expected = *step.spec.aux, *step.spec.aux_rows
        if aux or expected:
            check_aux_names(call.name, (*aux_names(y), *aux_rows(y)), expected)
        for buffer, detached in zip(("aux", "aux_rows"), aux, strict=False):
            if op.touches(buffer):
                mem[op.write(buffer)] = tree_map_only(Tensor, in_own_memory, detached.tensors)
    else:
        (output,) = (r for r in op.writes if r.buffer in ("act", "sent_act"))
        mem[output] = y
    if op.touches("residuals"):
        mem[op.write("residuals")] = residuals, before


def _compare_loss(op: Op, mem: Memory, step: StepContext, warn: Callable[[str], None]) -> None:
    """Warn if a micro-batch's loss is not the mean of the losses of its two halves, because the number of
    micro-batches then changes the result. Takes no more memory than the last segment's forward."""
    call, inputs = step.calls[op.index[1]], _with_targets(mem[_input(op)], op, mem)
    buffers = buffer_views(mem[op.read("module_buffers")], call.buffers) if call.buffers else {}
    weights = _weights(op, mem, step, buffers)
    rows = max((len(t) for t in tree_leaves(inputs[1:]) if isinstance(t, Tensor) and t.dim()), default=0)

    def loss_of(start: int, stop: int) -> Tensor:
        part = tree_map_only(Tensor, lambda t: t[start:stop] if t.dim() and len(t) == rows else t, inputs)
        with torch.no_grad(), step.randomness(*op.index):
            return loss_and_aux(call.name, call.evaluate({**weights.trained, **weights.fixed}, *part))[0]

    if rows > 1:
        half = rows // 2
        try:
            losses = loss_of(0, rows), loss_of(0, half), loss_of(half, rows)
        except Exception:  # of code for one number of rows, which nobody cuts otherwise
            return
        wait_for_device(step, step.devices[op.device], "the first loss")
        whole, first, second = map(float, losses)
        parts = (half * first + (rows - half) * second) / rows
        near = 1e-3 if step.dtype == torch.float32 else 3e-2
        if not math.isclose(whole, parts, rel_tol=near, abs_tol=1e-3):
            warn(
                f"segment {call.name!r}: the loss is no mean over rows: {whole:.4g} of {rows} rows, {parts:.4g} as "
                "the mean of two halves. A step has the mean of the losses of micro-batches, each of its own rows: "
                "contrastive losses need `micro_batches=1` on one rank, masked ones weights of the whole batch"
            )


def recompute(op: Op, mem: Memory, step: StepContext) -> None:
    """Run one segment's forward on a micro-batch again, for the residuals that its backward needs, with the
    random seed and module buffers of the first run."""
    call, (x, (_, before)) = step.calls[op.index[1]], _left_by_forward(op, mem)
    with step.randomness(*op.index):
        residuals = call.passes.recompute(_weights(op, mem, step, before), (x,))
    mem[op.write("recomputed")] = x, (residuals, before)


def backward(op: Op, mem: Memory, step: StepContext) -> None:
    """Run the backward of one segment on a micro-batch, with the seed and the module buffers of its forward."""
    grads, below = _pull(op, mem, step)
    _write_grads(op, mem, step, grads)
    _write_below(op, mem, below)


def backward_input(op: Op, mem: Memory, step: StepContext) -> None:
    """Run one segment's backward on a micro-batch as far as the input's gradient needs; keep what
    `backward_weight` needs."""
    below, mem[op.write("pending")] = _pull(op, mem, step)
    _write_below(op, mem, below)


def backward_weight(op: Op, mem: Memory, step: StepContext) -> None:
    """Compute the gradients of one segment's weights from what `backward_input` kept, with the random seed of
    its forward."""
    run, pending = mem[op.read("pending")]
    with step.randomness(*op.index):
        _write_grads(op, mem, step, run(*pending))


def gather(op: Op, mem: Memory, step: StepContext) -> None:
    """Gather a bucket's parameters from the slices of all ranks into a slot on the device: a collective."""
    _, b = op.index
    into = mem[op.write("weight_slot")].hold(step.spec.layout.all_buckets[b])
    fetched = op.write("weight_slot") in op.reads
    step.ranks.all_gather(into, into[step.shards[b]] if fetched else mem[op.read("params")].flat)


def pack(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy one segment's gradients into the flat gradient of a bucket. The first segment to do so also zeroes
    the padding between parameters."""
    _, b, _ = op.index
    bucket, slot, grads = step.spec.layout.buckets[b], mem[op.write("grad")], mem[op.read("grads")]
    if op.write("grad") not in op.reads:
        for start, stop in gaps(bucket.start, bucket.stop, ((x.start, x.stop) for x in bucket.spans)):
            slot[start - bucket.start : stop - bucket.start].zero_()
    torch._foreach_copy_(*_placed(grads, bucket, slot))


def add(op: Op, mem: Memory, step: StepContext) -> None:
    """Add one segment's gradients to its bucket's sum of gradients on the device."""
    _, b, _ = op.index
    total, grads, bucket = mem[op.write("grad")], mem[op.read("grads")], step.spec.layout.buckets[b]
    torch._foreach_add_(*_placed(grads, bucket, total))


def reduce_scatter(op: Op, mem: Memory, step: StepContext) -> None:
    """Sum a bucket's gradient over all ranks into this rank's slice of the bucket's slot: a collective."""
    _, b, _ = op.index
    slot = mem[op.write("grad")][: step.spec.layout.buckets[b].numel]
    step.ranks.reduce_scatter(slot[step.shards[b]], slot)


def square_sum_(op: Op, mem: Memory, step: StepContext) -> None:
    """Sum the squares of this rank's slice of a bucket's complete gradient on the device; an accelerator
    writes norms of its parts instead."""
    (b,) = op.index
    bucket, shard = step.spec.layout.buckets[b], step.shards[b]
    grad = mem[op.read("grad")][shard] if op.touches("grad") else mem[op.read("grad_shard")]
    if on_accelerator(grad.device):
        # In fp32: a sum in fp64 would copy the bucket to fp64 first. Gradients near 1e19 count as not finite. By
        # parameter, so on one rank the bits do not depend on the buckets. The host squares them: for the device
        # that would be 15 launches more.
        spans = bucket.spans_within(shard.start, shard.stop)
        pieces = [grad[first - shard.start : last - shard.start] for first, last, _ in spans]
        squares: Squares = mem[op.write("squares")]
        before = (
            sum(x.stop - bucket.start <= shard.start for x in bucket.spans) if step.spec.settings.norms else 0
        )
        squares.rows = [before + i * step.spec.settings.norms for i in range(len(pieces))]
        if pieces:
            torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float32), out=squares.norms)
    else:
        _write_squares(step, b, mem[op.write("squares")], lambda part: square_sum(grad[part]))


def accumulate(op: Op, mem: Memory, step: StepContext) -> None:
    """Add a bucket's gradient, copied to the host, to its fp32 sum there; sum the squares of the result."""
    _, b, _ = op.index
    first, shard = op.write("grad_shard") not in op.reads, step.shards[b]
    numel = shard.stop - shard.start  # where they are slots they have room for more
    total, grad = mem[op.write("grad_shard")][:numel], mem[op.read("host_slot")][:numel]
    _write_squares(
        step, b, mem[op.write("squares")], lambda part: accumulate_(total[part], grad[part], first=first)
    )


def hold(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy this rank's slice of a bucket's gradient to its buffer on the device, or add the slice to the buffer."""
    _, b, _ = op.index
    grad = mem[op.read("grad")][step.shards[b]]
    (into,) = op.writes
    total = mem[into][: grad.numel()]
    total.add_(grad) if into in op.reads else total.copy_(grad)


def join_sums(op: Op, mem: Memory, step: StepContext) -> None:
    """Add one of the gradient sums of a bucket of tied parameters (one for each segment) to the first; on the
    host, also sum the result's squares."""
    total, part = (mem[r] for r in op.reads)
    if op.touches("squares"):
        b, _ = op.index
        _write_squares(
            step, b, mem[op.write("squares")], lambda own: accumulate_(total[own], part[own], first=False)
        )
    else:
        total.add_(part)


def keep_buffers(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy the module buffers that forward changed, such as running statistics, to the State: on all ranks
    those of rank 0; not in a skipped step."""
    if mem[op.read("decision")].skip:
        return
    for kept in op.writes:
        if kept.lifetime != "state":
            continue
        changed = mem[Region("next_module_buffers", kept.index)]
        if step.ranks.world > 1:
            if step.ranks.rank:
                changed.zero_()  # the sum over ranks is what rank 0 has
            step.ranks.all_reduce(changed)
        mem[kept].copy_(changed)


def write(op: Op, mem: Memory, step: StepContext) -> None:
    """Write this rank's slice of a bucket's state, or of its frozen parameters, to the checkpoint."""
    (b,) = op.index
    checkpoint: CheckpointWriter = mem[op.read("checkpoint")]
    state = state_of(op, mem)
    if op.touches("frozen"):
        state[FROZEN] = own_part(step.shards[b], mem[op.read("frozen")].flat)
    if op.touches("weight_page"):
        state[FROZEN] = weights_in_page(mem[op.read("weight_page")], step.spec.places[b])
    if op.touches("ema"):
        state[EMA.name] = mem[op.read("ema")]
    checkpoint.write(b, state)
    mem[op.write("written")] = None


def write_buffers(op: Op, mem: Memory, step: StepContext) -> None:
    """Write the module buffers that forward changes to the checkpoint."""
    checkpoint: CheckpointWriter = mem[op.read("checkpoint")]
    number, own = len(step.spec.layout.all_buckets), {r.index[0]: r for r in op.operands("module_buffers")}
    for s, call in enumerate(step.calls):
        views = buffer_views(mem[own[s]], call.buffers).values() if s in own else ()
        for n, t in enumerate(views, number):
            checkpoint.write(n, {BUFFER: t.flatten()})
        number += len(call.buffers)
    mem[op.write("written_buffers")] = None


def publish(op: Op, mem: Memory, step: StepContext) -> None:
    """Finish the checkpoint on all ranks; the region "published" gets its path, or the reason of its failure."""
    mem[op.write("published")] = mem[op.read("checkpoint")].publish()


STAGES: dict[str, Stage] = {
    **MOVE_STAGES,
    **UPDATE_STAGES,
    **CLIPPING_STAGES,
    **named_like_verbs(
        load, gather, forward, recompute, backward, backward_input, backward_weight, pack, add, reduce_scatter
    ),
    **named_like_verbs(square_sum_, accumulate, hold, join_sums),
    **named_like_verbs(keep_buffers, write, write_buffers, publish),
}


def _weights(op: Op, mem: Memory, step: StepContext, buffers: dict[str, Tensor]) -> SegmentWeights:
    call, constants = step.calls[op.index[1]], step.constants[op.device, op.index[1]]
    views, names = dict[str, Tensor](), {*call.trained.values(), *call.fixed.values()}
    for r in op.operands("params"):
        of_bucket = mem[r].views  # a bucket may have those of many segments, and a segment many buckets
        views.update((name, of_bucket[name]) for name in of_bucket.keys() & names)
    trained = {short: views[full] for short, full in call.trained.items()}
    fixed = {short: views[full] for short, full in call.fixed.items()}
    return SegmentWeights(trained, {**fixed, **constants, **buffers}, call.name)


def _with_targets(x: Any, op: Op, mem: Memory) -> tuple[Any, ...]:
    return (x, *mem[op.read("targets")]) if op.touches("targets") else (x,)


def _memory_of_rows(op: Op, mem: Memory, step: StepContext) -> AbstractContextManager[None]:
    """A context in which a pass in tiles keeps attention's keys of a row where the plan has them, and waits for
    the device before it reads its results on the host."""
    if step.spec.settings.tiles == 1:
        return nullcontext()
    host = HostMemory(mem[op.write("host_keys")].flat) if op.touches("host_keys") else None
    wait = partial(wait_for_device, step, step.devices[op.device], "where documents of its rows begin")
    return keys_in(host, wait)


def _left_by_forward(op: Op, mem: Memory) -> tuple[Any, tuple[Any, dict[str, Tensor]]]:
    """What a segment's forward left for its backward: (input, (residuals or None, the module buffers that
    forward read))."""
    again = op.touches("recomputed")
    if again and (recomputed := Region("recomputed", op.index)) in op.reads:
        return mem[recomputed]
    if op.touches("act_slot"):
        slot: ActivationSlot = mem[op.read("act_slot")]
        x, *residuals = (slot.copied() if again else slot).tree
        return x, residuals[0] if residuals else (None, {})
    return mem[_input(op)], mem[op.read("residuals")] if op.touches("residuals") else (None, {})


def _input(op: Op) -> Region:
    """The region that holds the input of the segment which operation `op` runs; `op` may read the segment's
    output as well."""
    (region,) = (r for r in op.reads if r.buffer == "act" and r.index == op.index)
    return region


def _cotangents(op: Op, mem: Memory, step: StepContext) -> list[Tensor]:
    """The gradients of a segment's outputs, which the segment above made; for the loss, its scale /
    (micro-batches * ranks)."""
    if op.touches("targets"):
        seed = step.loss_scale / (step.spec.settings.micro_batches * step.ranks.world)
        return [torch.full((), seed, dtype=torch.float32, device=step.devices[op.device])]
    return mem[op.read("grad_act")]


def _pull(op: Op, mem: Memory, step: StepContext) -> Any:
    """Run that backward of a segment which the verb of `op` names, such as `backward_input`, with the random
    seed of its forward."""
    call = step.calls[op.index[1]]
    x, (residuals, before) = _left_by_forward(op, mem)
    weights, inputs = _weights(op, mem, step, before), _with_targets(x, op, mem)
    with step.randomness(*op.index), _memory_of_rows(op, mem, step):
        return getattr(call.passes, op.verb)(weights, inputs, residuals, _cotangents(op, mem, step))


def _write_grads(op: Op, mem: Memory, step: StepContext, grads: Mapping[str, Tensor]) -> None:
    if op.touches("grads"):
        names = step.calls[op.index[1]].trained
        mem[op.write("grads")] = {names[short]: grad for short, grad in grads.items()}


def _write_below(op: Op, mem: Memory, below: list[Tensor]) -> None:
    for r in op.writes:
        if r.buffer in ("grad_act", "sent_grad_act") and r.index == op.index:
            mem[r] = below


def _write_squares(step: StepContext, b: int, squares: Squares, sum_of: Callable[[slice], Tensor]) -> None:
    """Write the sums of squares of this rank's slice of bucket `b` to `squares`: one for the whole slice, or,
    with the setting `norms`, one for each parameter in it. `sum_of(part)` computes one."""
    squares.rows = None
    rows = squares.flat.zero_().view(-1, SUM_PARTS)  # those of parameters that other ranks have, too
    if not step.spec.settings.norms:
        rows[0].copy_(sum_of(slice(None)))
        return
    shard = step.shards[b]
    for row, (start, stop, _) in zip(rows, step.spec.layout.buckets[b].parts, strict=True):
        first, last = max(start, shard.start), min(stop, shard.stop)
        if first < last:
            row.copy_(sum_of(slice(first - shard.start, last - shard.start)))


def _placed(grads: Mapping[str, Tensor], bucket: Bucket, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For those of `grads`, by parameter name, that belong to `bucket`: the views of the bucket's `flat` gradient
    in their places and shapes, and the gradients themselves."""
    spans = [x for x in bucket.spans if x.name in grads]
    views = [flat[x.start - bucket.start : x.stop - bucket.start].view(x.shape) for x in spans]
    return views, [grads[x.name] for x in spans]
