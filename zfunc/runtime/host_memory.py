"""What this machine has: free memory, and the one allocator of the buffers the host sweeps over."""

import mmap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.runtime.host_pages import PAGE, HostPages, map_pages, touch
from zfunc.runtime.numa import first_touches
from zfunc.runtime.thread_budget import default_numa_slots, default_threads

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, whichever is current
_CGROUP = Path("/sys/fs/cgroup")


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


def available_device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device this process may still take, in bytes; what torch has cached and not used counts."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def alloc_host(
    numel: int, dtype: torch.dtype, *, pinned: bool, sweeps: Sequence[tuple[int, int]] = ()
) -> Tensor:
    """A zeroed host tensor [numel] for what the host sweeps over, in pages of its own, at its exact size.

    Its pages are there when it returns: each touched first from the NUMA node whose thread will sweep over it.
    `sweeps` are the elements (start, stop) one call of the kernel covers, ascending; () is one over all. Pinned
    buffers are registered with CUDA: torch's caching pinned allocator would round the size up to a power of two,
    nearly doubling a large one. Raises MemoryError where there is no room, RuntimeError if CUDA refuses.

    >>> alloc_host(3, torch.float32, pinned=False)
    tensor([0., 0., 0.])
    """
    nbytes = numel * dtype.itemsize
    if not numel or (nbytes < PAGE and not pinned):
        return torch.zeros(numel, dtype=dtype, device="cpu")
    pages, slots = map_pages(nbytes), default_numa_slots()
    threads = default_threads()
    touch(pages, first_touches(numel, dtype.itemsize, threads=threads, page=PAGE, sweeps=sweeps), slots)
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
    if pinned:
        _pin(pages)
    return tensor


def _pin(pages: HostPages) -> None:
    # A fork would leave this process copies of pages it writes to, and the device the ones it knows.
    pages.madvise(mmap.MADV_DONTFORK)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(pages.address, len(pages), PORTABLE))
    if code:
        raise RuntimeError(
            f"got CUDA error {code} when pinning {len(pages):,} bytes, expected room for them: raise the limit of "
            "locked memory (ulimit -l), or lower bucket_size"
        )
    pages.release = partial(runtime.cudaHostUnregister, pages.address)
