"""A file of tensors in the safetensors format: which tensor, of what type and shape, lies where.

The tensors of a Header tile the data without gap or overlap, up to the end of the file.

The format (github.com/huggingface/safetensors): 8 bytes, the length of the rest, little-endian; JSON that begins
with `{` and may end in spaces: for every name its dtype, shape and [begin, end) in the data; then the data. Files
written here have larger elements first, so that every tensor is aligned to the size of its elements.

Checksums are CRC-32, which protects against disks and memory, not against an attacker, who would change the
manifest too. It finds every error of up to 32 neighbouring bits and every three flipped bits in a chunk, and misses
one in 2^32 of the others. It is as fast as a good disk (blake2b: a third of it) and needs no interpreter lock.
"""

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

from attrs import field, frozen, validators

from zfunc.checkpoint import strict_json
from zfunc.checkpoint.strict_json import MAX_INT, JsonNode
from zfunc.core.dtypes import DTYPES
from zfunc.errors import CheckpointError, did_you_mean

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
_NAME = (
    validators.min_len(1),
    validators.max_len(1000),
    validators.not_(validators.in_((_METADATA,))),
)
_COUNT = validators.and_(validators.instance_of(int), validators.ge(0))


@frozen
class TensorInfo:
    """A tensor in a file: its dtype is a key of BYTES."""

    name: str = field(validator=_NAME)
    dtype: str = field(validator=validators.in_(BYTES))
    shape: tuple[int, ...] = field(converter=tuple[int, ...], validator=validators.deep_iterable(_COUNT))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * BYTES[self.dtype]


@frozen
class Shard:
    """A checkpoint's file as the manifest describes it: a reader gets the bytes that were written, or an error.

    `header` is the CRC-32 of all that precedes the data; `checksums[name]` are those of a tensor's chunks, each of
    `chunk` bytes but the last.
    """

    file: str
    size: int
    header: int
    chunk: int
    tensors: tuple[TensorInfo, ...]
    checksums: Mapping[str, tuple[int, ...]]


def num_chunks(nbytes: int, chunk: int) -> int:
    """Chunks of a tensor of so many bytes."""
    return -(-nbytes // chunk)


def cut(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """The bytes start to stop of a tensor, cut where chunks meet."""
    edges = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def cut_elements(start: int, stop: int, item: int, chunk: int) -> list[tuple[int, int]]:
    """The elements start to stop, of `item` bytes each, cut where chunks meet."""
    return [(a // item, b // item) for a, b in cut(start * item, stop * item, chunk)]


@frozen
class Header:
    """The bytes before the data, the tensors in the order of the data, and where in the file each begins."""

    raw: bytes
    tensors: Mapping[str, TensorInfo]
    begins: Mapping[str, int]
    size: int  # of the whole file, in bytes
    metadata: Mapping[str, str]


def make_header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> Header:
    """The header of a new file. Raises ValueError for two tensors of one name, or too many.

    >>> make_header([TensorInfo("b", "BF16", [2]), TensorInfo("w", "F32", [3])], {}).begins
    {'w': 128, 'b': 140}
    """
    placed = {t.name: t for t in sorted(tensors, key=lambda t: -BYTES[t.dtype])}
    if len(placed) < len(tensors):
        raise ValueError("got two tensors of one name, expected one each: give them names of their own")
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for t in placed.values():
        begins[t.name], end = end, end + t.nbytes
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (begins[t.name], end)}
    text = strict_json.render(entries)
    text += b" " * (-(LENGTH + len(text)) % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"got a header of {len(text)} bytes, expected at most {HEADER_LIMIT}: use fewer tensors"
        )
    raw = len(text).to_bytes(LENGTH, "little") + text
    return Header(raw, placed, {n: len(raw) + x for n, x in begins.items()}, len(raw) + end, metadata)


def describe_shard(file: str, header: Header, checksums: Mapping[str, Sequence[int]], chunk: int) -> Shard:
    """The Shard of a file that was written with this header, from the CRC-32 of its tensors' chunks."""
    return Shard(
        file=file,
        size=header.size,
        header=zlib.crc32(header.raw),
        chunk=chunk,
        tensors=tuple(header.tensors.values()),
        checksums={name: tuple(checksums[name]) for name in header.tensors},
    )


def header_length(path: Path, first: bytes, size: int) -> int:
    """Bytes of JSON, as the first 8 of a file of `size` say. Raises CheckpointError if they cannot be there."""
    length = int.from_bytes(first, "little")
    if size < LENGTH or not 2 <= length <= min(size - LENGTH, HEADER_LIMIT):
        claimed = f"a header of {length}" if size >= LENGTH else "no header"
        raise CheckpointError(
            f"{path}: got a file of {size} bytes with {claimed}, expected a header of 2 to {HEADER_LIMIT} bytes, "
            "all of it there: the file is truncated or not safetensors; use another"
        )
    return length


def read_header(path: Path, raw: bytes, size: int) -> Header:
    """Check and take apart all bytes before the data of a file of `size` bytes. Raises CheckpointError."""
    root = strict_json.parse_json(raw[LENGTH:], str(path))
    if raw[LENGTH : LENGTH + 1] != b"{":
        root.refuse("a header that begins with an object", "spaces before it")
    entries = root.entries()
    metadata = entries.pop(_METADATA, JsonNode({}, "")).entries()
    tensors = sorted((_entry(name, node) for name, node in entries.items()), key=lambda x: x[1:])
    end = 0
    for tensor, begin, stop in tensors:
        if begin != end:
            root.refuse(f"{end}, the end of what precedes it", f"{tensor.name!r} at byte {begin} of the data")
        end = stop
    if len(raw) + end != size:
        root.refuse(f"{end}, the end of the last tensor", f"{size - len(raw)} bytes of data")
    return Header(
        raw=raw,
        tensors={t.name: t for t, *_ in tensors},
        begins={t.name: len(raw) + begin for t, begin, _ in tensors},
        size=size,
        metadata={key: node.text(low=0, high=HEADER_LIMIT) for key, node in metadata.items()},
    )


def read_stored(name: JsonNode, dtype: JsonNode, shape: JsonNode) -> TensorInfo:
    """A checked tensor whose size in bytes fits in 64 bits."""
    return TensorInfo(name.text(), dtype.choice(tuple(BYTES)), read_shape(shape))


def read_shape(node: JsonNode) -> tuple[int, ...]:
    """A checked shape: its bytes, at any precision and with every 0 taken as 1, fit in 64 bits."""
    dims = node.integers()
    if len(dims) > 64 or prod(max(d, 1) for d in dims) * 8 > MAX_INT:
        node.refuse("at most 64 dimensions and 2^60 elements")
    return dims


def _entry(name: str, node: JsonNode) -> tuple[TensorInfo, int, int]:
    dtype, shape, offsets = node.fields("dtype", "shape", "data_offsets")
    tensor = read_stored(JsonNode(name, f"{node.where}, its name"), dtype, shape)
    begin, stop = offsets.integers(count=2)
    if stop - begin != tensor.nbytes:
        offsets.refuse(f"{tensor.nbytes} bytes, what {tensor.dtype} {list(tensor.shape)[:8]} takes")
    return tensor, begin, stop


def find_tensor(path: Path, header: Header, name: str) -> TensorInfo:
    """The tensor of that name. Raises ValueError, with the nearest name, if the file has none."""
    if name not in header.tensors:
        hint = did_you_mean(name, list(header.tensors))
        raise ValueError(f"{path}: got the name {name!r}{hint}, expected that of a tensor in it")
    return header.tensors[name]
