"""A drive that forgets: after a power cut any part of what no sync has waited for is there, and the rest is not.

`Drive` is the drive of lab 7: files by name, written in sectors. `some` also serves the tests of zfunc's own files.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, pairwise
from random import Random
from typing import Any, NamedTuple

from attrs import define, field

BLOCK = 512  # bytes of a sector, which is written whole or not at all


def some(by: Random, keys: Sequence[int]) -> list[int]:
    """A random subset of `keys`: none, all, a beginning, an end, all of random pages, or random sectors."""
    match by.randrange(6):
        case 0:
            return []
        case 1:
            return [*keys]
        case 2:
            return [*keys[: by.randrange(len(keys) + 1)]]
        case 3:
            return [*keys[by.randrange(len(keys) + 1) :]]
        case 4:
            pages = {k // 8 for k in keys if by.random() < 0.5}
            return [k for k in keys if k // 8 in pages]
        case _:
            return [k for k in keys if by.random() < 0.5]


class Change(NamedTuple):
    """A change by operation number `op` that a power cut may lose: bytes of a file's sector, or file
    names."""

    op: int
    file: int = -1  # that has the bytes; -1: names change
    offset: int = 0
    data: bytes = b""
    names: tuple[tuple[str, int], ...] = ()  # and the file of each; -1: it goes

    def torn(self, first: int, end: int) -> "Change":
        """This change with only the bytes from `first` to `end` written, as by a torn sector."""
        return self._replace(offset=self.offset + first, data=self.data[first:end])


def survivors(changes: Sequence[Change], most: int) -> Iterator[list[Change]]:
    """Yield subsets of `changes`, the largest first: all of them, or, if they are more than `most`, those
    that lose or keep few changes, and random ones."""
    numbers = range(len(changes))
    if 1 << len(changes) <= most:
        sets = (kept for size in reversed(range(len(changes) + 1)) for kept in combinations(numbers, size))
    else:
        by = Random(len(changes))
        few = [*map(set, [(), *((n,) for n in numbers)])]
        two = islice(map(set, combinations(numbers, 2)), most // 2)
        lost = [*few, *two]
        sets = [[n for n in numbers if n not in x] for x in lost]
        sets += [sorted(x) for x in few[: most // 4]] + [some(by, numbers) for _ in range(most // 4)]
    return ([changes[n] for n in kept] for kept in sets)


@define
class Contents:
    """What a drive holds: the bytes of each file, by its number, and the file's number, by name."""

    files: dict[int, bytes] = field(factory=dict[int, bytes])
    names: dict[str, int] = field(factory=dict[str, int])

    def make(self, change: Change) -> None:
        """Apply `change`; bytes between a file's end and the bytes written are 0."""
        if change.file >= 0:
            old = self.files.get(change.file, b"").ljust(change.offset, b"\0")
            self.files[change.file] = (
                old[: change.offset] + change.data + old[change.offset + len(change.data) :]
            )
        for name, file in change.names:
            if file < 0:
                self.names.pop(name, None)
            else:
                self.names[name] = file

    def copy(self) -> "Contents":
        """A copy of the contents; changes of one do not change the other."""
        return Contents(dict(self.files), dict(self.names))


class Moment(NamedTuple):
    """A drive between two operations: its contents on the disk, and changes that no sync has made lasting."""

    num_ops: int  # that have been done
    durable: Contents
    pending: tuple[Change, ...]


@define(eq=False)
class Drive:
    """A simulated drive with one folder and `sectors` sectors; only what is synced survives a power cut."""

    sectors: int = 1 << 20
    _durable: Contents = field(factory=Contents)
    _seen: Contents = field(factory=Contents)
    _pending: list[Change] = field(factory=list[Change])
    _said: list[str] = field(factory=list[str])
    _past: list[Moment] = field(factory=list[Moment])
    _number: int = 0  # of the last file

    def names(self) -> list[str]:
        """The names of all files."""
        return sorted(self._seen.names)

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        return self._seen.files.get(self._file(name), b"")

    def create(self, name: str) -> None:
        """A new, empty file. Raises FileExistsError if the name is taken."""
        if name in self._seen.names:
            raise FileExistsError(f"create: there is a file {name!r} already")
        self._number += 1
        self._do(f"create({name!r})", [Change(0, names=((name, self._number),))])

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write bytes to a file, from byte `offset` on. Raises OSError where there is no room."""
        file, data = self._file(name), bytes(data)
        cuts = sorted(
            {offset, *range(-(-offset // BLOCK) * BLOCK, offset + len(data), BLOCK), offset + len(data)}
        )
        parts = [(a, data[a - offset : b - offset]) for a, b in pairwise(cuts)]
        longer = {**self._lengths(), file: max(len(self.read(name)), offset + len(data))}
        if (need := sum(-(-n // BLOCK) for n in longer.values())) > self.sectors:
            raise OSError(28, f"no space left: {need} sectors are needed, the drive has {self.sectors}")
        self._do(f"write({name!r}, {offset}, {len(data)} bytes)", [Change(0, file, a, x) for a, x in parts])

    def rename(self, old: str, new: str) -> None:
        """Rename file `old` to `new`; a file that had the name `new` is replaced."""
        self._do(f"rename({old!r}, {new!r})", [Change(0, names=((old, -1), (new, self._file(old))))])

    def delete(self, name: str) -> None:
        """Delete a file."""
        self._file(name)
        self._do(f"delete({name!r})", [Change(0, names=((name, -1),))])

    def sync(self, name: str) -> None:
        """Wait until the bytes of file `name` survive a power cut. Its name may still be lost."""
        file = self._file(name)
        self._do(f"sync({name!r})", [], [x for x in self._pending if x.file == file])

    def sync_names(self) -> None:
        """Wait until the folder survives a power cut: every file's creation, renaming and deletion."""
        self._do("sync_names()", [], [x for x in self._pending if x.file < 0])

    # ---- what the grader does ---------------------------------------------------------------------------

    @property
    def said(self) -> list[str]:
        """All operations on the drive so far, as lines of text."""
        return [*self._said]

    @property
    def past(self) -> list[Moment]:
        """The drive before its first operation, and after each."""
        return [*self._past, self._moment()]

    def cuts(self, most: int = 256) -> Iterator["Drive"]:
        """Yield the drives that a power cut now may leave, the fewest losses first; about `most` at most."""
        moment = self._moment()
        return (self.after(moment, kept) for kept in survivors(moment.pending, most))

    def after(self, moment: Moment, kept: Sequence[Change]) -> "Drive":
        """The drive after a power cut at `moment`, of whose changes without sync only `kept` survive."""
        found = moment.durable.copy()
        for change in kept:
            found.make(change)
        drive = Drive(self.sectors, found, found.copy())
        drive._number = self._number
        return drive

    def _moment(self) -> Moment:
        return Moment(len(self._said), self._durable.copy(), tuple(self._pending))

    def _lengths(self) -> dict[int, int]:
        return {file: len(self._seen.files.get(file, b"")) for file in self._seen.names.values()}

    def _file(self, name: str) -> int:
        if name not in self._seen.names:
            raise FileNotFoundError(
                f"there is no file {name!r}; there are {', '.join(self.names()) or 'none'}"
            )
        return self._seen.names[name]

    def _do(self, said: str, changes: Sequence[Change], synced: Sequence[Change] = ()) -> None:
        self._past.append(self._moment())
        self._said.append(said)
        made = [x._replace(op=len(self._said)) for x in changes]
        for change in made:
            self._seen.make(change)
        for change in synced:
            self._durable.make(change)
        self._pending = [x for x in [*self._pending, *made] if x not in synced]


DriveOperations = namedtuple("DriveOperations", "create write read rename delete names sync sync_names")
"""The operations of a drive, and nothing else of it: what a student's functions get."""


def operations_of(drive: Drive) -> DriveOperations:
    """The operations of `drive`. They are no bound methods: the `__self__` of one would be the drive."""

    def operation(name: str) -> Callable[..., Any]:
        return lambda *args, **named: getattr(drive, name)(*args, **named)

    return DriveOperations(*map(operation, DriveOperations._fields))
