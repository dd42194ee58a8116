"""Host memory for large buffers: whole pages, huge ones asked for, touched in parallel before they are used.

A page lies on the NUMA node of the thread that touches it first, which needs no permission, as mbind does. Touching
costs what the first sweep would have paid for the pages otherwise. Huge pages come as
/sys/kernel/mm/transparent_hugepage/enabled allows: with
"always" and "madvise" this memory gets them, with "never" it does not, and sweeps go on with small ones.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PAGE = mmap.PAGESIZE
HUGE_MIN = 4 << 20  # bytes: a smaller mapping need not hold a huge page, which is 2 MiB
PARALLEL_MIN = 8 << 20  # bytes from which on several threads touch faster than one
TURN = 2 << 20  # bytes that a thread, and so a node, gets in turn: a huge page
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14: touches without writing
_libc: Any = ctypes.CDLL(None, use_errno=True)


class HostPages(mmap.mmap):
    """Anonymous memory; what registered it is undone before it is unmapped. A tensor on it keeps it alive."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()

    @property
    def address(self) -> int:
        """Where it begins: at a page, so that two registrations never share one."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def map_pages(nbytes: int) -> HostPages:
    """Zeroed pages for `nbytes` > 0, of no physical memory yet. Raises MemoryError where there is no room."""
    try:
        # Shared ones get no huge pages.
        pages = HostPages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(_refusal(nbytes, error.strerror or str(error))) from error
    if nbytes >= HUGE_MIN:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel built without them; `zfunc doctor` tells
            if error.errno != errno.EINVAL:
                raise
    return pages


def touch(pages: HostPages, threads: int = 1, nodes: Sequence[frozenset[int]] = ()) -> None:
    """Give every page its physical memory, from `threads` threads; from those on the CPUs of `nodes` in turn.

    Raises MemoryError where there is no room. The caller's thread stays where it is.
    """
    base, size = pages.address, len(pages)
    if not nodes and size < PARALLEL_MIN:
        _populate(base, size)
        return
    threads = max(threads, len(nodes))

    def touch_in_turn(n: int) -> None:
        if nodes:
            os.sched_setaffinity(0, nodes[n % len(nodes)])  # 0 is the thread that calls
        for start in range(n * TURN, size, threads * TURN):
            _populate(base + start, min(TURN, size - start))

    with ThreadPoolExecutor(threads, thread_name_prefix="zfunc first touch") as pool:
        for _ in pool.map(touch_in_turn, range(threads)):
            pass


def _populate(address: int, nbytes: int) -> None:
    """Through ctypes, which lets go of the GIL while the kernel of the system clears the pages."""
    while _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # before Linux 5.14
            ctypes.memset(address, 0, nbytes)
            return
        if code not in (errno.EAGAIN, errno.EINTR):
            raise MemoryError(_refusal(nbytes, os.strerror(code)))


def _refusal(nbytes: int, why: str) -> str:
    return (
        f"got no memory for {nbytes:,} bytes ({why}), expected room for them: stop what else uses memory, or train "
        "a smaller model"
    )
