"""Which bytes of a checkpoint a reader needs, whoever wrote it and whoever reads it.

The invariant: the reads of a slice fill it, every element once, and read nothing else.
"""

from bisect import bisect_right
from collections.abc import Sequence

from attrs import frozen

from zfunc.checkpoint.manifest import Manifest
from zfunc.errors import did_you_mean


@frozen
class WantedSlice:
    """Elements start to stop of one kind of a parameter's state, as if it were flat."""

    kind: str
    parameter: str
    start: int
    stop: int


@frozen
class PlannedRead:
    """Elements start to stop of a shard's tensor are elements `to` and on of the wanted slice number `wanted`."""

    shard: int
    tensor: str
    start: int
    stop: int
    wanted: int
    to: int


def plan_reads(manifest: Manifest, wanted: Sequence[WantedSlice]) -> tuple[PlannedRead, ...]:
    """The reads that fill the wanted slices, in the order they lie in the shards.

    Raises ValueError for a parameter or kind the checkpoint does not have, and for a slice outside of it.
    """
    reads = [read for n, slice_ in enumerate(wanted) for read in _reads(manifest, slice_, n)]
    return tuple(sorted(reads, key=lambda r: (r.shard, manifest.places[r.shard][r.tensor], r.start)))


def _reads(manifest: Manifest, wanted: WantedSlice, number: int) -> list[PlannedRead]:
    kept = manifest.by_name.get(wanted.parameter)
    if kept is None or wanted.kind not in kept.pieces:
        known = list(manifest.by_name if kept is None else kept.pieces)
        name = wanted.parameter if kept is None else wanted.kind
        raise ValueError(
            f"got {name!r}{did_you_mean(name, known)}, expected what the checkpoint has of {wanted}"
        )
    pieces = kept.pieces[wanted.kind]
    numel = pieces[-1].stop if pieces else 0
    if not 0 <= wanted.start <= wanted.stop <= numel:
        raise ValueError(f"got {wanted}, expected a slice of {numel} elements")
    reads: list[PlannedRead] = []
    at = wanted.start
    first = bisect_right(pieces, at, key=lambda x: x.start) - 1
    for piece in pieces[max(first, 0) :]:
        if at >= wanted.stop:
            break
        begin = piece.offset + at - piece.start
        count = min(piece.stop, wanted.stop) - at
        reads.append(PlannedRead(piece.shard, piece.tensor, begin, begin + count, number, at - wanted.start))
        at += count
    return reads
