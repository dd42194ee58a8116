"""Files that are read and written past the page cache, on a few threads a drive, with the system's own calls alone.

A transfer is cut into requests of 8 MiB, which `os.preadv` and `os.pwritev` make without the interpreter lock. It
takes a tenth of the processor time of one through the page cache, which it neither fills nor trusts.

The invariant: a transfer that returns has moved every byte. One that fails raises DiskError with the file, the
bytes, what they are and what to do. Either way no request is under way any more: the memory is the caller's again.
After an interrupt of a drive that hangs it is not; nothing can be done with the file then (AbandonedCalls).
"""

import errno
import logging
import os
import re
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

from attrs import define, field, frozen

from zfunc.core.extents import BLOCK
from zfunc.errors import AbandonedCalls, DiskError, explain_os_errors
from zfunc.runtime import system_calls
from zfunc.runtime.blocking_calls import LEAVE_AFTER, DaemonThreads, call_each
from zfunc.runtime.host_memory import HostPages, map_pages
from zfunc.units import format_bytes

log = logging.getLogger("zfunc")

ALIGNED = BLOCK  # offsets, lengths and addresses; some drives take 512 bytes, others do not
REQUEST = 8 << 20  # bytes of one call: with 1 MiB they take twice the processor time
MOST_PIECES = 1024  # areas of memory in one call: Linux's IOV_MAX
THREADS = 2  # for each drive and direction
MEASURED, CHUNK = 512 << 20, 64 << 20  # bytes of the file that `measure` makes, and of a transfer of it
LEAST = REQUEST  # bytes of that file on a drive with little room: of less, a drive is as slow as a call
SECONDS = 0.25  # that it reads, and that it writes, at most
MOST_RETRIES, PAUSE = 1000, 1e-3  # calls in a row that move less than a page, and the seconds between them

Memory = memoryview | Sequence[memoryview]
Direction = Literal["read", "write", "sync"]
T = TypeVar("T")

_DOING: dict[Direction, str] = {"read": "reading", "write": "writing"}
_ADVICE = {
    errno.ENOSPC: "free some space, or name a folder on another drive",
    errno.EDQUOT: "free some of your quota, or name a folder on another drive",
    errno.EFBIG: "name a folder on a file system for larger files",
    errno.ENOENT: "name a folder that exists",
    errno.EIO: "look for errors of the drive (dmesg, smartctl), and use another",
}


@frozen
class _Request:
    """One read or write of a drive: areas of memory, and the byte offset in the file of their consecutive bytes."""

    pieces: list[memoryview]
    offset: int
    nbytes: int


@define(eq=False)
class DirectFile:
    """A file whose size only `extend` changes, read and written past the page cache in requests of 8 MiB on a few
    threads.

    Each drive has two threads for reads and two for writes, shared by its files. Where the file system refuses
    O_DIRECT (`direct` is False), the page cache is used and asked to drop its pages, which is logged once. A file
    that is not `named` is gone when its process ends.

    Any thread may call. Callers have to order transfers of the same bytes.
    """

    path: Path
    nbytes: int
    direct: bool
    named: bool
    _fd: int
    _device: int
    _users: int = field(default=0, init=False)
    _moved: float = field(default=0.0, init=False)  # when a transfer began or ended last
    _closed: bool = field(default=False, init=False)
    _lost: str = field(default="", init=False)  # what the first `sync` that failed said, or what was given up
    _idle: threading.Condition = field(factory=threading.Condition, init=False)
    _close: Callable[[], Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._close = weakref.finalize(self, os.close, self._fd)

    @classmethod
    def create(cls, path: Path, nbytes: int) -> "DirectFile":
        """A new file of `nbytes`, a positive multiple of 4096, with its space reserved.

        Raises DiskError if the file exists, cannot be made or has no room; nothing is left then.
        """
        with _reserving(path, nbytes):
            fd = open_reserved(path, nbytes, os.O_RDWR)
            try:
                return cls._of(path, fd)
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise

    @classmethod
    def unnamed(cls, folder: Path, nbytes: int) -> "DirectFile":
        """A new file of `nbytes` in `folder` without a name, its space reserved; errors name the folder.

        The file is unlinked before it has any bytes, so nothing is left when the process ends.
        """
        with _reserving(folder, nbytes):
            name = f".zfunc-{os.urandom(8).hex()}"
            fd = open_reserved(folder / name, nbytes, os.O_RDWR, named=False)
            return cls._of(folder, fd, named=False)

    @classmethod
    def open(cls, path: Path) -> "DirectFile":
        """Open the file `path`. Raises DiskError if it is no regular file of whole pages, or not writable."""
        with explain_errors(path, "opening it"):
            # Without O_NONBLOCK opening a pipe could block.
            fd = os.open(path, os.O_RDWR | system_calls.UNLINKED)
            return cls._of(path, fd)

    @classmethod
    def _of(cls, path: Path, fd: int, *, named: bool = True) -> "DirectFile":
        """The DirectFile of open descriptor `fd`, `named` unless its path is unlinked; an error closes `fd`."""
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DiskError(f"{path}: got something else than a regular file: name another")
            if status.st_nlink > 1:
                raise DiskError(
                    f"{path}: got a file with {status.st_nlink} names (hard links), expected one, because what is "
                    "written here would change under all of them: copy it, and name the copy"
                )
            if status.st_size == 0 or status.st_size % ALIGNED:
                raise DiskError(
                    f"{path}: got a file of {status.st_size} bytes, expected a positive multiple of {ALIGNED}: it "
                    "was cut off, or something else wrote it; name another"
                )
            direct = _set_direct(fd)
        except BaseException:
            os.close(fd)
            raise
        if not direct:
            _tell_once(path, status.st_dev)
        return cls(path, status.st_size, direct, named, fd, status.st_dev)

    def read(self, into: Memory, offset: int, what: str = "") -> None:
        """Fill `into`, one area of memory or several in their order, with the file's bytes from `offset` on.

        Offset, lengths and addresses are multiples of 4096 bytes. `what` names the bytes in errors: "bucket 3".
        Raises DiskError; the content of the memory is undefined then.
        """
        self._transfer("read", into, offset, what)

    def write(self, data: Memory, offset: int, what: str = "") -> None:
        """Write `data`, one area of memory or several, to the file at `offset`; it survives a crash after `sync`.

        Raises DiskError; the content of these bytes of the file is undefined then.
        """
        self._transfer("write", data, offset, what)

    def extend(self, nbytes: int) -> None:
        """Extend the file to `nbytes`, if it is shorter, with its space reserved. No transfer may be under way.

        Raises DiskError where the drive has no room; the file is unchanged then.
        """
        if nbytes <= self.nbytes:
            return
        with self._in_use(), _reserving(self.path, nbytes):
            try:
                system_calls.reserve(self._fd, self.nbytes, nbytes - self.nbytes)
            except OSError:
                os.ftruncate(self._fd, self.nbytes)
                raise
        self.nbytes = nbytes

    def sync(self) -> None:
        """Wait until all bytes written to the file are on the drive, past the drive's own cache.

        Raises DiskError, also if the file has been deleted or replaced. Bytes written since the last `sync` may be
        lost then; the system reports such a loss once, so every later `sync` raises the same error.
        """
        self._check_lost()
        try:
            self._sync()
        except DiskError as error:
            self._lost = str(error)
            raise

    def _check_lost(self) -> None:
        if self._lost:
            raise DiskError(self._lost)

    def _sync(self) -> None:
        doing = "waiting until it is on the drive"
        with self._in_use(), explain_errors(self.path, doing):
            self._call_each("sync", self._sync_data, [self._fd], doing)
            if not self.direct:  # pages are clean now, and can be dropped
                system_calls.advise(self._fd, 0, self.nbytes, "DONTNEED")
            if self.named and not os.fstat(self._fd).st_nlink:
                raise DiskError(
                    f"{self.path}: got a file that was deleted or replaced, expected it to stay: name a folder "
                    "that nothing else cleans up"
                )

    def _sync_data(self, fd: int) -> None:
        with self._in_use(begun=True):
            system_calls.sync_data(fd)

    def close(self) -> bool:
        """Close the file when the transfers under way have ended, and return True. A second call does nothing.

        If no transfer ends for 5 seconds, return False; the file is closed when all have ended.
        """
        with self._idle:
            self._closed = True
            while self._users:
                if not self._idle.wait(max(0.0, self._moved + LEAVE_AFTER - time.monotonic())):
                    return False
        self._close()
        return True

    @contextmanager
    def _in_use(self, *, begun: bool = False) -> Generator[None, None, None]:
        """A context of an operation on the file, in which `close` keeps the file descriptor open. ValueError
        if the file is closed; with `begun` (part of an earlier operation) only if that operation is over."""
        with self._idle:
            if self._closed and not (begun and self._users):
                raise ValueError(f"{self.path}: got a closed file, expected an open one: open it again")
            self._users, self._moved = self._users + 1, time.monotonic()
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                if not self._lost:
                    self._moved = time.monotonic()
                self._idle.notify_all()
                if self._closed and not self._users:
                    self._close()

    def _transfer(self, direction: Direction, memory: Memory, offset: int, what: str) -> None:
        areas = cast("list[memoryview]", [memory]) if isinstance(memory, memoryview) else memory
        self._check_lost()
        self._check_places(areas, offset, what)
        requests = list(_requests(areas, offset))
        try:
            with self._in_use():
                self._check_size()
                if requests:
                    self._run(direction, requests, f" of {what}" if what else "")
                    if not self.direct:
                        end = requests[-1].offset + requests[-1].nbytes
                        system_calls.advise(self._fd, offset, end - offset, "DONTNEED")
        finally:
            # A thread may refer to them for a moment more, while the caller already unmaps the memory.
            for request in requests if not self._lost else ():
                for piece in request.pieces:
                    piece.release()

    def _check_places(self, areas: Sequence[memoryview], offset: int, what: str) -> None:
        nbytes = sum(area.nbytes for area in areas)
        uneven = any(area.nbytes % ALIGNED or _address(area) % ALIGNED for area in areas if area.nbytes)
        if offset % ALIGNED or uneven or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(
                f"{self.path}: {what or 'a transfer'}: got {nbytes} bytes at offset {offset}, expected a place in "
                f"its {self.nbytes}, and offset, lengths and addresses at multiples of {ALIGNED}: take memory from "
                "map_pages, and pad it"
            )

    def _check_size(self) -> None:
        """Raise DiskError if the file was truncated from outside: a write would extend the file with zeros."""
        size = os.fstat(self._fd).st_size
        if size != self.nbytes:
            raise DiskError(
                f"{self.path}: got a file of {size} bytes, expected its {self.nbytes}: another process changed it; "
                "start again from a checkpoint, in a folder that nothing else writes to"
            )

    def _run(self, direction: Direction, requests: Sequence[_Request], of_what: str) -> None:
        """Make `requests` on the drive's threads and wait. Errors end with `of_what`, such as " of bucket
        3"."""
        first, last = requests[0].offset, requests[-1].offset + requests[-1].nbytes

        def make(request: _Request) -> None:
            end = request.offset + request.nbytes
            with (
                self._in_use(begun=True),
                explain_errors(self.path, f"{_DOING[direction]} bytes {request.offset} to {end}{of_what}"),
            ):
                self._make(direction, request)

        self._call_each(direction, make, requests, f"{_DOING[direction]} bytes {first} to {last}{of_what}")

    def _call_each(
        self, direction: Direction, function: Callable[[T], Any], items: Sequence[T], doing: str
    ) -> None:
        """Call `function` on each of `items` on the drive's threads, and log slow calls, described by
        `doing`. After a call had to be abandoned, the file is no longer used."""

        def tell(seconds: float) -> None:
            log.warning("%s: %s: the drive has not answered for %.0f s", self.path, doing, seconds)

        try:
            call_each(_threads(self._device, direction), function, items, tell=tell)
        except AbandonedCalls:
            self._lost = (
                f"{self.path}: got an interrupt while {doing}, and no answer of the drive: go on from the last "
                "commit, in a new process"
            )
            raise

    def _make(self, direction: Direction, request: _Request) -> None:
        """Read or write all bytes of one request. A transfer that stops early is continued from the last full
        page, as O_DIRECT requires."""
        call = system_calls.read_at if direction == "read" else system_calls.write_at
        done = retries = 0
        while done < request.nbytes:
            left, rest = request.nbytes - done, list(_after(request.pieces, done))
            try:
                moved = call(self._fd, rest, request.offset + done)
            except (InterruptedError, BlockingIOError):
                if retries == MOST_RETRIES:
                    raise
                moved = None
            finally:
                for piece in rest:
                    piece.release()
            if moved is not None and moved != left:
                self._check_size()  # a file that was cut off has an error of its own
                if not 0 < moved < left or retries == MOST_RETRIES:
                    raise OSError(errno.EIO, f"{moved} of {left} bytes moved")
            whole = (moved or 0) // ALIGNED * ALIGNED
            done += whole
            retries = 0 if whole else retries + 1
            if retries:
                time.sleep(PAUSE)


def open_reserved(path: Path, nbytes: int, flags: int, *, mode: int = 0o600, named: bool = True) -> int:
    """A descriptor of a new file with `nbytes` reserved, so that a full disk is noticed before any write.

    `flags` are those of os.open, `mode` the permissions, by default for the owner alone. A file that is not `named`
    is unlinked before it has bytes. Raises OSError if the file exists or the disk is full; no file is left then.
    """
    fd = os.open(path, flags | system_calls.NEW, mode)
    try:
        if not named:
            path.unlink()
        system_calls.reserve(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            path.unlink()
        raise
    return fd


@contextmanager
def _reserving(path: Path, nbytes: int) -> Generator[None, None, None]:
    if nbytes <= 0 or nbytes % ALIGNED:
        raise ValueError(f"{path}: got {nbytes} bytes, expected a positive multiple of {ALIGNED}")
    with explain_errors(path, f"reserving {format_bytes(nbytes)}"):
        yield


@contextmanager
def pages_for(nbytes: int) -> Generator[HostPages, None, None]:
    """A context with `nbytes` of host pages, unmapped at its end unless a hanging drive may access them."""
    pages, abandoned = map_pages(nbytes), False
    try:
        yield pages
    except AbandonedCalls:
        abandoned = True
        raise
    finally:
        if not abandoned:
            pages.close()


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that `path` is on, such as "ext4"; "unknown" where the system does not say."""
    real, best, kind = f"{path.resolve()}/", "", "unknown"
    with suppress(OSError), mounts.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split()
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]).rstrip("/") + "/"
            if real.startswith(point) and len(point) >= len(best):
                best, kind = point, fields[fields.index("-") + 1]
    return kind


def explain_errors(path: Path, doing: str) -> Any:
    """A context that raises an OSError as a DiskError, which names the path and the next action."""
    return explain_os_errors(DiskError, path, doing, _ADVICE)


def _requests(areas: Sequence[memoryview], offset: int) -> Iterator[_Request]:
    """Yield requests of at most 8 MiB that together transfer the memory `areas`, in order, to or from the
    file's bytes from `offset` on."""
    pieces: list[memoryview] = []
    size = 0
    for area in areas:
        at = 0
        while at < area.nbytes:
            with area.cast("B") as flat:
                n = min(REQUEST - size, flat.nbytes - at)
                pieces.append(flat[at : at + n])
            at, size = at + n, size + n
            if size == REQUEST or len(pieces) == MOST_PIECES:
                yield _Request(pieces, offset, size)
                offset, pieces, size = offset + size, [], 0
    if pieces:
        yield _Request(pieces, offset, size)


def _after(pieces: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """The areas of memory `pieces` without their first `done` bytes."""
    for piece in pieces:
        if done < piece.nbytes:
            yield piece[done:]
        done = max(0, done - piece.nbytes)


def _address(area: memoryview) -> int:
    import numpy as np  # checkpoints are looked at without it

    return np.frombuffer(area, np.uint8).ctypes.data


def _set_direct(fd: int) -> bool:
    """Set O_DIRECT on descriptor `fd`; False if the system or the file system refuses."""
    try:
        direct = system_calls.set_direct(fd, direct=True)
        with closing(map_pages(ALIGNED)) as page:
            system_calls.read_at(fd, [page], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return system_calls.set_direct(fd, direct=False)
    return direct


_pools: dict[tuple[int, Direction, int], DaemonThreads] = {}
_told = set[int]()  # devices
_lock = threading.Lock()
system_calls.after_fork_in_child(_pools.clear)  # a child has none of the threads


def _threads(device: int, direction: Direction) -> DaemonThreads:
    with _lock:
        key = device, direction, THREADS
        if key not in _pools:
            _pools[key] = DaemonThreads(THREADS, f"zfunc disk {direction}")
        return _pools[key]


def _tell_once(path: Path, device: int) -> None:
    with _lock:
        if device in _told:
            return
        _told.add(device)
    log.warning(
        "%s: %s refuses O_DIRECT: reads and writes go through the page cache, which is slower and takes memory",
        *(path, file_system_of(path)),
    )


# --- how fast a drive is, by a file without a name: a process that is killed leaves nothing -----------------------


class DriveSpeeds(NamedTuple):
    """The speeds of reading and writing a drive in long transfers, in bytes/s."""

    read: float
    write: float


def measure(folder: Path) -> DriveSpeeds:
    """The speeds of the drive of `folder`, measured in about a second.

    The test file takes 512 MiB, or half of the free space if less, but at least 8 MiB. Raises DiskError if the
    drive has no room for the test file.
    """
    with explain_errors(folder, "measuring its drive"):
        half = shutil.disk_usage(folder).free // 2 // ALIGNED * ALIGNED
        chunk = min(CHUNK, max(LEAST, half))
        with (
            closing(DirectFile.unnamed(folder, max(LEAST, min(MEASURED, half)) // chunk * chunk)) as file,
            pages_for(chunk) as pages,
            memoryview(pages) as data,
        ):
            pages[:] = (os.urandom(1 << 20) * -(-chunk >> 20))[:chunk]  # some drives compress
            file.sync()
            _speed(file, file.write, data)  # the first time file systems also note that there is something
            write = _speed(file, file.write, data)
            return DriveSpeeds(_speed(file, file.read, data), write)


def is_direct(folder: Path) -> bool:
    """Whether DirectFiles in `folder` bypass the page cache. Raises DiskError where no file can be made."""
    with explain_errors(folder, "trying O_DIRECT"), closing(DirectFile.unnamed(folder, ALIGNED)) as file:
        return file.direct


def _speed(file: DirectFile, transfer: Callable[[memoryview, int], None], data: memoryview) -> float:
    start, offset = time.perf_counter(), 0
    while offset < file.nbytes and (not offset or time.perf_counter() - start < SECONDS):
        transfer(data, offset)
        offset += data.nbytes
    file.sync()
    return offset / (time.perf_counter() - start)
