"""ZeRO-Offload: gradients leave the device as backward makes them, and Adam runs on the host.

The device keeps 16-bit parameters and what forward and backward need, 2 bytes a parameter; the host keeps fp32
master weights and Adam's moments, 12 bytes a parameter, and a slice of them on each rank. A gradient crosses
the bus once, new parameters once. Clipping needs the norm of the whole gradient, so every update comes behind
the last backward.

Published beside planned: DeepSpeed copies gradients on the stream of backward (`overlap_comm` is off by
default) and runs Adam at the rate that its authors measured; docs/published.md has the facts of each row.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), sections 4.1 to 4.3.
"""

from collections.abc import Iterator

from zfunc.core.graph import Op
from zfunc.core.ops import OpBuilder
from zfunc.core.spec import StepSpec

SETTINGS = {"clip_norm": 1.0, "micro_batches": 2}
PUBLISHED = ("Z1", "Z4 DeepSpeed ZeRO-2", "Z11")


def zero_offload(spec: StepSpec) -> Iterator[Op]:
    """The operations of a step in serial order."""
    emit, last = OpBuilder(spec), spec.settings.micro_batches - 1
    for m in range(last + 1):
        yield emit.load(m)
        for s in range(spec.num_segments):
            yield emit.forward(m, s)
        if m == last and spec.mesh.several_ranks:
            yield emit.mean_loss()
        for s in reversed(range(spec.num_segments)):
            yield emit.backward(m, s)
            for b, d, segments in spec.layout.contributions(s):
                yield emit.pack(m, b, s, first=s == segments[0])
                if s == segments[-1]:  # the bucket is full
                    yield from offload(spec, emit, m, b, d)
    yield emit.global_norm()
    yield emit.decide()
    for bucket in reversed(spec.layout.buckets):
        yield emit.update(bucket.index)
        yield emit.to_device(bucket.index)
        if spec.world > 1:
            yield emit.all_gather(bucket.index)


def offload(spec: StepSpec, emit: OpBuilder, m: int, b: int, d: int) -> Iterator[Op]:
    """Leave each rank the sum of its slice of bucket `b`, and copy that slice to the host."""
    if spec.world > 1:
        yield emit.reduce_scatter(m, b, d)
    if spec.settings.micro_batches == 1:
        yield emit.square_sum(b, waits=False)
        yield emit.squares_to_host(b)
        yield emit.to_host(m, b, d)
    else:  # the host adds the micro-batches up, and their squares in the same pass
        yield emit.to_host(m, b, d)
        yield emit.accumulate(m, b, d, first=m == 0)
