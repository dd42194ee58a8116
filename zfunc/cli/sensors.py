"""The load of the machine: cores, memory, GPUs, and the process of a run, read without special permissions.

What cannot be read is None, or a reason in words; nothing here waits or raises.
"""

import os
import time
from pathlib import Path
from typing import Any

from attrs import frozen

from zfunc.runtime.cpu_topology import ROOT, busy_ticks, read_text
from zfunc.runtime.thread_budget import allowed_cpus


@frozen
class Cores:
    """The seconds that the CPUs of this process have worked, at a moment; None if unknown."""

    at: float
    worked: float | None
    count: int

    def busy_since(self, before: "Cores") -> float | None:
        """How many of them worked since `before`, on average."""
        if self.worked is None or before.worked is None or self.at <= before.at:
            return None
        return min(float(self.count), max(0.0, (self.worked - before.worked) / (self.at - before.at)))


def cores(root: Path = ROOT) -> Cores:
    """A reading of now."""
    cpus = allowed_cpus()
    ticks = busy_ticks(cpus, root)
    return Cores(time.monotonic(), None if ticks is None else ticks / os.sysconf("SC_CLK_TCK"), len(cpus))


def host_memory(root: Path = ROOT) -> tuple[int, int] | None:
    """Bytes in use and in all, of the machine; None if unknown."""
    sizes: dict[str, int] = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            sizes[name] = int(words[0]) << 10
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return None
    return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]


@frozen
class GPU:
    """A GPU: the share of time it was busy, 0 to 1, and bytes in use and in all."""

    name: str
    busy: float
    used: int
    total: int


def gpus(nvml: Any = None) -> tuple[GPU, ...] | str:
    """All GPUs that the driver lists, or why they are unknown. `nvml` is a module like pynvml."""
    try:
        if nvml is None:
            import pynvml as nvml  # pyright: ignore[reportMissingImports]
        nvml.nvmlInit()
    except ImportError:
        return "unknown: install nvidia-ml-py to see them"
    except Exception as error:
        return f"none that the driver lists ({error})"
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        return tuple(_gpu(nvml, handle) for handle in handles) or "none"
    except Exception as error:  # of a class that differs from version to version
        return f"unknown: {error}"
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> GPU:
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return GPU(name.decode() if isinstance(name, bytes) else str(name), busy, memory.used, memory.total)


def process_of(folder: Path, root: Path = ROOT) -> int | None:
    """The process that trains in a run folder: it holds the lock. None if there is none, or it is unknown."""
    try:
        inode = folder.stat().st_ino
    except OSError:
        return None
    for line in (read_text(root / "proc/locks") or "").splitlines():
        words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:131 0 EOF
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            return int(words[4]) if words[4].isdecimal() and int(words[4]) else None
    return None
