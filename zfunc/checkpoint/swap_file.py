"""The files of a swap space: a header that says what is in one, buffers in stripes, the records of commits.

A file holds, each part padded to 4,096 bytes:

    header     identity, rank, folders, their shares and extents as JSON, with a checksum
    extents    of every bucket, in two generations or in one: this folder's stripes of all buffers, one after the
               other
    2 records  in the first folder's file alone: number and generation of every extent, checksums of their bytes,
               and the metadata of the commit
    extents    the second generation of those that have one at first: once one of them is written again

The invariant: what is read is what was written, or refused. Buffers are moved on all drives at once: each has its
own threads, so that none waits for a slower one; after an error or an interrupt none goes on.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from attrs import asdict, evolve, field, frozen

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.safetensors_file import cut, num_chunks
from zfunc.checkpoint.strict_json import IN_MEMORY, MAX_INT, Count, Text, Within, decoded
from zfunc.core.extents import BLOCK, SUMMED, Extent, cut_in_shares, record_bytes, whole_blocks
from zfunc.errors import CheckpointError
from zfunc.runtime.blocking_calls import in_parallel
from zfunc.runtime.direct_io import DirectFile

VERSION = 2
HEADER_LIMIT = 64 << 20  # bytes: 100,000 parameters
BATCH = 16 << 20  # bytes that a thread sums and transfers at a time
SWAP_FILE = re.compile("rank-[0-9]{5,}-of-[0-9]{5,}-folder-[0-9]+[.]swap")
Read = Callable[[int, int], bytes]  # from an offset of a file, so many bytes
_HEADER = struct.Struct("<8sQI")  # magic, bytes and CRC-32 of the JSON that follows
# magic, number, bytes of JSON and of checksums, CRC-32 of all but this field
_RECORD = struct.Struct("<8sQQQI")
_HEADER_MAGIC, _RECORD_MAGIC = b"zf-swap\n", b"zf-done\n"


def swap_file_name(rank: int, world: int, folder: int) -> str:
    """The file name of one rank's swap file, which stores training state, in folder number `folder` of its
    swap space.

    >>> swap_file_name(0, 2, 1)
    'rank-00000-of-00002-folder-1.swap'
    """
    return f"rank-{rank:05d}-of-{world:05d}-folder-{folder}.swap"


# --- stripes --------------------------------------------------------------------------------------------------


@frozen
class Stripe:
    """A part of a buffer that is stored in one swap file: bytes `start` to `stop` of the buffer, from byte
    `place` of file number `file` on.

    Every 4 MiB of it have a checksum; `first` is the number of the first one, counted over all buffers.
    """

    file: int
    start: int
    stop: int
    place: int
    first: int

    @property
    def last(self) -> int:
        """How many checksums, counted over all buffers, there are up to the end of this stripe."""
        return self.first + num_chunks(self.stop - self.start, SUMMED)


Stripes = Mapping[str, tuple[Stripe, ...]]  # of a bucket's buffers, by name


def lay_stripes(nbytes: int, shares: Sequence[int], ends: list[int], first: int = 0) -> tuple[Stripe, ...]:
    """Divide a buffer of `nbytes` bytes into a stripe for each swap file, in the ratio `shares`. A stripe is
    placed at byte `ends[n]`, the end of file n, which then moves behind it. Its checksums are numbered from
    `first` on."""
    stripes: list[Stripe] = []
    for n, (start, stop) in enumerate(cut_in_shares(nbytes, shares)):
        if start < stop:
            stripes.append(Stripe(n, start, stop, ends[n], first))
            first, ends[n] = stripes[-1].last, ends[n] + whole_blocks(stop - start)
    return tuple(stripes)


def num_checksums(stripes: Sequence[Stripe]) -> int:
    """How many checksums, counted over all buffers, there are up to the end of a buffer with `stripes`; 0 if
    the buffer is empty."""
    return stripes[-1].last if stripes else 0


@frozen(eq=False)
class StripedBuffer:
    """A page-aligned buffer in memory, in whole disk blocks, with its `stripes` in swap files; `name` is for
    errors.

    `checksums` has those of all buffers: `write_striped` sets this buffer's, `read_striped` compares them.
    """

    name: str
    data: memoryview
    stripes: Sequence[Stripe]
    checksums: list[int]


@frozen
class _Chunk:
    """A part of a buffer that has one checksum, of number `number`: the memory `data`, in whole disk blocks,
    and the byte `place` in the swap file where it is stored."""

    buffer: StripedBuffer
    number: int
    data: memoryview
    nbytes: int
    place: int

    @property
    def end(self) -> int:
        return self.place + self.data.nbytes

    def sum(self) -> int:
        return block_checksum(self.data[: self.nbytes])


def write_striped(files: Sequence[DirectFile], buffers: Sequence[StripedBuffer]) -> None:
    """Write buffers to their stripes in the swap files `files`; sets their checksums. Raises DiskError."""
    _transfer(_write, files, buffers)


def read_striped(files: Sequence[DirectFile], buffers: Sequence[StripedBuffer]) -> None:
    """Read buffers into memory from their stripes in the swap files `files`. Raises DiskError, and
    CheckpointError for a wrong checksum."""
    _transfer(_read, files, buffers)


def _transfer(
    call: Callable[[DirectFile, list[_Chunk]], None],
    files: Sequence[DirectFile],
    buffers: Sequence[StripedBuffer],
) -> None:
    by_file: dict[int, list[_Chunk]] = {}  # a file is that of a drive
    for buffer in buffers:
        for x in buffer.stripes:
            data = buffer.data[x.start : whole_blocks(x.stop)]
            for n, (start, stop) in enumerate(cut(0, x.stop - x.start, SUMMED), x.first):
                chunk = _Chunk(buffer, n, data[start : whole_blocks(stop)], stop - start, x.place + start)
                by_file.setdefault(x.file, []).append(chunk)
    # Of the threads of a drive one sums while another waits for it.
    in_parallel(call, *([(files[n], x) for x in _batches(chunks)] for n, chunks in by_file.items()))


def _batches(chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
    """Group chunks that follow one another in a file into batches of at most 16 MiB."""
    batch: list[_Chunk] = []
    for x in chunks:
        if batch and (x.place != batch[-1].end or x.end - batch[0].place > BATCH):
            yield batch
            batch = []
        batch.append(x)
    if batch:
        yield batch


def _names(batch: list[_Chunk]) -> str:
    return " and ".join(dict.fromkeys(x.buffer.name for x in batch))


def _write(file: DirectFile, batch: list[_Chunk]) -> None:
    for x in batch:
        x.buffer.checksums[x.number] = x.sum()
    file.write([x.data for x in batch], batch[0].place, _names(batch))


def _read(file: DirectFile, batch: list[_Chunk]) -> None:
    file.read([x.data for x in batch], batch[0].place, _names(batch))
    for x in batch:
        if x.sum() != x.buffer.checksums[x.number]:
            raise CheckpointError(
                f"{file.path}: {x.buffer.name}: got other bytes than were written at {x.place} of the file, "
                f"{x.nbytes} of them: the checksum differs; check this disk, and resume from a checkpoint"
            )


def block_checksum(data: memoryview) -> int:
    """The CRC-32 of a Fletcher checksum of each block of `data`, and of the rest: as fast as memory is read.

    Of a block: the sum of its 512 64-bit words, and the sum of (512 - i) times word i, modulo 2^64. Flipped bits,
    words that change places, and blocks that are zero, old or of another place are found, but for one in 2^32.

    >>> block_checksum(memoryview(bytes(4096))) == block_checksum(memoryview(bytes(8192)))
    False
    """
    import numpy as np  # here, as the kernel that comes with torch: what reads no checkpoint needs none

    from zfunc.optim.kernel_loader import cpu_adam

    blocks, rest = divmod(data.nbytes, BLOCK)
    sums = np.empty(2 * blocks, "<u8")
    cpu_adam.block_sums(np.frombuffer(data, np.uint8).ctypes.data, sums.ctypes.data, blocks)
    return zlib.crc32(data[data.nbytes - rest :], zlib.crc32(sums.data))


# --- the header -----------------------------------------------------------------------------------------------


def _extents(value: Any) -> dict[int, Extent]:
    """Decode extents by bucket index from a JSON list of [bucket, number of copies, bytes by buffer]."""
    each = decoded(value, tuple[tuple[Count, Annotated[int, Within(int, 1, 2)], Mapping[str, Count]], ...])
    extents = {b: Extent.of(sizes.items(), generations=n) for b, n, sizes in each}
    if len(extents) < len(each):
        raise strict_json.Refusal("one twice", "extents of each bucket once")
    return extents


@frozen
class SwapHeader:
    """The header of each of one rank's swap files (training state on disk); in the files of one space it
    differs only in `folder`, the number of the file's own folder.

    `identity` says what the bytes mean, in JSON's own types; `run` tells apart spaces with the same identity.
    Folder n has a part of every buffer, in the ratio `shares[n]`, today all equal. `extents` has the buffers
    of each bucket.
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
        """The header's bytes at the start of a swap file. Raises CheckpointError for more than 64 MiB."""
        extents = [[b, x.generations, {p.name: p.nbytes for p in x.parts}] for b, x in self.extents.items()]
        named = {"version": VERSION, **asdict(self, recurse=False), "extents": extents}
        text = strict_json.render(named)
        if len(text) > HEADER_LIMIT:
            got, most = f"a header of {len(text)} bytes", f"at most {HEADER_LIMIT}"
            disk.reject("swap space", got, most, "use fewer and larger buckets")
        return frame_header(text)

    @property
    def paths(self) -> list[Path]:
        """The paths of this rank's swap files, in the order of their folders."""
        return [Path(x) / swap_file_name(self.rank, self.world, n) for n, x in enumerate(self.folders)]

    def of(self, folder: int) -> "SwapHeader":
        """The header of the swap file in the folder of number `folder`."""
        return evolve(self, folder=folder)

    @cached_property
    def _laid(self) -> tuple[dict[int, tuple[Stripes, ...]], list[int], int, list[int]]:
        """Lay out all files. Returns stripes by bucket and copy; for each file, the byte where the first
        copies' stripes end; the number of checksums in a commit; for each file, the byte where all stripes
        end."""
        ends, firsts = [len(self.of(n).raw) for n in range(len(self.folders))], dict[int, int]()
        stripes, last = dict[int, tuple[Stripes, ...]](), 0

        def lay(b: int, extent: Extent, ends: list[int], last: int) -> int:
            laid = dict[str, tuple[Stripe, ...]]()
            for x in extent.parts:
                laid[x.name] = lay_stripes(x.nbytes, self.shares, ends, last)
                last = num_checksums(laid[x.name]) or last
            stripes[b] = (*stripes.get(b, ()), laid)
            return last

        for b, extent in self.extents.items():
            firsts[b] = last
            for _ in range(extent.generations):
                last = lay(b, extent, ends, firsts[b])
        behind = [ends[0] + 2 * record_bytes(len(self.extents), last), *ends[1:]]
        for b, extent in self.extents.items():
            if extent.generations == 1:
                lay(b, extent, behind, firsts[b])
        return stripes, ends, last, behind

    @property
    def stripes(self) -> Mapping[int, tuple[Stripes, ...]]:
        """By bucket index, for each copy (generation) of the bucket, the stripes of each buffer by name. The
        copies have the same checksum numbers."""
        return self._laid[0]

    @property
    def num_checksums(self) -> int:
        """The number of checksums that a commit record has, those of all buffers of all buckets."""
        return self._laid[2]

    @property
    def record_size(self) -> int:
        """The bytes reserved in a swap file for a commit record."""
        return record_bytes(len(self.extents), self.num_checksums)

    @property
    def sizes(self) -> list[int]:
        """The size in bytes of the swap file in each folder."""
        first, *others = self._laid[1]
        return [first + 2 * self.record_size, *others]

    @property
    def sizes_of_two(self) -> list[int]:
        """The size in bytes of each folder's swap file once every bucket has two copies (generations)."""
        return self._laid[3]

    def record_at(self, number: int) -> int:
        """The byte offset, in the first swap file, of the record of commit `number`. Records of even and odd
        commits have one place each, so a record replaces the last but one."""
        return self._laid[1][0] + number % 2 * self.record_size


def new_header(
    folders: Sequence[Path],
    *,
    identity: Mapping[str, Any],
    extents: Mapping[int, Extent],
    run: str = "any",
    rank: int = 0,
    world: int = 1,
) -> SwapHeader:
    """The header of a new swap space of one rank, with equal parts of every buffer in all `folders`."""
    names = tuple(str(x.absolute()) for x in folders)
    return SwapHeader(identity, run, rank, world, names, (1,) * len(names), dict(extents), 0)


def frame_header(text: bytes) -> bytes:
    """The bytes of a swap file's header, from the header's JSON."""
    return _padded(_HEADER.pack(_HEADER_MAGIC, len(text), zlib.crc32(text)) + text)


def _padded(raw: bytes) -> bytes:
    return raw.ljust(whole_blocks(len(raw)), b"\0")


def read_header(read: Read, where: str) -> SwapHeader:
    """The header of swap file `where`, read by `read`. Raises CheckpointError for a damaged or foreign file."""
    magic, size, _ = _HEADER.unpack_from(read(0, BLOCK))
    if magic != _HEADER_MAGIC or size > HEADER_LIMIT:
        disk.reject(where, "another kind of file", "a swap space of zfunc's", "move it away")
    return parse_header(read(0, whole_blocks(_HEADER.size + size)), where)


def parse_header(raw: bytes, where: str) -> SwapHeader:
    """The swap header in bytes `raw`. Raises CheckpointError, which begins with `where`, for any other bytes."""
    _, size, checksum = _HEADER.unpack_from(raw)
    text = raw[_HEADER.size : _HEADER.size + size]
    if zlib.crc32(text) != checksum:
        do = "the checksum differs; resume from a checkpoint, with another swap folder, and check this disk"
        disk.reject(where, "another header than was written", "that one", do)
    root = strict_json.parse_json(text, where)
    header: SwapHeader = root.of_version(VERSION).read(SwapHeader)
    if not (all(header.shares) and header.folder < len(header.folders) == len(header.shares)):
        got = f"{header.folder} of {list(header.shares)}"
        root.refuse("a file of one of the folders, which have shares above 0", got)
    return header


def check_header(path: Path, header: SwapHeader, first: SwapHeader, expected: SwapHeader) -> None:
    """Raise CheckpointError unless the `header` of swap file `path` has the identity, extents and rank of
    `expected`, and belongs to the space whose first file has the header `first`."""
    both = header, expected
    pairs = {key: [x.identity.get(key) for x in both] for key in {**header.identity, **expected.identity}}
    pairs |= {key: [getattr(x, key) for x in both] for key in ("rank", "world")}
    pairs["number of folders"] = [len(x.folders) for x in both]
    if [*header.extents.items()] != [*expected.extents.items()]:
        pairs["buckets"] = ["others", "those of this model"]
    named = f"with its folders in their order, {', '.join(header.folders)}"
    for key, (got, other) in pairs.items():
        if got != other:
            do = f"continue with the settings it was made with, and {named}; or name another swap folder"
            disk.reject(path, f"a swap space with {key} {got!r:.60}", f"{other!r:.60}", do)
    if header != first:
        got = f"a file of another swap space than {first.folders[0]}"
        disk.reject(path, got, "one of the same", f"continue {named}")


# --- the records of commits -----------------------------------------------------------------------------------


@frozen
class CommitRecord:
    """A commit of a swap space, which makes written state valid: for each extent the number of its valid copy
    (generation), the metadata, the commit's number, and the checksums of all buffers, in order.

    Number 0 is the record of a new space: no copy is valid, and there is no metadata.
    """

    generations: tuple[Annotated[int, Within(int, 0, 1)], ...]
    metadata: Mapping[str, Any]
    number: int = field(default=0, metadata=IN_MEMORY)
    checksums: Sequence[int] = field(default=(), repr=False, metadata=IN_MEMORY)

    def written_again(self, header: SwapHeader) -> bool:
        """Whether the valid copy of some extent is the second one of an extent that began with a single
        one."""
        pairs = zip(self.generations, header.extents.values(), strict=False)
        return any(g == x.generations for g, x in pairs)

    def raw(self, room: int) -> bytes:
        """The bytes of the commit record. Raises CheckpointError if they are more than `room` bytes."""
        raw = frame_record(self.number, strict_json.render(strict_json.to_plain(self)), self.checksums)
        if len(raw) > room:
            disk.reject(
                "swap space", f"a record of {len(raw)} bytes", f"at most {room}", "save less as extra="
            )
        return raw


def frame_record(number: int, text: bytes, checksums: Sequence[int]) -> bytes:
    """The bytes of commit record `number` in a swap file, from its JSON `text` and the checksums of all buffers."""
    head = _RECORD.pack(_RECORD_MAGIC, number, len(text), 4 * len(checksums), 0)[:-4]
    body = text + struct.pack(f"<{len(checksums)}I", *checksums)
    return _padded(head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body)


def read_records(read: Read, header: SwapHeader, where: str) -> dict[int, CommitRecord]:
    """The commit records in a swap space's first file, by number. Raises CheckpointError if there is none."""
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
        do = "the file is damaged; check this disk, and resume from a checkpoint, with another swap folder"
        disk.reject(where, "no record of a commit", "one", do)
    return records


def parse_record(raw: bytes, header: SwapHeader, where: str) -> CommitRecord | None:
    """The commit record in `raw`; None if it is incomplete, or its number of extents is not the header's."""
    _, number, length, size, checksum = _RECORD.unpack_from(raw)
    body = raw[_RECORD.size : _RECORD.size + length + size]
    if zlib.crc32(body, zlib.crc32(raw[: _RECORD.size - 4])) != checksum or size != 4 * header.num_checksums:
        return None
    said: CommitRecord = strict_json.parse_json(body[:length], where).read(CommitRecord)
    if len(said.generations) != (len(header.extents) if number else 0):
        return None
    return evolve(said, number=number, checksums=struct.unpack(f"<{size // 4}I", body[length:]))


def read_space(path: Path) -> tuple[SwapHeader, dict[int, CommitRecord]]:
    """The header in the swap file `path`, and the commit records of its swap space, by commit number.

    Only the file in the space's first folder has records; for another file they are {}.
    """
    file = disk.open_file(path)
    header = read_header(file.read, str(path))
    return header, {} if header.folder else read_records(file.read, header, str(path))
