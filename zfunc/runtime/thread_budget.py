"""How many threads a sweep over host memory gets, and on which cores: chosen here and logged, never taken from
OMP_NUM_THREADS."""

import functools
import logging
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from attrs import frozen

from zfunc.runtime.cpu_topology import ROOT, cpu_quota, numa_nodes, physical_cores
from zfunc.runtime.numa_placement import NumaSlot, numa_slots

log = logging.getLogger("zfunc")


@frozen
class ThreadBudget:
    """The number of threads, and what it follows from."""

    threads: int
    cores: int  # physical, that this process may use
    cpus: frozenset[int]
    quota: float
    ranks: int
    launching: int  # cores left for the threads that launch an accelerator's work
    overruled: str  # "" or the OMP_NUM_THREADS that does not count

    def __str__(self) -> str:
        """The line for the log."""
        quota = "none" if math.isinf(self.quota) else f"{self.quota:g}"
        return (
            f"{self.threads} threads: {self.cores} physical cores of {len(self.cpus)} CPUs, quota {quota}, "
            f"{self.ranks} local ranks{', one core left for launching' if self.launching else ''}"
            f"{self.overruled and f'; {self.overruled}'}"
        )


def choose_threads(
    environment: Mapping[str, str], cpus: frozenset[int], root: Path = ROOT, *, on_accelerator: bool = False
) -> ThreadBudget:
    """Threads for a sweep: the physical cores behind `cpus`, no more than the cgroup's quota, over the local ranks.

    With an accelerator one core is left for the thread that launches its work, if there is another. OMP_NUM_THREADS
    does not count: torchrun sets it to 1 without being asked. Raises ValueError for a LOCAL_WORLD_SIZE that is no
    whole number above 0.
    """
    cores, quota = physical_cores(cpus, root), cpu_quota(root)
    ranks = local_ranks(environment)
    available = max(1, int(min(cores, quota)) // ranks)
    launching = int(on_accelerator and available > 1)
    threads = available - launching
    requested, overruled = environment.get("OMP_NUM_THREADS"), ""
    if requested is not None and requested.strip() != str(threads):
        torchrun = environment.keys() & {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"}
        overruled = f"OMP_NUM_THREADS={requested}{', set by torchrun,' if torchrun else ''} is overruled"
    return ThreadBudget(threads, cores, cpus, quota, ranks, launching, overruled)


def _count(environment: Mapping[str, str], name: str, lowest: int) -> int:
    text = environment.get(name, str(lowest))
    if not text.strip().isdecimal() or int(text) < lowest:
        raise ValueError(
            f"{name}: got {text!r}, expected a whole number of at least {lowest}: torchrun sets it; without "
            "torchrun, unset it"
        )
    return int(text)


def local_rank() -> int:
    """This process's number on its machine, from torchrun; 0 without. ValueError unless it is a number."""
    return _count(os.environ, "LOCAL_RANK", 0)


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks on this machine, from torchrun; 1 without. ValueError unless it is a number."""
    return _count(environment, "LOCAL_WORLD_SIZE", 1)


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks that train together, from torchrun; 1 without a RANK, which alone says that this is one of them.

    Raises ValueError unless it is a number.

    >>> world_size({"WORLD_SIZE": "8", "RANK": "0"}), world_size({"WORLD_SIZE": "8"})
    (8, 1)
    """
    size = _count(environment, "WORLD_SIZE", 1)
    return size if "RANK" in environment else 1


def allowed_cpus() -> frozenset[int]:
    """The CPUs this process may use: those of its main thread, as zfunc binds threads of its own."""
    return frozenset(os.sched_getaffinity(os.getpid()))


@functools.cache
def default_threads() -> int:
    """Threads for a sweep of this process, as `choose_threads` finds. Decided once, logged in one line."""
    from zfunc.runtime.accelerator import accelerator_type  # torch, which `zfunc top` starts without

    decision = choose_threads(os.environ, allowed_cpus(), on_accelerator=accelerator_type() is not None)
    log.info("host Adam uses %s", decision)
    return decision.threads


@functools.cache
def default_numa_slots() -> tuple[NumaSlot, ...]:
    """Where those threads run: () on one NUMA node; on several, decided once and logged in one line."""
    rank, ranks = local_rank(), local_ranks()
    place = partial(numa_slots, numa_nodes(), allowed_cpus(), cores=physical_cores)
    chosen = place(threads=default_threads(), rank=rank, ranks=ranks)
    if chosen:
        count = {slot.node: sum(x.node == slot.node for x in chosen) for slot in chosen}
        log.info("host Adam on NUMA nodes: %s", ", ".join(f"{k} on node {n}" for n, k in count.items()))
    return chosen


@functools.cache
def limit_threads(threads: int) -> int:
    """`threads`, or as many as this process may use if that is less: logged, once."""
    most = len(allowed_cpus())
    if threads > most:
        log.warning(
            "host Adam: %d threads asked for, this process may use %d CPUs: using those", threads, most
        )
    return min(threads, most)
