"""State that visits the device: Adam runs there, on one bucket at a time.

The state waits on the host, as in ZeRO-Offload, and a bucket's is copied to the device, updated there with the
gradient that never left, and copied back, while the next bucket's state is on its way. The bus carries 24 bytes
a parameter where ZeRO-Offload's carries 4, and no core of the host works: this pays where the bus is fast, as
between Grace and Hopper, or where cores are few.

Published: 15 to 20 GB less of device memory for 0.1 to 0.2 s an iteration, DeepSeek-V3 on GB200. In this
picture the bus has 20 GB/s each way, and the step is longer than ZeRO-Offload's. No row of docs/published.md:
that training is expert and pipeline parallel.

Megatron-LM, offloading of optimizer states (pull request 2760). zfunc's setting update_on="device" is this
recipe.
"""

from collections.abc import Iterator

from zfunc.core.graph import Op
from zfunc.core.ops import OpBuilder
from zfunc.core.spec import StepSpec

SETTINGS = {"update_on": "device", "clip_norm": 1.0}
PUBLISHED = ()


def staged(spec: StepSpec) -> Iterator[Op]:
    """The operations of a step in serial order."""
    emit = OpBuilder(spec)
    yield emit.load(0)
    for s in range(spec.num_segments):
        yield emit.forward(0, s)
    for s in reversed(range(spec.num_segments)):
        yield emit.backward(0, s)
        for b, d, segments in spec.layout.contributions(s):
            yield emit.pack(0, b, s, first=s == segments[0])
            if s == segments[-1]:
                yield emit.square_sum(b, waits=False)
                yield emit.hold(0, b, d, first=True)  # until the norm is known
                yield emit.squares_to_host(b)
    yield emit.global_norm()
    yield emit.decide()
    for bucket in reversed(spec.layout.buckets):
        yield emit.state_to_device(bucket.index)
        yield emit.update(bucket.index)
        yield emit.state_to_host(bucket.index)
