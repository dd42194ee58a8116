"""What a checkpoint contains, and which rank writes it: slices of every parameter's state.

The slices of all ranks tile the state of every parameter, because the layout's pieces do and begin where no element
is shared. Saving and loading take them from here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from zfunc.checkpoint.manifest import (
    BUFFER,
    PENDING,
    Manifest,
    ParameterEntry,
    StateSlice,
    TrainingPosition,
)
from zfunc.checkpoint.safetensors_file import Shard, TensorInfo
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.layout import Bucket, Layout, Span
from zfunc.core.optimizer_state import EMA, StateBuffer, stored_buffers
from zfunc.core.spec import FROZEN


@frozen
class Slice:
    """Elements start to stop of one kind of a parameter's state.

    In memory they begin at `at` of the rank's buffer of that kind and bucket. In the
    rank's shard they are the tensor `stored`, in the parameter's shape if it is complete.
    """

    parameter: str
    bucket: int
    kind: str
    start: int
    stop: int
    at: int
    stored: TensorInfo


def state_slices(
    layout: Layout, rank: int, world: int, pending: Mapping[int, Dtype], *, ema: bool = False
) -> Iterator[Slice]:
    """One rank's slices of the trained parameters, by bucket; with `ema` of the moving averages too.

    `pending` has the buckets whose gradient is still to be applied, with its type.
    """
    averages = (EMA,) if ema else ()
    for bucket in layout.buckets:
        gradient = [StateBuffer(PENDING, pending[bucket.index])] if bucket.index in pending else []
        for span in bucket.spans:
            piece = layout.piece(span, rank, world)
            if piece.start < piece.stop:
                for buffer in (*stored_buffers(bucket.state_format), *averages, *gradient):
                    yield _slice(span, bucket.index, buffer, piece.start, piece.stop, piece.at)


def frozen_slices(layout: Layout, bucket: Bucket, dtype: Dtype, rank: int, world: int) -> Iterator[Slice]:
    """One rank's slices of the frozen parameters of a bucket."""
    for span in bucket.spans:
        piece = layout.piece(span, rank, world)
        if piece.start < piece.stop:
            yield _slice(span, bucket.index, StateBuffer(FROZEN, dtype), piece.start, piece.stop, piece.at)


def _slice(span: Span, bucket: int, buffer: StateBuffer, start: int, stop: int, at: int) -> Slice:
    first, last = buffer.numel(start), buffer.numel(stop)
    complete = buffer.shared == 1 and (start, stop) == (0, span.stop - span.start)
    shape = span.shape if complete else (last - first,)
    stored = TensorInfo(f"{span.name}/{buffer.name}", DTYPES[buffer.dtype].safetensors, shape)
    return Slice(span.name, bucket, buffer.name, first, last, buffer.numel(at), stored)


def parameter_entries(
    layout: Layout, pieces: Mapping[str, Mapping[str, tuple[StateSlice, ...]]], *, ema: bool = False
) -> Iterator[ParameterEntry]:
    """The parameters of a checkpoint, from their pieces by name and kind. An empty parameter has none."""
    common = layout.state_format
    for bucket in (*layout.buckets, *layout.frozen_buckets):
        trainable = bucket.index < len(layout.buckets)
        state = (*stored_buffers(bucket.state_format), *((EMA,) if ema else ()))
        kinds = [x.name for x in state] if trainable else [FROZEN]
        own = bucket.state_format if trainable and bucket.state_format != common else None
        for span in bucket.spans:
            by_kind = {**dict.fromkeys(kinds, ()), **pieces.get(span.name, {})}
            yield ParameterEntry(span.name, span.shape, trainable, by_kind, own)


@frozen
class Snapshot:
    """What a checkpoint is of: everything but the bytes."""

    layout: Layout
    frozen_dtypes: Mapping[int, Dtype]  # of the frozen buckets
    position: TrainingPosition
    optimizer: Mapping[str, Any]
    buffers: Sequence[TensorInfo] = ()  # of modules, by full name
    ema: bool = False  # whether there are moving averages

    def slices(self, rank: int, world: int) -> list[Slice]:
        """What one rank writes: its slices, of frozen parameters too; rank 0 also modules' buffers."""
        layout = self.layout
        slices = [*state_slices(layout, rank, world, {}, ema=self.ema)]
        for bucket in layout.frozen_buckets:
            slices += frozen_slices(layout, bucket, self.frozen_dtypes[bucket.index], rank, world)
        first = len(layout.buckets) + len(layout.frozen_buckets)
        for number, x in enumerate(self.buffers if rank == 0 else (), first):
            if x.numel:
                stored = evolve(x, name=f"{x.name}/{BUFFER}")
                slices.append(Slice(x.name, number, BUFFER, 0, x.numel, 0, stored))
        return slices

    def manifest(self, shards: Sequence[Shard], extra: Mapping[str, Any]) -> Manifest:
        """The manifest of the shards that all ranks wrote, in their order."""
        pieces: dict[str, dict[str, tuple[StateSlice, ...]]] = {}
        for rank in range(len(shards)):
            for x in self.slices(rank, len(shards)):
                by_kind = pieces.setdefault(x.parameter, {})
                piece = StateSlice(x.start, x.stop, rank, x.stored.name, 0)
                by_kind[x.kind] = (*by_kind.get(x.kind, ()), piece)

        return Manifest(
            world=len(shards),
            state_format=self.layout.state_format,
            shards=tuple(shards),
            parameters=(*parameter_entries(self.layout, pieces, ema=self.ema), *self._buffer_entries(pieces)),
            position=self.position,
            optimizer=self.optimizer,
            extra=extra,
        )

    def _buffer_entries(
        self, pieces: Mapping[str, Mapping[str, tuple[StateSlice, ...]]]
    ) -> Iterator[ParameterEntry]:
        for x in self.buffers:
            yield ParameterEntry(x.name, x.shape, False, {BUFFER: (), **pieces.get(x.name, {})})
