"""What this machine has: free memory, and pinned buffers of exactly the size asked for."""

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def host_buffer(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A zeroed host tensor [numel]; pinned ones are page-aligned and registered at their exact size.

    torch's caching pinned allocator rounds a size up to a power of two, nearly doubling a large buffer.
    """
    if not pinned or numel == 0:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    nbytes = numel * dtype.itemsize
    pages = _Pages(-1, nbytes)  # anonymous, zeroed, page-aligned: two registrations never share a page
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, PORTABLE))
    if code:
        raise RuntimeError(
            f"got CUDA error {code} when pinning {nbytes:,} bytes, expected room for them: raise the limit of "
            "locked memory (ulimit -l), or lower bucket_size"
        )
    pages.release = partial(runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor


class _Pages(mmap.mmap):
    """Anonymous memory that is unregistered before it is unmapped; a tensor on it keeps it alive."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()
