"""Recipes: what a training step does, in the order the paper says it. This order is the reference result.

A recipe is a generator of operations. It knows nothing of lanes, streams or waits: those come from what the
operations touch (`zfunc.emit`) and from the schedule.
"""

from collections.abc import Iterator

from zfunc.emit import Emit, Job
from zfunc.graph import Op


def zero_offload(job: Job) -> Iterator[Op]:
    """ZeRO-Offload: parameters on the device, master weights and Adam on the host.

    Gradients leave the device a bucket at a time, while backward goes on, through `job.grad_slots` slots.
    With a barrier (clipping, fp16) every update waits for the norm of the whole gradient; without one, Adam
    of a bucket follows its gradient at once.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), sections 4 and 5.
    """
    emit = Emit(job)
    segments = range(job.num_segments)
    for m in range(job.micro_batches):
        yield emit.load(m)
        for s in segments:
            yield emit.forward(m, s)
        last = m == job.micro_batches - 1
        if last and not job.barrier:
            yield emit.decide()
        yield from _backward(job, emit, m, update=last and not job.barrier)
    yield emit.global_norm()
    if job.barrier:
        yield emit.decide()
        for bucket in reversed(job.layout.buckets):
            yield from _update(job, emit, bucket.index, None)


def _backward(job: Job, emit: Emit, m: int, *, update: bool) -> Iterator[Op]:
    """Backward of micro-batch `m`, each bucket delivered to the host as soon as it is complete."""
    layout = job.layout
    delivery = m * sum(len(b.deliveries) for b in layout.buckets)  # counts slots round robin
    for s in reversed(range(layout.first_trainable, job.num_segments)):
        yield emit.backward(m, s)
        for b in reversed(layout.buckets_of(s)):
            bucket = layout.buckets[b]
            d, group = next((d, group) for d, group in enumerate(bucket.deliveries) if s in group)
            yield emit.pack(m, b, s, delivery, first=s == group[0])
            if s == group[-1]:
                complete = update and d == len(bucket.deliveries) - 1
                yield from _deliver(job, emit, m, b, d, delivery, update=complete)
                delivery += 1


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
