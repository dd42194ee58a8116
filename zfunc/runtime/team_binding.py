"""The OpenMP team of a lane's thread, bound to its NUMA slots.

OpenMP keeps one team for each thread that opens parallel regions, and a new member runs where that thread does. A
lane's thread belongs to zfunc, so its team may be bound; the caller's thread and its team never are.

The invariant: binding changes where a sweep runs, never what it computes, and on one NUMA node nothing is bound.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from zfunc.runtime.numa_placement import NumaSlot
from zfunc.runtime.thread_budget import default_numa_slots

log = logging.getLogger("zfunc")
_bound = threading.local()


def bind_default_team() -> None:
    """Put the team of the calling thread on `default_numa_slots`, the first time this thread asks for it."""
    if default_numa_slots() and not getattr(_bound, "done", False):
        _bound.done = True
        bind_team(default_numa_slots())


def bind_team(slots: Sequence[NumaSlot]) -> bool:
    """Bind thread r of the calling thread's team of `len(slots)` to `slots[r]`; whether that was possible.

    It opens a parallel region of the runtime the kernel uses, found by the symbols the kernel is bound to.
    """
    try:
        runtime: Any = ctypes.CDLL(None)
        rank_of, parallel = runtime.omp_get_thread_num, runtime.GOMP_parallel
    except AttributeError as error:
        log.warning(
            "host Adam is not bound to its NUMA nodes: %s; sweeps read memory of other nodes too", error
        )
        return False

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def bind(_: Any) -> None:
        rank: int = rank_of()
        os.sched_setaffinity(0, slots[rank].cpus)  # 0 is the thread that calls

    parallel(bind, None, ctypes.c_uint(len(slots)), ctypes.c_uint(0))
    return True
