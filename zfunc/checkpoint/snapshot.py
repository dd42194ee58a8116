"""What a checkpoint contains, and which rank writes it: slices of every parameter's state.

The slices of all ranks tile the state of every parameter, because the layout's pieces do and begin where no element
is shared. Saving and loading take them from here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from zfunc.checkpoint.manifest import BUFFER, Manifest, ParameterEntry, StateSlice, TrainingPosition
from zfunc.checkpoint.safetensors_file import Shard, TensorInfo
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.layout import Layout, Span
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


Kinds = Mapping[int, Sequence[StateBuffer]]  # what is kept of the parameters of each bucket
Pieces = dict[str, dict[str, tuple[StateSlice, ...]]]  # by name and kind


def stored_kinds(
    layout: Layout, frozen: Mapping[int, Dtype], *, ema: bool = False
) -> dict[int, list[StateBuffer]]:
    """The kinds of state that a checkpoint has by bucket; `frozen` has the type of each frozen bucket's values, and
    with `ema` there are moving averages."""
    averages = [EMA] if ema else []
    kinds = {x.index: [*stored_buffers(x.state_format), *averages] for x in layout.buckets}
    return kinds | {b: [StateBuffer(FROZEN, dtype)] for b, dtype in frozen.items()}


def slices_of(layout: Layout, kinds: Kinds, rank: int, world: int) -> Iterator[Slice]:
    """One rank's slices of every parameter's state of these kinds, by bucket."""
    for bucket in (*layout.buckets, *layout.frozen_buckets):
        for span in bucket.spans if bucket.index in kinds else ():
            piece = layout.piece(span, rank, world)
            if piece.start < piece.stop:
                for kind in kinds[bucket.index]:
                    yield _slice(span, bucket.index, kind, piece.start, piece.stop, piece.at)


def _slice(span: Span, bucket: int, buffer: StateBuffer, start: int, stop: int, at: int) -> Slice:
    first, last = buffer.numel(start), buffer.numel(stop)
    complete = buffer.shared == 1 and (start, stop) == (0, span.stop - span.start)
    shape = span.shape if complete else (last - first,)
    stored = TensorInfo(f"{span.name}/{buffer.name}", DTYPES[buffer.dtype].safetensors, shape)
    return Slice(span.name, bucket, buffer.name, first, last, buffer.numel(at), stored)


def entries_of(layout: Layout, kinds: Kinds, pieces: Pieces) -> Iterator[ParameterEntry]:
    """The parameters of a checkpoint, from their pieces. An empty parameter has none."""
    common = layout.state_format
    for bucket in (*layout.buckets, *layout.frozen_buckets):
        trainable = bucket.index < len(layout.buckets)
        own = bucket.state_format if trainable and bucket.state_format != common else None
        for span in bucket.spans:
            by_kind = {x.name: pieces.get(span.name, {}).get(x.name, ()) for x in kinds[bucket.index]}
            yield ParameterEntry(span.name, span.shape, trainable, by_kind, own)


@frozen
class Snapshot:
    """What a checkpoint is of: everything but the bytes."""

    layout: Layout
    kinds: Kinds
    position: TrainingPosition
    optimizer: Mapping[str, Any]
    buffers: Sequence[TensorInfo] = ()  # of modules, by full name

    def slices(self, rank: int, world: int) -> list[Slice]:
        """What one rank writes: its slices, of frozen parameters too; rank 0 also modules' buffers."""
        slices = [*slices_of(self.layout, self.kinds, rank, world)]
        for number, x in enumerate(self.buffers if rank == 0 else (), len(self.kinds)):
            if x.numel:
                stored = evolve(x, name=f"{x.name}/{BUFFER}")
                slices.append(Slice(x.name, number, BUFFER, 0, x.numel, 0, stored))
        return slices

    def manifest(self, shards: Sequence[Shard], extra: Mapping[str, Any]) -> Manifest:
        """The manifest of the shards that all ranks wrote, in their order."""
        pieces: Pieces = {}
        for rank in range(len(shards)):
            for x in self.slices(rank, len(shards)):
                by_kind = pieces.setdefault(x.parameter, {})
                piece = StateSlice(x.start, x.stop, rank, x.stored.name, 0)
                by_kind[x.kind] = (*by_kind.get(x.kind, ()), piece)
        buffers = (
            ParameterEntry(x.name, x.shape, False, {BUFFER: (), **pieces.get(x.name, {})})
            for x in self.buffers
        )
        return Manifest(
            world=len(shards),
            moments=self.layout.state_format,
            shards=tuple(shards),
            parameters=(*entries_of(self.layout, self.kinds, pieces), *buffers),
            position=self.position,
            optimizer=self.optimizer,
            extra=extra,
        )
