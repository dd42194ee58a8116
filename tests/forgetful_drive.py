"""A drive that forgets: after a power cut any subset of the blocks that no sync has waited for is what was written.

`ForgetfulFile` stands in for `zfunc.runtime.direct_io.DirectFile`: names and locks are those of a real, empty file,
the bytes are those of a Drive. It can kill its process, that is raise Killed, in any write or sync.
"""

import os
import random
from pathlib import Path
from types import SimpleNamespace

from attrs import define, field

from course.forgetful import BLOCK, some

ALIGNED = 4096


class Killed(BaseException):
    """The process has ended here."""


@define(eq=False)
class Contents:
    """A file's blocks as its readers see them, as they are on the disk, and what was written in between."""

    seen: dict[int, bytes] = field(factory=dict[int, bytes])
    durable: dict[int, bytes] = field(factory=dict[int, bytes])
    pending: list[dict[int, bytes]] = field(factory=list[dict[int, bytes]])


@define(eq=False)
class Drive:
    """All files by inode, which a rename does not change; `left` is the number of operations until a kill."""

    by: random.Random
    left: int = 1 << 60
    files: dict[int, Contents] = field(factory=dict[int, Contents])

    def count(self) -> bool:
        """Whether this operation is the last one, of which a part may still be done."""
        if self.left <= 0:
            raise Killed
        self.left -= 1
        return self.left == 0

    def some(self, blocks: dict[int, bytes]) -> dict[int, bytes]:
        """Any subset of blocks."""
        return {k: blocks[k] for k in some(self.by, [*blocks])}

    def cut_power(self) -> None:
        """Forget what was not synced, but for a part."""
        for file in self.files.values():
            for blocks in file.pending:
                file.durable.update(self.some(blocks))
        self.forget()

    def forget(self) -> None:
        """Forget all that was not synced."""
        for file in self.files.values():
            file.seen, file.pending = dict(file.durable), []

    def snapshot(self) -> dict[int, Contents]:
        """A copy to go back to: assign it to `files`."""
        return {n: Contents(dict(x.seen), dict(x.durable), list(x.pending)) for n, x in self.files.items()}


@define(eq=False)
class ForgetfulFile:
    """A file on `drive`, which a test sets."""

    path: Path
    _inode: int
    nbytes: int = 1 << 60  # room is reserved

    drive = Drive(random.Random(0))

    @classmethod
    def create(cls, path: Path, _nbytes: int) -> "ForgetfulFile":
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        file = cls.open(path)
        cls.drive.files[file._inode] = Contents()
        return file

    @classmethod
    def open_file(cls, path: Path) -> SimpleNamespace:
        """In the place of `durable_files.open_file`."""

        def read(offset: int, nbytes: int) -> bytes:
            into = bytearray(nbytes)
            cls.open(path).read([memoryview(into)], offset, "")
            return bytes(into)

        return SimpleNamespace(read=read)

    @classmethod
    def open(cls, path: Path) -> "ForgetfulFile":
        return cls(path, path.stat().st_ino)

    def read(self, into: list[memoryview], offset: int, _what: str) -> None:
        seen = self.drive.files[self._inode].seen
        for view in into:
            assert not view.nbytes % ALIGNED
            assert not offset % ALIGNED
            first = offset // BLOCK
            view[:] = b"".join(seen.get(first + n, bytes(BLOCK)) for n in range(view.nbytes // BLOCK))
            offset += view.nbytes

    def write(self, data: list[memoryview], offset: int, _what: str) -> None:
        raw = b"".join(data)
        assert not len(raw) % ALIGNED
        assert not offset % ALIGNED
        first = offset // BLOCK
        blocks = {first + n: raw[n * BLOCK : (n + 1) * BLOCK] for n in range(len(raw) // BLOCK)}
        if last := self.drive.count():
            blocks = self.drive.some(blocks)
        file = self.drive.files[self._inode]
        file.seen.update(blocks)
        file.pending.append(blocks)
        if last:
            raise Killed

    def extend(self, _nbytes: int) -> None:
        """It has room."""

    def sync(self) -> None:
        last = self.drive.count()
        if not last or self.drive.by.random() < 0.5:
            file = self.drive.files[self._inode]
            for blocks in file.pending:
                file.durable.update(blocks)
            file.pending = []
        if last:
            raise Killed

    def close(self) -> bool:
        return True
