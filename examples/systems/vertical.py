"""GreedySnake's vertical accumulation: a layer's parameters come once a step, not once a micro-batch.

With parameters on the host, gradient accumulation as usual reads all layers for every micro-batch. Here all
micro-batches pass one layer before any passes the next, in forward and in backward: so each layer's parameters
cross the bus twice a step, its gradients are summed on the device, and one sum a layer leaves it. The price is
room for the activations of all micro-batches, which wait on the host.

Published: 1.96 times the tokens/s of ZeRO-Infinity, GPT-65B on one A100 (abstract). There the drives bound the
step, and a part of the update overlaps the next forward (here `defer`); in this picture the bus is never the
bound, so nothing is gained but the bytes. No row of docs/published.md: the run it is a ratio to is not given.

Yin, Yue and Qian, "GreedySnake: Accelerating SSD-Offloaded LLM Training with Efficient Scheduling and Optimizer
Step Overlapping" (2025), arXiv 2512.17570.
"""

from collections.abc import Iterator

from zfunc.core.graph import Op
from zfunc.core.ops import OpBuilder
from zfunc.core.spec import StepSpec

SETTINGS = {"params_on": "host", "activations_on": "host", "clip_norm": 1.0, "micro_batches": 4}
PUBLISHED = ()


def vertical(spec: StepSpec) -> Iterator[Op]:
    """The operations of a step in serial order."""
    emit, last, micro_batches = OpBuilder(spec), spec.num_segments - 1, range(spec.settings.micro_batches)
    for m in micro_batches:
        yield emit.load(m)
    for s in range(last):
        yield from fetch(spec, emit, s)
        for m in micro_batches:
            yield emit.forward(m, s)
            yield emit.stash(m, s)
    yield from fetch(spec, emit, last)
    for m in micro_batches:  # of the last layer backward follows at once
        yield emit.forward(m, last)
        yield from backward(spec, emit, m, last)
    for s in reversed(range(last)):
        yield from fetch(spec, emit, s)
        for m in micro_batches:
            yield emit.unstash(m, s)
            yield from backward(spec, emit, m, s)
    yield emit.global_norm()
    yield emit.decide()
    for bucket in reversed(spec.layout.buckets):
        yield emit.update(bucket.index)


def fetch(spec: StepSpec, emit: OpBuilder, s: int) -> Iterator[Op]:
    """Copy the parameters of segment `s` to the device that are in no slot there."""
    for b in emit.at.ring("weight_slot").take(spec.layout.weights_of(s)):
        yield emit.fetch(b)


def backward(spec: StepSpec, emit: OpBuilder, m: int, s: int) -> Iterator[Op]:
    """Backward of a micro-batch; its gradient is added on the device, and the last one's sum goes to the host."""
    yield emit.backward(m, s)
    sums = emit.at.ring("sum_slot")
    sums.take(spec.layout.buckets_of(s))
    for b, d, segments in spec.layout.contributions(s):
        yield emit.pack(m, b, s, first=s == segments[0])
        if s == segments[-1]:
            sums.kept.add(b)  # until its gradient has left
            yield emit.hold(m, b, d, first=m == 0)
            if m == spec.settings.micro_batches - 1:
                yield emit.to_host(m, b, d)
                sums.kept.discard(b)
                yield emit.accumulate(m, b, d, first=True)
