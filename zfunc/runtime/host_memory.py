"""Host memory: whole pages for large buffers, the one allocator of what the host sweeps over.

A page lies on the NUMA node of the thread that touches it first, which needs no permission, as mbind does. Touching
costs what the first sweep would have paid for the pages otherwise. Huge pages are asked for and come as
/sys/kernel/mm/transparent_hugepage/enabled allows: with "never" sweeps go on with small ones. torch is imported
where a tensor is made: exporting a checkpoint needs none.
"""

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from zfunc.runtime import system_calls
from zfunc.runtime.thread_budget import default_nodes, default_threads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGE = mmap.PAGESIZE
HUGE_MIN = 4 << 20  # bytes: a smaller mapping need not hold a huge page, which is 2 MiB
TURN = 2 << 20  # bytes that a thread, and so a node, touches in turn: a huge page
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14: touches without writing
LEAST_GIVEN_BACK = 1 << 20  # bytes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


class HostPages(mmap.mmap):
    """Anonymous memory pages that live as long as tensors on them; page-locks end before the mapping."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()

    @property
    def address(self) -> int:
        """The address of the pages, a multiple of the page size: page-locked ranges share no page."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def map_pages(nbytes: int) -> HostPages:
    """Map zeroed pages for `nbytes` > 0, without physical memory yet. Raises MemoryError without room."""
    try:
        # Shared ones get no huge pages. Windows has neither.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        pages = HostPages(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(_refusal(nbytes, error.strerror or str(error))) from error
    if nbytes >= HUGE_MIN and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel built without them
            if error.errno != errno.EINVAL:
                raise
    return pages


def touch(pages: HostPages, threads: int = 1, nodes: Sequence[frozenset[int]] = ()) -> None:
    """Give all `pages` physical memory, from `threads` threads on the CPUs of the NUMA `nodes` in turn.

    Raises MemoryError where there is no room. The caller's thread keeps its CPUs.
    """
    base, size = pages.address, len(pages)
    if not nodes and size <= TURN:
        return _populate(base, size)
    threads = min(max(threads, len(nodes)), -(-size // TURN))

    def touch_in_turn(n: int) -> None:
        if nodes:
            system_calls.bind(nodes[n % len(nodes)])
        for start in range(n * TURN, size, threads * TURN):
            _populate(base + start, min(TURN, size - start))

    with ThreadPoolExecutor(threads, thread_name_prefix="zfunc first touch") as pool:
        for _ in pool.map(touch_in_turn, range(threads)):
            pass


def _populate(address: int, nbytes: int) -> None:
    """Give the `nbytes` bytes at `address` physical memory: on Linux by madvise, called without the GIL;
    elsewhere by writing zeros."""
    if not sys.platform.startswith("linux"):
        ctypes.memset(address, 0, nbytes)
        return
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


def alloc_host(numel: int, dtype: "torch.dtype", *, pinned_for: "torch.device | None" = None) -> "Tensor":
    """A zeroed host tensor [numel] for host kernels to sweep over, in pages of its own, at its exact size.

    The pages have physical memory on return, on this rank's NUMA nodes in turn. With `pinned_for` an accelerator,
    the pages are locked in place for its copies. Where the driver has no call for locking, the memory comes from
    torch's pinned allocator, which rounds up to a power of two and knows no NUMA nodes.
    Raises MemoryError where there is no room, RuntimeError if the driver refuses.

    >>> import torch
    >>> alloc_host(3, torch.float32)
    tensor([0., 0., 0.])
    """
    import torch

    from zfunc.runtime.accelerator import pinning_of

    nbytes = numel * dtype.itemsize
    if not numel or (nbytes < PAGE and pinned_for is None):
        return torch.zeros(numel, dtype=dtype, device="cpu")
    pin = None if pinned_for is None else pinning_of(pinned_for)
    if pinned_for is not None and pin is None:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
    # One page more: an AMD core finds a line in L1 by bits 12 to 27 of its address too (Lipp et al., "Take A Way",
    # 2020). Buffers a multiple of 256 MiB apart push each other out of it: 1.7 times the time of a sweep.
    pages = map_pages(nbytes + PAGE)
    touch(pages, default_threads(), default_nodes())
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
    if pinned_for is not None and pin is not None:
        # A fork would leave this process copies of pages it writes to, and the device the ones it knows.
        pages.madvise(mmap.MADV_DONTFORK)
        pages.release = pin(pinned_for, pages.address, nbytes)
    return tensor


def give_back_freed() -> None:
    """Have malloc return freed blocks of `LEAST_GIVEN_BACK` bytes or more to the system at once.

    glibc's own threshold grows to 32 MiB with the blocks that are freed, and glibc keeps twice as much free memory:
    up to 5 % of the memory of a training whose state is on disk. With C libraries other than glibc nothing is done.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LEAST_GIVEN_BACK)
        mallopt(_TRIM_THRESHOLD, LEAST_GIVEN_BACK)
