"""Disks without room, drives that fail, lie or are slow, and processes that stop, a little later each time."""

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from zfunc.errors import CheckpointError
from zfunc.runtime.host_memory import map_pages

Call = Callable[..., Any]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # also where a failed test holds it open


def full_once(write_all: Callable[..., None], at: int) -> Callable[..., None]:
    """`durable_files.write_all` on a disk that has no room in its call number `at` from 1."""
    calls = count(1)

    def write(*args: Any) -> None:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(*args)

    return write


def with_more_room(disk: Path, write: Callable[[int], Any], check: Callable[[], Any]) -> list[str]:
    """The errors of write(0), write(1), ... with as many free pages, until one succeeds; `check` after each."""
    refused: list[str] = []
    for room in range(100):
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "ballast").write_bytes(bytes(max(free - 4096 * room, 0)))
        try:
            write(room)
            return refused
        except CheckpointError as error:
            refused.append(str(error))
        finally:
            (disk / "ballast").unlink()
        check()
    raise AssertionError("no room is enough")


def stopped_everywhere(
    monkeypatch: pytest.MonkeyPatch,
    functions: list[tuple[Any, str]],
    run: Callable[[int], Any],
    check: Callable[[], Any],
    *,
    killed: bool,
) -> int:
    """Stop run(n) before its n-th call of one of these functions, for n from 0 until it is not stopped.

    Where it is killed no later call works either. `check` after each; returns the last n.
    """
    left = 0

    def stoppable(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1 or (killed and left < 0):
                raise KeyboardInterrupt
            return function(*args)

        return call

    originals = [(module, name, getattr(module, name)) for module, name in functions]
    for n in range(1000):
        with monkeypatch.context() as patched:
            for module, name, function in originals:
                patched.setattr(module, name, stoppable(function))
            left, stopped = n, False
            try:
                run(n)
            except KeyboardInterrupt:
                stopped = True
        check()
        if not stopped:
            return n
    raise AssertionError("stopped each time")


def fails(number: int) -> Callable[[Call], Call]:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return lambda _: fail


def short(call: Call) -> Call:
    return lambda fd, views, at: call(fd, [memoryview(views[0])[:4096]], at)


def slow(call: Call) -> Call:
    return lambda *args: time.sleep(0.002) or call(*args)  # type: ignore[func-returns-value]


def zeros_written(call: Call) -> Call:
    return lambda fd, views, at: call(fd, [memoryview(map_pages(sum(x.nbytes for x in views)))], at)


def zeros_read(call: Call) -> Call:
    """Where there are zeros anyway, an error, so that there is something to be told of."""

    def read(fd: int, views: list[memoryview], at: int) -> int:
        moved = call(fd, views, at)
        if not any(any(memoryview(view).cast("B")) for view in views):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for view in views:
            view[:] = bytes(len(view))
        return moved

    return read


def once(right: Call, wrong: Call, calls: Iterator[int], at: int) -> Call:
    """The wrong one in call number `at`, from 0."""
    return lambda *args: (wrong if next(calls) == at else right)(*args)


# of `os`: the call, what it does, whether an error is due
FAULTS: dict[str, tuple[str, Callable[[Call], Call], bool]] = {
    "EIO when written": ("pwritev", fails(errno.EIO), True),
    "ENOSPC when written": ("pwritev", fails(errno.ENOSPC), True),
    "EIO when read": ("preadv", fails(errno.EIO), True),
    "EIO when synced": ("fdatasync", fails(errno.EIO), True),
    "written short": ("pwritev", short, False),
    "read short": ("preadv", short, False),
    "slow": ("pwritev", slow, False),
    "zeros written": ("pwritev", zeros_written, True),
    "zeros read": ("preadv", zeros_read, True),
}
