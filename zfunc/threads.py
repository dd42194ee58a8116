"""How many threads a sweep over host memory gets: chosen explicitly, said in the log, never the environment's."""

import functools
import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("zfunc")


@functools.cache
def default_threads() -> int:
    """Threads for a sweep: the physical cores this process may use, shared among the local ranks.

    Affinity and the cgroup's quota bound the cores; LOCAL_WORLD_SIZE divides them. OMP_NUM_THREADS does
    not count: torchrun sets it to 1 without being asked. Decided once, logged in one line.
    """
    cpus = os.sched_getaffinity(0)
    cores, quota = _physical_cores(cpus), _cpu_quota()
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = max(1, int(min(cores, quota)) // ranks)
    log.info(
        "host Adam uses %d threads: %d physical cores of %d CPUs, quota %s, %d local ranks",
        threads,
        cores,
        len(cpus),
        "none" if math.isinf(quota) else f"{quota:g}",
        ranks,
    )
    return threads


def _physical_cores(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Cores behind these CPUs: hyperthreads of one core wait for the same memory."""
    cores: set[str] = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _cpu_quota(root: Path = Path("/")) -> float:
    """CPUs the cgroup grants (v2 cpu.max, v1 cfs_quota), the tightest level on the way up; inf if none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
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
    try:
        if (level / "cpu.max").exists():
            quota, period = (level / "cpu.max").read_text().split()
        else:
            quota = (level / "cpu.cfs_quota_us").read_text()
            period = (level / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


@functools.cache
def clamp(threads: int) -> int:
    """`threads`, or as many as this process may use if that is less: logged, once."""
    most = len(os.sched_getaffinity(0))
    if threads > most:
        log.warning(
            "host Adam: %d threads asked for, this process may use %d CPUs: using those", threads, most
        )
    return min(threads, most)
