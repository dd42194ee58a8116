"""fp32 weights: into a State and out of it, for any format of the state and any number of ranks.

After `put_weights` the device has what a step with these weights would have sent.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from zfunc.core.graph import Region
from zfunc.core.layout import Bucket, Layout, Span
from zfunc.core.optimizer_state import HIGH_HALF
from zfunc.engine.state import Buffers
from zfunc.optim.compact import initial_state, master_weights
from zfunc.runtime.collectives import RankGroup

PART = 1 << 20  # elements


def bucket_weights(buffers: Buffers, bucket: Bucket, ranks: RankGroup) -> Tensor:
    """The fp32 weights of a bucket [bucket.numel], from the slices of all ranks: a collective.

    Read only: on one rank the result may be the master itself.
    """
    shard = master_weights(buffers.state(bucket.index), 0, bucket.numel // ranks.world)
    if ranks.world == 1:
        return shard
    full = torch.empty(bucket.numel, device="cpu")
    ranks.all_gather(full, shard)
    return full


def parameter_weights(buffers: Buffers, layout: Layout, ranks: RankGroup) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once: its full name and fp32 weights on the host, in its shape; read only.

    Frozen parameters come from the device. Each bucket is a collective: all ranks have to exhaust the iterator.
    """
    for bucket in layout.buckets:
        flat = bucket_weights(buffers, bucket, ranks)
        for span in bucket.spans:
            yield span.name, flat[span.start - bucket.start : span.stop - bucket.start].view(span.shape)
    for span in layout.frozen:
        yield span.name, buffers.views[span.name].float().cpu()


def put_weights(buffers: Buffers, layout: Layout, span: Span, value: Tensor, ranks: RankGroup) -> None:
    """Set the weights of one parameter: this rank's slice on the host, and all of it on the device."""
    flat = value.flatten().to("cpu", torch.float32)
    on_device = buffers.views[span.name].view(-1)
    bucket = layout.bucket_of(span)
    state = buffers.state(bucket.index)
    initial = initial_state(flat, state)
    high = initial.get(HIGH_HALF)
    on_device.copy_(high if high is not None and on_device.dtype == high.dtype else flat)
    piece = layout.piece(span, ranks.rank, ranks.world)
    for name, values in initial.items():
        state[name][piece.at : piece.at + piece.stop - piece.start].copy_(values[piece.start : piece.stop])


def send_weights(buffers: Buffers, bucket: Bucket, ranks: RankGroup) -> None:
    """Send the weights of a bucket from the host to the device: a collective."""
    state, size = buffers.state(bucket.index), bucket.numel // ranks.world
    params: Tensor = buffers.memory[Region("params", (bucket.index,))].flat
    shard, high = params[slice(*bucket.slice_of(ranks.rank, ranks.world))], state.get(HIGH_HALF)
    for first in range(0, size, PART):  # joining a split master allocates: a part at a time
        last = min(first + PART, size)
        if high is not None and params.dtype == high.dtype:
            shard[first:last].copy_(high[first:last])
        else:
            shard[first:last].copy_(master_weights(state, first, last))
    if ranks.world > 1:
        ranks.all_gather(params, shard)
