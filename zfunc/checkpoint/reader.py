"""Reads slices of a checkpoint's state into buffers, whatever files they lie in. NumPy and torch are not needed.

The reads of a slice fill it, every element once, and every byte passes its checksum.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.durable_files import in_parallel
from zfunc.checkpoint.manifest import Checkpoint, Manifest
from zfunc.checkpoint.safetensors_file import BYTES, ShardReader, cut_elements, open_shard
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.errors import did_you_mean

_DTYPES: dict[str, Dtype] = {x.safetensors: name for name, x in DTYPES.items()}
MAX_OPEN = 4  # files: a slice seldom lies in more, and each keeps a chunk in memory


@frozen
class WantedSlice:
    """Elements start to stop of one kind of a parameter's state, as if it were flat."""

    kind: str
    parameter: str
    start: int
    stop: int


@frozen
class PlannedRead:
    """Elements start to stop of a shard's tensor are elements `to` and on of the wanted slice number `wanted`."""

    shard: int
    tensor: str
    start: int
    stop: int
    wanted: int
    to: int


def plan_reads(manifest: Manifest, wanted: Sequence[WantedSlice]) -> tuple[PlannedRead, ...]:
    """The reads that fill the wanted slices, in the order of the shards and of the bytes in them.

    Raises ValueError for a parameter or kind the checkpoint does not have, and for a slice outside of it.
    """
    reads = [read for n, slice_ in enumerate(wanted) for read in _reads(manifest, slice_, n)]
    return tuple(sorted(reads, key=lambda r: (r.shard, manifest.shards[r.shard].begins[r.tensor], r.start)))


def _reads(manifest: Manifest, wanted: WantedSlice, number: int) -> Iterator[PlannedRead]:
    entry = manifest.by_name.get(wanted.parameter)
    if entry is None or wanted.kind not in entry.pieces:
        known = list(manifest.by_name if entry is None else entry.pieces)
        name = wanted.parameter if entry is None else wanted.kind
        raise ValueError(
            f"got {name!r}{did_you_mean(name, known)}, expected what the checkpoint has of {wanted}"
        )
    pieces = entry.pieces[wanted.kind]
    numel = pieces[-1].stop if pieces else 0
    if not 0 <= wanted.start <= wanted.stop <= numel:
        raise ValueError(f"got {wanted}, expected a slice of {numel} elements")
    at = wanted.start
    first = bisect_right(pieces, at, key=lambda x: x.start) - 1
    for piece in pieces[max(first, 0) :]:
        if at >= wanted.stop:
            break
        begin = piece.offset + at - piece.start
        count = min(piece.stop, wanted.stop) - at
        yield PlannedRead(piece.shard, piece.tensor, begin, begin + count, number, at - wanted.start)
        at += count


@define(eq=False)
class CheckpointReader:
    """A checkpoint open for reading: its shards are opened as they are needed, at most MAX_OPEN at a time."""

    checkpoint: Checkpoint
    _open: dict[int, ShardReader] = field(factory=dict[int, ShardReader])

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        for n in list(self._open):
            self._open.pop(n).close()

    @property
    def manifest(self) -> Manifest:
        """What is in the checkpoint."""
        return self.checkpoint.manifest

    def dtype(self, parameter: str, kind: str) -> Dtype:
        """The type of the stored elements; "fp32" for a parameter without any."""
        pieces = self.manifest.by_name[parameter].pieces[kind]
        return _DTYPES[self.manifest.tensor(pieces[0]).dtype] if pieces else "fp32"

    def read(self, targets: Sequence[tuple[WantedSlice, Any]]) -> None:
        """Fill each slice's buffer: writable, contiguous, of the slice's size and stored type.

        Raises CheckpointError, with file, tensor and offset, for bytes that are not what was written.
        """
        by_shard: dict[int, list[PlannedRead]] = {}
        for read in plan_reads(self.manifest, [wanted for wanted, _ in targets]):
            by_shard.setdefault(read.shard, []).append(read)
        for n, reads in by_shard.items():
            calls = [call for read in reads for call in self._calls(read, targets[read.wanted][1])]
            in_parallel(self._shard(n).read_into, calls)

    def _calls(self, read: PlannedRead, buffer: Any) -> Iterator[tuple[str, int, int, memoryview]]:
        """The arguments of `read_into`, one chunk a call, so that there is work for several threads."""
        data = disk.bytes_of(buffer)
        shard = self.manifest.shards[read.shard]
        item = BYTES[shard.by_name[read.tensor].dtype]
        for start, stop in cut_elements(read.start, read.stop, item, shard.chunk):
            at = read.to + start - read.start
            yield read.tensor, start, stop, data[at * item : (at + stop - start) * item]

    def _shard(self, n: int) -> ShardReader:
        if n not in self._open:
            while len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[n] = open_shard(self.checkpoint.file(n), self.manifest.shards[n])
        return self._open[n]
