"""The optimizer state of a bucket as the disk has it: its buffers one after another, each at whole blocks.

What memory has as well comes last, so that a step moves one range and leaves the rest to a commit. Each of several
drives has an equal part of every buffer.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from attrs import field, frozen

from zfunc.core.layout import round_up

BLOCK = 4096  # bytes; direct transfers begin and end at a multiple
SUMMED = 4 << 20  # bytes of a stripe that share a checksum
_METADATA = 1 << 20  # bytes of a record of a commit beside generations and checksums


def whole_blocks(nbytes: int) -> int:
    """`nbytes` rounded up to whole disk blocks, of 4096 bytes.

    >>> whole_blocks(0), whole_blocks(1), whole_blocks(4096)
    (0, 4096, 4096)
    """
    return round_up(nbytes, BLOCK)


def record_bytes(num_extents: int, num_checksums: int) -> int:
    """Bytes, in whole disk blocks, of a commit's record of `num_extents` extents and `num_checksums` checksums."""
    return whole_blocks(_METADATA + 16 * num_extents + 4 * num_checksums)


def cut_in_shares(nbytes: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Divide a buffer of `nbytes` bytes among drives in the ratio `shares`. Returns (start, stop) in bytes of
    each drive's part; every part but the last is a multiple of the disk block of 4096 bytes.

    >>> cut_in_shares(5 * BLOCK + 1, [2, 1])
    ((0, 16384), (16384, 20481))
    """
    blocks, total = whole_blocks(nbytes) // BLOCK, sum(shares)
    edges = (blocks * x // total * BLOCK for x in accumulate(shares, initial=0))
    return tuple((start, min(stop, nbytes)) for start, stop in pairwise(edges))


@frozen
class ExtentPart:
    """One buffer in a bucket's extent: its name, its size in bytes, and its start, a byte offset in the extent."""

    name: str
    nbytes: int
    start: int

    @property
    def stop(self) -> int:
        """Byte offset in the extent where this part ends, rounded up to a disk block."""
        return whole_blocks(self.start + self.nbytes)


@frozen
class Extent:
    """The place on disk of one bucket's optimizer state, buffer after buffer; each update reads and writes
    the first `moved` buffers.

    `generations` is the number of copies: 2 if each commit writes the buffers anew, to the older copy; 1 for
    buffers that no step changes. Equality ignores `moved`, which files do not store.

    >>> extent = Extent.of([("master_low", 5000), ("exp_avg", 100)], [("master_high", 5000)])
    >>> [x.start for x in extent.parts], extent.nbytes, extent.moved_bytes
    ([0, 8192, 12288], 20480, 12288)
    """

    parts: tuple[ExtentPart, ...] = field(converter=tuple)
    moved: int = field(eq=False)
    generations: int = 2

    @classmethod
    def of(
        cls, moved: Iterable[tuple[str, int]], others: Iterable[tuple[str, int]] = (), *, generations: int = 2
    ) -> "Extent":
        """An extent with `generations` copies of these buffers, given as (name, bytes): first the buffers
        `moved` by every update, then the `others`."""
        moved = list(moved)
        sizes = [*moved, *others]
        starts = accumulate((whole_blocks(nbytes) for _, nbytes in sizes), initial=0)
        parts = tuple(ExtentPart(*x, start) for x, start in zip(sizes, starts, strict=False))
        return cls(parts, len(moved), generations)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts of one generation of the extent, in whole blocks."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes, in whole disk blocks, of the buffers that every update reads from this extent and writes."""
        return self.parts[self.moved - 1].stop if self.moved else 0
