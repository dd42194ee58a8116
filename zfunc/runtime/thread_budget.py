"""How many threads a sweep over host memory gets, and on which NUMA nodes: chosen here and logged.

A rank's sweeps run on its share of the NUMA nodes, and its host buffers lie on those in turn. Binding changes where
a sweep runs, never what it computes; on one node nothing is bound.

What the files of the Linux kernel say of this machine is read by functions of a root folder alone, so that a test
can hand them a tree of its own; what is missing or cannot be read is unknown, never an exception.
"""

import functools
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from zfunc.core.display import counted
from zfunc.runtime import system_calls

ROOT = Path("/")
log = logging.getLogger("zfunc")


@frozen
class ThreadBudget:
    """The number of threads for optimizer updates on the host, and the reasons for it, for the log."""

    threads: int
    why: str

    def __str__(self) -> str:
        return f"{counted(self.threads, 'thread')}: {self.why}"


def choose_threads(
    environment: Mapping[str, str], cpus: frozenset[int], root: Path = ROOT, *, on_accelerator: bool = False
) -> ThreadBudget:
    """The number of threads for optimizer updates on the host: the physical cores of `cpus`, at most the
    cgroup's quota, divided by the number of ranks on this machine.

    With an accelerator one core is left for the thread that launches its work, if there are several.
    OMP_NUM_THREADS takes precedence, up to the number of CPUs, but not the value 1 that torchrun sets for
    several processes. Raises ValueError for a LOCAL_WORLD_SIZE that is no whole number above 0.
    """
    cores, quota = physical_cores(cpus, root), cpu_quota(root)
    ranks = local_ranks(environment)
    available = max(1, int(min(cores, quota)) // ranks)
    threads = available - (launching := on_accelerator and available > 1)
    limit = "none" if math.isinf(quota) else f"{quota:g}"
    why = f"{counted(cores, 'physical core')} of {counted(len(cpus), 'CPU')}, quota {limit}, "
    why += counted(ranks, "local rank")
    why += ", one core left for launching" * launching
    said = environment.get("OMP_NUM_THREADS", "").strip()
    first = said.partition(",")[0]  # of nested teams the outer one
    if said == "1" and ranks > 1 and "TORCHELASTIC_RUN_ID" in environment:
        why += "; OMP_NUM_THREADS=1 is torchrun's, and does not count" * (threads != 1)
    elif first.isdecimal() and int(first):
        threads, why = min(int(first), len(cpus)), f"{why}; OMP_NUM_THREADS={said} is followed"
    elif said:
        why += f"; OMP_NUM_THREADS={said} is no number of threads, and does not count"
    return ThreadBudget(threads, why)


def _count(environment: Mapping[str, str], name: str, lowest: int) -> int:
    text = environment.get(name, str(lowest))
    if not text.strip().isdecimal() or int(text) < lowest:
        raise ValueError(
            f"{name}: got {text!r}, expected a whole number of at least {lowest}: torchrun sets it; without "
            "torchrun, unset it"
        )
    return int(text)


def local_rank() -> int:
    """This process's number on its machine, from torchrun's LOCAL_RANK; 0 if unset. ValueError if not a number."""
    return _count(os.environ, "LOCAL_RANK", 0)


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks on this machine, torchrun's LOCAL_WORLD_SIZE; 1 if unset. ValueError if not a number."""
    return _count(environment, "LOCAL_WORLD_SIZE", 1)


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks that train together, from torchrun's WORLD_SIZE; 1 unless RANK says that this process is one of them.

    Raises ValueError unless it is a number.

    >>> world_size({"WORLD_SIZE": "8", "RANK": "0"}), world_size({"WORLD_SIZE": "8"})
    (8, 1)
    """
    size = _count(environment, "WORLD_SIZE", 1)
    return size if "RANK" in environment else 1


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this process may use: those of its main thread; all where threads cannot be bound."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


@functools.cache
def default_threads() -> int:
    """The number of threads of this process's host Adam, by `choose_threads`. Decided once, logged in one line."""
    from zfunc.runtime.accelerator import accelerator_type  # torch, which help starts without

    decision = choose_threads(os.environ, allowed_cpus(), on_accelerator=accelerator_type() is not None)
    log.info("host Adam uses %s", decision)
    return decision.threads


def share_of_nodes(
    nodes: Sequence[frozenset[int]], cpus: frozenset[int], rank: int = 0, ranks: int = 1
) -> tuple[frozenset[int], ...]:
    """The NUMA nodes for rank `rank` of the `ranks` on this machine, each as its CPUs among `cpus`; () if all
    of `cpus` are on one node.

    >>> two = frozenset({0, 1}), frozenset({2, 3})
    >>> [sorted(x) for x in share_of_nodes(two, frozenset(range(4)))]
    [[0, 1], [2, 3]]
    >>> [sorted(x) for x in share_of_nodes(two, frozenset(range(4)), rank=1, ranks=2)]
    [[2, 3]]
    """
    usable = [x & cpus for x in nodes if x & cpus]
    if len(usable) < 2:
        return ()
    first, last = (n * len(usable) // ranks for n in (rank % ranks, rank % ranks + 1))
    return tuple(usable[first : max(last, first + 1)])


@functools.cache
def default_nodes() -> tuple[frozenset[int], ...]:
    """The NUMA nodes that this rank uses, each as its CPUs; () if there is one. Decided and logged once."""
    chosen = share_of_nodes(numa_nodes(), allowed_cpus(), local_rank(), local_ranks())
    if chosen:
        log.info("host Adam runs on %d NUMA nodes: CPUs %s", len(chosen), [*map(sorted, chosen)])
    return chosen


def bind_to_nodes() -> None:
    """Bind the calling thread, and each OpenMP team that it opens later, to the CPUs of this rank's NUMA nodes."""
    if nodes := default_nodes():
        system_calls.bind({cpu for node in nodes for cpu in node})


@functools.cache
def limit_threads(threads: int) -> int:
    """The smaller of `threads` and the number of CPUs of this process; a reduction is logged once."""
    most = len(allowed_cpus())
    if threads > most:
        log.warning(
            "host Adam: %d threads asked for, this process may use %d CPUs: using those", threads, most
        )
    return min(threads, most)


# --- what the kernel's files say ---------------------------------------------------------------------------------


def cpu_list(text: str) -> frozenset[int]:
    """The CPU numbers in `text`, a CPU list as the Linux kernel writes it.

    >>> sorted(cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    bounds = (part.split("-") for part in text.strip().split(",") if part)
    return frozenset(
        cpu for first, *last in bounds for cpu in range(int(first), int(last[0] if last else first) + 1)
    )


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> int:
    """The number of physical cores of `cpus`: hyperthreads share a core; an unknown CPU counts as one."""
    siblings = (f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({read_text(root / path) or path for path in siblings})


def cpu_quota(root: Path = ROOT) -> float:
    """The number of CPUs that the control group grants this process (v2 cpu.max, v1 cfs_quota), the least
    over the group and its parents; inf without a limit."""
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


def numa_nodes(root: Path = ROOT) -> tuple[frozenset[int], ...]:
    """The CPUs of each NUMA node, in the order of the nodes; () where the kernel reports none."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    in_order = sorted(folders, key=lambda x: int(x.name.removeprefix("node")))
    return tuple(cpu_list(read_text(x / "cpulist") or "") for x in in_order)


def cpu_model(root: Path = ROOT) -> str | None:
    """The model name of this machine's processor; None: unknown."""
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


def largest_cache(root: Path = ROOT) -> int | None:
    """The size in bytes of the largest cache of CPU 0; None: unknown."""
    sizes = [
        read_text(path) or "" for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(
        (int(size[:-1]) << 10 for size in sizes if size[:-1].isdecimal() and size[-1] == "K"), default=None
    )
