"""The weights of a checkpoint as one safetensors file that other programs read. NumPy, no torch.

The invariant: a file under the name that was asked for is whole and on the disk, none that was there is touched,
and every value in it passed its checksum when it was read. Shards are read one after the other, each from its
beginning to its end, a piece at a time: what is in memory does not grow with the weights.
"""

import errno
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from attrs import define, evolve, field, frozen

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.manifest import FROZEN, Manifest, ParameterEntry
from zfunc.checkpoint.read_plan import PlannedRead, WantedSlice, plan_reads
from zfunc.checkpoint.safetensors_file import TensorInfo
from zfunc.checkpoint.shard_reader import ShardReader, open_shard
from zfunc.checkpoint.shard_writer import ShardWriter, create_shard
from zfunc.core.dtypes import DTYPES
from zfunc.core.optimizer_state import stored_buffers
from zfunc.errors import CheckpointError, did_you_mean
from zfunc.optim.adam_reference import Array, round_to, to_float32
from zfunc.optim.compact_reference import join

DType = Literal["fp32", "bf16", "fp16"]
SUFFIX = ".safetensors"
PIECE = 1 << 16  # elements at a time: they are converted while they are in the cache


OVERFLOW: dict[DType, float] = {  # the smallest magnitude that becomes inf
    "fp32": math.inf,
    "bf16": 2.0**128 - 2.0**119,  # halfway to what would be the next value, as in fp16
    "fp16": 2.0**16 - 2.0**4,
}
_NUMPY = {x.safetensors: np.dtype(x.numpy) for x in DTYPES.values()}
log = logging.getLogger("zfunc")


@frozen
class ExportedWeights:
    """A file that was written: how many parameters of which step are in it, of what type, and its size in bytes."""

    path: Path
    parameters: int
    bytes: int
    step: int
    dtype: DType


def export_weights(source: Path, out: Path, *, dtype: DType = "fp32") -> ExportedWeights:
    """Write the weights of a checkpoint, each parameter by its full name and in its shape, as a new file.

    `source` is a checkpoint, a folder of them or a run, found by `directory.locate_checkpoint`. It has to stay
    there: a training that goes on deletes the oldest. `out` is a new file whose name ends in .safetensors.

    "fp32" gives the master weights, exactly. The others are rounded to nearest, ties to even; NaN stays NaN. That
    is the copy the device computes with, bit by bit, but for "bf16" of a checkpoint with compact moments: there
    that copy is half of the master, its ties rounded away from zero, and of 2^17 evenly spread values one differs,
    in its last bit. Parameters that are not trained are converted from the type they are kept in.

    A tied parameter is in the file once, under the first of its names. Tie the others in the model, as for
    training, and load with `safetensors.torch.load_model` or `load_state_dict(..., strict=False)`: they do without.

    Raises ValueError for arguments that will not do, and for a weight too large for `dtype`, which names it;
    CheckpointError for a checkpoint that is not whole, which names file, parameter and place, and for a disk that
    cannot take the file. Then there is no file.

    >>> export_weights(Path("runs/mine"), Path("mine.safetensors"), dtype="bf61")
    Traceback (most recent call last):
    ValueError: dtype: got 'bf61' (did you mean 'bf16'?), expected fp32, bf16 or fp16: choose one of them
    """
    if dtype not in OVERFLOW:
        hint = did_you_mean(str(dtype), list(OVERFLOW))
        raise ValueError(f"dtype: got {dtype!r}{hint}, expected fp32, bf16 or fp16: choose one of them")
    partial = _unfinished(out)
    checkpoint = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(source))
    manifest, step = checkpoint.manifest, checkpoint.manifest.position.step
    log.info("export: the weights of %s as %s", checkpoint.path, dtype)
    if manifest.position.pending is not None:
        log.warning("export: %s: its last gradient waits to be applied and is not in them", checkpoint.path)
    tensors = [TensorInfo(x.name, DTYPES[dtype].safetensors, x.shape) for x in manifest.parameters]
    writer = create_shard(partial, tensors, metadata={"format": "pt", "step": str(step)})
    try:
        # What becomes too large is told by name; inf and NaN stay what they are.
        with np.errstate(all="ignore"), CheckpointWeights(checkpoint) as weights:
            for part in _parts(manifest):
                _write(weights, part, writer, dtype)
        writer.finish()
        _name(partial, out)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    finally:
        writer.close()
    return ExportedWeights(out, len(tensors), writer.header.size, step, dtype)


@frozen
class WeightPart:
    """Elements start to stop of a parameter, and the reads that give them: one, or one for each half."""

    parameter: str
    start: int
    stop: int
    reads: tuple[PlannedRead, ...]

    def pieces(self) -> Iterator["WeightPart"]:
        """The same in order, PIECE elements at most at a time."""
        for at in range(0, self.stop - self.start, PIECE):
            count = min(PIECE, self.stop - self.start - at)
            reads = tuple(evolve(r, start=r.start + at, stop=r.start + at + count) for r in self.reads)
            yield WeightPart(self.parameter, self.start + at, self.start + at + count, reads)


def _parts(manifest: Manifest) -> list[WeightPart]:
    """All parameters, each of its elements once, in the order they lie in the shards."""
    ranges = [x for kept in manifest.parameters for x in _ranges(manifest, kept)]
    wanted = [
        (n, WantedSlice(kind, name, start, stop))
        for n, (name, start, stop, kinds) in enumerate(ranges)
        for kind in kinds
    ]
    reads: dict[int, list[PlannedRead]] = {}
    for read in plan_reads(manifest, [slice_ for _, slice_ in wanted]):
        reads.setdefault(wanted[read.wanted][0], []).append(read)
    return [
        WeightPart(*ranges[n][:3], tuple(sorted(parts, key=lambda r: r.wanted))) for n, parts in reads.items()
    ]


def _ranges(manifest: Manifest, kept: ParameterEntry) -> list[tuple[str, int, int, tuple[str, ...]]]:
    """Elements of a parameter of which each kind needs one read: name, start, stop, kinds."""
    kinds = (FROZEN,)
    if kept.trainable:  # one buffer, or the two halves that `join` takes
        buffers = stored_buffers(manifest.state_format)
        kinds = tuple(x.name for x in buffers if x.name.startswith("master"))
    edges = sorted({x.start for kind in kinds for x in kept.pieces[kind]} | {kept.numel})
    return [(kept.name, start, stop, kinds) for start, stop in pairwise(edges)]


@define(eq=False)
class CheckpointWeights:
    """A checkpoint's weights in float32, open for reading. One open shard for each half, whatever their number."""

    checkpoint: Checkpoint
    _open: dict[int, tuple[int, ShardReader]] = field(factory=dict[int, tuple[int, ShardReader]])

    def __enter__(self) -> "CheckpointWeights":
        return self

    def __exit__(self, *_: object) -> None:
        for _shard, reader in self._open.values():
            reader.close()

    def read(self, part: WeightPart) -> Array:
        """The values of a part: [stop - start] float32, exact. Raises CheckpointError if they are damaged."""
        try:
            halves = [self._read(half, read) for half, read in enumerate(part.reads)]
        except CheckpointError as error:
            where = f"{part.parameter!r}, elements {part.start} to {part.stop}"
            raise CheckpointError(f"{where}: {error}") from error
        return join(*halves) if len(halves) == 2 else to_float32(halves[0])

    def _read(self, half: int, read: PlannedRead) -> Array:
        stored = self.checkpoint.manifest.tensors[read.shard][read.tensor]
        values = np.empty(read.stop - read.start, _NUMPY[stored.dtype])
        self._reader(half, read.shard).read_into(read.tensor, read.start, read.stop, values)
        return values

    def _reader(self, half: int, number: int) -> ShardReader:
        if half not in self._open or self._open[half][0] != number:
            if half in self._open:
                self._open.pop(half)[1].close()
            shard = self.checkpoint.manifest.shards[number]
            self._open[half] = number, open_shard(self.checkpoint.path / shard.file, shard)
        return self._open[half][1]


def _write(weights: CheckpointWeights, part: WeightPart, writer: ShardWriter, dtype: DType) -> None:
    for piece in part.pieces():
        values = weights.read(piece)
        if _largest(values) >= OVERFLOW[dtype]:
            raise _too_large(weights, piece.parameter, dtype)
        writer.write_at(piece.parameter, piece.start, round_to(values, dtype))


def _largest(values: Array) -> float:
    """The largest finite magnitude."""
    size = np.abs(values)
    return float(size.max(initial=0, where=size < math.inf))


def _too_large(weights: CheckpointWeights, name: str, dtype: DType) -> ValueError:
    parts = [x for x in _parts(weights.checkpoint.manifest) if x.parameter == name]
    largest = max(_largest(weights.read(piece)) for part in parts for piece in part.pieces())
    other = "bf16" if largest < OVERFLOW["bf16"] else "fp32"
    return ValueError(
        f"{name!r}: got a weight of magnitude {largest:g}, expected less than {OVERFLOW[dtype]:g}, from "
        f"where on {dtype} has inf alone: export as {other}"
    )


def _unfinished(out: Path) -> Path:
    """The name of a file until it is whole. Raises ValueError if it, or `out`, cannot be one's of a new file."""
    if out.suffix != SUFFIX:
        raise ValueError(f"out: got {out}, expected the name of a file that ends in {SUFFIX}: add that")
    if os.path.lexists(out):
        raise ValueError(
            f"out: got {out}, which is there, expected a new file: name another, or move that one"
        )
    if not out.parent.is_dir():
        raise ValueError(f"out: got {out}, expected a file in a folder that is there: make {out.parent}")
    partial = out.with_name(f"{disk.UNFINISHED}{out.name}")
    if os.path.lexists(partial):
        raise ValueError(
            f"out: got {out}, of which there is {partial.name}: another export is writing it or was killed; delete "
            "that if none is, or name another file"
        )
    return partial


def _name(partial: Path, out: Path) -> None:
    """Give a file that is whole its name, which is nobody's."""
    with disk.os_errors_as(out, "giving a file its name"):
        try:
            os.link(partial, out)  # and not rename, which would replace what came there meanwhile
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            log.info("export: no hard links in %s: %s is renamed", out.parent, partial.name)
            if os.path.lexists(out):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            os.rename(partial, out)
        else:
            partial.unlink()
    disk.sync(out.parent)
