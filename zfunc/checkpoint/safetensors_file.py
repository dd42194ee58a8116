"""A file of tensors in the safetensors format: which tensor, of what type and shape, lies where.

The format (github.com/huggingface/safetensors): 8 bytes, the length of the rest, little-endian; JSON that begins
with `{` and may end in spaces: for every name its dtype, shape and [begin, end) in the data; then the data. Files
written here have larger elements first, so that every tensor is aligned to the size of its elements.

Checksums are CRC-32, which protects against disks and memory, not against an attacker, who would change the
manifest too. It finds every error of up to 32 neighbouring bits and every three flipped bits in a chunk, and misses
one in 2^32 of the others. It is as fast as a good disk (blake2b: a third of it) and needs no interpreter lock.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

from attrs import field, frozen, validators

from zfunc.checkpoint import strict_json
from zfunc.core.dtypes import DTYPES
from zfunc.errors import did_you_mean

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
    """A checkpoint's file as the manifest describes it: the bytes of a header, then the tensors, in this order.

    `header` is the CRC-32 of the header; `checksums[name]` are those of a tensor's chunks, each of `chunk` bytes
    except the last. In a file of another format, which may have gaps between and in tensors and more than them,
    `places` says where they begin, and `checksum` is how chunks were summed.
    """

    file: str
    size: int
    header: int
    chunk: int
    tensors: tuple[TensorInfo, ...]
    checksums: Mapping[str, tuple[int, ...]]
    places: Mapping[str, int] | None = None
    checksum: Callable[[memoryview], int] = zlib.crc32

    @property
    def header_size(self) -> int:
        """Bytes before the first tensor."""
        return self.size - sum(t.nbytes for t in self.tensors)

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """The tensors by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def begins(self) -> dict[str, int]:
        """Where in the file each tensor begins, by name."""
        if self.places is not None:
            return dict(self.places)
        begins = accumulate((t.nbytes for t in self.tensors), initial=self.header_size)
        return dict(zip(self.by_name, begins, strict=False))


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
    """The bytes before the data of a new file, the tensors in the order of the data, and where each begins."""

    raw: bytes
    tensors: Mapping[str, TensorInfo]
    begins: Mapping[str, int]
    size: int  # of the complete file, in bytes


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
    return Header(raw, placed, {n: len(raw) + x for n, x in begins.items()}, len(raw) + end)


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


def find_tensor(path: Path, tensors: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    """The tensor of that name. Raises ValueError, with the nearest name, if the file has none."""
    if name not in tensors:
        hint = did_you_mean(name, list(tensors))
        raise ValueError(f"{path}: got the name {name!r}{hint}, expected that of a tensor in it")
    return tensors[name]
