"""Files that survive a crash: atomic replacement and folder locks for everybody, and what a checkpoint is made of.

What a function here wrote is on the disk when it returns. Those for checkpoints raise CheckpointError, with the
file, what was being done and what to do, and follow nothing out of a folder: a link, a device or a pipe is no
checkpoint's.
"""

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from zfunc.errors import CheckpointError

log = logging.getLogger("zfunc")
UNFINISHED = "unfinished-"  # begins the name of what a crash may leave behind
_NEXT = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "free some of your quota, or keep fewer checkpoints",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "name a folder this user may use",
    errno.EPERM: "name a folder this user may use",
    errno.ENOTDIR: "name a folder, or move the file that is in its place",
    errno.EEXIST: "name another folder, or move what is in its place",
    errno.EISDIR: "move the folder that is in the file's place",
    errno.ELOOP: "put the file itself there: links are not followed",
    errno.ENOENT: "use a checkpoint that is complete",
    errno.EIO: "look at the disk, and use another",
}


@contextmanager
def os_errors_as(path: Path, doing: str) -> Generator[None, None, None]:
    """Turn an OSError into a CheckpointError that names `path` and what was being done to it."""
    try:
        yield
    except OSError as error:
        advice = _NEXT.get(error.errno or 0, "look at the disk and the folder's owner")
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: got {reason!r} while {doing}: {advice}") from error


def open_new(path: Path, size: int) -> int:
    """A descriptor of a new file whose `size` bytes are reserved at once: a full disk is told before writing.

    Raises CheckpointError if it is there already, or there is no room for it: then it is not left behind.
    """
    with os_errors_as(path, f"making a file of {size} bytes"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise
    return fd


def open_file(path: Path) -> tuple[int, int]:
    """A descriptor for reading a regular file, and its size in bytes. Raises CheckpointError for anything else."""
    with os_errors_as(path, "opening it"):
        # Without O_NONBLOCK a pipe in the place of a file would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    raise CheckpointError(f"{path}: got something that is no file, expected one: {_NEXT[errno.ENOENT]}")


def bytes_of(buffer: Any) -> memoryview:
    """The bytes of a contiguous buffer, not copied."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("got a buffer with gaps, expected a contiguous one: pass a contiguous copy")
    return view.cast("B") if view.nbytes else memoryview(b"")  # one of no bytes cannot be cast


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at `offset`, however many calls that takes."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def read_all(fd: int, data: memoryview, offset: int) -> None:
    """Fill `data` from `offset`. Raises OSError where the file ends before."""
    while data.nbytes:
        got = os.preadv(fd, [data], offset)
        if not got:
            raise OSError(errno.EIO, "the file ended early")
        data, offset = data[got:], offset + got


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes. Raises CheckpointError for a larger one, before reading it."""
    fd, size = open_file(path)
    try:
        if size > limit:
            raise CheckpointError(
                f"{path}: got {size} bytes, expected at most {limit}: this was not written by zfunc, use another"
            )
        raw = bytearray(size)
        with os_errors_as(path, "reading it"):
            read_all(fd, memoryview(raw), 0)
        return bytes(raw)
    finally:
        os.close(fd)


@contextmanager
def atomic_replace(
    path: Path, *, mode: int = 0o666, partial: Path | None = None
) -> Generator[BinaryIO, None, None]:
    """A new file that replaces `path` when the block ends and its bytes are on the disk. Raises OSError.

    A reader, or a crash, finds the old file or the complete new one; an error leaves the old one alone. Until then
    it is `partial`, by default a name that no other writer has and `is_partial` knows.
    """
    partial = partial or path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    partial.unlink(missing_ok=True)
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def is_partial(path: Path) -> bool:
    """Whether `path` was left behind by an `atomic_replace` whose process was killed, by its name.

    >>> is_partial(Path("run/.config.json.0a1b2c3d.partial"))
    True
    """
    return re.fullmatch(r"\..+\.[0-9a-f]+\.partial", path.name) is not None


def replace_text(path: Path, text: str) -> None:
    """Write a text file as a whole. A link is followed; a device or pipe is written to. Raises OSError."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with atomic_replace(path) as file:
        file.write(text.encode())


def write_durably(path: Path, data: bytes) -> None:
    """Replace a checkpoint's file, and wait until its name is on the disk too. One writer at a time."""
    partial = path.with_name(f"{UNFINISHED}{path.name}")
    with os_errors_as(path, "writing it"), atomic_replace(path, partial=partial) as file:
        file.write(data)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    with os_errors_as(path, "waiting until it is on the disk"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def lock(path: Path, *, wait: bool = True) -> int:
    """A descriptor that holds the lock on a folder until it is closed or its process ends.

    Waits for it, or raises BlockingIOError. Where the file system has no locks, it holds none, and logs that.
    """
    with os_errors_as(path, "locking it"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.warning("%s is locked by another process: waiting for it", path)
            fcntl.flock(fd, fcntl.LOCK_EX)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError as error:
        log.warning("%s cannot be locked (%s): have one writer a folder", path, error.strerror)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock(fd: int) -> None:
    """Give a lock back: also where a child of this process has inherited the descriptor."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """Hold the lock on a folder."""
    fd = lock(path)
    try:
        yield
    finally:
        unlock(fd)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock on a folder; True where that cannot be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
