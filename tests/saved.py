"""A small checkpoint to read, break and compare: any model, cut by any layout, its bytes known from names alone.

No torch and no State.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint.manifest import Checkpoint, Manifest, Slice, Snapshot, TrainingPosition, stored_kinds
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.safetensors_file import BYTES, Shard, TensorInfo, create_shard, cut
from zfunc.checkpoint.strict_json import to_plain
from zfunc.checkpoint.swap_checkpoint import swap_identity
from zfunc.checkpoint.swap_file import new_header
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.core.dtypes import DTYPES
from zfunc.core.extents import Extent, whole_blocks
from zfunc.core.layout import Layout, Parameter, make_layout
from zfunc.core.optimizer_state import FROZEN, STATE_FORMATS, AdamFormat, StateBuffer
from zfunc.errors import CheckpointError
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.host_memory import map_pages

FROZEN_FP32 = StateBuffer(FROZEN, "fp32")
CHUNK = 64  # bytes: several chunks in a tensor, and slices that begin inside of one
MODEL = [
    [Parameter("embed.weight", (10, 13))],
    [Parameter("head.weight", (7, 30)), Parameter("head.bias", (30,))],
]


def refused(message: str) -> Any:
    """A context in which a checkpoint is refused with this message."""
    return pytest.raises(CheckpointError, match=message)


def content(name: str, kind: str, nbytes: int, salt: int = 0) -> bytes:
    """The bytes of a parameter's state: any, but always the same."""
    return np.random.default_rng([zlib.crc32(f"{name} {kind}".encode()), salt]).bytes(nbytes)


def checksummed(shard: Shard, contents: Mapping[str, bytes], chunk: int) -> Shard:
    """What a manifest says of a file with these tensors."""
    sums = {
        name: [zlib.crc32(data[a:b]) for a, b in cut(0, len(data), chunk)] for name, data in contents.items()
    }
    return evolve(shard, chunk=chunk).summed(sums)


def write_shard(path: Path, tensors: Mapping[TensorInfo, bytes], chunk: int) -> Shard:
    """A complete file."""
    writer = create_shard(path, list(tensors))
    try:
        for stored, data in tensors.items():
            writer.write_at(stored.name, 0, data)
        writer.finish()
    finally:
        writer.close()
    return checksummed(writer.shard, {t.name: data for t, data in tensors.items()}, chunk)


def save(
    folder: Path,
    *,
    step: int = 3,
    world: int = 2,
    bucket_size: int = 200,
    moments: AdamFormat = "fp32",
    model: list[list[Parameter]] = MODEL,
    keep: int = 2,
    salt: int = 0,
) -> Path:
    """Write and publish a checkpoint; every byte follows from names and `salt`."""
    layout = make_layout(in_format(model, moments), bucket_size=bucket_size, world=world)
    pending = checkpoints.begin_checkpoint(folder, step)
    try:
        position = TrainingPosition(step, step + 1, 8 * step, 7, LossScale(scale=1024.0))
        optimizer = {"lr": 1e-3, "betas": [0.9, 0.999], "decoupled": True}
        snapshot, shards = Snapshot(layout, kinds_in(layout), position, optimizer), list[Shard]()
        for rank in range(world):
            tensors = {x.stored: part_of(layout, x, salt) for x in snapshot.slices(rank, world)}
            shards.append(write_shard(pending.path / checkpoints.shard_name(rank, world), tensors, CHUNK))
        manifest = snapshot.manifest(world, shards, {"salt": salt})
        return checkpoints.publish_checkpoint(pending, manifest, keep=keep)
    except CheckpointError:
        checkpoints.abandon_checkpoint(pending)
        raise
    finally:
        pending.release()


def in_format(model: list[list[Parameter]], state_format: str) -> list[list[Parameter]]:
    """The parameters, with a state of this format."""
    return [[evolve(p, state_format=state_format) for p in own] for own in model]


def kinds_in(layout: Layout) -> dict[int, list[StateBuffer]]:
    """What is kept of each bucket; of frozen ones fp32."""
    return stored_kinds(layout, {x.index: "fp32" for x in layout.frozen_buckets})


def save_swap(
    folders: list[Path],
    *,
    step: int = 3,
    world: int = 2,
    bucket_size: int = 200,
    moments: AdamFormat = "fp32",
    model: list[list[Parameter]] = MODEL,
    salt: int = 0,
) -> None:
    """Commit the same state to a new swap space, with something else in all padding."""
    layout = make_layout(in_format(model, moments), bucket_size=bucket_size, world=world)
    position = TrainingPosition(step, step + 1, 8 * step, 7, LossScale(scale=1024.0))
    snapshot = Snapshot(layout, kinds_in(layout), position, {})
    stored = STATE_FORMATS[moments][::-1]
    for rank in range(world):
        extents = {
            x.index: Extent.of((s.name, s.nbytes(x.numel // world)) for s in stored) for x in layout.buckets
        }
        frozen = {x.index: [(FROZEN, 4 * x.numel // world)] for x in layout.frozen_buckets}
        extents |= {b: Extent.of(sizes, generations=1) for b, sizes in frozen.items()}
        identity = swap_identity(layout, "fp32")
        header = new_header(folders, identity=identity, run="one", extents=extents, rank=rank, world=world)
        # Older versions of zfunc gave a faster drive more.
        space = SwapSpace.create(evolve(header, shares=tuple(range(1, len(folders) + 1))))
        buffers = {
            b: {x.name: map_pages(whole_blocks(x.nbytes)) for x in extent.parts}
            for b, extent in extents.items()
        }
        for pages in (p for x in buffers.values() for p in x.values()):
            pages[:] = b"?" * len(pages)
        for x in snapshot.slices(rank, world):
            part, at = part_of(layout, x, salt), x.at * BYTES[x.stored.dtype]
            buffers[x.bucket][x.kind][at : at + len(part)] = part
        for b, pages in buffers.items():
            space.write(b, list(pages), [memoryview(x) for x in pages.values()])
        space.commit({"position": to_plain(position), "optimizer": {}, "extra": {"salt": salt}})
        space.close()


def part_of(layout: Layout, x: Slice, salt: int) -> bytes:
    """The bytes of a slice of a parameter's state."""
    (span,) = {s for s in (*layout.spans, *layout.frozen) if s.name == x.parameter}
    buffer = next((b for b in STATE_FORMATS[layout.state_format] if b.name == x.kind), FROZEN_FP32)
    item = BYTES[x.stored.dtype]
    complete = content(x.parameter, x.kind, buffer.nbytes(span.stop - span.start), salt)
    return complete[x.start * item : x.stop * item]


def fill(checkpoint: Checkpoint, wanted: list[WantedSlice]) -> list[bytearray]:
    """The bytes of the wanted slices, read from the shards."""
    with CheckpointReader(checkpoint) as reader:
        sizes = [(w.stop - w.start) * DTYPES[reader.dtype(w.parameter, w.kind)].nbytes for w in wanted]
        buffers = [bytearray(size) for size in sizes]
        reader.read(list(zip(wanted, buffers, strict=True)))
    return buffers


def everything(manifest: Manifest) -> list[WantedSlice]:
    """All there is in a checkpoint."""
    return [
        WantedSlice(kind, entry.name, 0, pieces[-1].stop if pieces else 0)
        for entry in manifest.parameters
        for kind, pieces in entry.pieces.items()
    ]


def assert_complete(checkpoint: checkpoints.Checkpoint) -> None:
    """Every byte of a checkpoint is the one that `save` wrote."""
    wanted = everything(checkpoint.manifest)
    for w, got in zip(wanted, fill(checkpoint, wanted), strict=True):
        assert got == content(w.parameter, w.kind, len(got), checkpoint.manifest.extra["salt"]), w
