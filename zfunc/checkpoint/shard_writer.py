"""Writing a safetensors file: its space is reserved at once, its tensors are filled in any order by any thread.

`finish` returns only if all bytes are written and on the disk.
"""

import os
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
    _missing: dict[str, int]  # bytes still to be written, by tensor
    _lock: Lock = field(factory=Lock)
    _writing: int = 0  # calls under way
    _closing: bool = False

    def write_at(self, name: str, start: int, buffer: Any) -> None:
        """Write a contiguous buffer (an array, bytes) as elements `start` and on of tensor `name`.

        Raises ValueError for a buffer that does not fit; CheckpointError if the disk cannot take it: `close` the
        file then. Slices have to be disjoint.
        """
        data = disk.bytes_of(buffer)
        tensor = find_tensor(self.path, self.header.tensors, name)
        item = BYTES[tensor.dtype]
        first, last = start * item, start * item + data.nbytes
        if data.nbytes % item or not 0 <= first <= last <= tensor.nbytes:
            raise ValueError(
                f"{name!r}: got {data.nbytes} bytes for element {start}, expected whole {tensor.dtype} elements "
                f"within {tensor.numel}: pass a slice of the tensor and where it begins"
            )
        with self._lock:
            self._writing += 1
        try:
            with disk.os_errors_as(self.path, f"writing bytes {first} to {last} of {name!r}"):
                disk.write_all(self._fd, data, self.header.begins[name] + first)
            with self._lock:
                self._missing[name] -= data.nbytes
        finally:
            with self._lock:
                self._writing -= 1
                self._close_if_idle()

    def finish(self) -> None:
        """Wait until the file is on the disk, and close it.

        Raises CheckpointError if the number of bytes written is not that of all tensors, or the disk fails.
        """
        for name, missing in self._missing.items():
            if missing:
                nbytes = self.header.tensors[name].nbytes
                raise CheckpointError(
                    f"{self.path}: got {nbytes - missing} bytes of {name!r}, expected {nbytes}: call write_at once "
                    "for every slice before finish"
                )
        with disk.os_errors_as(self.path, "waiting until it is on the disk"):
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file, after the writes under way. A second call does nothing."""
        with self._lock:
            self._closing = True
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Close the file unless a call still writes, which would write to the next file with its descriptor."""
        if self._closing and not self._writing and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def create_shard(
    path: Path,
    tensors: Sequence[TensorInfo],
    metadata: Mapping[str, str] | None = None,
    *,
    mode: int = 0o600,
) -> ShardWriter:
    """Make the file for `tensors` at its full size, with its header, in which `metadata` is stored as text.

    Its owner alone may read it, unless `mode` and the umask say otherwise.

    Raises ValueError for two tensors of one name; CheckpointError if the file exists or the disk has no space.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = create_shard(Path(folder, "a.safetensors"), [TensorInfo("w", "F32", (2, 3))])
    ...     writer.write_at("w", 4, bytes(8))
    ...     writer.write_at("w", 0, bytes(16))
    ...     writer.finish()
    """
    header = make_header(tensors, metadata or {})
    fd = disk.open_new(path, header.size, mode)
    try:
        with disk.os_errors_as(path, "writing its header"):
            disk.write_all(fd, memoryview(header.raw), 0)
    except BaseException:
        os.close(fd)
        raise
    return ShardWriter(path, header, fd, {t.name: t.nbytes for t in tensors})
