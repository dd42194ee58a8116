"""Checksums of a tensor's chunks, however the tensor is written: in any order, by any thread, in any pieces.

The invariant: the checksum of a chunk is the CRC-32, `zlib.crc32`, of its bytes, and no byte is counted twice.

A checksum here answers to disks and memory, not to an enemy, who would change the manifest too. CRC-32 finds every
error of up to 32 neighbouring bits, every three flipped bits anywhere in a chunk and all others but one in 2^32,
as fast as a good disk (blake2b: a third of it), without the interpreter's lock. And it is linear: the checksum of
two neighbours follows from theirs, so bytes are read once, when they are written, while they are in the cache.
"""

from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise

from attrs import define, field

CHUNK = 4 << 20  # bytes of a tensor that share a checksum: what a flipped byte is narrowed down to
CHUNK_LIMIT = 64 << 20  # a reader keeps one chunk in memory
_POLYNOMIAL, _ONE = 0xEDB88320, 1 << 31  # bit-reflected: the highest bit is x^0


def num_chunks(nbytes: int, chunk: int) -> int:
    """Chunks of a tensor of so many bytes."""
    return -(-nbytes // chunk)


def cut(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """The bytes start to stop, cut where chunks meet."""
    edges = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two neighbours from theirs; `length` is the second's, in bytes.

    Source: zlib's crc32_combine: appending n bytes multiplies by x^(8n) modulo the polynomial.

    >>> import zlib
    >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    return _times(_power(length), first) ^ second


@lru_cache(maxsize=1024)
def _power(length: int) -> int:
    """x^(8 length) modulo the polynomial, by squaring."""
    result, base = _ONE, 1 << (31 - 8)
    while length:
        if length & 1:
            result = _times(base, result)
        base, length = _times(base, base), length >> 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial."""
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product, a = product ^ b, a ^ bit
        bit, b = bit >> 1, b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@define(eq=False)
class ChunkChecksums:
    """What is known of a tensor while it is written. Offsets are in bytes; not for two threads at once."""

    nbytes: int
    chunk: int
    _starts: list[int] = field(factory=list[int])  # of the claimed ranges, ascending, with their ends
    _stops: list[int] = field(factory=list[int])
    _parts: dict[int, list[tuple[int, int, int]]] = field(factory=dict[int, list[tuple[int, int, int]]])

    def claim(self, start: int, stop: int) -> bool:
        """Reserve bytes start to stop, start < stop, for one writer. False if some are another's."""
        at = bisect_left(self._starts, start)
        if (at and self._stops[at - 1] > start) or (at < len(self._starts) and self._starts[at] < stop):
            return False
        self._starts.insert(at, start)
        self._stops.insert(at, stop)
        return True

    def add(self, start: int, stop: int, checksum: int) -> None:
        """Bytes start to stop, all of one chunk, are written."""
        self._parts.setdefault(start // self.chunk, []).append((start, stop, checksum))

    def first_missing(self) -> int | None:
        """The first byte that is not written, or None if the tensor is whole."""
        for index in range(num_chunks(self.nbytes, self.chunk)):
            end = index * self.chunk
            for start, stop, _ in sorted(self._parts.get(index, ())):
                if start != end:
                    return end
                end = stop
            if end != min((index + 1) * self.chunk, self.nbytes):
                return end
        return None

    def checksums(self) -> tuple[int, ...]:
        """Those of all chunks of a whole tensor."""
        result: list[int] = []
        for index in range(num_chunks(self.nbytes, self.chunk)):
            (_, _, total), *others = sorted(self._parts[index])
            for start, stop, checksum in others:
                total = combine(total, checksum, stop - start)
            result.append(total)
        return tuple(result)
