"""How fast this machine's memory is for a sweep, and what the Adam kernel reaches of that: measured in a second.

The yardstick is the kernel's skeleton: it moves the bytes of a step with 16-bit gradients and copy, 28 a parameter,
without arithmetic. The two take turns in one run, so what else the machine does hits both.

The invariant: it is measured on memory and threads placed as those of a training are.
"""

import os
import threading
import time
from collections.abc import Callable
from statistics import median

import torch
from attrs import frozen
from torch import Tensor

from zfunc.optim.host_adam import adam_update_
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.runtime.cpu_topology import busy_ticks, largest_cache, mapping_of
from zfunc.runtime.host_memory import alloc_host, available_host_bytes
from zfunc.runtime.team_binding import bind_default_team
from zfunc.runtime.thread_budget import allowed_cpus, default_threads

BYTES = 28  # of a parameter, in a sweep
LEAST, MOST = 128 << 20, 2 << 30  # bytes swept over
SECONDS, TURNS = 0.6, 25


@frozen
class Bandwidth:
    """What was measured, over `nbytes`."""

    nbytes: int
    gigabytes: float  # per second, of the skeleton
    reached: float  # by the Adam kernel, of that
    beyond_caches: bool
    huge: tuple[int, int] | None  # bytes in huge pages, of so many; None: unknown
    others: float | None  # CPUs that other processes kept busy meanwhile; None: unknown


def measure_bandwidth(seconds: float = SECONDS) -> Bandwidth:
    """Measure in a thread of its own, seated as a lane's. Raises MemoryError where there is no room for it."""
    result: list[Bandwidth | BaseException] = []

    def run() -> None:
        try:
            bind_default_team()
            result.append(_measure(seconds))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="zfunc bandwidth")
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _measure(seconds: float) -> Bandwidth:
    cache = largest_cache() or 0
    nbytes = min(max(LEAST, 2 * cache), MOST)
    if nbytes > available_host_bytes() // 2:
        raise MemoryError(
            f"got {available_host_bytes():,} bytes available, expected {2 * nbytes:,}: stop what else uses memory"
        )
    n = nbytes // BYTES
    kept = [alloc_host(n, torch.float32) for _ in range(3)]
    grad, out = (alloc_host(n, torch.bfloat16) for _ in range(2))
    before = clocks()
    skeleton, adam = _turns(_skeleton(kept, grad, out), _adam(kept, grad, out), seconds=seconds)
    return Bandwidth(
        nbytes=n * BYTES,
        gigabytes=n * BYTES / median(skeleton) / 1e9,
        reached=median(a / b for a, b in zip(skeleton, adam, strict=True)),
        beyond_caches=n * BYTES > cache,
        huge=_huge(kept[0]),
        others=other_processes(before, clocks()),
    )


def _skeleton(kept: list[Tensor], grad: Tensor, out: Tensor) -> Callable[[], None]:
    state = [(t.data_ptr(), t.element_size()) for t in kept]
    return lambda: cpu_adam.skeleton(state, grad.data_ptr(), out.data_ptr(), grad.numel(), default_threads())


def _adam(kept: list[Tensor], grad: Tensor, out: Tensor) -> Callable[[], None]:
    return lambda: adam_update_(*kept, grad, out=out, step=10, lr=1e-4, weight_decay=0.1)


def _turns(*contestants: Callable[[], None], seconds: float) -> list[list[float]]:
    """Seconds each takes, turn by turn; the first two turns start threads and do not count."""
    times: list[list[float]] = [[] for _ in contestants]
    end = time.perf_counter() + seconds
    for turn in range(2 + TURNS):
        for run, own in zip(contestants, times, strict=True):
            start = time.perf_counter()
            run()
            if turn >= 2:
                own.append(time.perf_counter() - start)
        if turn >= 4 and time.perf_counter() > end:
            break
    return times


def clocks() -> tuple[float, float, float] | None:
    """Seconds: of this wall, of this process, and of the CPUs it may use."""
    ticks = busy_ticks(allowed_cpus())
    return (
        None
        if ticks is None
        else (time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"))
    )


def other_processes(before: tuple[float, ...] | None, after: tuple[float, ...] | None) -> float | None:
    """How many CPUs other processes kept busy between two readings of `clocks`; None: unknown."""
    if before is None or after is None:
        return None
    wall, own, all_of_them = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, all_of_them - own) / wall


def _huge(tensor: Tensor) -> tuple[int, int] | None:
    """Bytes in huge pages, of those of the whole mapping: the kernel joins neighbours into one."""
    told = mapping_of(tensor.data_ptr())
    if "AnonHugePages" not in told or "Rss" not in told:
        return None
    huge, there = (int(told[x].split()[0]) << 10 for x in ("AnonHugePages", "Rss"))
    return huge, there
