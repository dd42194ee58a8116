"""What surrounds a command: signals that end it gently, its log as lines, and what a terminal may be shown."""

import logging
import os
import signal
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define


def printable(text: str) -> str:
    r"""`text` without anything a terminal would obey: control and format characters are spelled out.

    >>> printable("a\tb\x1b[2J")
    'a    b\\x1b[2J'
    """
    shown = text.replace("\t", "    ")
    return "".join(repr(c)[1:-1] if unicodedata.category(c)[0] == "C" else c for c in shown)


@define
class Interrupts:
    """Counts them; `stopping()` is True after the first."""

    count: int = 0

    def __call__(self) -> bool:
        """Whether one has come."""
        return self.count > 0


@contextmanager
def interrupts(tell: str) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM set a flag that the context gives; the second one raises KeyboardInterrupt.

    `tell` is said on stderr at the first one; "" says nothing. What handled the signals before does so again after
    the context. In a thread other than the main one, which gets no signals, nothing changes.
    """
    seen = Interrupts()

    def handle(_signal: int, _frame: Any) -> None:
        seen.count += 1
        if seen.count > 1:
            raise KeyboardInterrupt
        if tell:
            os.write(2, f"{tell}\n".encode())  # print is not safe here: the signal may have come inside one

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(printable(record.getMessage()), flush=True)


@contextmanager
def logged() -> Iterator[None]:
    """What zfunc logs, such as what it chose by itself, is printed in this context."""
    log, handler = logging.getLogger("zfunc"), _Printed()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def size(nbytes: float) -> str:
    """Bytes in the unit that suits them.

    >>> size(900), size(3 << 20), size(40e9)
    ('900 B', '3.0 MiB', '37.3 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
