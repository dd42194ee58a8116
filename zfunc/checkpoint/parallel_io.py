"""Reads and writes of a checkpoint's bytes on a few threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 2  # with one, the disk would wait for the checksums


def in_parallel(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, threads: int = THREADS
) -> None:
    """Call `function` with each of the argument tuples on so many threads.

    After an exception no further call starts; it is raised when those under way have ended.
    """
    calls = list(calls)
    if len(calls) < 2:
        for call in calls:
            function(*call)
        return
    with ThreadPoolExecutor(min(threads, len(calls))) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
