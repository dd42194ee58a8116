"""ZeRO-Infinity: the state lives on drives, the parameters on the host, and neither is ever whole on a device.

A rank keeps a slice of everything. Before a segment runs its parameters are copied from the host, each rank its
slice, and gathered over the network; activations wait for backward on the host. To update a bucket its state is
read from the drives into a pinned page, changed there and written back, while the next page is being read.

Published beside planned: the rows have the state on the host, not on drives, and DeepSpeed's own Adam there;
docs/published.md has the facts of each row.

Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021),
sections 5 and 6.
"""

from collections.abc import Iterator

from zfunc.core.graph import Op
from zfunc.core.ops import OpBuilder
from zfunc.core.spec import StepSpec

SETTINGS = {"stage": 3, "params_on": "host", "activations_on": "host", "state_on": "disk"}
SETTINGS |= {"clip_norm": 1.0, "commit_every": 2}
PUBLISHED = ("Z2", "R2")


def zero_infinity(spec: StepSpec) -> Iterator[Op]:
    """The operations of a step in serial order."""
    emit, last = OpBuilder(spec), spec.num_segments - 1
    yield emit.load(0)
    for s in range(spec.num_segments):
        yield from fetch(spec, emit, s)
        yield emit.forward(0, s)
        if s < last:  # its backward comes next
            yield emit.stash(0, s)
    if spec.mesh.several_ranks:
        yield emit.mean_loss()
    for s in reversed(range(spec.num_segments)):
        if s < last:
            yield from fetch(spec, emit, s)
            yield emit.unstash(0, s)
        yield emit.backward(0, s)
        for b, d, segments in spec.layout.contributions(s):
            yield emit.pack(0, b, s, first=s == segments[0])
            if s == segments[-1]:
                yield from offload(spec, emit, b, d)
    yield emit.global_norm()
    yield emit.decide()
    for bucket in reversed(spec.layout.buckets):
        yield emit.page_in(bucket.index)
        yield emit.update(bucket.index)
        yield emit.page_out(bucket.index)


def fetch(spec: StepSpec, emit: OpBuilder, s: int) -> Iterator[Op]:
    """Bring the parameters of segment `s` to the device that are in no slot there, each rank its slice."""
    for b in emit.at.ring("weight_slot").take(spec.layout.weights_of(s)):
        yield emit.fetch(b)
        if spec.world > 1:
            yield emit.gather(b)


def offload(spec: StepSpec, emit: OpBuilder, b: int, d: int) -> Iterator[Op]:
    """Leave each rank the sum of its slice of bucket `b`, and copy that slice to the host."""
    if spec.world > 1:
        yield emit.reduce_scatter(0, b, d)
    yield emit.square_sum(b, waits=False)
    yield emit.squares_to_host(b)
    yield emit.to_host(0, b, d)
