"""The optimizer state of one rank in preallocated files, one a folder, which are a checkpoint after every commit.

Nothing here knows what a bucket is for: it has a number, and buffers of a name and a size. An extent has two
generations. `write` goes to the one that is not committed, in place until `commit` makes it the committed one; an
extent of one generation is written before the first commit, and again where `make_room` gave it a second one:

    first write after a commit   retire the older of the two records, wait until that is on the disk, and write
    commit                       wait until all data is on the disk, write a record, wait until it is on the disk

So the extents of every record in the files are whole, at any moment at which the process is killed or the power
fails; and if a step has begun to write, there is no record but the last. Of what else is in the folders nothing is
deleted that zfunc did not make, that a process uses, or that has a commit.
"""

import logging
import os
import re
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from attrs import define, evolve, field

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import check_plain
from zfunc.checkpoint.swap_file import (
    SWAP_FILE,
    CommitRecord,
    Read,
    StripedBuffer,
    Stripes,
    SwapHeader,
    check_header,
    read_header,
    read_records,
    read_space,
    read_striped,
    write_striped,
)
from zfunc.core.extents import BLOCK, Extent, whole_blocks
from zfunc.errors import CheckpointError
from zfunc.runtime.blocking_calls import in_parallel
from zfunc.runtime.direct_io import DirectFile, pages_for

_UNFINISHED_FILE = re.compile(f"{disk.UNFINISHED}{SWAP_FILE.pattern}-[0-9a-f]{{8}}")
_GO_ON = "go on from the last commit: open the swap space again"
log = logging.getLogger("zfunc")


@define(eq=False)
class _Bucket:
    """The state of a bucket in a swap space: the stripes of its copies, which of its two copies is committed
    (-1: none), and which buffers were written since."""

    sizes: dict[str, int]  # of its buffers, in bytes
    stripes: tuple[Stripes, ...]  # of the generations
    committed: int
    written: set[str] = field(factory=set[str])  # buffers whose newest bytes are in the other generation

    @property
    def other(self) -> int:
        """The number of the bucket's copy that the next write goes to: the one that is not committed."""
        return 0 if self.committed < 0 else 1 - self.committed

    def newest(self, name: str) -> int:
        """The number of the copy from which to read buffer `name`: the uncommitted one if it was written
        since the last commit, else the committed one."""
        return self.other if name in self.written else self.committed

    @property
    def missing(self) -> list[str]:
        """Names of the bucket's buffers still to be written before a commit, which takes all of them or
        none."""
        changed = self.committed < 0 or self.written
        return [x for x in self.sizes if changed and x not in self.written]


@define(eq=False)
class SwapSpace:
    """One rank's training state in preallocated files, one in each folder, open for reading and writing. Any
    thread may read and write, but calls for one bucket, and `commit`, have to be made one after another."""

    header: SwapHeader
    _files: list[DirectFile]
    _locks: list[int]
    # those in the files, by number: the last commit and, until a write, the one before
    _records: dict[int, CommitRecord]
    _buckets: dict[int, _Bucket] = field(init=False)
    _checksums: tuple[list[int], list[int]] = field(init=False)  # by generation, as a record has them
    _lost: str = ""  # why nothing can be read or written any more, or ""
    _lock: Lock = field(factory=Lock)
    _close: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._close = weakref.finalize(self, _close, self._files, self._locks)
        self._close.atexit = False  # it waits for transfers; the system closes files by itself
        record, extents = self._records[self.number], self.header.extents
        self._checksums = [*record.checksums], [*record.checksums]
        self._buckets = {
            b: _Bucket({x.name: x.nbytes for x in extents[b].parts}, self.header.stripes[b], g)
            for b, g in zip(extents, record.generations or [-1] * len(extents), strict=True)
        }

    @classmethod
    def create(cls, header: SwapHeader) -> "SwapSpace":
        """Reserve the files of a new swap space, one in each folder, and open it. `header.run` is a text that
        all ranks share and no other run has.

        Raises CheckpointError, in one line, for a folder that is missing, in memory, not writable, full,
        given twice, or has the state of another run. Nothing is left then; the folders are unchanged, except
        that spaces without a commit are deleted.
        """
        check_plain(header.identity, "identity")
        paths = header.paths
        disk.check_folders([path.parent for path in paths])
        made: list[Path] = []
        files, locks = list[DirectFile](), list[int]()
        try:
            for path in paths:
                with disk.locked(path.parent):  # against the other ranks
                    _delete_uncommitted(path.parent, header.run)
            for n, path in enumerate(paths):
                _refuse_others(path, header.run)
                unfinished = path.with_name(f"{disk.UNFINISHED}{path.name}-{os.urandom(4).hex()}")
                # Under the folder's lock, until it has one of its own: others take it for a dead process's.
                with disk.locked(path.parent):
                    _delete_unfinished(path.parent)
                    with disk.os_errors_as(unfinished, f"reserving {header.sizes[n]} bytes for a swap space"):
                        files.append(DirectFile.create(unfinished, header.sizes[n]))
                    made.append(unfinished)
                    locks.append(_lock_file(unfinished))
                _write(files[n], header.of(n).raw, 0, "the header")
            first = CommitRecord((), {}, 0, [0] * header.num_checksums)
            _write(files[0], first.raw(header.record_size), header.record_at(0), "the first record")
            for n, path in enumerate(paths):  # the first says that nothing was committed: before the others
                files[n].sync()
                with disk.locked(path.parent), disk.os_errors_as(path, "naming a swap space"):
                    _refuse_others(path, header.run)
                    os.rename(made[n], path)
                made[n] = files[n].path = path
                disk.sync(path.parent)
            return cls(header, files, locks, {0: first})
        except BaseException:
            for path in made:
                with suppress(OSError):
                    path.unlink()
            _close(files, locks)
            raise

    @classmethod
    def open(
        cls, expected: SwapHeader, *, instead: Mapping[int, Extent] | None = None, at: int | None = None
    ) -> "SwapSpace":
        """Open an existing swap space, which must have the header `expected` (but for the run), at its last
        commit.

        With `at`, open it at the commit of that number, and delete a later one. `instead` has, by bucket
        index, other extents that the space may have instead of the expected ones.

        Raises CheckpointError, in one line, for a space that is missing, in use, damaged, of another
        identity, world or extents, or without a commit of that number.
        """
        paths = expected.paths
        disk.check_folders([path.parent for path in paths])
        files, locks = list[DirectFile](), list[int]()
        try:
            for path in paths:
                if not path.exists():
                    do = "name all of its folders in their order; if another number of ranks made it, pass another "
                    do += f"one as `swap` with `resume=auto` (zfunc.load({str(path.parent)!r}, program))"
                    disk.reject(path, "none", "a file of the swap space", do)
                with disk.os_errors_as(path, "opening a swap space"):
                    locks.append(_lock_file(path))
                    files.append(DirectFile.open(path))
            headers = [read_header(_reads(file), str(file.path)) for file in files]
            header = headers[0]
            for n, own in enumerate(headers):
                other = {b: x for b, x in (instead or {}).items() if own.extents.get(b) == x}
                allowed = evolve(expected, extents={**expected.extents, **other})
                check_header(paths[n], own, header.of(n), allowed)
            _check_sizes(files, header.sizes)
            for file in files:  # what a killed process wrote may still be in a cache
                file.sync()
            records = read_records(_reads(files[0]), header, str(paths[0]))
            if any(x.written_again(header) for x in records.values()):
                _check_sizes(files, header.sizes_of_two)
            if at is not None:
                if at not in records:
                    there, do = (
                        map(str, sorted(records)),
                        "resume from a checkpoint, with another swap folder",
                    )
                    disk.reject(paths[0], f"no commit {at}", f"one of {', '.join(there)}", do)
                for number in [x for x in records if x > at]:
                    _retire(files[0], header, records.pop(number))
            return cls(header, files, locks, records)
        except BaseException:
            _close(files, locks)
            raise

    def lose(self, why: str) -> None:
        """Make every later read, write and commit of this swap space raise an error with the reason `why`."""
        self._lost = self._lost or why

    def close(self) -> None:
        """Close the files and release the locks; what was written since the last commit is lost.
        Idempotent."""
        self.lose("it is closed")
        self._close()

    @property
    def number(self) -> int:
        """The number of the swap space's last commit; 0 before the first."""
        return max(self._records)

    def record(self) -> Mapping[str, Any] | None:
        """The metadata of the last commit, as given to `commit`; None before the first commit."""
        return self._records[self.number].metadata if self.number else None

    def is_written(self, b: int) -> bool:
        """Whether bucket `b` has state to read in the swap space, committed or not."""
        return self._buckets[b].committed >= 0 or bool(self._buckets[b].written)

    def missing(self, b: int) -> list[str]:
        """Names of bucket `b`'s buffers still to be written before `commit`, which takes all of them or
        none."""
        return self._buckets[b].missing

    def make_room(self) -> None:
        """Reserve room on the drive for a second copy of each extent that has one, so that it can be written
        after a commit. Raises DiskError if the drive is full; the space can still be used."""
        self._check_not_lost()
        for file, nbytes in zip(self._files, self.header.sizes_of_two, strict=True):
            file.extend(nbytes)

    def read(self, b: int, names: Sequence[str], into: Sequence[memoryview]) -> None:
        """Read buffers `names` of bucket `b` from the files into the memory `into`, their newest bytes
        whether committed or not, and compare checksums.

        Each view in `into` begins at a page and has the buffer's size in whole blocks of 4,096 bytes;
        adjacent buffers are read together. Raises CheckpointError, with file and bucket, for bytes that are
        not what was written.
        """
        bucket = self._usable(b, names, into)
        for name in (x for x in names if bucket.newest(x) < 0):
            self._refuse(f"bucket {b}, {name!r}", "none", "it to be written before it is read")
        read_striped(self._files, self._buffers(b, names, into, bucket.newest))

    def write(self, b: int, names: Sequence[str], data: Sequence[memoryview]) -> None:
        """Write buffers `names` of bucket `b` to the bucket's copy that is not committed, from the memory
        `data`: views at page borders, in whole blocks of 4,096 bytes.

        After a failed write the space cannot be used, because bytes are lost. Raises ValueError for a
        committed bucket with a single copy, unless `make_room` was called.
        """
        bucket = self._usable(b, names, data)
        again = bucket.other == self.header.extents[b].generations
        if again and any(
            file.nbytes < n for file, n in zip(self._files, self.header.sizes_of_two, strict=True)
        ):
            raise ValueError(f"bucket {b}: got a write after a commit, expected none: it has one generation")
        self._retire_older()
        with self._lost_if_it_fails(f"a write of bucket {b}"):
            write_striped(self._files, self._buffers(b, names, data, lambda _: bucket.other))
        bucket.written.update(names)

    def commit(self, record: Mapping[str, Any]) -> None:
        """Make the newest bytes of all buffers, and `record` (a dict of JSON's own types), the state that the
        next `open` finds.

        Raises CheckpointError for a bucket of which only some buffers were written, and before the first
        commit for one without any; the space can be used further. After any other error it cannot: the disk
        then has this commit or the one before, complete.
        """
        self._check_not_lost()
        check_plain(record, "record")
        for b, bucket in self._buckets.items():
            if missing := bucket.missing:
                got = f"{', '.join(missing)} not written since the last commit"
                self._refuse(f"bucket {b}", got, "all of its buffers", f"write them, or {_GO_ON}")
        now, first = self._records[self.number], self._files[0]
        chosen = {b: x.other if x.written else x.committed for b, x in self._buckets.items()}
        sums = [0] * self.header.num_checksums
        for b, g in chosen.items():
            for x in (x for own in self._buckets[b].stripes[g].values() for x in own):
                sums[x.first : x.last] = self._checksums[g][x.first : x.last]
        new = CommitRecord(tuple(chosen.values()), dict(record), now.number + 1, sums)
        raw = new.raw(self.header.record_size)
        with self._lost_if_it_fails(f"commit {new.number}"):
            in_parallel(DirectFile.sync, [(file,) for file in self._files])
            at, what = self.header.record_at(new.number), f"the record of commit {new.number}"
            _write(first, raw, at, what)
            first.sync()
            if _reads(first)(at, len(raw)) != raw:  # everything hangs on it
                do = "check this disk, and resume from a checkpoint"
                self._refuse(what, "other bytes than were written", "those", do)
        self._records = {now.number: now, new.number: new}
        for b, bucket in self._buckets.items():
            bucket.committed = chosen[b]
            bucket.written.clear()

    def _buffers(
        self, b: int, names: Sequence[str], views: Sequence[memoryview], of: Callable[[str], int]
    ) -> list[StripedBuffer]:
        """A StripedBuffer for each buffer in `names` of bucket `b`: its memory in `views`, and its stripes in
        the bucket's copy number `of(name)`."""
        stripes = self._buckets[b].stripes
        return [
            StripedBuffer(f"bucket {b}, {name!r}", view, stripes[g][name], self._checksums[g])
            for name, view, g in zip(names, views, map(of, names), strict=True)
        ]

    def _refuse(self, what: str, got: str, expected: str, do: str = _GO_ON) -> NoReturn:
        disk.reject(f"{self._files[0].path}: {what}", got, expected, do)

    def _check_not_lost(self) -> None:
        if self._lost:
            raise CheckpointError(
                f"{self._files[0].path}: got a swap space that is lost ({self._lost}): {_GO_ON}"
            )

    def _usable(self, b: int, names: Sequence[str], data: Sequence[memoryview]) -> _Bucket:
        self._check_not_lost()
        bucket = self._buckets[b]
        for name, x in zip(names, data, strict=True):
            if x.nbytes != (expected := whole_blocks(bucket.sizes[name])):
                raise ValueError(f"bucket {b}, {name!r}: got {x.nbytes} bytes, expected {expected}")
        return bucket

    def _retire_older(self) -> None:
        """Make the record of the last commit but one invalid, as the next write overwrites its data."""
        with self._lock, self._lost_if_it_fails("retiring a record"):
            for number in sorted(self._records)[:-1]:
                _retire(self._files[0], self.header, self._records[number])
                del self._records[number]

    @contextmanager
    def _lost_if_it_fails(self, doing: str) -> Generator[None, None, None]:
        """A context in which an error makes the space unusable, because the content of the disk is unknown
        then; `doing` describes the action."""
        try:
            yield
        except BaseException as error:  # which other threads, that find it lost, may tell first
            self._lost = f"{doing} has failed: {error}"
            raise


def _retire(file: DirectFile, header: SwapHeader, record: CommitRecord) -> None:
    """Overwrite the record of a commit in `file` with an invalid one, and wait until that is on the disk."""
    _write(file, bytes(BLOCK), header.record_at(record.number), f"the record of commit {record.number}")
    file.sync()


def _check_sizes(files: Sequence[DirectFile], sizes: Sequence[int]) -> None:
    """Raise CheckpointError for a swap file that is shorter than its element of `sizes`, in bytes."""
    for file, nbytes in zip(files, sizes, strict=True):
        if file.nbytes < nbytes:
            do = "it was cut off: resume from a checkpoint, with another swap folder"
            disk.reject(file.path, f"{file.nbytes} bytes", f"its {nbytes}", do)


def _write(file: DirectFile, data: bytes, offset: int, what: str) -> None:
    with pages_for(len(data)) as pages:
        pages[:] = data
        with memoryview(pages) as view:
            file.write([view], offset, what)


def _reads(file: DirectFile) -> Read:
    """A function of (offset, nbytes) that reads the header and commit records of a swap file."""

    def read(offset: int, nbytes: int) -> bytes:
        with pages_for(nbytes) as pages:
            with memoryview(pages) as view:
                file.read([view], offset, "the header and records")
            return pages[:]

    return read


def _close(files: list[DirectFile], locks: list[int]) -> None:
    """Close swap `files`, and release `locks` unless a write to a hanging drive is still in progress."""
    closed = [file.close() for file in files]
    if all(closed):
        while locks:
            disk.unlock(locks.pop())


# --- what else is in the folders ------------------------------------------------------------------------------


def in_use(path: Path) -> CheckpointError:
    """The CheckpointError for a file of a swap space that another process has locked."""
    return CheckpointError(
        f"{path}: got a swap space that a process uses, expected it free: wait until that has ended, or name "
        "another folder; if it is this process, load it with the program whose swap space it is, zfunc.save the "
        "state in another folder and load that, or delete that program and its states first"
    )


def swap_files(folder: Path, names: re.Pattern[str] = SWAP_FILE) -> list[Path]:
    """The files in a folder whose names match `names`, by default those of swap spaces of any rank and world."""
    with disk.os_errors_as(folder, "looking for swap spaces"):
        return [folder / x for x in sorted(os.listdir(folder)) if names.fullmatch(x)]


def _lock_file(path: Path) -> int:
    try:
        return disk.lock(path, wait=False)
    except BlockingIOError as error:
        raise in_use(path) from error


def _refuse_others(path: Path, run: str) -> None:
    """Raise CheckpointError if swap file `path` exists, or its folder has a swap file of a run other than `run`."""
    for other in swap_files(path.parent):
        if other == path or read_space(other)[0].run != run:
            do = "resume that run, name another folder, or delete its .swap files if its state is not wanted"
            disk.reject(other, "the swap space of another run", "none", do)


def _delete_uncommitted(folder: Path, run: str) -> None:
    """Delete from `folder` the swap spaces of other runs than `run` that ended before their first commit."""
    for first in swap_files(folder):
        with suppress(BlockingIOError):
            fd = disk.lock(first, wait=False)
            try:
                header, records = read_space(first)
                if records and header.run != run and not max(records):
                    others = [x for x in header.paths[1:] if x.exists()]
                    for path in [*(x for x in others if read_space(x)[0].run == header.run), first]:
                        _delete(path, "nothing was committed to it")
            finally:
                disk.unlock(fd)


def _delete_unfinished(folder: Path) -> None:
    """Delete from `folder` incomplete swap files whose process was killed, which shows in that they are not
    locked.

    The caller must hold the folder's lock, under which other processes make and lock their files.
    """
    for path in swap_files(folder, _UNFINISHED_FILE):
        if path.is_file() and not disk.is_locked(path):
            _delete(path, "its process ended before it was complete")


def _delete(path: Path, why: str) -> None:
    log.warning("swap: %s is deleted: %s", path, why)
    with disk.os_errors_as(path, "deleting it"):
        path.unlink()
