"""A file of tensors in the safetensors format: which tensor, of what type and shape, lies where; written and read.

The format (github.com/huggingface/safetensors): 8 bytes, the length of the rest, little-endian; JSON that begins
with `{` and may end in spaces: for every name its dtype, shape and [begin, end) in the data; then the data. Files
written here have larger elements first, so that every tensor is aligned to the size of its elements.

Checksums are CRC-32, which protects against disks and memory, not against an attacker, who would change the
manifest too. It finds every error of up to 32 neighbouring bits and every three flipped bits in a chunk, and misses
one in 2^32 of the others. It is as fast as a good disk (blake2b: a third of it) and needs no interpreter lock.

A new file's space is reserved at once, and its tensors are filled in any order by any thread; `finish` returns only
if all bytes are written and on the disk. No byte of one that is read is returned before its checksum was compared,
and nothing is allocated before the file has the expected size.
"""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from reprlib import repr as brief
from threading import Lock
from typing import Annotated, Any

from attrs import define, evolve, field, frozen, validators

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.strict_json import IN_MEMORY, MAX_INT, Checksum, Count, Refusal, Text, Within, known
from zfunc.core.dtypes import DTYPES
from zfunc.errors import USE_ANOTHER, CheckpointError, refuse
from zfunc.runtime import system_calls
from zfunc.runtime.direct_io import open_reserved

BYTES = {
    **{x.safetensors: x.nbytes for x in DTYPES.values()},
    **dict.fromkeys(("I64", "U64"), 8),
    **dict.fromkeys(("I32", "U32"), 4),
    "U16": 2,
    **dict.fromkeys(("I8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Bytes of an element, by the format's names; its types of less than a byte are not read."""
CHUNK = 4 << 20  # bytes of a tensor that share a checksum: what a flipped byte is narrowed down to
CHUNK_LIMIT = 64 << 20  # a reader keeps one chunk in memory
HEADER_LIMIT = 16 << 20  # bytes; 100,000 tensors
LENGTH = 8  # bytes before the JSON
_ALIGNMENT = 64  # of the data in the file; the format wants 8
_METADATA = "__metadata__"
_NAME = validators.matches_re(f"(?s)(?!{_METADATA}$).{{1,1000}}")  # but for the name of the metadata
_COUNT = validators.and_(validators.instance_of(int), validators.ge(0))
_NEXT = f"{USE_ANOTHER}; check this disk"


def shape(value: Any) -> tuple[int, ...]:
    """Decode a shape from JSON. Raises Refusal above 64 dimensions or 2^60 elements, a 0 counted as 1."""
    dims: tuple[int, ...] = strict_json.decoded(value, tuple[Count, ...])
    if len(dims) > 64 or prod(max(d, 1) for d in dims) * 8 > MAX_INT:
        raise Refusal(brief(value), "at most 64 dimensions and 2^60 elements")
    return dims


Shape = Annotated[tuple[int, ...], shape]


@frozen
class TensorInfo:
    """A tensor in a safetensors file: name, dtype as the format calls it ("F32"), shape; after writing also
    the checksums of its chunks."""

    name: Text = field(validator=_NAME)
    dtype: Annotated[str, known(lambda: {x: x for x in BYTES})] = field(validator=validators.in_(BYTES))
    shape: Shape = field(converter=tuple[int, ...], validator=validators.deep_iterable(_COUNT))
    checksums: tuple[Checksum, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements of the tensor; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements of the tensor."""
        return self.numel * BYTES[self.dtype]


@frozen
class Shard:
    """A shard file of a checkpoint as the manifest describes it: `size` in bytes, and the tensors, in the
    order in which they follow the header.

    `header` is the CRC-32 of the header; a tensor has a checksum for every `chunk` bytes. For a file of
    another format, such as a swap file, `places` has the byte at which each tensor begins, and `checksum` is
    the function that sums a chunk.
    """

    file: Annotated[str, Within(str, 1, 200)]
    size: Count
    header: Checksum
    chunk: Annotated[int, Within(int, 1, CHUNK_LIMIT)]
    tensors: tuple[TensorInfo, ...]
    places: Mapping[str, int] | None = field(default=None, metadata=IN_MEMORY)
    checksum: Callable[[memoryview], int] = field(default=zlib.crc32, metadata=IN_MEMORY)

    def summed(self, checksums: Mapping[str, Sequence[int]]) -> "Shard":
        """A copy of this shard with `checksums` of each tensor's chunks, given by the tensor's name."""
        return evolve(
            self, tensors=tuple(evolve(t, checksums=tuple(checksums[t.name])) for t in self.tensors)
        )

    @property
    def header_size(self) -> int:
        """Bytes of the file before its first tensor: the header's length field and the header."""
        return self.size - sum(t.nbytes for t in self.tensors)

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """The tensors of the shard by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def begins(self) -> dict[str, int]:
        """The byte of the file at which each tensor begins, by name."""
        if self.places is not None:
            return dict(self.places)
        begins = accumulate((t.nbytes for t in self.tensors), initial=self.header_size)
        return dict(zip(self.by_name, begins, strict=False))


def num_chunks(nbytes: int, chunk: int) -> int:
    """The number of chunks, each of `chunk` bytes with its own checksum, in a tensor of `nbytes` bytes."""
    return -(-nbytes // chunk)


def cut(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Divide bytes `start` to `stop` of a tensor into ranges (start, stop) at multiples of `chunk`."""
    edges = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def cut_elements(start: int, stop: int, item: int, chunk: int) -> list[tuple[int, int]]:
    """Divide elements `start` to `stop` of a tensor, of `item` bytes each, into ranges (start, stop) at the
    multiples of `chunk` bytes."""
    return [(a // item, b // item) for a, b in cut(start * item, stop * item, chunk)]


@define(eq=False)
class ShardWriter:
    """Writes a safetensors file: call `write_at` for all elements, from any threads, then `finish`."""

    path: Path
    shard: Shard  # without checksums
    _file: disk.Opened
    _missing: dict[str, int]  # bytes still to be written, by tensor
    _lock: Lock = field(factory=Lock)

    def write_at(self, name: str, start: int, buffer: Any) -> None:
        """Write a contiguous buffer (an array, bytes) as elements `start` and on of tensor `name`.

        Raises ValueError for a buffer that does not fit; CheckpointError if the disk cannot take it: `close` the
        file then. Slices have to be disjoint.
        """
        data = disk.bytes_of(buffer)
        tensor = self.shard.by_name[name]
        item = BYTES[tensor.dtype]
        first, last = start * item, start * item + data.nbytes
        if data.nbytes % item or not 0 <= first <= last <= tensor.nbytes:
            got, expected = (
                f"{data.nbytes} bytes for element {start}",
                f"whole {tensor.dtype} elements within ",
            )
            refuse(repr(name), got, expected + str(tensor.numel), "pass a slice of it and where that begins")
        file = self._file
        with disk.os_errors_as(self.path, f"writing bytes {first} to {last} of {name!r}"):
            disk.write_all(file.fd, data, self.shard.begins[name] + first)
        with self._lock:
            self._missing[name] -= data.nbytes

    def finish(self) -> None:
        """Wait until the file is on the disk, and close it.

        Raises CheckpointError if the number of bytes written is not that of all tensors, or the disk fails.
        """
        for name, missing in self._missing.items():
            if missing:
                nbytes = self.shard.by_name[name].nbytes
                do = "call write_at once for every slice before finish"
                disk.reject(self.path, f"{nbytes - missing} bytes of {name!r}", f"{nbytes}", do)
        with disk.os_errors_as(self.path, "waiting until it is on the disk"):
            os.fsync(self._file.fd)
        self.close()

    def close(self) -> None:
        """Close the file once the writes under way have ended. A second call does nothing."""
        self._file = disk.Opened()


def create_shard(
    path: Path,
    tensors: Sequence[TensorInfo],
    metadata: Mapping[str, str] | None = None,
    *,
    mode: int = 0o600,
) -> ShardWriter:
    """Make the file for `tensors` at its full size, with its header, in which `metadata` is stored as text.

    Only the file's owner may read it, unless `mode` and the umask say otherwise.

    Raises ValueError for two tensors of one name, or too many; CheckpointError if the file exists or has no room.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = create_shard(Path(folder, "a.safetensors"), [TensorInfo("w", "F32", (2, 3))])
    ...     writer.write_at("w", 4, bytes(8))
    ...     writer.write_at("w", 0, bytes(16))
    ...     writer.finish()
    """
    placed = {t.name: t for t in sorted(tensors, key=lambda t: -BYTES[t.dtype])}
    if len(placed) < len(tensors):
        raise ValueError("got two tensors of one name, expected one each: give them names of their own")
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for t in placed.values():
        begin, end = end, end + t.nbytes
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (begin, end)}
    text = strict_json.render(entries)
    text += b" " * (-(LENGTH + len(text)) % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        refuse(path.name, f"a header of {len(text)} bytes", f"at most {HEADER_LIMIT}", "use fewer tensors")
    header = len(text).to_bytes(LENGTH, "little") + text
    shard = Shard(path.name, len(header) + end, zlib.crc32(header), CHUNK, tuple(placed.values()))
    with disk.os_errors_as(path, f"making a file of {shard.size} bytes"):
        file = disk.Opened(open_reserved(path, shard.size, os.O_WRONLY, mode=mode))
        disk.write_all(file.fd, memoryview(header), 0)
    return ShardWriter(path, shard, file, {t.name: t.nbytes for t in tensors})


@define(eq=False)
class ShardReader:
    """A shard file of a checkpoint, open for reading until `close`; every read is compared with the
    checksums. Any thread may read."""

    path: Path
    shard: Shard
    _file: disk.Opened
    _lock: Lock = field(factory=Lock)
    _last_chunk: tuple[tuple[str, int], memoryview] | None = None  # of those that were wanted in part

    def close(self) -> None:
        """Close the file and free the memory. A second call does nothing."""
        self._file, self._last_chunk = disk.Opened(), None

    def read_into(self, name: str, start: int, stop: int, buffer: Any) -> None:
        """Fill a writable contiguous buffer with elements `start` to `stop` of tensor `name`.

        Reads at most those elements and, at both ends, the rest of a chunk. Raises ValueError for a range or buffer
        that does not fit; CheckpointError, with file, tensor and offset, for bytes that are not what was written:
        what the buffer holds is undefined then.
        """
        tensor, data = self.shard.by_name[name], disk.bytes_of(buffer)
        item = BYTES[tensor.dtype]
        fits = data.nbytes == (stop - start) * item and not (data.readonly and data.nbytes)
        if not 0 <= start <= stop <= tensor.numel or not fits:
            raise ValueError(
                f"{name!r}: got elements {start} to {stop} for {data.nbytes} bytes, expected a range within "
                f"{tensor.numel} {tensor.dtype} elements and a writable buffer of its size"
            )
        first, chunk = start * item, self.shard.chunk
        for begin, end in cut(first, stop * item, chunk):
            part, (index, offset) = data[begin - first : end - first], divmod(begin, chunk)
            size = min(chunk, tensor.nbytes - index * chunk)
            if part.nbytes == size:
                self._read_chunk(tensor, index, part)
                continue
            with self._lock:
                if self._last_chunk is None or self._last_chunk[0] != (name, index):
                    self._last_chunk = None  # freed before the next one is allocated
                    self._read_chunk(tensor, index, whole := memoryview(bytearray(size)))
                    self._last_chunk = (name, index), whole
                part[:] = self._last_chunk[1][offset : offset + part.nbytes]

    def _read_chunk(self, tensor: TensorInfo, index: int, part: memoryview) -> None:
        begin, item = index * self.shard.chunk, BYTES[tensor.dtype]
        end, at = begin + part.nbytes, self.shard.begins[tensor.name] + begin
        file = self._file
        with disk.os_errors_as(self.path, f"reading bytes {begin} to {end} of {tensor.name!r}"):
            disk.read_all(file.fd, part, at)
        if self.shard.checksum(part) != tensor.checksums[index]:
            raise CheckpointError(
                f"{self.path}: got other bytes than were written in {tensor.name!r}, elements {begin // item} to "
                f"{end // item} (bytes {at} to {at + part.nbytes} of the file): the checksum differs; {_NEXT}"
            )


def open_shard(path: Path, shard: Shard) -> ShardReader:
    """Open the file at `path` that `shard` describes. Raises CheckpointError for another size or header; a
    swap file may be larger than described."""
    file = disk.open_file(path)
    if file.size < shard.size or (file.size > shard.size and shard.places is None):
        do = f"the file is truncated or another one; {USE_ANOTHER}"
        disk.reject(path, f"{file.size} bytes", f"{shard.size}", do)
    header = b"" if shard.places is not None else file.read(0, shard.header_size)
    if shard.places is None and zlib.crc32(header) != shard.header:
        got = f"another header than was written, in bytes 0 to {len(header)}"
        disk.reject(path, got, "that one", f"the checksum differs; {_NEXT}")
    system_calls.advise(file.fd, 0, 0, "SEQUENTIAL")  # two threads would look like random access
    return ShardReader(path, shard, file)
