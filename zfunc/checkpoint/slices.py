"""What one rank keeps of every parameter's state, as slices: in its buffers, in its shard, in the manifest.

The invariant: the slices of all ranks of a world tile every parameter's state, because the layout's slices do, and
begin and end where elements are not shared. Who writes and who reads takes them from here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from zfunc.checkpoint.manifest import (
    FROZEN,
    PENDING,
    Manifest,
    ParameterEntry,
    StateSlice,
    TrainingPosition,
    state_kinds,
)
from zfunc.checkpoint.safetensors_file import Shard, TensorInfo
from zfunc.core.layout import Layout, Span

NOTHING: Mapping[int, str] = {}
FROZEN_BUCKET = -1  # of slices of parameters that are not trained


@frozen
class Slice:
    """Elements start to stop of one kind of a parameter's state; `at` is where the rank's buffer of it has them,
    counted from its bucket (from 0, of parameters that are not trained).

    `stored` is the tensor a shard has of it: of the parameter's own shape where it is the whole of it.
    """

    parameter: str
    bucket: int
    kind: str
    start: int
    stop: int
    at: int
    stored: TensorInfo


def slices_of(
    layout: Layout, state_format: str, rank: int, world: int, pending: Mapping[int, str] = NOTHING
) -> Iterator[Slice]:
    """All slices of one rank, in the order of the buckets. Those in `pending` have a gradient that waits, too, of
    the dtype given, in a shard's terms.
    """
    kinds = state_kinds(state_format)
    for bucket in layout.buckets:
        for span in bucket.spans:
            piece = layout.piece(span, rank, world)
            if piece.start == piece.stop:
                continue
            for name, kind in kinds.items():
                start, stop = piece.start // kind.shared, kind.numel(piece.stop)
                shape = _shape(span, start, stop) if kind.shared == 1 else (stop - start,)
                stored = TensorInfo(f"{span.name}/{name}", kind.dtypes[0], shape)
                yield Slice(span.name, bucket.index, name, start, stop, piece.at // kind.shared, stored)
            if dtype := pending.get(bucket.index):
                stored = TensorInfo(f"{span.name}/{PENDING}", dtype, _shape(span, piece.start, piece.stop))
                yield Slice(span.name, bucket.index, PENDING, piece.start, piece.stop, piece.at, stored)


def _shape(span: Span, start: int, stop: int) -> tuple[int, ...]:
    return span.shape if (start, stop) == (0, span.stop - span.start) else (stop - start,)


def frozen_slices(layout: Layout, dtype: str) -> Iterator[Slice]:
    """Those of the parameters that are not trained, which are in rank 0's shard; `dtype` is a shard's."""
    for span in layout.frozen:
        if span.start == span.stop:
            continue
        stored = TensorInfo(f"{span.name}/{FROZEN}", dtype, span.shape)
        yield Slice(span.name, FROZEN_BUCKET, FROZEN, 0, span.stop - span.start, span.start, stored)


def build_manifest(
    layout: Layout,
    state_format: str,
    slices: Sequence[Iterable[Slice]],
    shards: Sequence[Shard],
    *,
    position: TrainingPosition,
    optimizer: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Manifest:
    """The manifest of what all ranks wrote: `slices[r]` are in `shards[r]`."""
    pieces: dict[tuple[str, str], list[StateSlice]] = {}
    for rank, of_rank in enumerate(slices):
        for x in of_rank:
            piece = StateSlice(x.start, x.stop, rank, x.stored.name, 0)
            pieces.setdefault((x.parameter, x.kind), []).append(piece)

    def kept(span: Span, kinds: Iterable[str], *, trainable: bool) -> ParameterEntry:
        return ParameterEntry(
            span.name, span.shape, trainable, {k: tuple(pieces.get((span.name, k), ())) for k in kinds}
        )

    def kinds(span: Span) -> list[str]:
        return [*state_kinds(state_format), *([PENDING] if (span.name, PENDING) in pieces else [])]

    trained = [kept(span, kinds(span), trainable=True) for span in layout.spans]
    fixed = [kept(span, (FROZEN,), trainable=False) for span in layout.frozen]
    return Manifest(
        world=len(shards),
        state_format=state_format,
        shards=tuple(shards),
        parameters=(*trained, *fixed),
        position=position,
        optimizer=optimizer,
        extra=extra,
    )
