"""What the files of the Linux kernel say of this machine: cores, quota, NUMA nodes, huge pages, OpenMP runtimes.

The invariant: a function of a root folder alone, so that a test can hand it a tree of its own; what is missing
or cannot be read is unknown, never an exception.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

ROOT = Path("/")


@frozen
class NumaNode:
    """A NUMA node: memory, and the CPUs that are near to it. None stands for unknown."""

    index: int
    cpus: frozenset[int]
    total_bytes: int | None = None
    free_bytes: int | None = None


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list as the kernel writes it.

    >>> sorted(cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    bounds = (part.split("-") for part in text.strip().split(",") if part)
    return frozenset(
        cpu for first, *last in bounds for cpu in range(int(first), int(last[0] if last else first) + 1)
    )


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> int:
    """Cores behind these CPUs: hyperthreads of one core wait for the same memory. An unknown CPU is a core."""
    siblings = (f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({read_text(root / path) or path for path in siblings})


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs the cgroup grants (v2 cpu.max, v1 cfs_quota), the tightest level on the way up; inf if none."""
    quotas = [math.inf]
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        here = mount / group.lstrip("/")
        for level in (here, *here.parents):
            quotas.append(_quota_of(level))
            if level == mount:
                break
    return min(quotas)


def _quota_of(level: Path) -> float:
    words = (read_text(level / "cpu.max") or "").split() or [
        read_text(level / f"cpu.cfs_{x}_us") or "max" for x in ("quota", "period")
    ]
    try:
        quota, period = map(float, words)
    except ValueError:  # "max", or nothing there
        return math.inf
    return quota / period if quota > 0 else math.inf


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """The NUMA nodes that have CPUs or memory, in order; () where the kernel tells none."""
    folder = root / "sys/devices/system/node"
    nodes = (_node(path) for path in folder.glob("node[0-9]*"))
    return tuple(sorted((n for n in nodes if n.cpus or n.total_bytes), key=lambda n: n.index))


def _node(folder: Path) -> NumaNode:
    # Node 0 MemFree: 9 kB.
    lines = (line.split() for line in (read_text(folder / "meminfo") or "").splitlines())
    sizes = {words[2]: int(words[3]) * 1024 for words in lines if len(words) == 5}
    cpus = cpu_list(read_text(folder / "cpulist") or "")
    return NumaNode(
        int(folder.name.removeprefix("node")), cpus, sizes.get("MemTotal:"), sizes.get("MemFree:")
    )


def huge_page_mode(root: Path = ROOT) -> str | None:
    """Who gets transparent huge pages: "always" everyone, "madvise" who asks, "never" nobody; None: unknown."""
    words = (read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def cpu_model(root: Path = ROOT) -> str | None:
    """The name of the processor; None: unknown."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return None


def read_text(path: Path) -> str | None:
    """The text of a small file without the white space around it; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def mapping_of(address: int, root: Path = ROOT) -> dict[str, str]:
    """What the kernel says of this process's memory at `address`, such as AnonHugePages; {} if unknown."""
    mappings: dict[str, str] = {}
    inside = False
    for line in (read_text(root / "proc/self/smaps") or "").splitlines():
        key, *values = line.split(maxsplit=1)
        if key.endswith(":"):
            if inside:
                mappings[key.removesuffix(":")] = "".join(values)
            continue
        first, _, last = key.partition("-")
        inside = int(first, 16) <= address < int(last, 16)
    return mappings


def largest_cache(root: Path = ROOT) -> int | None:
    """Bytes of the largest cache of CPU 0; None: unknown."""
    sizes = [
        read_text(path) or "" for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(
        (int(size[:-1]) << 10 for size in sizes if size[:-1].isdecimal() and size[-1] == "K"), default=None
    )


def busy_ticks(cpus: Iterable[int], root: Path = ROOT) -> int | None:
    """Ticks (`os.sysconf("SC_CLK_TCK")` a second) these CPUs have worked since they started; None: unknown."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    lines = (line.split() for line in (read_text(root / "proc/stat") or "").splitlines())
    # user, nice, system, then idle and waiting for disks, then interrupts and what a hypervisor gave others
    ticks = [sum(map(int, (*words[1:4], *words[6:9]))) for words in lines if words and words[0] in wanted]
    return sum(ticks) if ticks else None
