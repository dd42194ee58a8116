"""Reading slices of a shard, by what the manifest says of it.

No byte is returned whose checksum was not compared; nothing is allocated before the file has the expected size.
"""

import os
import zlib
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.safetensors_file import BYTES, Shard, TensorInfo, cut, find_tensor
from zfunc.errors import USE_ANOTHER, CheckpointError

_NEXT = f"{USE_ANOTHER}; check this disk"


@define(eq=False)
class ShardReader:
    """A validated file, open for reading; closes at the end of a `with`. Any thread may read."""

    path: Path
    shard: Shard
    _fd: int
    _lock: Lock = field(factory=Lock)
    _last_chunk: tuple[tuple[str, int], memoryview] | None = None  # of those that were wanted in part

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and free the memory. A second call does nothing."""
        fd, self._fd, self._last_chunk = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def read_into(self, name: str, start: int, stop: int, buffer: Any) -> None:
        """Fill a writable contiguous buffer with elements start to stop of tensor `name`.

        Reads those, and at both ends the rest of a chunk, at most. Raises ValueError for a range or buffer that
        does not fit; CheckpointError, with file, tensor and offset, for bytes that are not what was written: what
        the buffer holds is undefined then.
        """
        tensor, data = find_tensor(self.path, self.shard.by_name, name), disk.bytes_of(buffer)
        item = BYTES[tensor.dtype]
        fits = data.nbytes == (stop - start) * item and not (data.readonly and data.nbytes)
        if not 0 <= start <= stop <= tensor.numel or not fits:
            raise ValueError(
                f"{name!r}: got elements {start} to {stop} for {data.nbytes} bytes, expected a range within "
                f"{tensor.numel} {tensor.dtype} elements and a writable buffer of its size"
            )
        first = start * item
        for begin, end in cut(first, stop * item, self.shard.chunk):
            self._read(tensor, begin, data[begin - first : end - first])

    def _read(self, tensor: TensorInfo, begin: int, part: memoryview) -> None:
        """Bytes of a tensor from `begin`, all of one chunk."""
        index, offset = divmod(begin, self.shard.chunk)
        size = min(self.shard.chunk, tensor.nbytes - index * self.shard.chunk)
        if part.nbytes == size:
            return self._read_chunk(tensor, index, part)
        with self._lock:
            if self._last_chunk is None or self._last_chunk[0] != (tensor.name, index):
                self._last_chunk = None  # freed before the next one is allocated
                chunk = memoryview(bytearray(size))
                self._read_chunk(tensor, index, chunk)
                self._last_chunk = (tensor.name, index), chunk
            part[:] = self._last_chunk[1][offset : offset + part.nbytes]

    def _read_chunk(self, tensor: TensorInfo, index: int, part: memoryview) -> None:
        begin, item = index * self.shard.chunk, BYTES[tensor.dtype]
        end, at = begin + part.nbytes, self.shard.begins[tensor.name] + begin
        with disk.os_errors_as(self.path, f"reading bytes {begin} to {end} of {tensor.name!r}"):
            disk.read_all(self._fd, part, at)
        if self.shard.checksum(part) != self.shard.checksums[tensor.name][index]:
            raise CheckpointError(
                f"{self.path}: got other bytes than were written in {tensor.name!r}, elements {begin // item} to "
                f"{end // item} (bytes {at} to {at + part.nbytes} of the file): the checksum differs; {_NEXT}"
            )


def open_shard(path: Path, shard: Shard) -> ShardReader:
    """Open the file that `shard` describes. Raises CheckpointError if it has another size or header."""
    fd, size = disk.open_file(path)
    try:
        if size != shard.size:
            raise CheckpointError(
                f"{path}: got {size} bytes, expected {shard.size}: the file is truncated or another one; "
                f"{USE_ANOTHER}"
            )
        if shard.places is None:
            _check_header(path, fd, shard)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # two threads would look like random access
        return ShardReader(path, shard, fd)
    except BaseException:
        os.close(fd)
        raise


def _check_header(path: Path, fd: int, shard: Shard) -> None:
    header = bytearray(shard.header_size)
    with disk.os_errors_as(path, "reading its header"):
        disk.read_all(fd, memoryview(header), 0)
    if zlib.crc32(header) != shard.header:
        raise CheckpointError(
            f"{path}: got another header than was written, in bytes 0 to {len(header)}: the checksum differs; "
            f"{_NEXT}"
        )
