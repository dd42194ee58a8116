"""Reading slices of a shard.

The invariant: nothing is allocated by what a file claims before its whole header agrees with the file's size, and
no byte is handed out unchecked where its checksum is known.
"""

import os
import zlib
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.safetensors_file import (
    BYTES,
    CHUNK,
    LENGTH,
    Header,
    Shard,
    TensorInfo,
    cut,
    find_tensor,
    header_length,
    read_header,
)
from zfunc.errors import CheckpointError


@define(eq=False)
class ShardReader:
    """A validated file, open for reading; closes at the end of a `with`. Any thread may read."""

    path: Path
    header: Header
    _fd: int
    _shard: Shard | None
    _lock: Lock = field(factory=Lock)
    _kept: tuple[tuple[str, int], memoryview] | None = None  # the last chunk of which only a part was wanted

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor and the memory back. Nothing happens the second time."""
        fd, self._fd, self._kept = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def read_into(self, name: str, start: int, stop: int, buffer: Any) -> None:
        """Fill a writable contiguous buffer with elements start to stop of tensor `name`.

        Reads those, and at its two ends the rest of a chunk, at most. Raises ValueError for a range or buffer that
        does not fit; CheckpointError, with file, tensor and offset, for bytes that are not what was written. The
        buffer holds no particular bytes then.
        """
        tensor, data = find_tensor(self.path, self.header, name), disk.bytes_of(buffer)
        item = BYTES[tensor.dtype]
        fits = data.nbytes == (stop - start) * item and not (data.readonly and data.nbytes)
        if not 0 <= start <= stop <= tensor.numel or not fits:
            raise ValueError(
                f"{name!r}: got elements {start} to {stop} for {data.nbytes} bytes, expected a range within "
                f"{tensor.numel} {tensor.dtype} elements and a writable buffer of its size"
            )
        first, last = start * item, stop * item
        for begin, end in cut(first, last, self._shard.chunk if self._shard else CHUNK):
            self._read(tensor, begin, data[begin - first : end - first])

    def _read(self, tensor: TensorInfo, begin: int, part: memoryview) -> None:
        """Bytes of a tensor from `begin`, all of one chunk."""
        if self._shard is None:
            return self._read_raw(tensor.name, begin, part)
        index = begin // self._shard.chunk
        floor = index * self._shard.chunk
        size = min(self._shard.chunk, tensor.nbytes - floor)
        if part.nbytes == size:
            return self._read_chunk(self._shard, tensor, index, part)
        with self._lock:
            if self._kept is None or self._kept[0] != (tensor.name, index):
                self._kept = None  # before the next one is allocated
                chunk = memoryview(bytearray(size))
                self._read_chunk(self._shard, tensor, index, chunk)
                self._kept = (tensor.name, index), chunk
            part[:] = self._kept[1][begin - floor : begin - floor + part.nbytes]

    def _read_raw(self, name: str, begin: int, part: memoryview) -> None:
        with disk.os_errors_as(self.path, f"reading bytes {begin} to {begin + part.nbytes} of {name!r}"):
            disk.read_all(self._fd, part, self.header.begins[name] + begin)

    def _read_chunk(self, shard: Shard, tensor: TensorInfo, index: int, part: memoryview) -> None:
        begin, item = index * shard.chunk, BYTES[tensor.dtype]
        self._read_raw(tensor.name, begin, part)
        if zlib.crc32(part) == shard.checksums[tensor.name][index]:
            return
        at = self.header.begins[tensor.name] + begin
        raise CheckpointError(
            f"{self.path}: got other bytes than were written in {tensor.name!r}, elements {begin // item} to "
            f"{(begin + part.nbytes) // item} (bytes {at} to {at + part.nbytes} of the file): the checksum "
            "differs; use another checkpoint, and check this disk"
        )


def open_shard(path: Path, shard: Shard | None = None) -> ShardReader:
    """Open and validate a file; with `shard`, what the manifest keeps of it, everything read is compared to that.

    Raises CheckpointError if it is no whole safetensors file, or not the one written: before anything is allocated
    but its header, whose size is bounded and is that of bytes in the file.
    """
    fd, size = disk.open_file(path)
    try:
        if shard and size != shard.size:
            raise CheckpointError(
                f"{path}: got {size} bytes, expected {shard.size}: the file is truncated or another one; "
                "use another checkpoint"
            )
        raw = _read_head(path, fd, size)
        if shard and zlib.crc32(raw) != shard.header:
            raise CheckpointError(
                f"{path}: got another header than was written, in bytes 0 to {len(raw)}: the checksum differs; "
                "use another checkpoint, and check this disk"
            )
        header = read_header(path, raw, size)
        if shard and header.tensors != {t.name: t for t in shard.tensors}:
            raise CheckpointError(f"{path}: got other tensors than the manifest's: use another checkpoint")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # or two threads look like reading at random
        return ShardReader(path, header, fd, shard)
    except BaseException:
        os.close(fd)
        raise


def _read_head(path: Path, fd: int, size: int) -> bytes:
    first = bytearray(min(size, LENGTH))
    with disk.os_errors_as(path, "reading its header"):
        disk.read_all(fd, memoryview(first), 0)
        rest = bytearray(header_length(path, bytes(first), size))
        disk.read_all(fd, memoryview(rest), LENGTH)
    return bytes(first + rest)
