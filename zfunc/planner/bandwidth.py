"""Host memory bandwidth of a sweep, and the share of it that the Adam kernel reaches: measured in a second.

The baseline is the kernel without arithmetic (its skeleton), moving the 28 bytes a parameter of a step with 16-bit
gradients and copy. The two take turns, so that other load on the machine affects both. Memory and threads are
placed as in training.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from attrs import frozen

from zfunc.optim.adamw import adam_update_
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.runtime.host_memory import alloc_host, available_host_bytes
from zfunc.runtime.thread_budget import bind_to_nodes, default_threads, largest_cache

BYTES = 28  # of a parameter, in a sweep
MIN_BYTES, MAX_BYTES = 128 << 20, 2 << 30  # swept over
SECONDS, TURNS = 0.6, 25


@frozen
class Bandwidth:
    """Measured by sweeping over `nbytes`."""

    nbytes: int
    gigabytes: float  # per second, of the skeleton
    reached: float  # share of that which the Adam kernel reaches


def measure_bandwidth(seconds: float = SECONDS) -> Bandwidth:
    """Measure in a thread of its own, bound to CPUs as a lane's. Raises MemoryError where memory is short."""

    def run() -> Bandwidth:
        bind_to_nodes()
        return _measure(seconds)

    with ThreadPoolExecutor(1, "zfunc bandwidth") as pool:
        return pool.submit(run).result()


def _measure(seconds: float) -> Bandwidth:
    cache, available = largest_cache() or 0, available_host_bytes()
    nbytes = min(max(MIN_BYTES, 2 * cache), MAX_BYTES)
    if nbytes > available // 2:
        raise MemoryError(
            f"got {available:,} bytes available, expected {2 * nbytes:,}: stop what else uses memory"
        )
    n = nbytes // BYTES
    state = [alloc_host(n, torch.float32) for _ in range(3)]
    grad, out = (alloc_host(n, torch.bfloat16) for _ in range(2))
    addresses = [(t.data_ptr(), t.element_size()) for t in state]
    skeleton, adam = _turns(
        lambda: cpu_adam.skeleton(addresses, grad.data_ptr(), out.data_ptr(), n, default_threads()),
        lambda: adam_update_(*state, grad, out=out, step=10, lr=1e-4, weight_decay=0.1),
        seconds=seconds,
    )
    return Bandwidth(
        nbytes=n * BYTES,
        gigabytes=n * BYTES / median(skeleton) / 1e9,
        reached=median(a / b for a, b in zip(skeleton, adam, strict=True)),
    )


def _turns(*contestants: Callable[[], object], seconds: float) -> list[list[float]]:
    """Seconds of each contestant, turn by turn; the first two turns start threads and do not count."""
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
