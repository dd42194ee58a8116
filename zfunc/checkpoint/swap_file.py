"""The format of a swap space's files: the header that says what is in one, and the records of commits.

A file holds, each part padded to 4,096 bytes:

    header     identity, rank, folders, their shares and extents as JSON, with a checksum
    extents    of every bucket, in two generations or in one: this folder's stripes of all buffers, one after the
               other
    2 records  in the first folder's file alone: number and generation of every extent, checksums of their bytes,
               and the metadata of the commit

A header or record is read back equal to the one written, or refused. The bytes of extents are checked where they
are read (`zfunc.checkpoint.swap_stripes`), what else is in a folder in `zfunc.checkpoint.swap_folders`.
"""

import re
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from attrs import asdict, evolve, field, frozen

from zfunc.checkpoint import strict_json
from zfunc.checkpoint.strict_json import COUNT, MAX_INT, Count, Text, Within
from zfunc.checkpoint.swap_stripes import Stripe, lay_stripes, num_checksums
from zfunc.core.extents import BLOCK, Extent, record_bytes, whole_blocks
from zfunc.errors import CheckpointError
from zfunc.runtime.direct_io import DirectFile, pages_for

VERSION = 2
HEADER_LIMIT = 64 << 20  # bytes: 100,000 parameters
_HEADER = struct.Struct("<8sQI")  # magic, bytes and CRC-32 of the JSON that follows
# magic, number, bytes of JSON and of checksums, CRC-32 of all but this field
_RECORD = struct.Struct("<8sQQQI")
Read = Callable[[int, int], bytes]  # from an offset of a file, so many bytes
Stripes = Mapping[str, tuple[Stripe, ...]]  # of a bucket's buffers, by name
SWAP_FILE = re.compile("rank-[0-9]{5,}-of-[0-9]{5,}-folder-[0-9]+[.]swap")
_HEADER_MAGIC, _RECORD_MAGIC = b"zf-swap\n", b"zf-done\n"


def _extents(value: Any) -> dict[int, Extent]:
    """The kind of extents: of each a list of its bucket, its generations, and its buffers' sizes by name."""
    each = strict_json.of_kind(value, [(COUNT, Within(int, 1, 2), {str: COUNT})])
    extents = {b: Extent.of(sizes.items(), generations=n) for b, n, sizes in each}
    if len(extents) < len(each):
        raise strict_json.Refusal("one twice", "extents of each bucket once")
    return extents


def swap_file_name(rank: int, world: int, folder: int) -> str:
    """The file of one rank in the folder of that number.

    >>> swap_file_name(0, 2, 1)
    'rank-00000-of-00002-folder-1.swap'
    """
    return f"rank-{rank:05d}-of-{world:05d}-folder-{folder}.swap"


@frozen
class SwapHeader:
    """What a file of a swap space says of all of it. Only `folder`, the number of its own one, differs among files.

    `identity` says what the bytes mean, in JSON's own types; `run` tells spaces of one identity apart. Each folder
    has a stripe of every buffer, in proportion to its number in `shares`: equal ones, but older versions of zfunc
    made them follow the speed of drives. Extents are by bucket.
    """

    identity: Mapping[str, Any]
    run: Text
    rank: Count
    world: Annotated[int, Within(int, 1, MAX_INT)]
    folders: tuple[Annotated[str, Within(str, 1, 10_000)], ...]
    shares: tuple[Count, ...]
    extents: Annotated[Mapping[int, Extent], _extents]
    folder: Count

    @cached_property
    def raw(self) -> bytes:
        """The bytes that a file begins with. Raises CheckpointError for too many of them."""
        extents = [[b, x.generations, {p.name: p.nbytes for p in x.parts}] for b, x in self.extents.items()]
        named = {"version": VERSION, **asdict(self, recurse=False), "extents": extents}
        text = strict_json.render(named)
        if len(text) > HEADER_LIMIT:
            raise CheckpointError(
                f"swap space: got a header of {len(text)} bytes, expected at most {HEADER_LIMIT}: use fewer and "
                "larger buckets"
            )
        return frame_header(text)

    @property
    def paths(self) -> list[Path]:
        """The files of the space, by folder."""
        return [Path(x) / swap_file_name(self.rank, self.world, n) for n, x in enumerate(self.folders)]

    def of(self, folder: int) -> "SwapHeader":
        """The header of the file in the folder of that number."""
        return evolve(self, folder=folder)

    @cached_property
    def _laid(self) -> tuple[dict[int, tuple[Stripes, ...]], list[int]]:
        """The stripes, and where they end in each file."""
        ends = [len(self.of(n).raw) for n in range(len(self.folders))]

        def lay(extent: Extent) -> Stripes:
            return {x.name: lay_stripes(x.nbytes, self.shares, ends) for x in extent.parts}

        return {
            b: tuple(lay(extent) for _ in range(extent.generations)) for b, extent in self.extents.items()
        }, ends

    @property
    def stripes(self) -> Mapping[int, tuple[Stripes, ...]]:
        """Where the files have each bucket's buffers, by name, in each generation."""
        return self._laid[0]

    @cached_property
    def num_checksums(self) -> int:
        """Checksums in a record: of all buffers."""
        return sum(num_checksums(x) for stripes, *_ in self.stripes.values() for x in stripes.values())

    @cached_property
    def record_size(self) -> int:
        """Bytes reserved for a record."""
        return record_bytes(len(self.extents), self.num_checksums)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each folder's file."""
        first, *others = self._laid[1]
        return [first + 2 * self.record_size, *others]

    def record_at(self, number: int) -> int:
        """Where in the first file the record of that number is: they alternate."""
        return self._laid[1][0] + number % 2 * self.record_size

    def checksums_of(self, record: "CommitRecord") -> dict[int, dict[str, list[int]]]:
        """The checksums in a record, by bucket and buffer."""
        left = iter(record.checksums)
        return {
            b: {name: list(islice(left, num_checksums(x))) for name, x in stripes.items()}
            for b, (stripes, *_) in self.stripes.items()
        }


def new_header(
    folders: Sequence[Path],
    *,
    identity: Mapping[str, Any],
    extents: Mapping[int, Extent],
    run: str = "any",
    rank: int = 0,
    world: int = 1,
) -> SwapHeader:
    """The header of a space in which each folder gets an equal part of every buffer."""
    names = tuple(str(x.absolute()) for x in folders)
    return SwapHeader(identity, run, rank, world, names, (1,) * len(names), dict(extents), 0)


def frame_header(text: bytes) -> bytes:
    """A header's bytes in a file, from its JSON."""
    raw = _HEADER.pack(_HEADER_MAGIC, len(text), zlib.crc32(text)) + text
    return raw.ljust(whole_blocks(len(raw)), b"\0")


def frame_record(number: int, text: bytes, checksums: Sequence[int]) -> bytes:
    """A record's bytes in a file, from its JSON and the checksums of all buffers."""
    sums = array("I", checksums)
    if sys.byteorder == "big":
        sums.byteswap()
    head = _RECORD.pack(_RECORD_MAGIC, number, len(text), 4 * len(sums), 0)[:-4]
    body = text + sums.tobytes()
    raw = head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body
    return raw.ljust(whole_blocks(len(raw)), b"\0")


def reader_of(file: DirectFile) -> Read:
    """What reads a file's header and records."""

    def read(offset: int, nbytes: int) -> bytes:
        with pages_for(nbytes) as pages:
            with memoryview(pages) as view:
                file.read([view], offset, "the header and records")
            return pages[:]

    return read


def read_header(read: Read, where: str) -> SwapHeader:
    """The header of a file called `where`. Raises CheckpointError if it is damaged or not a swap space's."""
    magic, size, _ = _HEADER.unpack_from(read(0, BLOCK))
    if magic != _HEADER_MAGIC or size > HEADER_LIMIT:
        raise CheckpointError(
            f"{where}: got another kind of file, expected a swap space of zfunc's: move it away"
        )
    return parse_header(read(0, whole_blocks(_HEADER.size + size)), where)


def parse_header(raw: bytes, where: str) -> SwapHeader:
    """The header that `raw` is of. Raises CheckpointError, which begins with `where`, for anything else."""
    _, size, checksum = _HEADER.unpack_from(raw)
    text = raw[_HEADER.size : _HEADER.size + size]
    if zlib.crc32(text) != checksum:
        raise CheckpointError(
            f"{where}: got another header than was written, the checksum differs: resume from a checkpoint, with "
            "another swap folder; check this disk"
        )
    root = strict_json.parse_json(text, where)
    header: SwapHeader = root.of_version(VERSION).read(SwapHeader)
    if (
        header.folder >= len(header.folders)
        or len(header.shares) != len(header.folders)
        or not all(header.shares)
    ):
        got = f"{header.folder} of {list(header.shares)}"
        root.refuse("a file of one of the folders, which have shares above 0", got)
    return header


def check_header(
    path: Path,
    header: SwapHeader,
    first: SwapHeader,
    expected: SwapHeader,
) -> None:
    """Raise CheckpointError unless the file is of the expected identity, extents and place, and of one space with
    the first."""
    same = "continue with the settings it was made with, or name another swap folder"
    for key in {**header.identity, **expected.identity}:
        if header.identity.get(key) != expected.identity.get(key):
            got, other = (f"{x.identity.get(key)!r:.60}" for x in (header, expected))
            raise CheckpointError(f"{path}: got a swap space with {key} {got}, expected {other}: {same}")
    got, place = ((x.rank, x.world, len(x.folders)) for x in (header, expected))
    if got != place:
        raise CheckpointError(
            f"{path}: got rank, ranks and folders {got}, expected {place}: name its folders, "
            f"{', '.join(header.folders)}"
        )
    if [*header.extents.items()] != [*expected.extents.items()]:
        raise CheckpointError(
            f"{path}: got a swap space of other buckets, expected those of this model: {same}"
        )
    if header != first:
        raise CheckpointError(
            f"{path}: got a file of another swap space than {first.folders[0]}, expected one of the same: name its "
            f"folders in their order, {', '.join(header.folders)}"
        )


@frozen
class CommitRecord:
    """A commit: its number, which generation of each extent it is of, their checksums, and its metadata.

    The checksums are those of the chunks of all buffers of all extents, in order. Number 0 is of a new space, with
    no generation of anything and no metadata.
    """

    number: int
    generations: tuple[int, ...]
    checksums: Sequence[int] = field(repr=False)
    metadata: Mapping[str, Any]

    def raw(self, room: int) -> bytes:
        """Its bytes. Raises CheckpointError if they are more than `room`."""
        text = strict_json.render({"generations": self.generations, "metadata": self.metadata})
        raw = frame_record(self.number, text, self.checksums)
        if len(raw) > room:
            raise CheckpointError(
                f"swap space: got a record of {len(raw)} bytes, expected at most {room}: save less as extra="
            )
        return raw


def read_records(read: Read, header: SwapHeader, where: str) -> dict[int, CommitRecord]:
    """The commits in the first file of a space, by number. Raises CheckpointError if there is none."""
    records: dict[int, CommitRecord] = {}
    for slot in (0, 1):
        at = header.record_at(slot)
        magic, number, text, sums, _ = _RECORD.unpack_from(read(at, BLOCK))
        size = _RECORD.size + text + sums
        if magic == _RECORD_MAGIC and number % 2 == slot and size <= header.record_size:
            record = parse_record(read(at, whole_blocks(size)), header, where)
            if record is not None:
                records[number] = record
    if not records:
        raise CheckpointError(
            f"{where}: got no record of a commit, expected one: the file is damaged; check this disk, and resume "
            "from a checkpoint, with another swap folder"
        )
    return records


def parse_record(raw: bytes, header: SwapHeader, where: str) -> CommitRecord | None:
    """The record that `raw` is of, or None if it is torn or of another number of extents."""
    _, number, length, size, checksum = _RECORD.unpack_from(raw)
    body = raw[_RECORD.size : _RECORD.size + length + size]
    if zlib.crc32(body, zlib.crc32(raw[: _RECORD.size - 4])) != checksum or size != 4 * header.num_checksums:
        return None
    sums = array("I", body[length:])
    if sys.byteorder == "big":
        sums.byteswap()
    x = strict_json.parse_json(body[:length], where).read(
        {"generations": [Within(int, 0, 1)], "metadata": dict}
    )
    record = CommitRecord(number, x["generations"], sums, x["metadata"])
    extents = [*header.extents.values()] if number else []
    fits = len(record.generations) == len(extents) and all(
        g < x.generations for g, x in zip(record.generations, extents, strict=True)
    )
    return record if fits else None
