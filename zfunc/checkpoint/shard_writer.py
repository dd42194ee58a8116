"""Writing a shard: the whole file reserved at once, its tensors filled in any order by any thread.

The invariant: a Shard is made only of a file that is complete and on the disk, every element written exactly once.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.checksums import CHUNK, CHUNK_LIMIT, ChunkChecksums, cut
from zfunc.checkpoint.safetensors_file import BYTES, Header, Shard, TensorInfo, find_tensor, make_header
from zfunc.errors import CheckpointError


@define(eq=False)
class ShardWriter:
    """A file being written: `write_at` by any thread, in any order, then `finish`."""

    path: Path
    header: Header
    _fd: int
    _chunk: int
    _collected: dict[str, ChunkChecksums]
    _lock: Lock = field(factory=Lock)
    _writing: int = 0  # calls under way
    _closing: bool = False

    def write_at(self, name: str, start: int, buffer: Any) -> None:
        """Write a contiguous buffer (an array, bytes) as elements `start` and on of tensor `name`.

        Raises ValueError for a buffer that does not fit there or overlaps what was written; CheckpointError for a
        disk that cannot take it: the file is lost then, `close` it.
        """
        data = disk.bytes_of(buffer)
        first, last = self._claim(name, start, data.nbytes)
        try:
            for begin, end in cut(first, last, self._chunk):
                part = data[begin - first : end - first]
                checksum = zlib.crc32(part)
                with disk.os_errors_as(self.path, f"writing bytes {begin} to {end} of {name!r}"):
                    disk.write_all(self._fd, part, self.header.begins[name] + begin)
                with self._lock:
                    self._collected[name].add(begin, end, checksum)
        finally:
            with self._lock:
                self._writing -= 1
                self._close_if_idle()

    def _claim(self, name: str, start: int, nbytes: int) -> tuple[int, int]:
        """The bytes of the tensor that this call alone writes."""
        tensor = find_tensor(self.path, self.header, name)
        item = BYTES[tensor.dtype]
        first, last = start * item, start * item + nbytes
        if nbytes % item or not 0 <= first <= last <= tensor.nbytes:
            raise ValueError(
                f"{name!r}: got {nbytes} bytes for element {start}, expected whole {tensor.dtype} elements within "
                f"{tensor.numel}: pass a slice of the tensor and where it begins"
            )
        with self._lock:
            if first < last and not self._collected[name].claim(first, last):
                raise ValueError(
                    f"{name!r}: got elements {start} to {last // item}, some of them written before, expected each "
                    "once: write disjoint slices"
                )
            self._writing += 1
        return first, last

    def finish(self) -> Shard:
        """Wait until the file is on the disk, close it, and return what the manifest keeps of it.

        Raises CheckpointError if an element was never written, or the disk fails.
        """
        for name, collected in self._collected.items():
            if (missing := collected.first_missing()) is not None:
                element = missing // BYTES[self.header.tensors[name].dtype]
                raise CheckpointError(
                    f"{self.path}: got no element {element} of {name!r}, expected all to be written: call write_at "
                    "for every slice before finish"
                )
        with disk.os_errors_as(self.path, "waiting until it is on the disk"):
            os.fsync(self._fd)
        self.close()
        return Shard(
            file=self.path.name,
            size=self.header.size,
            header=zlib.crc32(self.header.raw),
            chunk=self._chunk,
            tensors=tuple(self.header.tensors.values()),
            checksums={name: collected.checksums() for name, collected in self._collected.items()},
        )

    def close(self) -> None:
        """Give the descriptor back, after the writes under way; the file stays as it is. Nothing happens twice."""
        with self._lock:
            self._closing = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """A write that is still on its way would go on into whatever file gets the number next."""
        if self._closing and not self._writing and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def create_shard(
    path: Path,
    tensors: Sequence[TensorInfo],
    *,
    chunk: int = CHUNK,
    metadata: Mapping[str, str] | None = None,
) -> ShardWriter:
    """Make the file for `tensors` at its full size, with its header. `metadata` is kept beside them, as text.

    Raises ValueError for two tensors of one name; CheckpointError if the file is there or the disk has no room.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = create_shard(Path(folder, "a.safetensors"), [TensorInfo("w", "F32", (2, 3))])
    ...     writer.write_at("w", 4, bytes(8))
    ...     writer.write_at("w", 0, bytes(16))
    ...     writer.finish().size
    152
    """
    if not 0 < chunk <= CHUNK_LIMIT or chunk % 8:
        raise ValueError(
            f"chunk: got {chunk} bytes, expected a multiple of 8 up to {CHUNK_LIMIT}: leave it out for {CHUNK}"
        )
    header = make_header(tensors, metadata or {})
    collected = {t.name: ChunkChecksums(t.nbytes, chunk) for t in tensors}
    fd = disk.open_new(path, header.size)
    try:
        with disk.os_errors_as(path, "writing its header"):
            disk.write_all(fd, memoryview(header.raw), 0)
    except BaseException:
        os.close(fd)
        raise
    return ShardWriter(path, header, fd, chunk, collected)
