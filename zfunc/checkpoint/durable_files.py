"""Files that survive a crash: atomic replacement, folder locks, and reading and writing a checkpoint's files.

Data is on the disk when a function that wrote it returns. Functions for checkpoints raise CheckpointError, with the
file, the operation and what to do, and refuse links, devices and pipes.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from attrs import define

from zfunc.errors import USE_ANOTHER, CheckpointError, DiskError, explain_os_errors, refuse
from zfunc.runtime import system_calls

log = logging.getLogger("zfunc")
IN_MEMORY = ("tmpfs", "ramfs")  # file systems in the memory that swapping is to save
UNFINISHED = "unfinished-"  # prefix of files and folders that a crash may leave behind
_NEXT = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "free some of your quota, or keep fewer checkpoints",
    errno.ENOENT: "use a complete checkpoint",
}


def reject(where: object, got: str, expected: str, do: str = USE_ANOTHER) -> NoReturn:
    """Raise CheckpointError: `where`, what was `got` there, what was `expected`, and what to `do`."""
    refuse(str(where), got, expected, do, CheckpointError)


@contextmanager
def os_errors_as(path: Path, doing: str) -> Generator[None, None, None]:
    """A context that turns OSError into CheckpointError with `path` and `doing`, what was being done to it."""
    with explain_os_errors(CheckpointError, path, doing, _NEXT):
        yield


@define(eq=False)
class Opened:
    """A file open for reading, closed with the last reference to this object, so never during a read."""

    fd: int = -1  # of a closed one
    path: Path = Path()
    size: int = 0  # in bytes

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes of the file from byte `offset` on. Raises CheckpointError if the file is
        shorter, before any memory is allocated."""
        with os_errors_as(self.path, f"reading bytes {offset} to {offset + nbytes}"):
            if offset + nbytes > self.size:
                raise OSError(errno.EIO, "the file ended early")
            read_all(self.fd, memoryview(raw := bytearray(nbytes)), offset)
        return bytes(raw)


def open_file(path: Path) -> Opened:
    """Open a regular file for reading. Raises CheckpointError for anything else."""
    with os_errors_as(path, "opening it"):
        # Without O_NONBLOCK opening a pipe would block until it has a writer.
        file = Opened(os.open(path, os.O_RDONLY | system_calls.UNLINKED), path)
        status = os.fstat(file.fd)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: got something else than a regular file: {_NEXT[errno.ENOENT]}")
    file.size = status.st_size
    return file


def bytes_of(buffer: Any) -> memoryview:
    """The bytes of a contiguous buffer, as a memoryview of its memory."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("got a buffer with gaps, expected a contiguous one: pass a contiguous copy")
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty one cannot be cast


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` to the file of descriptor `fd`, from byte `offset` on."""
    while data.nbytes:
        written = system_calls.write_at(fd, [data], offset)
        data, offset = data[written:], offset + written


def read_all(fd: int, data: memoryview, offset: int) -> None:
    """Fill `data` with the bytes of file `fd` from `offset` on. Raises OSError if the file ends before."""
    while data.nbytes:
        read = system_calls.read_at(fd, [data], offset)
        if not read:
            raise OSError(errno.EIO, "the file ended early")
        data, offset = data[read:], offset + read


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes. Raises CheckpointError for a larger one, before reading it."""
    file = open_file(path)
    if file.size > limit:
        reject(path, f"{file.size} bytes", f"at most {limit}", "zfunc did not write this file; use another")
    return file.read(0, file.size)


@contextmanager
def atomic_replace(
    path: Path, *, mode: int = 0o666, partial: Path | None = None
) -> Generator[BinaryIO, None, None]:
    """A context that yields a new file, which replaces `path` at the end of the block, once its bytes are on
    the disk. Raises OSError.

    Readers see the old file or the complete new one, also after a crash; after an error they see the old one.
    Until then the new file is named `partial`, by default a unique name that `is_partial` recognizes.
    """
    partial = partial or path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    partial.unlink(missing_ok=True)
    try:
        fd = os.open(partial, os.O_RDWR | system_calls.NEW, mode)
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
    """Whether `path` has the name of an `atomic_replace` in progress, whose process may have been killed.

    >>> is_partial(Path("run/.config.json.0a1b2c3d.partial"))
    True
    """
    return re.fullmatch(r"\..+\.[0-9a-f]+\.partial", path.name) is not None


def replace_text(path: Path, text: str) -> None:
    """Replace a text file atomically; follows a link, and writes to a device or pipe. Raises OSError."""
    if path.exists() and not path.is_file():  # /dev/stdout may lead to a pipe, which has no other path
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))  # of a loop of links the loop, where Path.resolve raises
    with explain_os_errors(DiskError, path, "writing it", {}), atomic_replace(path) as file:
        file.write(text.encode())


def write_durably(path: Path, data: bytes) -> None:
    """Replace checkpoint file `path` by `data`, and wait until it is on the disk. For a single writer."""
    partial = path.with_name(f"{UNFINISHED}{path.name}")
    with os_errors_as(path, "writing it"), atomic_replace(path, mode=0o600, partial=partial) as file:
        file.write(data)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    with os_errors_as(path, "waiting until it is on the disk"):
        if path.is_dir():
            system_calls.sync_names(path)
        else:
            file = Opened(os.open(path, os.O_RDONLY | system_calls.FOLLOWED))
            os.fsync(file.fd)


def lock(path: Path, *, wait: bool = True) -> int:
    """Lock a folder or file against other processes; returns a file descriptor, which holds the lock until it
    is closed or its process ends.

    If another process has the lock, waits for it, or, unless `wait`, raises BlockingIOError. On a file system
    without locks a warning is logged, and nothing is locked.
    """
    with os_errors_as(path, "locking it"):
        fd = system_calls.open_to_lock(path)
    try:
        try:
            system_calls.lock_descriptor(fd)
        except BlockingIOError:
            if not wait:
                raise
            log.warning("%s is locked by another process: waiting", path)
            system_calls.lock_descriptor(fd, wait=True)
    except BaseException as error:
        if not isinstance(error, OSError) or isinstance(error, BlockingIOError):
            os.close(fd)
            raise
        log.warning("%s cannot be locked (%s): use only one writer for it", path, error.strerror)
    return fd


def unlock(fd: int) -> None:
    """Release the lock that descriptor `fd` of `lock` holds, also if a child process has inherited `fd`."""
    with suppress(OSError):
        system_calls.unlock_descriptor(fd)
    os.close(fd)


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """A context that waits for the lock on folder `path`, and holds the lock until its end."""
    fd = lock(path)
    try:
        yield
    finally:
        unlock(fd)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a folder or file; True if unknown, False without file locks."""
    if not system_calls.has_locks():
        return False
    try:
        file = Opened(os.open(path, os.O_RDONLY | system_calls.UNLINKED))
        system_calls.lock_descriptor(file.fd, shared=True)  # shared: others may ask at the same moment
    except OSError:
        return True
    return False


def check_folders(folders: Sequence[Path]) -> None:
    """Raise CheckpointError, in one line, for a folder that is missing, on a tmpfs, or given twice."""
    from zfunc.runtime.direct_io import file_system_of  # here: `zfunc --help` needs none of it

    if not folders:
        refuse("swap", "no folder", "one for each drive", kind=CheckpointError)
    real = dict[Path, Path]()
    for folder in folders:
        flaw, other = "", real.setdefault(Path(os.path.realpath(folder)), folder)
        if not folder.is_dir():
            got = "something else" if os.path.lexists(folder) else "none"
            flaw = f"got {got}, expected a folder: mount the drive, and make the folder"
        elif other is not folder:
            flaw = f"got the folder {other} twice, expected one for each drive: name it once"
        elif (kind := file_system_of(folder)) in IN_MEMORY:
            flaw = f"got a folder in memory ({kind}), expected one on a drive: swapping is to save memory"
        if flaw:
            raise CheckpointError(f"{folder}: {flaw}")
