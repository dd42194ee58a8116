"""Reads and writes of a checkpoint's bytes on a few threads."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from zfunc.runtime.blocking_calls import DaemonThreads, call_each

THREADS = 2  # with one, a drive would wait for the checksums


def in_parallel(function: Callable[..., Any], *queues: Iterable[tuple[Any, ...]]) -> None:
    """Call `function` with each of the argument tuples; each queue has THREADS threads of its own.

    After an exception no further call starts; it is raised when those under way have ended. An interrupt does not
    wait for a drive that hangs (see `zfunc.runtime.blocking_calls`).
    """
    calls = [own for queue in queues if (own := [*queue])]
    if sum(map(len, calls)) < 2:
        for call in (x for own in calls for x in own):
            function(*call)
        return
    threads = min(THREADS, max(map(len, calls)))
    with closing(DaemonThreads(threads * len(calls), "zfunc checkpoint")) as pool:
        call_each(pool, lambda call: function(*call), *calls)
