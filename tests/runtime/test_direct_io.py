"""Files past the page cache: every byte moves, or an error says which did not, whatever the system does."""

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from zfunc.errors import AbandonedCalls, DiskError
from zfunc.runtime import blocking_calls, direct_io
from zfunc.runtime.direct_io import ALIGNED, DirectFile, file_system_of, is_direct, measure
from zfunc.runtime.host_memory import HostPages, map_pages

PAGES = 40
Call = Callable[..., int]


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REQUEST": 5 * ALIGNED, "MOST_PIECES": 3, "MOST_RETRIES": 50, "PAUSE": 0}.items():
        monkeypatch.setattr(direct_io, name, value)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    with closing(DirectFile.create(tmp_path / "file", PAGES * ALIGNED)) as made:
        yield made


@pytest.fixture
def pages() -> Iterator[HostPages]:
    with closing(map_pages(PAGES * ALIGNED)) as mapped:
        yield mapped  # closing it fails while anything refers to its memory


def fail(calls: dict[str, Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put these in the place of the system's calls, each with the real one as first argument; "" is for both."""
    for name in ("preadv", "pwritev"):
        call = calls.get(name) or calls.get("")
        if call is not None:
            monkeypatch.setattr(os, name, partial(call, getattr(os, name)))


def refused(words: str) -> Any:
    return pytest.raises(DiskError, match=words)


def test_it_is_extended_where_there_is_room(
    file: DirectFile, pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallocate = os.posix_fallocate

    def full(fd: int, start: int, nbytes: int) -> None:
        fallocate(fd, start, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pages[:] = os.urandom(len(pages))
    with memoryview(pages) as data:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with refused("No space left on device.*reserving"):
            file.extend(2 * len(pages))
        file.write(data, 0)  # as before
        monkeypatch.undo()
        for nbytes in (2 * len(pages), ALIGNED):  # the second has no effect
            file.extend(nbytes)
        file.write(data, len(pages))
        expected = bytes(pages)
        pages[:] = bytes(len(pages))
        file.read(data, len(pages))
        assert (bytes(pages), file.nbytes) == (expected, 2 * len(pages))


# --- what the system may do -------------------------------------------------------------------------


def short(most: int) -> Call:
    """A call that moves `most` bytes, and what it claims; a read leaves rubbish behind them."""

    def call(real: Call, fd: int, areas: list[Any], offset: int) -> int:
        moved = min(most, real(fd, areas, offset))
        flat = [(x, n) for x in areas for n in range(0, len(x), 512)]
        for n, (x, at) in enumerate(flat):
            if n * 512 >= moved and real.__name__ == "preadv":
                x[at] ^= 0xFF
        return moved

    return call


def failing(error: int, every: int = 1) -> Call:
    """A call that fails, but for one in `every`."""
    turns = count(1)

    def call(real: Call, *of: Any) -> int:
        if every == 1 or next(turns) % every:
            raise OSError(error, os.strerror(error))
        return real(*of)

    return call


def after(good: int, then: Call) -> Call:
    """The real call `good` times, then another."""
    turns = count()
    return lambda real, *of: real(*of) if next(turns) < good else then(real, *of)


def returning(moved: int) -> Call:
    return lambda real, *of: moved


SHORT = {
    f"short by {5 * ALIGNED - n}": short(n) for n in (ALIGNED, ALIGNED + 1, 2 * ALIGNED + 512, 4 * ALIGNED)
}
SURVIVED: dict[str, Call] = {
    **SHORT,
    "interrupted": failing(errno.EINTR, 3),
    "busy": failing(errno.EAGAIN, 3),
}
FATAL: dict[str, tuple[Call, str]] = {
    "EIO": (
        after(2, failing(errno.EIO)),
        "'Input/output error' while {doing} bytes .*: look for errors of the",
    ),
    "ENOSPC": (
        after(3, failing(errno.ENOSPC)),
        "'No space left on device' .*: free some space, or name a folder",
    ),
    "always busy": (failing(errno.EAGAIN), "'Resource temporarily unavailable' while {doing}"),
    "nothing": (after(1, returning(0)), "'0 of 20480 bytes moved' while {doing} bytes"),
    "never a page": (after(1, short(4095)), "'4095 of 20480 bytes moved' while {doing} bytes"),
    "more than asked for": (returning(1 << 20), "'1048576 of 20480 bytes moved' while {doing} bytes"),
}


@pytest.mark.parametrize(
    ("direct", "threads", "faults"), [(True, 1, False), (False, 3, False), (True, 3, False), (True, 2, True)]
)
def test_what_is_read_is_what_was_written_or_an_error(
    tmp_path: Path,
    pages: HostPages,
    monkeypatch: pytest.MonkeyPatch,
    direct: bool,
    threads: int,
    faults: bool,
) -> None:
    """As of a bytearray. A write that failed leaves its bytes undefined, until the next one that does not."""
    if not direct:
        monkeypatch.setattr(direct_io, "_set_direct", lambda fd: False)
    monkeypatch.setattr(direct_io, "THREADS", threads)
    random, expected, defined = Random(threads), bytearray(PAGES * ALIGNED), bytearray(b"\1" * PAGES)

    def faulty(real: Call, *of: Any) -> int:
        fault = random.choice([None] * 24 + [*SURVIVED] + ["EIO", "nothing"])
        if fault is None:
            return real(*of)
        if fault in SURVIVED:
            return short(random.randint(1, 5 * ALIGNED))(real, *of)
        return (failing(errno.EIO) if fault == "EIO" else returning(0))(real, *of)

    failures = reads = 0
    with closing(DirectFile.create(tmp_path / "x", len(expected))) as file, memoryview(pages) as view:
        assert file.direct == direct or file_system_of(tmp_path) != "ext4"
        if faults:
            fail({"": faulty}, monkeypatch)
        for turn in range(80 if faults else 40):
            cuts = sorted(random.sample(range(PAGES + 1), random.randint(2, 8)))  # as an extent's buffers are
            parts = [view[a * ALIGNED : b * ALIGNED] for a, b in pairwise(cuts)]
            into = random.sample(parts, len(parts))
            num = sum(x.nbytes for x in into) // ALIGNED
            at = random.randint(0, PAGES - num)
            first, last = at * ALIGNED, (at + num) * ALIGNED
            writing = random.random() < 0.5
            pages[:] = random.randbytes(len(pages))
            try:
                (file.write if writing else file.read)(into, first, f"turn {turn}")
            except DiskError:
                failures += 1
                defined[at : at + num] = bytes(num) if writing else defined[at : at + num]
                continue
            now = b"".join(into)
            if writing:
                expected[first:last], defined[at : at + num] = now, b"\1" * num
            for page in (n for n in range(at, at + num) if defined[n]):
                reads += 1
                assert (
                    now[(page - at) * ALIGNED :][:ALIGNED] == expected[page * ALIGNED : (page + 1) * ALIGNED]
                )
        file.sync()
        del parts, into
    assert failures > 10 if faults else not failures
    assert reads > 100
    if not faults:
        with closing(DirectFile.open(tmp_path / "x")) as file, memoryview(pages) as view:
            file.read(view, 0)
            assert view == expected == (tmp_path / "x").read_bytes()


@pytest.mark.parametrize("fault", SURVIVED)
def test_a_transfer_goes_on_after(
    fault: str, file: DirectFile, pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Random(0).randbytes(len(pages))
    pages[:] = data
    fail({"": SURVIVED[fault]}, monkeypatch)
    with memoryview(pages) as view:
        cuts = [n * ALIGNED for n in (0, 1, 3, 4, 11, 12, 13, 30, PAGES)]
        parts = [view[a:b] for a, b in pairwise(cuts)]
        file.write(parts, 0)
        pages[:] = bytes(len(pages))
        file.read(parts, 0)
        assert view == data
        del parts


@pytest.mark.parametrize("fault", FATAL)
@pytest.mark.parametrize(("call", "doing"), [("preadv", "reading"), ("pwritev", "writing")])
def test_a_transfer_that_fails_says_where(
    fault: str, call: str, doing: str, file: DirectFile, pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty, words = FATAL[fault]
    fail({call: faulty}, monkeypatch)
    with memoryview(pages) as view, refused(words.format(doing=doing)) as caught:
        (file.read if doing == "reading" else file.write)(view, 0, "bucket 7")
    assert str(caught.value).startswith(f"{file.path}: got ")
    assert " of bucket 7: " in str(caught.value)
    (place,) = re.findall(r" bytes (\d+) to (\d+) of ", str(caught.value))
    assert (int(place[0]) % direct_io.REQUEST, int(place[1]) - int(place[0])) == (0, direct_io.REQUEST)
    assert caught.value.errno in (errno.EIO, errno.ENOSPC, errno.EAGAIN)


@pytest.mark.parametrize("interrupt", [False, True])
def test_after_an_error_or_an_interrupt_no_request_is_under_way(
    file: DirectFile, pages: HostPages, monkeypatch: pytest.MonkeyPatch, interrupt: bool
) -> None:
    running, calls, begun, wait = [0], [0], threading.Event(), blocking_calls.wait

    def interrupted(*of: Any) -> Any:
        begun.wait()
        monkeypatch.setattr(blocking_calls, "wait", wait)
        raise KeyboardInterrupt

    def slow(real: Call, fd: int, of: list[Any], offset: int) -> int:
        calls[0] += 1
        if not offset and not interrupt:
            raise OSError(errno.EIO, "no")
        running[0] += 1
        begun.set()
        time.sleep(0.02)
        running[0] -= 1
        return real(fd, of, offset)

    fail({"": slow}, monkeypatch)
    if interrupt:
        monkeypatch.setattr(blocking_calls, "wait", interrupted)
    with memoryview(pages) as view, pytest.raises(KeyboardInterrupt if interrupt else DiskError):
        file.read(view, 0)
    assert running == [0]
    assert calls[0] <= 2  # of 8 requests


def test_a_drive_that_hangs_is_named_and_delays_no_other_direction(
    file: DirectFile, pages: HostPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking_calls, "SLOW", 0.01)
    begun, go_on = threading.Event(), threading.Event()
    fail({"preadv": lambda real, *of: begun.set() or (go_on.wait() and real(*of))}, monkeypatch)  # type: ignore[func-returns-value]
    with memoryview(pages) as view, caplog.at_level(logging.WARNING, "zfunc"):
        reader = threading.Thread(target=file.read, args=(view[ALIGNED:], ALIGNED, "bucket 3"))
        reader.start()
        begun.wait()
        file.write(view[:ALIGNED], 0)
        while not caplog.text:
            time.sleep(0.001)
        closer = threading.Thread(target=file.close)  # waits for the read
        closer.start()
        go_on.set()
        reader.join()
        closer.join()
    said = f"{file.path}: reading bytes 4096 to 163840 of bucket 3: the drive has not answered for"
    assert said in caplog.text


def test_an_interrupt_leaves_a_drive_that_hangs_and_the_file_is_lost(
    tmp_path: Path, pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory and descriptor stay as long as the drive may still use them."""
    begun, go_on, wait = threading.Barrier(3), threading.Event(), blocking_calls.wait
    file = DirectFile.create(tmp_path / "file", PAGES * ALIGNED)

    def interrupted(*of: Any) -> Any:
        begun.wait()
        monkeypatch.setattr(blocking_calls, "wait", wait)
        raise KeyboardInterrupt

    fail({"pwritev": lambda real, *of: begun.wait() + 1 and go_on.wait() and real(*of)}, monkeypatch)
    monkeypatch.setattr(blocking_calls, "LEAVE_AFTER", 0.01)
    monkeypatch.setattr(blocking_calls, "wait", interrupted)
    monkeypatch.setattr(direct_io, "LEAVE_AFTER", 0.01)
    with memoryview(pages) as view:
        with pytest.raises(AbandonedCalls, match="2 reads or writes were under way, which have not ended"):
            file.write(view, 0, "bucket 3")
        for act in (file.sync, lambda: file.read(view, 0), lambda: file.write(view, 0)):
            with refused("interrupt while writing bytes 0 to 163840 of bucket 3, and no answer"):
                act()
    with pytest.raises(BufferError):
        pages.close()
    assert file.close() is False
    os.fstat(file._fd)
    go_on.set()
    while file._users:
        time.sleep(0.001)
    with file._idle, pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)


HANGS = """
import os, signal, sys, threading
from pathlib import Path
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.host_memory import map_pages
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may ignore it
os.pwritev = os.fdatasync = lambda *_: print("hangs", flush=True) or threading.Event().wait()
file = DirectFile.create(Path(sys.argv[1]), 4096)
threading.Thread(target=file.sync, daemon=True).start()
file.write([memoryview(map_pages(4096))], 0)
"""


def test_a_process_ends_whose_drive_hangs(tmp_path: Path) -> None:
    """By two interrupts: the first waits a little."""
    command = [sys.executable, "-c", HANGS, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["hangs\n"] * 2
        for _ in range(2):
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[1]
        assert "AbandonedCalls: interrupted while 1 reads or writes were" in said


# --- what other processes may do --------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, ALIGNED, (PAGES + 1) * ALIGNED])
def test_a_file_of_another_size_is_no_zeros(file: DirectFile, pages: HostPages, size: int) -> None:
    os.truncate(file.path, size)
    with memoryview(pages) as view:
        for transfer in (file.read, file.write):
            with refused(rf"file of {size} bytes, expected its {PAGES * ALIGNED}: another proc"):
                transfer(view, 0, "bucket 7")


def test_a_file_that_shrinks_meanwhile_is_no_zeros(
    file: DirectFile, pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(real: Call, *of: Any) -> int:
        os.truncate(file.path, 2 * ALIGNED)
        return real(*of)

    fail({"": after(1, shrink)}, monkeypatch)
    with memoryview(pages) as view, refused("got a file of 8192 bytes, expected"):
        file.read(view, 0)


def test_a_sync_that_failed_never_succeeds(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a drive with an error, or of a file that was replaced."""
    file.sync()
    other = DirectFile.create(file.path.with_name("other"), ALIGNED)
    other.path.rename(file.path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", lambda fd: failing(errno.EIO)(os.fsync, fd))
        with refused("'Input/output error' while waiting until it is on the drive"):
            other.sync()
    with closing(other), refused("'Input/output error' while waiting until it is on the drive"):
        other.sync()
    for _ in range(2):
        with refused("got a file that was deleted or replaced, expected it to stay"):
            file.sync()


# --- files that are not made, opened, or asked for --------------------------------------------------


def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", partial(failing(errno.ENOSPC), os.posix_fallocate))
    with refused("while reserving 5.0 GiB: free some space, or name a folder on ano") as e:
        DirectFile.create(tmp_path / "x", 5 << 30)
    assert e.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "preadv", partial(failing(errno.EIO), os.preadv))  # the first transfer
    with refused("look for errors of the drive"):
        DirectFile.create(tmp_path / "x", ALIGNED)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_of_whole_pages_is_not_opened(tmp_path: Path, file: DirectFile) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(bytes(100))
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "one").write_bytes(bytes(ALIGNED))
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    descriptors = os.listdir("/proc/self/fd")
    for name, words in {
        "pipe": "got something else than a regular file: name another",
        "short": "got a file of 100 bytes, expected a positive multiple of 4096",
        "link": "replace the link by the file",
        "two": r"two: got a file with 2 names \(hard links\), expected one",
        "none": "'No such file or directory' while opening it: name a folder that exists",
        ".": "'Is a directory' while opening it: move the folder",
    }.items():
        with refused(words):
            DirectFile.open(tmp_path / name)
    with refused("'File exists' while reserving .*: name another one"):
        DirectFile.create(file.path, ALIGNED)
    for nbytes in (0, 100):
        with pytest.raises(ValueError, match=f"got {nbytes} bytes, expected a positive multiple of 4096"):
            DirectFile.create(tmp_path / "new", nbytes)
    (opened := DirectFile.open(file.path)).close()
    assert os.listdir("/proc/self/fd") == descriptors
    del opened  # which would close it too


def test_transfers_are_of_whole_pages_within_the_file(file: DirectFile, pages: HostPages) -> None:
    with memoryview(pages) as view:
        for area, offset in (
            *((view[:4608], 0), (view[:ALIGNED], 512), (view[64 : ALIGNED + 64], 0)),
            *((view[:], ALIGNED), (view[:ALIGNED], -ALIGNED)),
        ):
            said = f"bucket 7: got {area.nbytes} bytes at offset {offset}, expected a place in its 163840, and off"
            with area, pytest.raises(ValueError, match=said):
                file.read(area, offset, "bucket 7")
        file.close()
        file.close()
        with pytest.raises(ValueError, match="got a closed file, expected an open one"):
            file.read(view, 0)


# --- drives -----------------------------------------------------------------------------------------


def test_a_file_system_that_refuses_is_told_of_once_and_its_pages_are_dropped(
    tmp_path: Path, pages: HostPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail({"preadv": failing(errno.EINVAL)}, monkeypatch)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, nbytes, how: dropped.append((start, nbytes)))
    monkeypatch.setattr(direct_io, "_told", set[int]())
    with caplog.at_level(logging.WARNING, "zfunc"):
        for name in ("a", "b"):
            with closing(DirectFile.create(tmp_path / name, 3 * ALIGNED)) as file, memoryview(pages) as view:
                assert not file.direct
                file.write(view[:ALIGNED], ALIGNED)
                file.sync()
    assert dropped == 2 * [(ALIGNED, ALIGNED), (0, 3 * ALIGNED)]
    assert caplog.text.count("refuses O_DIRECT: reads and writes go through the page cache") == 1


def test_a_drive_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MEASURED", 4 << 20)
    monkeypatch.setattr(direct_io, "CHUNK", 1 << 20)
    assert min(measure(tmp_path)) > 1e6
    assert list(tmp_path.iterdir()) == []
    with refused("'No such file or directory' while measuring its drive: name a folder"):
        measure(tmp_path / "none")
    (tmp_path / "file").touch()
    for made in (measure, is_direct):
        with refused(r"file: got 'Not a directory' while reserving .*: name a folder"):
            made(tmp_path / "file")
    turns: list[str] = []

    def speed(file: DirectFile, transfer: Any, data: memoryview) -> float:
        turns.append(transfer.__name__)
        return {"read": 3.0, "write": 2.0}[turns[-1]]

    monkeypatch.setattr(direct_io, "_speed", speed)
    assert measure(tmp_path) == (3.0, 2.0)
    assert turns == ["write", "write", "read"]  # first into a file that has nothing yet


def test_a_drive_with_little_room_is_measured_with_half_of_it(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left of a process that is killed meanwhile: the file never has bytes and a name."""
    with refused("'No space left on device' while reserving 8.0 MiB: free some space"):
        measure(small_disk)
    monkeypatch.setattr(direct_io, "LEAST", ALIGNED)
    reserve, seen = os.posix_fallocate, list[tuple[list[str], int]]()
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *x: (seen.append((os.listdir(small_disk), x[2])), reserve(*x))
    )
    assert min(measure(small_disk)) > 0
    assert seen == [([], 1 << 19)]


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    (mounts := tmp_path / "mounts").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:5 / {tmp_path}/a\\040b rw shared:1 - tmpfs none rw\n3 1 0:6 / {tmp_path}/a rw - xfs /dev/sdb rw\n"
    )
    for name, kind in {"a b/c": "tmpfs", "a": "xfs", "a c": "ext4", "ab": "ext4"}.items():
        assert file_system_of(tmp_path / name, mounts) == kind
    assert file_system_of(tmp_path, tmp_path / "none") == "unknown"


def test_a_file_without_a_name_is_written_and_read(tmp_path: Path) -> None:
    with closing(DirectFile.unnamed(tmp_path, 2 * ALIGNED)) as file:
        assert list(tmp_path.iterdir()) == []
        page, into = map_pages(ALIGNED), map_pages(ALIGNED)
        page[:] = b"x" * ALIGNED
        file.write(memoryview(page), ALIGNED)
        file.read(memoryview(into), ALIGNED)
        assert into[:] == page[:]
