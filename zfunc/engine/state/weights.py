"""The fp32 weights of a State, set and read, in any format of the optimizer state and on any number of ranks.

After `put_weights` a State's parameters have the bits that a step which ends with these weights would have left.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zfunc.core.dtypes import Precision
from zfunc.core.layout import Bucket, Layout, Span
from zfunc.core.optimizer_state import EMA, FROZEN, HIGH_HALF, MASTER, PARAMS, state_slice
from zfunc.core.spec import StepSpec
from zfunc.engine.state.memory import Flat
from zfunc.engine.state.state import Buffers
from zfunc.engine.trace.tensor_memory import own_part
from zfunc.optim.formats import initial_state, master_weights, split_to_even
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

PART = 1 << 20  # elements


def bucket_weights(buffers: Buffers, bucket: Bucket, ranks: RankGroup, *, ema: bool = False) -> Tensor:
    """The fp32 weights of a bucket [bucket.numel], gathered from the slices of all ranks: a collective.

    With `ema`, the moving average of the weights. The weights of a frozen bucket are its parameters, or the fp32
    values that these were rounded from, if kept. Read only: on one rank the result may be the master itself.
    """
    home = buffers.homes.get(bucket.index)
    if home is None:
        return _bucket_weights(buffers, bucket, ranks, ema=ema)
    own = _bucket_weights(buffers, bucket, ranks, ema=ema) if home == ranks.stage else None
    return _of_home(ranks, home, bucket, own, torch.float32)


def _of_home(ranks: RankGroup, home: int, bucket: Bucket, own: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Broadcast a bucket's parameters, of `dtype`, to the hosts of all ranks from pipeline stage `home`,
    which passes them as `own`."""
    own = torch.empty(bucket.numel, dtype=dtype, device="cpu") if own is None else own
    return ranks.from_stage(home, own)  # pyright: ignore  # StageRanks


def _bucket_weights(buffers: Buffers, bucket: Bucket, ranks: RankGroup, *, ema: bool) -> Tensor:
    average = averaged(buffers, bucket, ranks) if ema else None
    shard = _kept_weights(buffers, bucket, ranks) if average is None else average.cpu()
    if shard.numel() == bucket.numel:
        return shard
    full = torch.empty(bucket.numel, device="cpu")
    ranks.all_gather(full, shard)
    return full


def _kept_weights(buffers: Buffers, bucket: Bucket, ranks: RankGroup) -> Tensor:
    """The fp32 weights of a bucket that this rank has, on the host: its slice, or the whole bucket if every
    rank keeps all parameters of it."""
    state = buffers.state(bucket.index)
    if FROZEN in state and MASTER not in state:
        return state[FROZEN].float()
    if state:
        return master_weights(state, 0, bucket.numel // ranks.world)
    return buffers.parameters(bucket.index).flat.cpu().float()


def averaged(buffers: Buffers, bucket: Bucket, ranks: RankGroup) -> Tensor | None:
    """This rank's slice of the moving average of a bucket's weights, up to date; None if none is kept."""
    average = buffers.ema(bucket.index)
    if average is None or bucket.index not in buffers.averages:
        return average
    weights = own_part(ranks.shard(bucket), _kept_weights(buffers, bucket, ranks))
    return torch.lerp(weights, average, buffers.averages_left)  # to the bit where both are equal


def kept_of_frozen(buffers: Buffers, bucket: Bucket, ranks: RankGroup) -> dict[str, Tensor]:
    """What this rank keeps of a frozen bucket beside its parameters, by kind: its slices of the fp32 weights
    and of their moving average."""
    kept = {FROZEN: buffers.frozen_master(bucket.index), EMA.name: averaged(buffers, bucket, ranks)}
    return {kind: x for kind, x in kept.items() if x is not None}


def rounded(name: str, weights: Tensor, dtype: Precision) -> Tensor:
    """The weights of parameter `name`, rounded to `dtype`. Raises ValueError where a weight is too large for it."""
    given = weights.to(TORCH_DTYPES[dtype])
    if given is not weights and not torch.equal(given.isfinite(), weights.isfinite()):
        raise ValueError(f"{name!r}: got a weight too large for {dtype}: save as bf16 or fp32")
    return given


def parameter_weights(
    buffers: Buffers, layout: Layout, ranks: RankGroup, *, ema: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter once, as (full name, fp32 weights in its shape), on the host and read only. With
    `ema`, the moving averages of the weights.

    A collective for each bucket: all ranks have to exhaust the iterator.
    """
    for bucket in layout.all_buckets:
        flat = bucket_weights(buffers, bucket, ranks, ema=ema)
        for span in bucket.spans:
            yield span.name, flat[span.start - bucket.start : span.stop - bucket.start].view(span.shape)


def put_weights(
    buffers: Buffers,
    layout: Layout,
    span: Span,
    value: Tensor,
    ranks: RankGroup,
    *,
    keep_moments: bool = False,
) -> None:
    """Set the weights of parameter `span` to `value`, in this rank's slices of the master weights and of the
    parameters. Its moments must be 0, unless `keep_moments`.

    Works on a part of the elements at a time, because splitting fp32 weights into two halves takes memory.
    """
    flat, bucket = value.flatten(), layout.bucket_of(span)
    state, params = buffers.state(bucket.index, write=True), buffers.weights.get(bucket.index)
    copy = state.pop(PARAMS, state.pop(FROZEN, None))  # on the disk
    piece = layout.piece(span, ranks.rank, ranks.world)
    views = params.views[span.name].view(-1) if params is not None and params.views else None
    for start in range(0, flat.numel(), PART):
        part = flat[start : start + PART].to("cpu", torch.float32)
        initial = initial_state(part, state) if state else {}
        first, last = max(start, piece.start), min(start + part.numel(), piece.stop)
        own = slice(piece.at + first - piece.start, piece.at + last - piece.start)
        if keep_moments and "exp_avg_sq" in initial and first < last:  # its signs belong to the weights
            at = slice(first - start, last - start)
            initial["exp_avg_sq"][at] = split_to_even(part[at], state["exp_avg_sq"][own].cpu().abs())[2]
        high = initial.get(HIGH_HALF)
        new = high if high is not None and params is not None and params.flat.dtype == high.dtype else part
        if views is not None:
            views[start : start + PART].copy_(new)
        if first >= last:
            continue
        kept = [(state[name], values) for name, values in initial.items()]
        if copy is not None:
            kept.append((copy, part))
        if params is not None and views is None:
            kept.append((params.flat, new))
        for into, values in kept:
            into[own].copy_(values[first - start : last - start])


def begin_again(buffers: Buffers, layout: Layout, span: Span, value: Tensor, ranks: RankGroup) -> None:
    """Zero this rank's moments of the parameter `span`, and set its moving average, if one is kept, to `value`."""
    bucket, piece = layout.bucket_of(span), layout.piece(span, ranks.rank, ranks.world)
    start, stop = piece.at, piece.at + piece.stop - piece.start
    state = buffers.state(bucket.index, write=True)
    for x in state_slice(bucket.state_format, state, start, stop).values():
        x.zero_()
    if (average := buffers.ema(bucket.index)) is not None:
        average[start:stop].copy_(value.flatten()[piece.start : piece.stop])


def send_weights(buffers: Buffers, buckets: Iterable[Bucket], ranks: RankGroup) -> None:
    """Set the parameters of `buckets` to the rounded master weights, on every rank: a collective for each
    bucket of which a rank has more than its slice."""
    for bucket in (x for x in buckets if buffers.homes.get(x.index, ranks.stage) == ranks.stage):
        on_disk = bucket.index not in buffers.weights
        state, size = buffers.state(bucket.index, write=on_disk), bucket.numel // ranks.world
        params = state.get(PARAMS, state.get(HIGH_HALF)) if on_disk else buffers.weights[bucket.index].flat
        high = state.get(HIGH_HALF)
        if on_disk and params is high:
            continue
        same = high if high is not None and params.dtype == high.dtype else state.get(MASTER)
        shard = own_part(ranks.shard(bucket), params)
        for first in range(0, size, PART):  # joining a split master allocates: a part at a time
            last = min(first + PART, size)
            weights = master_weights(state, first, last) if same is None else same[first:last]
            shard[first:last].copy_(weights)
        if params.numel() > size:
            ranks.all_gather(params, shard)
    ranks.settle()


def average_frozen(buffers: Buffers, layout: Layout, ranks: RankGroup) -> None:
    """Bring the moving averages of frozen weights up to date, which steps leave as they are."""
    for bucket in (x for x in layout.frozen_buckets if x.index in buffers.averages):
        average, now = buffers.ema(bucket.index), averaged(buffers, bucket, ranks)
        if average is not None and now is not None:
            average.copy_(now)
    buffers.averages_left = 1.0


def begin_averages(buffers: Buffers, layout: Layout, ranks: RankGroup) -> None:
    """Set the moving averages of all weights, where averages are kept, to the weights."""
    for bucket in layout.all_buckets:
        average = buffers.ema(bucket.index)
        if average is not None and bucket.index in buffers.averages:
            average.copy_(own_part(ranks.shard(bucket), _kept_weights(buffers, bucket, ranks)))
        elif average is not None:
            state = buffers.state(bucket.index)
            for first in range(0, average.numel(), PART):
                part = average[first : first + PART]
                part.copy_(master_weights(state, first, first + part.numel()))


def gathered(
    buffers: Buffers, spec: StepSpec, bucket: Bucket, device: torch.device, ranks: RankGroup
) -> dict[str, Tensor]:
    """The parameters of a bucket by full name: those in memory or on the disk, or, if each rank has a slice
    or one pipeline stage has them, copies on `device` made by a collective."""
    home = buffers.homes.get(bucket.index)
    if home is not None:
        own = _gathered(buffers, spec, bucket, device, ranks) if home == ranks.stage else None
        flat = _of_home(ranks, home, bucket, own and own.flat, TORCH_DTYPES[spec.places[bucket.index].dtype])
        return Flat.of(flat.to(device), bucket).views
    whole = _gathered(buffers, spec, bucket, device, ranks)
    return whole.views or Flat.of(whole.flat, bucket).views


def _gathered(
    buffers: Buffers, spec: StepSpec, bucket: Bucket, device: torch.device, ranks: RankGroup
) -> Flat:
    params = buffers.parameters(bucket.index)
    if not spec.places[bucket.index].sharded:
        return params
    flat = torch.empty(bucket.numel, dtype=params.flat.dtype, device=device)
    own = own_part(ranks.shard(bucket), flat)
    own.copy_(params.flat)
    ranks.all_gather(flat, own)
    ranks.settle()  # before the caller copies anything between host and device
    return Flat.of(flat, bucket)


def segment_weights(
    buffers: Buffers, spec: StepSpec, s: int, device: torch.device, ranks: RankGroup, *, ema: bool = False
) -> dict[str, Tensor]:
    """The parameters of segment `s` by full name, on `device`. A collective if each rank has a slice of them.

    With `ema`, the moving averages of the weights, rounded to the dtype of the parameters: always a
    collective.
    """
    weights: dict[str, Tensor] = {}
    for b in spec.layout.weights_of(s):
        bucket = spec.layout.all_buckets[b]
        if ema and (b < len(spec.layout.buckets) or b in buffers.averages):
            average = bucket_weights(buffers, bucket, ranks, ema=True)
            views = Flat.of(average.to(device, TORCH_DTYPES[spec.places[b].dtype]), bucket).views
        elif spec.places[b].params != "device" and not spec.places[b].sharded and not spec.mesh.over_ranks:
            views = Flat.of(buffers.parameters(b).flat.to(device), bucket).views
        else:
            views = gathered(buffers, spec, bucket, device, ranks)
        weights |= views
    return weights
