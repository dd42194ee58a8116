"""What surrounds a command: signals that end it gently, its log as lines, and text that a terminal can show."""

import logging
import os
import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from zfunc.cli.parser import with_flags
from zfunc.options import Options
from zfunc.train.events import INTERRUPT, TERMINATED

HANG_UP = getattr(signal, "SIGHUP", None)  # Windows has none


def printable(text: str) -> str:
    r"""`text` with control and format characters, which a terminal would obey, spelled out.

    >>> printable("a\tb\x1b[2J")
    'a    b\\x1b[2J'
    """
    shown = text.replace("\t", "    ")
    return "".join(repr(c)[1:-1] if unicodedata.category(c)[0] == "C" else c for c in shown)


def show_line(text: str) -> None:
    """Print a line and flush, as the reader of a pipe waits for it. On a full disk it stays in stdout's buffer."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # a training goes on; if there is no room at its end, the command's last flush raises
        pass


def can_redraw(stream: TextIO | None = None) -> bool:
    """Whether `stream`, by default stdout, is a terminal that can redraw a line; that of `!` in Jupyter cannot."""
    jupyter = "JPY_PARENT_PID" in os.environ
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb" and not jupyter


@contextmanager
def progress_line() -> Generator[Callable[[str], None]]:
    """A context that yields a function to show a text in a line of stderr, once a second at most; erased
    last."""
    shown, last = False, time.monotonic()

    def show(text: str) -> None:
        nonlocal shown, last
        if can_redraw(sys.stderr) and time.monotonic() - last >= 1:
            shown, last = True, time.monotonic()
            text = text[: shutil.get_terminal_size().columns - 1]  # a longer one would be two lines
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def interrupts(*, tell: bool) -> Generator[Callable[[], str]]:
    """In this context Ctrl-C, SIGTERM and SIGHUP request a stop; the second Ctrl-C raises KeyboardInterrupt.

    It yields a function that returns the request: "", "interrupt" after SIGINT, or "terminated" after any other.
    With `tell`, a line on stderr answers the first signal of a kind. Earlier handlers are restored at the end.
    SIGHUP, if ignored as by nohup, stays so; where the terminal is gone, later output is discarded. Only the main
    thread gets requests.
    """
    taken: list[int] = []
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def request() -> str:
        return TERMINATED if {*taken} - {signal.SIGINT} else INTERRUPT if taken else ""

    def handle(number: int, _frame: Any) -> None:
        before, message = request(), "stopping after this step; once more stops at once"
        taken.append(number)
        if number != signal.SIGINT:  # may come twice: from a launcher, and from who ends the launcher
            message = "" if before == TERMINATED else "terminated: stopping after this step"
        elif taken.count(number) > 1:
            raise KeyboardInterrupt
        for fd in terminals:
            if number == HANG_UP and not os.isatty(fd):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        if message and tell:
            with suppress(OSError):
                os.write(2, f"{message}\n".encode())  # print is not safe here: it may be what was interrupted

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    hung_up = [x for x in (HANG_UP,) if x is not None and signal.getsignal(x) is not signal.SIG_IGN]
    numbers = (signal.SIGINT, signal.SIGTERM, *hung_up)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Lines(logging.Handler):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options

    def emit(self, record: logging.LogRecord) -> None:
        show_line(with_flags(record.getMessage(), self.options))


@contextmanager
def logged(options: Options) -> Generator[None]:
    """A context that prints what zfunc logs, with settings in it as the flags of a command with `options`."""
    log, handler = logging.getLogger("zfunc"), _Lines(options)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
