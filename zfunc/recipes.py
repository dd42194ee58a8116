"""Recipes: what a training step does, in the order the paper says it. This order is the reference result.

A recipe is a generator of operations. It knows nothing of lanes, streams or waits: those come from what the
operations touch (`zfunc.emit`) and from the schedule.
"""

from collections.abc import Iterator

from zfunc.emit import Emit, Job
from zfunc.graph import Op
from zfunc.layout import Bucket


def zero_offload(job: Job) -> Iterator[Op]:
    """ZeRO-Offload: parameters on the device, master weights and Adam on the host.

    Gradients leave the device a bucket at a time, while backward goes on, through `job.grad_slots` slots.
    With a barrier (clipping, fp16) every update waits for the norm of the whole gradient; without one, Adam
    of a bucket follows its gradient at once. On several ranks each reduces, copies, updates and sends back its
    slice of every bucket: ZeRO's stage 2; with `job.stage` 1 gradients are added up on the device first.
    With `job.save` a checkpoint is written meanwhile.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), sections 4 and 5.
    """
    emit = Emit(job)
    segments = range(job.num_segments)
    if job.save:
        yield from _write(job, emit)
    for m in range(job.micro_batches):
        yield emit.load(m)
        for s in segments:
            yield emit.forward(m, s)
        last = m == job.micro_batches - 1
        if last and job.world > 1:
            yield emit.mean_loss()
        if last and not job.barrier:
            yield emit.decide()
        yield from _backward(job, emit, m, update=last and not job.barrier)
    yield emit.global_norm()
    if job.barrier:
        yield emit.decide()
        for bucket in reversed(job.layout.buckets):
            yield from _update(job, emit, bucket.index, None)
    if job.save:
        yield emit.publish(last=True)


def checkpoint(job: Job) -> Iterator[Op]:
    """A checkpoint by itself, between two steps."""
    emit = Emit(job)
    yield from _write(job, emit)
    yield emit.publish()


def _write(job: Job, emit: Emit) -> Iterator[Op]:
    """The state as this step found it, in the order in which the step will want to update it."""
    for bucket in reversed(job.layout.buckets):
        yield emit.write(bucket.index)
    if job.layout.frozen:
        yield emit.write_frozen()


def _backward(job: Job, emit: Emit, m: int, *, update: bool) -> Iterator[Op]:
    """Backward of micro-batch `m`, each bucket delivered to the host as soon as it is complete.

    Slots are dealt round robin. Of a segment's buckets, the one begun above comes first and the one that goes
    on below comes last, so at most one is open at any time and even a single slot is enough.
    """
    layout = job.layout
    slot = m * sum(len(b.deliveries) for b in layout.buckets)
    for s in reversed(range(layout.first_trainable, job.num_segments)):
        yield emit.backward(m, s)
        parts = [(b, *_delivery(layout.buckets[b], s)) for b in layout.buckets_of(s)]
        for b, d, group in sorted(parts, key=lambda p: (s == p[2][0], s != p[2][-1], -p[0])):
            if job.stage == 1:
                yield from _add_up(job, emit, m, b, d, s, update=update)
                continue
            yield emit.pack(m, b, s, slot, first=s == group[0])
            if s == group[-1]:
                complete = update and d == len(layout.buckets[b].deliveries) - 1
                yield from _deliver(job, emit, m, b, d, slot, update=complete)
                slot += 1


def _add_up(job: Job, emit: Emit, m: int, b: int, d: int, s: int, *, update: bool) -> Iterator[Op]:
    """Stage 1: add to the bucket's sum on the device, and deliver it after the last contribution of the step."""
    deliveries = job.layout.buckets[b].deliveries
    if m == 0 and d == 0:
        yield emit.pack(m, b, s, b, first=s == deliveries[0][0])
    else:
        yield emit.add(m, b, s)
    if m == job.micro_batches - 1 and s == deliveries[-1][-1]:
        yield from _deliver(job, emit, m, b, d, b, update=update)


def _delivery(bucket: Bucket, s: int) -> tuple[int, tuple[int, ...]]:
    """Which delivery of `bucket` segment `s` fills, and with which other segments."""
    return next((d, group) for d, group in enumerate(bucket.deliveries) if s in group)


def _deliver(job: Job, emit: Emit, m: int, b: int, d: int, slot: int, *, update: bool) -> Iterator[Op]:
    """Reduce a bucket, measure it, send it to the host; add it up there if more than one is to come."""
    accumulated = job.num_deliveries(job.layout.buckets[b]) > 1
    host_slot = slot if accumulated or not job.barrier else None
    if job.world > 1:
        yield emit.reduce_scatter(m, b, d, slot)
    if not accumulated:
        yield emit.square_sum(b, slot)
    yield emit.to_host(m, b, d, slot, host_slot)
    if accumulated:
        yield emit.accumulate(m, b, d, slot, first=m == 0 and d == 0)
    if update:
        yield from _update(job, emit, b, None if accumulated else host_slot)


def _update(job: Job, emit: Emit, b: int, host_slot: int | None) -> Iterator[Op]:
    """Adam on the host, the new parameters back to the device."""
    yield emit.adam(b, host_slot)
    yield emit.to_device(b)
    if job.world > 1:
        yield emit.all_gather(b)
