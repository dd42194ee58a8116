"""Reads and writes of a checkpoint's bytes on a few threads."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from zfunc.runtime.blocking_calls import DaemonThreads, call_each

THREADS = 2  # with one, the disk would wait for the checksums


def in_parallel(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, threads: int = THREADS
) -> None:
    """Call `function` with each of the argument tuples on so many threads.

    After an exception no further call starts; it is raised when those under way have ended. An interrupt does not
    wait for a drive that hangs (see `zfunc.runtime.blocking_calls`).
    """
    calls = list(calls)
    if len(calls) < 2:
        for call in calls:
            function(*call)
        return
    with closing(DaemonThreads(min(threads, len(calls)), "zfunc checkpoint")) as pool:
        call_each(pool, lambda call: function(*call), calls)
