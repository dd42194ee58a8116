"""Host memory: how much is free, the one allocator of the buffers the host sweeps over, giving memory back."""

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor

from zfunc.runtime.accelerator import pinning_of
from zfunc.runtime.host_pages import PAGE, map_pages, touch
from zfunc.runtime.thread_budget import default_nodes, default_threads

_CGROUP = Path("/sys/fs/cgroup")
LEAST_GIVEN_BACK = 1 << 20  # bytes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def available_host_bytes() -> int:
    """Host memory this process may still take, in bytes: the machine's, or its control group's if less."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (int((_CGROUP / f"memory.{x}").read_text()) for x in ("max", "current"))
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    # Used counts the page cache: what was read of a data set and can be dropped is room.
    return max(0, min(available, limit - used + int(cached.get("inactive_file", 0))))


def alloc_host(numel: int, dtype: torch.dtype, *, pinned_for: torch.device | None = None) -> Tensor:
    """A zeroed host tensor [numel] for what the host sweeps over, in pages of its own, at its exact size.

    Its pages are there when it returns, on the NUMA nodes of this rank in turn. With `pinned_for` an accelerator,
    the pages are locked in place for its copies. Where its driver has no call for that, the memory is of torch's
    pinned allocator, which rounds up to a power of two and knows no NUMA nodes.
    Raises MemoryError where there is no room, RuntimeError if the driver refuses.

    >>> alloc_host(3, torch.float32)
    tensor([0., 0., 0.])
    """
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


def give_back_freed(least: int = LEAST_GIVEN_BACK) -> None:
    """Let this process give blocks of at least so many bytes back to the system whenever they are freed.

    glibc's own threshold grows to 32 MiB with the blocks that are freed, and it keeps twice as much free memory: up
    to a twentieth of what a training needs whose state is on the disk. Other C libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, least)
        mallopt(_TRIM_THRESHOLD, least)
