"""How fast drives are past the page cache, and the share of each of several in a buffer."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from zfunc.runtime.direct_io import ALIGNED, DirectFile, explain_errors, pages_for

MEASURED, CHUNK = 512 << 20, 64 << 20  # bytes of the file that `measure` makes, and of a transfer of it
SECONDS = 0.25  # that it reads, and that it writes, at most


class DriveSpeeds(NamedTuple):
    """Of long transfers, in B/s."""

    read: float
    write: float


def measure(folder: Path) -> DriveSpeeds:
    """How fast the drive of `folder` is, in about a second. Raises DiskError without room for MEASURED bytes."""
    with (
        explain_errors(folder, "measuring its drive"),
        TemporaryDirectory(dir=folder, prefix=".zfunc-") as temporary,
    ):
        file = DirectFile.create(Path(temporary) / "measured", MEASURED)
        with closing(file), pages_for(CHUNK) as pages, memoryview(pages) as data:
            pages[:] = os.urandom(1 << 20) * (CHUNK >> 20)  # some drives compress
            file.sync()
            _speed(file, file.write, data)  # the first time file systems also note that there is something
            write = _speed(file, file.write, data)
            return DriveSpeeds(_speed(file, file.read, data), write)


def drive_shares(folders: Sequence[Path]) -> tuple[int, ...]:
    """The share of each folder in a buffer, so that all drives take as long to write it and to read it.

    Several drives are measured; folders on one drive share its speed. Raises as `measure`.
    """
    drives = [folder.stat().st_dev for folder in folders]
    if len(set(drives)) < 2:
        return (1,) * len(folders)
    speeds = [_drive_speed(x, drive) / drives.count(drive) for x, drive in zip(folders, drives, strict=True)]
    return tuple(max(1, round(1000 * x / sum(speeds))) for x in speeds)


def is_direct(folder: Path) -> bool:
    """Whether files in `folder` go past the page cache. Raises DiskError where none can be made."""
    with (
        explain_errors(folder, "trying O_DIRECT"),
        TemporaryDirectory(dir=folder, prefix=".zfunc-") as temporary,
        closing(DirectFile.create(Path(temporary) / "page", ALIGNED)) as file,
    ):
        return file.direct


_speeds: dict[int, float] = {}  # of drives by device: a process measures each once


def _drive_speed(folder: Path, device: int) -> float:
    """Bytes a second that are read and written again."""
    if device not in _speeds:
        read, write = measure(folder)
        _speeds[device] = 1 / (1 / read + 1 / write)
    return _speeds[device]


def _speed(file: DirectFile, transfer: Callable[[memoryview, int], None], data: memoryview) -> float:
    start, offset = time.perf_counter(), 0
    while offset < file.nbytes and (not offset or time.perf_counter() - start < SECONDS):
        transfer(data, offset)
        offset += data.nbytes
    file.sync()
    return offset / (time.perf_counter() - start)
