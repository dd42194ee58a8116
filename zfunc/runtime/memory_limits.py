"""How much host memory this process has, and may have: the machine, the control group, limits of the process."""

import sys
from importlib.util import find_spec
from pathlib import Path

from zfunc.runtime.system_calls import system_module
from zfunc.runtime.thread_budget import local_ranks
from zfunc.units import format_bytes

# Addresses that an import of torch takes, by the bytes of its libraries, as tried with torch 2.13 on CPUs.
_OF_LIBRARIES = 1.4
_CGROUP = Path("/sys/fs/cgroup")
resource = system_module("resource")


def available_host_bytes() -> int:
    """Host memory this process may still allocate, in bytes: the least of what the machine, the control group and
    the address limits (RLIMIT_AS) of the ranks on this machine leave.
    """
    import psutil

    available = psutil.virtual_memory().available
    if (most := address_limit()) is not None:
        own = psutil.Process().memory_info().vms
        available = max(0, min(available, (most - own) * local_ranks()))
    try:
        limit, used = (int((_CGROUP / f"memory.{x}").read_text()) for x in ("max", "current"))
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    # Used counts the page cache: what was read of a data set and can be dropped is room.
    return max(0, min(available, limit - used + int(cached.get("inactive_file", 0))))


def address_limit() -> int | None:
    """The bytes of addresses that this process may have at most (RLIMIT_AS, `ulimit -v`); None without a limit."""
    return _limit("RLIMIT_AS")


def locked_limit() -> int | None:
    """The bytes that this process may page-lock at most (RLIMIT_MEMLOCK, `ulimit -l`); None without a limit."""
    return _limit("RLIMIT_MEMLOCK")


def resident_bytes() -> int:
    """Physical memory of this process, in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The peak physical memory of this process so far, in bytes; its memory now where the system has no peak."""
    if resource is None:
        import psutil

        now = psutil.Process().memory_info()
        return getattr(now, "peak_wset", now.rss)  # the former is Windows'
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_addresses() -> None:
    """Raise MemoryError if RLIMIT_AS leaves too few addresses to import torch, which might end Python silently."""
    most, torch = address_limit(), None if "torch" in sys.modules else find_spec("torch")
    if most is None or torch is None or torch.origin is None:
        return
    libraries = {x.resolve() for x in Path(torch.origin).parent.glob("lib/*.so*")}  # links to one are one
    least = _OF_LIBRARIES * sum(x.stat().st_size for x in libraries if x.is_file())
    if most < least:
        raise MemoryError(
            f"RLIMIT_AS: got {format_bytes(most)} of addresses, expected {format_bytes(least)} at least, which the "
            "import of torch takes: raise it by ulimit -v"
        )


def _limit(name: str) -> int | None:
    """The limit `name` of this process in bytes, "RLIMIT_AS" or "RLIMIT_MEMLOCK"; None: no limit, or none known."""
    if not hasattr(resource, name):
        return None
    most, _ = resource.getrlimit(getattr(resource, name))
    return None if most == resource.RLIM_INFINITY else most
