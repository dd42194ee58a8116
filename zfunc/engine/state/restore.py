"""Reads the state of a checkpoint into a rank's buffers, whatever world, layout or state format it was saved with.

Only the slices that this rank keeps are read, directly into its buffers where the formats are equal. Otherwise the
optimizer converts a bounded part at a time.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.manifest import BUFFER, Manifest, ParameterEntry, Slice, slices_of, stored_kinds
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.layout import Bucket, Layout
from zfunc.core.optimizer_state import EMA, FROZEN, HIGH_HALF, MASTER, STATE_FORMATS, StateBuffer
from zfunc.core.spec import StepSpec
from zfunc.engine.state.state import Buffers
from zfunc.engine.state.weights import begin_averages
from zfunc.errors import CheckpointError
from zfunc.optim.base import Optimizer
from zfunc.optim.formats import initial_state
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.torch_dtypes import SAFETENSORS_TYPES, TORCH_DTYPES

PART = 1 << 17  # elements of a parameter that are converted at once: 5 MB of temporaries


def fill_state(
    buffers: Buffers,
    layout: Layout,
    optimizer: Optimizer,
    checkpoint: Checkpoint,
    ranks: RankGroup,
    *,
    strict: bool = True,
) -> list[str]:
    """Read this rank's part of a checkpoint into a State's `buffers`, except trained parameters on the
    device, which are made from the master weights later.

    Moving averages that the checkpoint lacks begin as the weights. Unless `strict`, trained parameters that
    were frozen when saved, or whose saved moments the optimizer cannot read, begin with moments of 0; returns
    their names, where this rank has a slice. Raises CheckpointError, with file, tensor and offset, for
    damaged bytes.
    """
    # 1. What this rank keeps, and whether it was saved as it is kept.
    manifest, world = checkpoint.manifest, ranks.world
    trained = {x.name for x in manifest.parameters if x.trainable}
    kinds = stored_kinds(layout, {}, ema=any(buffers.ema(b.index) is not None for b in layout.buckets))
    kinds |= {b: [EMA] for b in buffers.averages}
    kinds = {b: kind for b, kind in kinds.items() if buffers.homes.get(b, ranks.stage) == ranks.stage}
    state = [*slices_of(layout, kinds, ranks.rank, world)]
    averages = [x for x in state if x.kind == EMA.name]
    own = {x.name: bucket.state_format for bucket in layout.buckets for x in bucket.spans}
    other = {x for x in own if x not in trained or manifest.format_of(manifest.by_name[x]) != own[x]}
    changed = [x for x in state if x.parameter in other and x.kind != EMA.name]
    frozen = [*_frozen_slices(buffers, layout, ranks)]
    converted = [x for x in frozen if x.parameter in trained]
    masters = {b: [StateBuffer(MASTER, "fp32")] for b in buffers.masters}
    converted += slices_of(layout, masters, ranks.rank, world)
    equal = [x for x in state if x.parameter not in other and x.kind != EMA.name]
    equal += [x for x in frozen if x.parameter not in trained]
    begun: list[str] = []
    with CheckpointReader(checkpoint) as reader:
        # 2. The state of another format is converted, or begins with the weights; frozen weights are those.
        for (b, name), kinds in groupby(changed, key=lambda x: (x.bucket, x.parameter)):
            by_kind, bucket = {x.kind: x for x in kinds}, layout.buckets[b]
            if name in trained and _convert(reader, by_kind, buffers, bucket, optimizer, strict=strict):
                continue
            _begin(reader, by_kind, buffers)
            begun.append(name)
        for x in sorted(converted, key=lambda x: x.bucket):
            for start, stop in _parts(x):
                part = slice_memory(buffers, x)[start - x.start : stop - x.start]
                part.copy_(reader.weights(x.parameter, start, stop))
        # 3. The rest is read where it is kept; averages that were not saved begin as the weights.
        for _, slices in groupby(equal, key=lambda x: x.bucket if buffers.on_disk else 0):
            # Of what is on the disk, one bucket is in memory at a time.
            _fill(reader, buffers, slices)
        if averages:
            begin_averages(buffers, layout, ranks)
            stored = (x for x in averages if EMA.name in manifest.by_name[x.parameter].pieces)
            _fill(reader, buffers, stored)
    return begun


def fill_buffers(checkpoint: Checkpoint, buffers: Mapping[str, Tensor]) -> None:
    """Read a checkpoint's module buffers into `buffers`, by name; CheckpointError for other dtypes or damage."""
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


def kept_frozen(manifest: Manifest, spec: StepSpec) -> dict[str, frozenset[int]]:
    """The frozen buckets of which a State keeps more than the parameters, by field of `StepSpec`: indices of
    those with fp32 weights, if the device's are rounded, and of those with moving averages, if the checkpoint
    has them and the program keeps any."""

    def rounded(entry: ParameterEntry, dtype: Dtype) -> bool:
        pieces = entry.pieces.get(FROZEN, ())
        return entry.trainable or any(manifest.tensor(x).dtype != DTYPES[dtype].safetensors for x in pieces)

    entries = {x.index: [manifest.by_name[s.name] for s in x.spans] for x in spec.layout.frozen_buckets}
    narrow = {b: dtype for b in entries if (dtype := spec.places[b].dtype) != "fp32"}
    masters = (b for b, dtype in narrow.items() if any(rounded(x, dtype) for x in entries[b]))
    averages = (b for b, own in entries.items() if any(EMA.name in x.pieces for x in own))
    kept = averages if spec.settings.ema is not None else ()
    return {"frozen_masters": frozenset(masters), "frozen_averages": frozenset(kept)}


def _frozen_slices(buffers: Buffers, layout: Layout, ranks: RankGroup) -> Iterator[Slice]:
    """Yield the slices of frozen parameters that this rank keeps: its part of each bucket, or all of it."""
    for bucket in layout.frozen_buckets:
        if buffers.homes.get(bucket.index, ranks.stage) != ranks.stage:
            continue
        params = buffers.weights.get(bucket.index)  # None: each has its slice on the disk
        whole = params is not None and params.flat.numel() == bucket.numel
        rank, world = (0, 1) if whole else (ranks.rank, ranks.world)
        yield from slices_of(layout, {bucket.index: [StateBuffer(FROZEN, "fp32")]}, rank, world)


def slice_memory(buffers: Buffers, x: Slice) -> Tensor:
    """A view of a State's memory for slice `x` of a parameter's state, frozen weights or moving average."""
    if x.kind == FROZEN and x.bucket in buffers.weights:
        flat = buffers.weights[x.bucket].flat
    elif x.kind == EMA.name:
        flat = buffers.ema(x.bucket)
        assert flat is not None
    else:
        flat = buffers.state(x.bucket, write=True)[x.kind]
    return flat[x.at : x.at + x.stop - x.start]


def _parts(x: Slice) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of at most 131,072 elements of the parameter that together are slice `x`."""
    for start in range(x.start, x.stop, PART):
        yield start, min(start + PART, x.stop)


def _begin(reader: CheckpointReader, slices: dict[str, Slice], buffers: Buffers) -> None:
    """Set this rank's `slices` of a parameter's state, by buffer name, to the initial state for the saved
    weights: moments are 0."""
    memory = {kind: slice_memory(buffers, x).zero_() for kind, x in slices.items()}
    first = slices["master" if "master" in slices else HIGH_HALF]
    for start, stop in _parts(first):
        weights = reader.weights(first.parameter, start, stop)
        for kind, values in initial_state(weights, memory).items():
            memory[kind][start - first.start : stop - first.start].copy_(values)


def _fill(reader: CheckpointReader, buffers: Buffers, slices: Iterable[Slice]) -> None:
    """Read the saved values of `slices` into the State's memory: directly, or part by part where that is on a
    device or has another dtype."""
    direct: list[tuple[WantedSlice, memoryview]] = []
    for x in slices:
        into = slice_memory(buffers, x)
        if not on_accelerator(into.device) and into.dtype == TORCH_DTYPES[reader.dtype(x.parameter, x.kind)]:
            direct.append((WantedSlice(x.kind, x.parameter, x.start, x.stop), as_bytes(into)))
            continue
        for start, stop in _parts(x):
            part = reader.tensors([WantedSlice(x.kind, x.parameter, start, stop)])
            into[start - x.start : stop - x.start].copy_(part[x.kind])
    reader.read(direct)


def _convert(
    reader: CheckpointReader,
    slices: dict[str, Slice],
    buffers: Buffers,
    bucket: Bucket,
    optimizer: Optimizer,
    *,
    strict: bool,
) -> bool:
    """Convert a parameter's saved state to the state format of `bucket`, and store it in this rank's
    `slices`, by buffer name.

    Returns whether the optimizer can read the saved format; with `strict`, raises CheckpointError if not.
    """
    manifest = reader.manifest
    own = {x.name: x for x in STATE_FORMATS[bucket.state_format]}
    unshared = next(x for kind, x in slices.items() if own[kind].shared == 1)
    name = unshared.parameter
    (group,) = (x.group for x in bucket.spans if x.name == name)
    stored_format = manifest.format_of(manifest.by_name[name])
    stored = STATE_FORMATS[stored_format]
    for start in range(unshared.start, unshared.stop, PART):
        stop = min(start + PART, unshared.stop)
        parts = [WantedSlice(x.name, name, x.numel(start), x.numel(stop)) for x in stored]
        values = reader.tensors(parts)
        try:
            converted = optimizer.convert_state(values, stored_format, manifest.position.step, group=group)
        except CheckpointError as error:
            if strict:
                raise CheckpointError(f"{reader.checkpoint.path}: {name!r}: {error}") from error
            return False
        for kind, values in converted.items():
            at = own[kind].numel(start) - slices[kind].start
            slice_memory(buffers, slices[kind])[at : at + values.numel()].copy_(values)
    return True
