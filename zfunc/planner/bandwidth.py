"""Host memory bandwidth of a sweep, and the share of it that the Adam kernel reaches: measured in a second.

The baseline is the kernel without arithmetic (its skeleton), moving the 28 bytes a parameter of a step with 16-bit
gradients and copy. The two take turns, so that other load on the machine affects both. Memory and threads are
placed as in training.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

import torch
from attrs import frozen

from zfunc.optim.adamw import adam_update_
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.memory_limits import available_host_bytes
from zfunc.runtime.thread_budget import bind_to_nodes, default_threads, largest_cache

BYTES = 28  # of a parameter, in a sweep
MIN_BYTES, MAX_BYTES = 128 << 20, 2 << 30  # swept over
SECONDS, TURNS, WARM_UP = 0.6, 27, 2  # the first turns start threads, and do not count


@frozen
class Bandwidth:
    """Host memory bandwidth (GB/s) in sweeps over `nbytes` bytes, and the share of it (0 to 1) that Adam gets."""

    nbytes: int
    gigabytes: float  # per second, of the skeleton
    reached: float  # share of that which the Adam kernel reaches


def measure_bandwidth(seconds: float = SECONDS) -> Bandwidth:
    """Measure host memory bandwidth for about `seconds`, in a thread bound to the CPUs that training uses.
    Raises MemoryError if too little memory is free."""
    with ThreadPoolExecutor(1, "zfunc bandwidth", initializer=bind_to_nodes) as pool:
        return pool.submit(_measure, seconds).result()


def _measure(seconds: float) -> Bandwidth:
    available = available_host_bytes()
    nbytes = min(max(MIN_BYTES, 2 * (largest_cache() or 0)), MAX_BYTES)
    if nbytes > available // 2:
        raise MemoryError(
            f"got {available:,} bytes available, expected {2 * nbytes:,}: stop what else uses memory"
        )
    n = nbytes // BYTES
    state = [alloc_host(n, torch.float32) for _ in range(3)]
    grad, out = (alloc_host(n, torch.bfloat16) for _ in range(2))
    addresses = [(t.data_ptr(), t.element_size()) for t in state]
    pairs: list[list[float]] = []  # seconds of the skeleton and of Adam
    end = time.perf_counter() + seconds
    while len(pairs) < WARM_UP + 3 or (len(pairs) < TURNS and time.perf_counter() < end):
        times = [time.perf_counter()]
        cpu_adam.skeleton(addresses, grad.data_ptr(), out.data_ptr(), n, default_threads())
        times.append(time.perf_counter())
        adam_update_(*state, grad, out=out, step=10, lr=1e-4, weight_decay=0.1)
        times.append(time.perf_counter())
        pairs.append([b - a for a, b in pairwise(times)])
    skeleton, adam = zip(*pairs[WARM_UP:], strict=True)
    reached = median(a / b for a, b in zip(skeleton, adam, strict=True))
    return Bandwidth(nbytes=n * BYTES, gigabytes=n * BYTES / median(skeleton) / 1e9, reached=reached)
