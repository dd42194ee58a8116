"""Reads the state of a checkpoint into a rank's buffers, whatever world, layout or state format it was saved with.

Only the slices that this rank keeps are read, directly into its buffers where the formats are equal. Otherwise the
optimizer converts a bounded part at a time.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from attrs import evolve
from torch import Tensor

from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.manifest import BUFFER, PENDING
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.snapshot import Slice, frozen_slices, state_slices
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.dtypes import Dtype
from zfunc.core.layout import Bucket, Layout
from zfunc.core.optimizer_state import EMA, stored_buffers
from zfunc.core.spec import FROZEN
from zfunc.engine.state import Buffers
from zfunc.engine.weights import begin_averages, send_weights
from zfunc.errors import CheckpointError
from zfunc.optim.base import Optimizer
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.torch_dtypes import SAFETENSORS_TYPES, TORCH_DTYPES

BESIDE = (PENDING, EMA.name)  # kinds of state that no optimizer converts
PART = 1 << 17  # elements of a parameter that are converted at once: 5 MB of temporaries


def fill_state(
    buffers: Buffers, layout: Layout, optimizer: Optimizer, checkpoint: Checkpoint, ranks: RankGroup
) -> None:
    """Read what this rank keeps. Trained parameters on the device are not written.

    Moving averages that are not there begin as the weights. Raises CheckpointError, naming file, tensor and offset,
    for bytes that are not what was written.
    """
    manifest = checkpoint.manifest
    gradients = buffers.waiting() if manifest.position.pending is not None else ()
    pending: dict[int, Dtype] = dict.fromkeys(gradients, "fp32")
    averages = buffers.ema(0) is not None and manifest.averages
    state = [*state_slices(layout, ranks.rank, ranks.world, pending, ema=averages)]
    slices = [*state, *_frozen_slices(buffers, layout, ranks)]
    with CheckpointReader(checkpoint) as reader:
        own = {x.name: bucket.state_format for bucket in layout.buckets for x in bucket.spans}
        other = {x for x in own if manifest.format_of(manifest.by_name[x]) != own[x]}
        converted = [x for x in state if x.parameter in other and x.kind not in BESIDE]
        slices = [x for x in slices if x.parameter not in other or x.kind in BESIDE]
        for b, kinds in groupby(converted, key=lambda x: (x.bucket, x.parameter)):
            _convert(reader, {x.kind: x for x in kinds}, buffers, layout.buckets[b[0]], optimizer)
        for _, own in groupby(slices, key=lambda x: x.bucket if buffers.on_disk else 0):
            # Of what is on the disk, one bucket is in memory at a time.
            _fill(
                reader,
                [(WantedSlice(x.kind, x.parameter, x.start, x.stop), slice_memory(buffers, x)) for x in own],
            )

    if not averages:
        begin_averages(buffers, layout)


def fill_buffers(checkpoint: Checkpoint, buffers: Mapping[str, Tensor]) -> None:
    """Read modules' buffers by full name. Raises CheckpointError for one of another type, and for damage."""
    manifest = checkpoint.manifest
    with CheckpointReader(checkpoint) as reader:
        for name, into in buffers.items():
            for piece in manifest.by_name[name].pieces[BUFFER]:
                stored, expected = manifest.tensor(piece).dtype, SAFETENSORS_TYPES[into.dtype]
                if stored != expected:
                    raise CheckpointError(
                        f"{name!r}: got a buffer of {stored}, expected {expected}: convert the module"
                    )
                values = torch.empty(into.numel(), dtype=into.dtype, device="cpu")
                reader.read([(WantedSlice(BUFFER, name, 0, into.numel()), as_bytes(values))])
                into.copy_(values.view(into.shape))


def send_parameters(buffers: Buffers, layout: Layout, ranks: RankGroup) -> None:
    """Give every rank's device the weights that are on all hosts: a collective for each bucket."""
    for bucket in layout.buckets:
        send_weights(buffers, bucket, ranks)


def _frozen_slices(buffers: Buffers, layout: Layout, ranks: RankGroup) -> Iterator[Slice]:
    """What this rank keeps of frozen parameters: its slice of a bucket, or all of it."""
    for bucket in layout.frozen_buckets:
        params = buffers.weights.get(bucket.index)  # None: each has its slice on the disk
        whole = params is not None and params.flat.numel() == bucket.numel
        rank, world = (0, 1) if whole else (ranks.rank, ranks.world)
        yield from frozen_slices(layout, bucket, "fp32", rank, world)


def slice_memory(buffers: Buffers, x: Slice) -> Tensor:
    """Where the buffers have a slice."""
    if x.kind == FROZEN and x.bucket in buffers.weights:
        flat = buffers.weights[x.bucket].flat
    elif x.kind == PENDING:
        flat = buffers.waiting()[x.bucket]
    elif x.kind == EMA.name:
        flat = buffers.ema(x.bucket)
        assert flat is not None
    else:
        flat = buffers.state(x.bucket, write=True)[x.kind]
    return flat[x.at : x.at + x.stop - x.start]


def _fill(reader: CheckpointReader, targets: Iterable[tuple[WantedSlice, Tensor]]) -> None:
    """Fill each tensor with its slice, one on the device or of another type in bounded parts."""
    direct: list[tuple[WantedSlice, memoryview]] = []
    for x, into in targets:
        if not on_accelerator(into.device) and into.dtype == TORCH_DTYPES[reader.dtype(x.parameter, x.kind)]:
            direct.append((x, as_bytes(into)))
            continue
        for start in range(x.start, x.stop, PART):
            stop = min(start + PART, x.stop)
            part = _read(reader, [evolve(x, start=start, stop=stop)])
            into[start - x.start : stop - x.start].copy_(part[x.kind])
    reader.read(direct)


def _convert(
    reader: CheckpointReader,
    slices: dict[str, Slice],
    buffers: Buffers,
    bucket: Bucket,
    optimizer: Optimizer,
) -> None:
    """Convert the state of one parameter of a bucket; `slices` are this rank's, by kind."""
    manifest = reader.manifest
    own = {x.name: x for x in stored_buffers(bucket.state_format)}
    unshared = next(x for kind, x in slices.items() if own[kind].shared == 1)
    name = unshared.parameter
    (group,) = (x.group for x in bucket.spans if x.name == name)
    stored_format = manifest.format_of(manifest.by_name[name])
    stored = stored_buffers(stored_format)
    for start in range(unshared.start, unshared.stop, PART):
        stop = min(start + PART, unshared.stop)
        parts = [WantedSlice(x.name, name, x.numel(start), x.numel(stop)) for x in stored]
        values = _read(reader, parts)
        try:
            converted = optimizer.convert_state(values, stored_format, manifest.position.step, group=group)
        except CheckpointError as error:
            raise CheckpointError(f"{name!r}: {error}") from error
        for kind, values in converted.items():
            at = own[kind].numel(start) - slices[kind].start
            slice_memory(buffers, slices[kind])[at : at + values.numel()].copy_(values)


def _read(reader: CheckpointReader, wanted: Iterable[WantedSlice]) -> dict[str, Tensor]:
    """Slices of different kinds as new tensors, by kind."""
    tensors = {
        x: torch.empty(x.stop - x.start, dtype=TORCH_DTYPES[reader.dtype(x.parameter, x.kind)], device="cpu")
        for x in wanted
    }
    reader.read([(x, as_bytes(values)) for x, values in tensors.items()])
    return {x.kind: values for x, values in tensors.items()}
