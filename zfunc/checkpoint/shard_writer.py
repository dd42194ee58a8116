"""Writing a safetensors file: its space is reserved at once, its tensors are filled in any order by any thread.

`finish` returns only if every element was written, exactly once, and is on the disk.
"""

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.safetensors_file import BYTES, Header, TensorInfo, find_tensor, make_header
from zfunc.errors import CheckpointError


@define(eq=False)
class ShardWriter:
    """A file being written: `write_at` by any thread, in any order, then `finish`."""

    path: Path
    header: Header
    _fd: int
    _ranges: dict[str, list[tuple[int, int]]]  # of bytes written or being written, ascending, by tensor
    _lock: Lock = field(factory=Lock)
    _writing: int = 0  # calls under way
    _closing: bool = False

    def write_at(self, name: str, start: int, buffer: Any) -> None:
        """Write a contiguous buffer (an array, bytes) as elements `start` and on of tensor `name`.

        Raises ValueError for a buffer that does not fit there or overlaps what was written; CheckpointError for a
        disk that cannot take it: the file is lost then, `close` it.
        """
        data = disk.bytes_of(buffer)
        first, last = self._byte_range(name, start, data.nbytes)
        if first == last:
            return
        self._claim(name, first, last)
        try:
            with disk.os_errors_as(self.path, f"writing bytes {first} to {last} of {name!r}"):
                disk.write_all(self._fd, data, self.header.begins[name] + first)
        except BaseException:
            with self._lock:
                self._ranges[name].remove((first, last))
            raise
        finally:
            with self._lock:
                self._writing -= 1
                self._close_if_idle()

    def _byte_range(self, name: str, start: int, nbytes: int) -> tuple[int, int]:
        tensor = find_tensor(self.path, self.header, name)
        item = BYTES[tensor.dtype]
        first, last = start * item, start * item + nbytes
        if nbytes % item or not 0 <= first <= last <= tensor.nbytes:
            raise ValueError(
                f"{name!r}: got {nbytes} bytes for element {start}, expected whole {tensor.dtype} elements within "
                f"{tensor.numel}: pass a slice of the tensor and where it begins"
            )
        return first, last

    def _claim(self, name: str, first: int, last: int) -> None:
        """Reserve bytes of a tensor for one call to write."""
        with self._lock:
            ranges = self._ranges[name]
            at = bisect_left(ranges, (first, last))
            if any(start < last and first < stop for start, stop in ranges[max(at - 1, 0) : at + 1]):
                item = BYTES[self.header.tensors[name].dtype]
                raise ValueError(
                    f"{name!r}: got elements {first // item} to {last // item}, some of them written before, "
                    "expected each once: write disjoint slices"
                )
            ranges.insert(at, (first, last))
            self._writing += 1

    def finish(self) -> None:
        """Wait until the file is on the disk, and close it.

        Raises CheckpointError if an element was never written, or the disk fails.
        """
        for name, tensor in self.header.tensors.items():
            end = 0
            for start, stop in (*self._ranges[name], (tensor.nbytes, tensor.nbytes)):
                if start > end:
                    raise CheckpointError(
                        f"{self.path}: got no element {end // BYTES[tensor.dtype]} of {name!r}, expected all to be "
                        "written: call write_at for every slice before finish"
                    )
                end = stop
        with disk.os_errors_as(self.path, "waiting until it is on the disk"):
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Give the descriptor back, after the writes under way; the file stays as it is. Nothing happens twice."""
        with self._lock:
            self._closing = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Close the file unless a call still writes, which would write to the next file with its descriptor."""
        if self._closing and not self._writing and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def create_shard(
    path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str] | None = None
) -> ShardWriter:
    """Make the file for `tensors` at its full size, with its header. `metadata` is kept beside them, as text.

    Raises ValueError for two tensors of one name; CheckpointError if the file is there or the disk has no room.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = create_shard(Path(folder, "a.safetensors"), [TensorInfo("w", "F32", (2, 3))])
    ...     writer.write_at("w", 4, bytes(8))
    ...     writer.write_at("w", 0, bytes(16))
    ...     writer.finish()
    """
    header = make_header(tensors, metadata or {})
    fd = disk.open_new(path, header.size)
    try:
        with disk.os_errors_as(path, "writing its header"):
            disk.write_all(fd, memoryview(header.raw), 0)
    except BaseException:
        os.close(fd)
        raise
    return ShardWriter(path, header, fd, {t.name: [] for t in tensors})
