"""Wherever a swap space is killed, and whatever the drives forget then: it opens at a whole commit, to the bit.

The law holds for every record that is found, and for all ranks together. Each way to break the protocol is found.
"""

import random
import struct
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import define, field
from forgetful_drive import Drive, ForgetfulFile, Killed

from zfunc.checkpoint import durable_files, swap_file, swap_space
from zfunc.checkpoint.swap_file import SwapHeader, new_header
from zfunc.core.extents import Extent, whole_blocks
from zfunc.errors import CheckpointError

SIZES = {"low": 2 * 4096, "scale": 100, "high": 3 * 4096}
EXTENTS = {b: Extent.of(SIZES.items(), generations=1 if b == 1 else 2) for b in range(3)}  # 1: seldom
CHANGING = {b: 0.6 if extent.generations == 2 else 0.1 for b, extent in EXTENTS.items()}  # in so many steps
IDENTITY = {"model": "three buckets"}


def content(rank: int, b: int, name: str, write: int) -> bytes:
    """Pages that say which write of what they are of."""
    said = struct.pack("<IIIQxxxx", rank, b, len(name), write).ljust(32, b"*")
    return said * (whole_blocks(SIZES[name]) // len(said))


@define(eq=False)
class Training:
    """Steps that write, read and commit a swap space a rank, and which write has to be found in it."""

    module: ModuleType
    folders: list[Path]
    by: random.Random
    world: int = 2
    memory: Callable[[bytes], memoryview] = lambda data: memoryview(bytearray(data))
    spaces: list[Any] = field(factory=list)
    writes: int = 0
    commits: int = 0  # that have ended on all ranks
    number: int = 0  # of the last, begun or ended
    now: dict[tuple[int, str], int] = field(factory=dict)
    committed: dict[int, dict[tuple[int, str], int]] = field(factory=lambda: {0: {}})

    def create(self) -> None:
        for rank in range(self.world):
            self.spaces.append(self.module.SwapSpace.create(self.header(rank)))

    def open(self, rank: int, at: int | None = None) -> Any:
        return self.module.SwapSpace.open(self.header(rank), at=at)

    def header(self, rank: int) -> SwapHeader:
        return new_header(
            self.folders, identity=IDENTITY, run="one", extents=EXTENTS, rank=rank, world=self.world
        )

    def write(self) -> None:
        self.writes += 1
        chosen = (
            [b for b, often in CHANGING.items() if self.by.random() < often] if self.number else [*EXTENTS]
        )
        if self.number and 1 in chosen:
            for space in self.spaces:
                space.make_room()
        for b in chosen:
            names = list(SIZES)
            halves = [names[: (cut := self.by.randrange(4))], names[cut:]]
            for part in halves if self.by.random() < 0.5 else halves[::-1]:
                for rank, space in enumerate(self.spaces):
                    data = [self.memory(content(rank, b, n, self.writes)) for n in part]
                    space.write(b, part, data)
                self.now |= {(b, n): self.writes for n in part}

    def check(self, rank: int, space: Any, state: dict[tuple[int, str], int]) -> None:
        """Everything is there, to the bit, in one read or one by one."""
        for b in EXTENTS:
            names = [n for n in SIZES if (b, n) in state]
            into = [self.memory(bytes(whole_blocks(SIZES[n]))) for n in names]
            space.read(b, names, into)
            for name, got in zip(names, into, strict=True):
                size, write = SIZES[name], state[b, name]
                assert got[:size] == content(rank, b, name, write)[:size]

    def commit(self) -> None:
        self.number += 1
        self.committed[self.number] = dict(self.now)
        for space in self.spaces:
            space.commit({"writes": self.writes, "number": self.number})
        self.commits = self.number

    def step(self) -> None:
        self.write()
        if self.by.random() < 0.3:
            for rank, space in enumerate(self.spaces):
                self.check(rank, space, self.now)
        if self.by.random() < 0.7:
            self.commit()
        if self.by.random() < 0.1 and self.number:
            self.commit()

    def resume(self, drive: Drive) -> None:
        """Open all ranks at the last commit that all of them have, and check that and every other they have."""
        self.spaces = []
        for rank in range(self.world):
            self.spaces.append(space := self.open(rank))
            assert set(space._records) <= set(self.committed)
            self.check(rank, space, self.committed[space.number])
        self.number = min(space.number for space in self.spaces)
        assert self.commits <= self.number <= self.commits + 1
        for rank, space in enumerate(self.spaces):
            if space.number > self.number or (len(space._records) > 1 and self.by.random() < 0.1):
                space.close()
                before, drive.left = (drive.snapshot(), drive.left), 1 << 60
                with closing(self.open(rank, at=space.number - 1)) as older:
                    self.check(rank, older, self.committed[older.number])
                drive.files, drive.left = before
                self.spaces[rank] = space = self.open(rank, at=self.number)
                self.check(rank, space, self.committed[self.number])
        self.now, self.commits = dict(self.committed[self.number]), self.number
        self.committed = {n: x for n, x in self.committed.items() if n <= self.number}


def simulate(module: ModuleType, tmp_path: Path, kills: int, seed: int) -> int:
    """Train, be killed, resume, so many times; returns the number of commits."""
    by = random.Random(seed)
    drive = ForgetfulFile.drive = Drive(by)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    training = Training(module, folders, by)
    training.create()
    for _ in range(kills):
        drive.left = by.randrange(1, by.choice([5, 60]))
        try:
            while True:
                training.step()
        except Killed:
            pass
        for space in training.spaces:
            space.close()
        if by.random() < 0.7:  # else the process alone is gone
            drive.cut_power()
        drive.left = by.choice([1 << 60, by.randrange(1, 12)])
        while True:
            try:
                training.resume(drive)
                break
            except Killed:  # again, while it opens
                for space in training.spaces:
                    space.close()
                drive.cut_power()
                drive.left = 1 << 60
    for space in training.spaces:
        space.close()
    return training.number


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_space, "DirectFile", ForgetfulFile)
    monkeypatch.setattr(durable_files, "open_file", ForgetfulFile.open_file)
    monkeypatch.setattr(swap_file, "in_parallel", in_any_order)


def in_any_order(function: Callable[..., Any], *queues: Iterable[tuple[Any, ...]]) -> None:
    """One after another, as a seed says."""
    calls = [call for queue in queues for call in queue]
    ForgetfulFile.drive.by.shuffle(calls)
    for call in calls:
        function(*call)


def test_killed_anywhere_with_writes_lost_it_opens_at_a_whole_commit(tmp_path: Path) -> None:
    assert simulate(swap_space, tmp_path, 200, 0) > 70


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_killed_ten_thousand_times(tmp_path: Path, seed: int) -> None:
    assert simulate(swap_space, tmp_path, 1000, seed) > 300


SYNC_ALL = "in_parallel(DirectFile.sync, [(file,) for file in self._files])"
MUTANTS = {
    "no sync before the record": (SYNC_ALL, "pass"),
    "the first file alone is synced": (SYNC_ALL, "first.sync()"),
    "no sync after the record": ("            first.sync()\n            if _read", "            if _read"),
    "the committed generation is written": (
        "0 if self.committed < 0 else 1 - self.committed",
        "max(0, self.committed)",
    ),
    "records are not retired": ("        self._retire_older()\n", ""),
    "retiring is not synced": (
        'the record of commit {record.number}")\n    file.sync()',
        'the record of commit {record.number}")',
    ),
    "a later record stays": ("_retire(files[0], header, records.pop(number))", "records.pop(number)"),
    "one place for all records": ("self.header.record_at(new.number)", "self.header.record_at(0)"),
    "the record says what was written before": (
        "x.other if x.written else x.committed",
        "max(0, x.committed)",
    ),
}


def mutant(old: str, new: str) -> ModuleType:
    """The module with one change."""
    source = Path(swap_space.__file__).read_text()
    assert source.count(old) == 1, old
    module = ModuleType(swap_space.__name__)
    exec(compile(source.replace(old, new), swap_space.__file__, "exec"), module.__dict__)
    module.DirectFile = ForgetfulFile  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", MUTANTS)
def test_each_way_to_break_the_protocol_is_found(tmp_path: Path, name: str) -> None:
    with pytest.raises((AssertionError, CheckpointError)):
        simulate(mutant(*MUTANTS[name]), tmp_path, 100, 0)


def test_a_commit_that_was_found_is_found_after_a_power_cut_too(tmp_path: Path) -> None:
    """A killed process may leave a record in a cache alone."""
    drive = ForgetfulFile.drive = Drive(random.Random(0))
    training = Training(swap_space, [tmp_path], drive.by, world=1)
    training.create()
    drive.forget()  # what is made is there
    training.spaces[0].close()
    training.resume(drive)
    training.write()
    for left in range(1, 9):  # from before the data is synced until after the record is
        drive.left = left
        with suppress(Killed):
            training.commit()
        drive.left = 1 << 60
        training.spaces[0].close()
        training.resume(drive)
        found = training.number
        drive.forget()
        training.spaces[0].close()
        training.resume(drive)
        assert training.number == found
        training.write()
    assert found > 2
