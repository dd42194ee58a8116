"""Calls that a drive may never answer, on threads that do not keep the process from ending.

The invariant: an interrupt waits for calls under way for `LEAVE_AFTER` seconds at most, a second one for none.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from zfunc.errors import AbandonedCalls

SLOW = 30.0  # seconds after which calls that have not ended are logged, and again
LEAVE_AFTER = 5.0  # seconds that an interrupt waits for calls under way, which use the caller's memory

T = TypeVar("T")


class DaemonThreads:
    """So many threads that make calls in turn. At the end of the process nothing waits for them."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        for n in range(count):
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name} {n}", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[None]":
        """Make a call when a thread is free."""
        future = Future[None]()
        self._tasks.put((future, function, args))
        return future

    def close(self) -> None:
        """Let the threads end after the calls that were submitted."""
        for _ in range(self.count):
            self._tasks.put(None)


def call_each(
    threads: DaemonThreads,
    function: Callable[[T], Any],
    items: Iterable[T],
    *,
    tell: Callable[[float], Any] = lambda _: None,
) -> None:
    """Call `function` with each item. After an error or an interrupt no further call begins.

    It is raised when those under way have ended; an interrupt as AbandonedCalls if they do not in LEAVE_AFTER
    seconds, or before a second interrupt. `tell` is called with the seconds that calls have taken, every SLOW.
    """
    left, futures, interrupt = deque(items), list[Future[None]](), None
    began, until = time.monotonic(), math.inf
    try:
        for _ in range(min(threads.count, len(left))):
            futures.append(threads.submit(_call_next, function, left))
    except BaseException as error:
        interrupt = error
    pending = set(futures)
    while True:
        if interrupt is not None and until == math.inf:
            left.clear()
            until = time.monotonic() + LEAVE_AFTER
            pending = {x for x in pending if not x.cancel()}
        if not pending or time.monotonic() >= until:
            break
        try:
            pending = wait(pending, min(SLOW, until - time.monotonic())).not_done
            if pending and interrupt is None:
                tell(time.monotonic() - began)
        except BaseException as error:
            if interrupt is not None:
                until = 0.0
            interrupt = error
    try:
        if pending:
            raise AbandonedCalls(
                f"interrupted while {len(pending)} reads or writes were under way, which have not ended"
            ) from interrupt
        if interrupt is not None:
            raise interrupt
        while futures:
            futures.pop(0).result()
    finally:  # an error that refers to this frame would keep the caller's memory until garbage is collected
        interrupt = None
        futures.clear()


def _call_next(function: Callable[[T], Any], left: deque[T]) -> None:
    """Call it with items that no other thread takes."""
    try:
        while left:
            try:
                item = left.popleft()
            except IndexError:
                return
            function(item)
    except BaseException:
        left.clear()
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
