"""How fast a drive is past the page cache, by a file without a name: a process that is killed leaves nothing."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from zfunc.runtime.direct_io import ALIGNED, REQUEST, DirectFile, explain_errors, pages_for
from zfunc.units import format_bytes

MEASURED, CHUNK = 512 << 20, 64 << 20  # bytes of the file that `measure` makes, and of a transfer of it
LEAST = REQUEST  # bytes of the file on a drive with little room: of less, a drive is as slow as a call
SECONDS = 0.25  # that it reads, and that it writes, at most

log = logging.getLogger("zfunc")


class DriveSpeeds(NamedTuple):
    """Of long transfers, in B/s."""

    read: float
    write: float


def measure(folder: Path) -> DriveSpeeds:
    """How fast the drive of `folder` is, in about a second.

    The file takes MEASURED bytes, or half of what is free if that is less, which is logged, and LEAST at least.
    Raises DiskError without room for it.
    """
    with explain_errors(folder, "measuring its drive"):
        size, chunk = _sizes(folder)
        with (
            closing(DirectFile.unnamed(folder, size)) as file,
            pages_for(chunk) as pages,
            memoryview(pages) as data,
        ):
            pages[:] = (os.urandom(1 << 20) * -(-chunk >> 20))[:chunk]  # some drives compress
            file.sync()
            _speed(file, file.write, data)  # the first time file systems also note that there is something
            write = _speed(file, file.write, data)
            return DriveSpeeds(_speed(file, file.read, data), write)


def is_direct(folder: Path) -> bool:
    """Whether files in `folder` go past the page cache. Raises DiskError where none can be made."""
    with explain_errors(folder, "trying O_DIRECT"), closing(DirectFile.unnamed(folder, ALIGNED)) as file:
        return file.direct


def _sizes(folder: Path) -> tuple[int, int]:
    """Bytes of the file and of a transfer."""
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if free >= 2 * MEASURED:
        return MEASURED, CHUNK
    half = max(LEAST, free // 2 // ALIGNED * ALIGNED)
    chunk = min(CHUNK, half)
    size = half // chunk * chunk
    log.info("%s: %s are free: its drive is measured with %s", folder, *map(format_bytes, (free, size)))
    return size, chunk


def _speed(file: DirectFile, transfer: Callable[[memoryview, int], None], data: memoryview) -> float:
    start, offset = time.perf_counter(), 0
    while offset < file.nbytes and (not offset or time.perf_counter() - start < SECONDS):
        transfer(data, offset)
        offset += data.nbytes
    file.sync()
    return offset / (time.perf_counter() - start)
