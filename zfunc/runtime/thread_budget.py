"""How many threads a sweep over host memory gets, and on which NUMA nodes: chosen here and logged.

A rank's sweeps run on its share of the NUMA nodes, and its host buffers lie on those in turn. Binding changes where
a sweep runs, never what it computes; on one node nothing is bound.
"""

import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from zfunc.runtime.cpu_topology import ROOT, NumaNode, cpu_quota, numa_nodes, physical_cores

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
    requested: str  # what became of OMP_NUM_THREADS, or ""

    def __str__(self) -> str:
        """The line for the log."""
        quota = "none" if math.isinf(self.quota) else f"{self.quota:g}"
        return (
            f"{self.threads} threads: {self.cores} physical cores of {len(self.cpus)} CPUs, quota {quota}, "
            f"{self.ranks} local ranks{', one core left for launching' if self.launching else ''}"
            f"{self.requested and f'; {self.requested}'}"
        )


def choose_threads(
    environment: Mapping[str, str], cpus: frozenset[int], root: Path = ROOT, *, on_accelerator: bool = False
) -> ThreadBudget:
    """Threads for a sweep: the physical cores behind `cpus`, no more than the cgroup's quota, over the local ranks.

    With an accelerator one core is left for the thread that launches its work, if there is another. OMP_NUM_THREADS
    is followed, up to the number of CPUs, but for the 1 that torchrun sets where it starts several processes.
    Raises ValueError for a LOCAL_WORLD_SIZE that is no whole number above 0.
    """
    cores, quota = physical_cores(cpus, root), cpu_quota(root)
    ranks = local_ranks(environment)
    available = max(1, int(min(cores, quota)) // ranks)
    launching = int(on_accelerator and available > 1)
    threads = available - launching
    said = environment.get("OMP_NUM_THREADS", "").strip()
    first, requested = said.partition(",")[0], ""  # of nested teams the outer one
    if said == "1" and ranks > 1 and "TORCHELASTIC_RUN_ID" in environment:
        requested = "OMP_NUM_THREADS=1 is torchrun's, and does not count" if threads != 1 else ""
    elif first.isdecimal() and int(first):
        threads, requested = min(int(first), len(cpus)), f"OMP_NUM_THREADS={said} is followed"
    elif said:
        requested = f"OMP_NUM_THREADS={said} is no number of threads, and does not count"
    return ThreadBudget(threads, cores, cpus, quota, ranks, launching, requested)


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
    from zfunc.runtime.accelerator import accelerator_type  # torch, which help starts without

    decision = choose_threads(os.environ, allowed_cpus(), on_accelerator=accelerator_type() is not None)
    log.info("host Adam uses %s", decision)
    return decision.threads


def share_of_nodes(
    nodes: Sequence[NumaNode], cpus: frozenset[int], rank: int = 0, ranks: int = 1
) -> tuple[frozenset[int], ...]:
    """The CPUs of each node that is for this rank of a machine, of those in `cpus`; () if they are all on one node.

    >>> two = NumaNode(0, frozenset({0, 1})), NumaNode(1, frozenset({2, 3}))
    >>> [sorted(x) for x in share_of_nodes(two, frozenset(range(4)))]
    [[0, 1], [2, 3]]
    >>> [sorted(x) for x in share_of_nodes(two, frozenset(range(4)), rank=1, ranks=2)]
    [[2, 3]]
    """
    usable = [x.cpus & cpus for x in nodes if x.cpus & cpus]
    if len(usable) < 2:
        return ()
    first, last = (n * len(usable) // ranks for n in (rank % ranks, rank % ranks + 1))
    return tuple(usable[first : max(last, first + 1)])


@functools.cache
def default_nodes() -> tuple[frozenset[int], ...]:
    """The CPUs of each NUMA node that this rank uses; () on one node. Decided once, logged in one line."""
    chosen = share_of_nodes(numa_nodes(), allowed_cpus(), local_rank(), local_ranks())
    if chosen:
        log.info("host Adam runs on %d NUMA nodes: CPUs %s", len(chosen), [*map(sorted, chosen)])
    return chosen


def bind_to_nodes() -> None:
    """Keep the calling thread on `default_nodes`, and with it the OpenMP team that it opens from now on."""
    if nodes := default_nodes():
        os.sched_setaffinity(0, {cpu for node in nodes for cpu in node})  # 0 is the thread that calls


@functools.cache
def limit_threads(threads: int) -> int:
    """`threads`, or as many as this process may use if that is less: logged, once."""
    most = len(allowed_cpus())
    if threads > most:
        log.warning(
            "host Adam: %d threads asked for, this process may use %d CPUs: using those", threads, most
        )
    return min(threads, most)
