"""Host memory for large buffers: whole pages, huge ones asked for, touched in parallel before they are used.

The invariant: a page is touched by a thread that runs where its part of a sweep will run, so it lies on that NUMA
node. Nothing here needs a permission: memory is placed by first touch, which a container allows, not by mbind.

On one node nothing is bound, and touching costs what the first sweep would have paid for the pages otherwise: less
with huge ones, as there are fewer. Huge pages come as /sys/kernel/mm/transparent_hugepage/enabled allows: with
"always" and "madvise" this memory gets them, with "never" it does not, and sweeps go on with small ones.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from zfunc.runtime.numa_placement import FirstTouch, NumaSlot

PAGE = mmap.PAGESIZE
HUGE_MIN = 4 << 20  # bytes: a smaller mapping need not hold a huge page, which is 2 MiB
PARALLEL_MIN = 8 << 20  # bytes from which on several threads touch faster than one
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


def touch(pages: HostPages, touches: Sequence[FirstTouch], slots: Sequence[NumaSlot] = ()) -> None:
    """Give every page its physical memory, each rank's from a thread of its own, on its slot if it has one.

    Raises MemoryError where there is no room. The caller's thread stays where it is.
    """
    base = pages.address
    if not slots and len(pages) < PARALLEL_MIN:
        _populate(base, len(pages))
        return
    ranks = [list(group) for _, group in groupby(sorted(touches, key=_rank), key=_rank)]

    def touch_rank(mine: list[FirstTouch]) -> None:
        if slots:
            os.sched_setaffinity(0, slots[mine[0].rank].cpus)  # 0 is the thread that calls
        for one in mine:
            _populate(base + one.start, one.stop - one.start)

    with ThreadPoolExecutor(len(ranks), thread_name_prefix="zfunc first touch") as pool:
        for _ in pool.map(touch_rank, ranks):
            pass


def _rank(touch: FirstTouch) -> int:
    return touch.rank


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
