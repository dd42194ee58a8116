"""Calls that a drive may never answer, on threads that do not keep the process from ending.

The invariant: an interrupt waits for calls under way for `LEAVE_AFTER` seconds at most, a second one for none.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import closing
from queue import SimpleQueue
from typing import Any, TypeVar

from zfunc.errors import AbandonedCalls

SLOW = 30.0  # seconds after which calls that have not ended are logged, and again
THREADS = 2  # of `in_parallel` for a queue; with one, a drive would wait for the checksums
LEAVE_AFTER = 5.0  # seconds that an interrupt waits for calls under way, which use the caller's memory

T = TypeVar("T")


class DaemonThreads:
    """`count` daemon threads that make submitted calls in order. The end of the process does not wait for them."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        for n in range(count):
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name} {n}", daemon=True).start()

    def submit(self, future: "Future[None]", function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` on a free thread, unless `future`, which tells its end, is cancelled before."""
        self._tasks.put((future, function, args))

    def close(self) -> None:
        """End the daemon threads once they have made all submitted calls."""
        for _ in range(self.count):
            self._tasks.put(None)


def call_each(
    threads: DaemonThreads,
    function: Callable[[T], Any],
    *queues: Iterable[T],
    tell: Callable[[float], Any] = lambda _: None,
) -> None:
    """Call `function` with every item of `queues`, in parallel: each queue has an equal share of `threads` of
    its own.

    After an error or an interrupt no further call begins. The error is raised once the calls in progress have
    ended, or as AbandonedCalls if they do not within 5 seconds or before a second interrupt. Every 30 seconds
    `tell` is called with the seconds since the start.
    """
    left = [deque(items) for items in queues]
    share = threads.count // len(left)
    workers = [(Future[None](), own) for own in left for _ in range(min(share, len(own)))]
    futures = [future for future, _ in workers]
    try:
        _begin_and_wait(threads, function, left, workers, tell)
        while futures:
            futures.pop(0).result()
    except BaseException as error:
        # Also from between any two lines of `_begin_and_wait`. What was not submitted can be cancelled.
        if under_way := sum(not x.cancel() and not x.done() for x in futures):
            raise AbandonedCalls(
                f"interrupted while {under_way} reads or writes were under way, which have not ended"
            ) from error
        raise
    finally:  # an error that refers to this frame would keep the caller's memory until garbage is collected
        workers.clear()
        futures.clear()


def in_parallel(function: Callable[..., Any], *queues: Iterable[tuple[Any, ...]]) -> None:
    """Call `function` with each argument tuple, on two threads for each queue; the threads end with the calls."""
    calls = [own for queue in queues if (own := [*queue])]
    if sum(map(len, calls)) < 2:
        for call in (x for own in calls for x in own):
            function(*call)
        return
    with closing(DaemonThreads(min(THREADS, max(map(len, calls))) * len(calls), "zfunc checkpoint")) as pool:
        call_each(pool, lambda call: function(*call), *calls)


def _begin_and_wait(
    threads: DaemonThreads,
    function: Callable[[T], Any],
    left: list[deque[T]],
    workers: "list[tuple[Future[None], deque[T]]]",
    tell: Callable[[float], Any],
) -> None:
    """Start `workers` (future, queue) on `threads` and wait for all: each calls `function` with its queue's
    items. After an interrupt, empty the queues `left`, wait up to 5 s, and raise."""
    began, pending = time.monotonic(), {future for future, _ in workers}
    try:
        for future, own in workers:
            threads.submit(future, _call_next, function, own, left)
        while pending := wait(pending, SLOW).not_done:
            tell(time.monotonic() - began)
    except BaseException:
        for own in left:
            own.clear()
        wait([future for future, _ in workers if not future.cancel()], LEAVE_AFTER)
        raise


def _call_next(function: Callable[[T], Any], own: deque[T], left: list[deque[T]]) -> None:
    """Call `function` with the items of queue `own` until it is empty. An error is raised, after all queues
    in `left` were emptied so that other threads stop, too."""
    try:
        while own:
            try:
                item = own.popleft()
            except IndexError:
                return
            function(item)
    except BaseException:
        for others in left:
            others.clear()
        raise


def _work(tasks: "SimpleQueue[Any]") -> None:
    while (task := tasks.get()) is not None:
        future, function, args = task
        if future.set_running_or_notify_cancel():
            try:
                function(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del task, future, function, args  # or an idle thread would keep the last call's memory
