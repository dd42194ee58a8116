"""What this machine has: free memory, and pinned buffers of exactly the size asked for."""

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Host memory this process may still take, in bytes: the machine's, or its control group's if less."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        room = int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    return max(0, min(available, room))


def available_device_bytes(device: torch.device) -> int:
    """Memory of `device` this process may still take, in bytes; what torch has cached and not used counts."""
    if device.type != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_buffer(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A zeroed host tensor [numel]; pinned ones are page-aligned and registered at their exact size.

    torch's caching pinned allocator rounds a size up to a power of two, nearly doubling a large buffer.
    """
    if not pinned or numel == 0:
        return torch.zeros(numel, dtype=dtype)
    nbytes = numel * dtype.itemsize
    pages = _Pages(-1, nbytes)  # anonymous, zeroed, page-aligned: two registrations never share a page
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0))
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
