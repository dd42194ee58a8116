"""Calls of the operating system that some systems lack, each with a plain fallback.

All of zfunc asks here, but for the CPUs of a process (`thread_budget`), its pages (`host_memory`) and its memory
(`memory_limits`). macOS lacks `fdatasync`, `posix_fallocate`, `posix_fadvise`, O_DIRECT and binding to CPUs;
Windows lacks `fcntl` and `resource` too. A fallback is slower or promises less, as its function says. Each function
looks for its call when it runs, so that a test can take calls away.
"""

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any


def system_module(name: str) -> Any:
    """Python's module `name`, such as fcntl, which only some operating systems have; None on the others."""
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl = system_module("fcntl")
_seeking = threading.Lock()  # of a descriptor's one position, where no call takes an offset


def _flags(*names: str) -> int:
    """The flags of `os.open` with these `names`; those that a system lacks are left out."""
    return sum(getattr(os, name, 0) for name in names)


FOLLOWED = _flags("O_CLOEXEC", "O_NONBLOCK", "O_BINARY")
"""Flags to open a file or folder: no child inherits the descriptor, opening a pipe does not wait for a writer."""
UNLINKED = FOLLOWED | _flags("O_NOFOLLOW")
"""Flags to open a file that is no symbolic link; a system without O_NOFOLLOW follows links."""
NEW = _flags("O_CREAT", "O_EXCL", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY")
"""Flags to make a file whose name is not taken."""


# --- files --------------------------------------------------------------------------------------------------------


def read_at(fd: int, pieces: Sequence[Any], offset: int) -> int:
    """Fill `pieces`, areas of memory, with bytes of file `fd` from `offset` on; returns how many bytes came.

    Without `preadv` one thread reads at a time, and one area a call.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, pieces, offset)
    with _seeking, FileIO(fd, closefd=False) as file:
        file.seek(offset)
        return file.readinto(pieces[0])


def write_at(fd: int, pieces: Sequence[Any], offset: int) -> int:
    """Write `pieces`, areas of memory, to file `fd` from `offset` on; returns how many bytes were written.

    Without `pwritev` one thread writes at a time, and one area a call.
    """
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, pieces, offset)
    with _seeking, FileIO(fd, "r+", closefd=False) as file:
        file.seek(offset)
        return file.write(pieces[0])


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Reserve `nbytes` of file `fd` from `offset` on, which extends the file; OSError if the drive is full.

    Without `posix_fallocate` the file is extended alone, and a full drive is noticed by a later write.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, nbytes)
    else:
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + nbytes))


def advise(fd: int, offset: int, nbytes: int, advice: str) -> None:
    """Tell the page cache how file `fd` is used, "DONTNEED" or "SEQUENTIAL"; nothing without `posix_fadvise`."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, getattr(os, f"POSIX_FADV_{advice}"))


def sync_data(fd: int) -> None:
    """Wait until the bytes of file `fd` are on the drive, past the drive's own cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS, whose fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        getattr(os, "fdatasync", os.fsync)(fd)


def sync_names(folder: Path) -> None:
    """Wait until the names in `folder` are on the drive; Windows opens no folder, and orders names by itself."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY | FOLLOWED)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_direct(fd: int, *, direct: bool) -> bool:
    """Make transfers of file `fd` blocking, past the page cache if `direct`; returns whether they bypass the cache:
    False on a system without O_DIRECT. Raises OSError where the file system refuses O_DIRECT."""
    if fcntl is None:
        return False
    flags, bypass = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK, getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | bypass if direct else flags & ~bypass)
    return direct and bool(bypass)


def open_to_lock(path: Path) -> int:
    """A descriptor of the folder or file `path`; where folders cannot be opened (Windows), of the null device."""
    openable = os.name != "nt" or not path.is_dir()
    return os.open(path if openable else os.devnull, os.O_RDONLY | FOLLOWED)


def lock_descriptor(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock the file or folder of `fd` until `fd` is closed, for this process alone, or `shared` with other readers.

    If it is locked, wait, or unless `wait` raise BlockingIOError. Raises OSError where no such locks exist.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this system has no flock")
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def has_locks() -> bool:
    """Whether this system can lock files at all; Windows has no `flock`."""
    return fcntl is not None


def unlock_descriptor(fd: int) -> None:
    """Release the lock of `fd`, also if a child process has inherited the descriptor."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)


# --- processors and processes -------------------------------------------------------------------------------------


def bind(cpus: Iterable[int]) -> None:
    """Bind the calling thread to `cpus`; on a system that cannot bind threads, do nothing."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def after_fork_in_child(function: Any) -> None:
    """Have `function` called in each process that is forked from here; a system without forks needs no call."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def is_owners_alone(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user and nobody else may write it, by its `status`; True on
    systems without such owners."""
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
