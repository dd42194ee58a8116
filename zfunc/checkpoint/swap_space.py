"""The optimizer state of one rank in preallocated files, one a folder, which are a checkpoint after every commit.

Nothing here knows what a bucket is for: it has a number, and buffers of a name and a size. An extent has two
generations. `write` goes to the one that is not committed, in place until `commit` makes it the committed one; an
extent of one generation is written before the first commit alone:

    first write after a commit   retire the older of the two records, wait until that is on the disk, and write
    commit                       wait until all data is on the disk, write a record, wait until it is on the disk

So the extents of every record in the files are whole, at any moment at which the process is killed or the power
fails; and if a step has begun to write, there is no record but the last.
"""

import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, evolve, field

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.durable_files import in_parallel
from zfunc.checkpoint.manifest import check_plain
from zfunc.checkpoint.swap_file import (
    CommitRecord,
    Stripes,
    SwapHeader,
    check_header,
    read_header,
    read_records,
    reader_of,
)
from zfunc.checkpoint.swap_folders import (
    check_folders,
    delete_uncommitted,
    delete_unfinished,
    refuse_other_worlds,
    refuse_others,
    tell_shared_drives,
    unfinished_name,
)
from zfunc.checkpoint.swap_stripes import StripedBuffer, read_striped, write_striped
from zfunc.core.extents import BLOCK, Extent, whole_blocks
from zfunc.errors import CheckpointError
from zfunc.runtime.direct_io import DirectFile, pages_for

_GO_ON = "go on from the last commit: open the swap space again"


@define(eq=False)
class _Bucket:
    """Where a bucket is, which generation of it is committed (-1: none), and what was written since."""

    sizes: dict[str, int]  # of its buffers, in bytes
    stripes: tuple[Stripes, ...]  # of the generations
    committed: int
    checksums: tuple[dict[str, list[int]], ...]  # of the generations' buffers
    written: set[str] = field(factory=set[str])  # buffers whose newest bytes are in the other generation
    lost: set[str] = field(factory=set[str])  # buffers of which a write has failed

    @property
    def other(self) -> int:
        """The generation that is written."""
        return 0 if self.committed < 0 else 1 - self.committed

    def newest(self, name: str) -> int:
        """The generation that is read."""
        return self.other if name in self.written else self.committed

    @property
    def missing(self) -> list[str]:
        """What a commit still needs."""
        changed = self.committed < 0 or self.written or self.lost
        return [x for x in self.sizes if changed and (x not in self.written or x in self.lost)]


@define(eq=False)
class SwapSpace:
    """An open swap space. Any thread may read and write; those of one bucket, and `commit`, have to be in order."""

    header: SwapHeader
    _files: list[DirectFile]
    _locks: list[int]
    # those in the files, by number: the last commit and, until a write, the one before
    _records: dict[int, CommitRecord]
    _buckets: dict[int, _Bucket] = field(init=False)
    _lost: str = ""  # why nothing can be read or written any more, or ""
    _lock: Lock = field(factory=Lock)
    _close: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._close = weakref.finalize(self, _close, self._files, self._locks)
        self._close.atexit = False  # it waits for transfers; the system closes files by itself
        self._buckets = dict(self._read_buckets(self._records[max(self._records)]))

    @classmethod
    def create(cls, header: SwapHeader) -> "SwapSpace":
        """Reserve the files of a new space, one in each folder, and open it. Nothing is in it before `commit`.

        The header's `run` is a text that all ranks share and no other run has.

        Raises CheckpointError, in one line, for a folder that is missing, in memory, cannot be written, is full, is
        given twice, or has the state of another run. Then nothing is left, and what was in the folders stays as it
        was, but for spaces without a commit.
        """
        check_plain(header.identity, "identity")
        paths, run = header.paths, header.run
        folders = [path.parent for path in paths]
        check_folders(folders)
        tell_shared_drives(folders)
        made: list[Path] = []
        files, locks = list[DirectFile](), list[int]()
        try:
            for folder in folders:
                with disk.locked(folder):  # against the other ranks
                    delete_uncommitted(folder, run)
            for n, path in enumerate(paths):
                refuse_others(path, run)
                unfinished = unfinished_name(path)
                with disk.locked(
                    path.parent
                ):  # until it has a lock of its own, others take it for a dead one's
                    delete_unfinished(path.parent)
                    with disk.os_errors_as(unfinished, f"reserving {header.sizes[n]} bytes for a swap space"):
                        files.append(DirectFile.create(unfinished, header.sizes[n]))
                    made.append(unfinished)
                    locks.append(_lock_file(unfinished))
                _write(files[n], header.of(n).raw, 0, "the header")
            first = CommitRecord(0, (), [0] * header.num_checksums, {})
            _write(files[0], first.raw(header.record_size), header.record_at(0), "the first record")
            for n, path in enumerate(paths):  # the first says that nothing was committed: before the others
                files[n].sync()
                with disk.locked(path.parent), disk.os_errors_as(path, "naming a swap space"):
                    refuse_others(path, run)
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
        """Open the existing space that is `expected`, of any run, at its last commit.

        With `at` it is opened at the commit of that number, and a later one is gone then. It may have an extent of
        `instead` where another of that number is expected.

        Raises CheckpointError, in one line, if it is not there, in use, damaged, of another identity, world or
        extents, or has no commit of that number.
        """
        paths = expected.paths
        check_folders([path.parent for path in paths])
        files, locks = list[DirectFile](), list[int]()
        try:
            for path in paths:
                if not path.exists():
                    refuse_other_worlds(path, expected.world)
                    raise CheckpointError(
                        f"{path}: got none, expected a file of the swap space: name all of its folders, in "
                        "their order"
                    )
                with disk.os_errors_as(path, "opening a swap space"):
                    locks.append(_lock_file(path))
                    files.append(DirectFile.open(path))
            headers = [read_header(reader_of(file), str(file.path)) for file in files]
            for n, (file, header) in enumerate(zip(files, headers, strict=True)):
                other = {b: x for b, x in (instead or {}).items() if header.extents.get(b) == x}
                own = evolve(expected, extents={**expected.extents, **other})
                check_header(file.path, header, headers[0].of(n), own)
            for file in files:  # what a killed process wrote may still be in a cache
                file.sync()
            header = headers[0]
            records = read_records(reader_of(files[0]), header, str(paths[0]))
            if at is not None:
                if at not in records:
                    raise CheckpointError(
                        f"{paths[0]}: got no commit {at}, expected one of {', '.join(map(str, sorted(records)))}: "
                        "resume from a checkpoint, with another swap folder"
                    )
                for number in [x for x in records if x > at]:
                    _retire(files[0], header, records.pop(number))
            return cls(header, files, locks, records)
        except BaseException:
            _close(files, locks)
            raise

    def lose(self, why: str) -> None:
        """Let nothing be read, written or committed any more."""
        self._lost = self._lost or why

    def close(self) -> None:
        """Close the files and release the locks; what was written since the last commit is gone.

        A second call does nothing.
        """
        self.lose("it is closed")
        self._close()

    @property
    def number(self) -> int:
        """The number of the last commit; 0 before the first."""
        return max(self._records)

    def record(self) -> Mapping[str, Any] | None:
        """What the caller of the last commit said, or None before the first."""
        return self._records[self.number].metadata if self.number else None

    def is_written(self, b: int) -> bool:
        """Whether a bucket has anything to read, committed or not."""
        return self._buckets[b].committed >= 0 or bool(self._buckets[b].written)

    def missing(self, b: int) -> list[str]:
        """The buffers of a bucket that have to be written before `commit`, because others of it were."""
        return self._buckets[b].missing

    def read(self, b: int, names: Sequence[str], into: Sequence[memoryview]) -> None:
        """Fill buffers with what was last written of a bucket's, committed or not, and compare the checksums.

        Each is at the beginning of a page and of its buffer's size in whole blocks of 4,096 bytes; neighbours are
        one request. Raises CheckpointError, with file and bucket, for bytes that are not what was written.
        """
        bucket = self._usable(b, names, into)
        for name in names:
            if name in bucket.lost or bucket.newest(name) < 0:
                why = "a write of it has failed" if name in bucket.lost else "none"
                raise CheckpointError(
                    f"{self._files[0].path}: bucket {b}, {name!r}: got {why}, expected it to be written before it "
                    f"is read: {_GO_ON}"
                )
        read_striped(self._files, _buffers(bucket, b, names, into, bucket.newest))

    def write(self, b: int, names: Sequence[str], data: Sequence[memoryview]) -> None:
        """Write buffers of a bucket where they do not overwrite a commit. As for `read`, in whole blocks.

        What a failed write was to replace is gone, and `commit` refuses until it has been written. Raises
        ValueError for a bucket of one generation that was committed.
        """
        bucket = self._usable(b, names, data)
        if bucket.other == len(bucket.stripes):
            raise ValueError(f"bucket {b}: got a write after a commit, expected none: it has one generation")
        self._retire_older()
        bucket.lost.update(names)
        write_striped(self._files, _buffers(bucket, b, names, data, lambda _: bucket.other))
        bucket.written.update(names)
        bucket.lost.difference_update(names)

    def commit(self, record: Mapping[str, Any]) -> None:
        """Make what was written the state that `open` finds, with `record`, a dict of JSON's own types.

        Raises CheckpointError for a bucket that was written in part, and before the first commit for one that was
        not written; the space can still be used. After any other error it cannot: what is on the disk is this
        commit or the one before, either of them whole.
        """
        self._usable_at_all()
        check_plain(record, "record")
        for b, bucket in self._buckets.items():
            if missing := bucket.missing:
                raise CheckpointError(
                    f"{self._files[0].path}: bucket {b}: got {', '.join(missing)} not written "
                    f"since the last commit, expected all of its buffers: write them, or {_GO_ON}"
                )
        now = self._records[self.number]
        generations = [x.other if x.written else x.committed for x in self._buckets.values()]
        sums = [
            x
            for g, bucket in zip(generations, self._buckets.values(), strict=True)
            for own in bucket.checksums[g].values()
            for x in own
        ]
        new = CommitRecord(now.number + 1, tuple(generations), sums, dict(record))
        raw = new.raw(self.header.record_size)
        with self._lost_if_it_fails(f"commit {new.number}"):
            in_parallel(DirectFile.sync, [(file,) for file in self._files])
            at, what = self.header.record_at(new.number), f"the record of commit {new.number}"
            _write(self._files[0], raw, at, what)
            self._files[0].sync()
            if reader_of(self._files[0])(at, len(raw)) != raw:  # everything hangs on it
                raise CheckpointError(
                    f"{self._files[0].path}: {what}: got other bytes than were written: check this disk, and "
                    "resume from a checkpoint"
                )
        self._records = {now.number: now, new.number: new}
        for g, bucket in zip(generations, self._buckets.values(), strict=True):
            bucket.committed = g
            bucket.written.clear()

    def _read_buckets(self, record: CommitRecord) -> Iterator[tuple[int, _Bucket]]:
        """The buckets by number, as a commit left them."""
        header, own = self.header, self.header.checksums_of(record)
        generations = record.generations or [-1] * len(header.extents)
        for (b, extent), g in zip(header.extents.items(), generations, strict=True):
            other = {name: [0] * len(x) for name, x in own[b].items()}
            checksums = tuple(own[b] if n == max(g, 0) else other for n in range(extent.generations))
            sizes = {x.name: x.nbytes for x in extent.parts}
            yield b, _Bucket(sizes, header.stripes[b], g, checksums)

    def _usable_at_all(self) -> None:
        if self._lost:
            raise CheckpointError(
                f"{self._files[0].path}: got a swap space that is lost ({self._lost}): {_GO_ON}"
            )

    def _usable(self, b: int, names: Sequence[str], data: Sequence[memoryview]) -> _Bucket:
        self._usable_at_all()
        bucket = self._buckets[b]
        for name, x in zip(names, data, strict=True):
            if x.nbytes != (expected := whole_blocks(bucket.sizes[name])):
                raise ValueError(f"bucket {b}, {name!r}: got {x.nbytes} bytes, expected {expected}")
        return bucket

    def _retire_older(self) -> None:
        """The extents of the record before the last are about to be overwritten."""
        with self._lock, self._lost_if_it_fails("retiring a record"):
            for number in sorted(self._records)[:-1]:
                _retire(self._files[0], self.header, self._records[number])
                del self._records[number]

    @contextmanager
    def _lost_if_it_fails(self, doing: str) -> Generator[None, None, None]:
        """After a failed sync nobody knows what is on the disk, and another one would not tell."""
        try:
            yield
        except BaseException:
            self._lost = f"{doing} has failed"
            raise


def _buffers(
    bucket: _Bucket,
    b: int,
    names: Sequence[str],
    views: Sequence[memoryview],
    generation: Callable[[str], int],
) -> list[StripedBuffer]:
    return [
        StripedBuffer(f"bucket {b}, {name!r}", view, bucket.stripes[g][name], bucket.checksums[g][name])
        for name, view in zip(names, views, strict=True)
        for g in [generation(name)]
    ]


def _retire(file: DirectFile, header: SwapHeader, record: CommitRecord) -> None:
    """Make a record invalid, and wait until that is on the disk."""
    _write(file, bytes(BLOCK), header.record_at(record.number), f"the record of commit {record.number}")
    file.sync()


def _lock_file(path: Path) -> int:
    try:
        return disk.lock(path, wait=False)
    except BlockingIOError as error:
        raise disk.in_use(path) from error


def _write(file: DirectFile, data: bytes, offset: int, what: str) -> None:
    with pages_for(len(data)) as pages:
        pages[:] = data
        with memoryview(pages) as view:
            file.write([view], offset, what)


def _close(files: list[DirectFile], locks: list[int]) -> None:
    """Release the locks if nothing writes any more: a drive that hangs keeps them until the process ends."""
    closed = [file.close() for file in files]
    if all(closed):
        while locks:
            disk.unlock(locks.pop())
