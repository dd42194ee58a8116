"""The place of every parameter in the flat buffer, and the buckets that are reduced, moved and updated as a unit.

All trainable parameters of a model are one flat buffer, in segment order. Spans and buckets never overlap. A layout
depends on names, shapes and sizes alone, so every process that builds it gets the same one. No torch here.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from numbers import Integral
from typing import Any, cast

from attrs import field, frozen

from zfunc.core.display import brief, counted
from zfunc.values import of_type, whole

# Elements. Every span begins at a multiple, so views are aligned for vector units in any precision.
ALIGNMENT = 64
LEFT = -1  # the group of parameters that a step does not update

# Of a parameter, one in a bucket: the format of its state, and whether it stays in fp32, or is kept as bytes.
Kind = tuple[str, bool, bool]


@frozen
class UpdateWork:
    """What an optimizer's update of one matrix costs on the device in addition to the element-wise part:
    `flops`, `workspace` in bytes, kernel `launches`. All 0 for an element-wise optimizer."""

    flops: int = 0
    workspace: int = 0
    launches: int = 0


ELEMENTWISE = UpdateWork()  # no more than that pass


def _tuple(shape: Any) -> Any:
    """An attrs converter of an iterable to a tuple; `Parameter` checks the items."""
    return tuple(cast("Iterable[Any]", shape)) if isinstance(shape, Iterable) else shape


@frozen
class Parameter:
    """One parameter of a model: full name, shape, whether it is trained, and what its optimizer says of it.

    `group` is the number of the settings that the optimizer has for it (`zfunc.optim.base.Optimizer.group`). A name
    that two segments declare is a tied parameter: it has one span; its gradient is the sum of both segments'.

    `encodes` is the number of weights that a frozen, quantized parameter encodes in its bytes, which its segment
    decodes; the bytes are uint8 on the device in any precision. 0 for any other parameter.

    Raises ValueError for an invalid name or shape, and for a trainable parameter with `encodes`.
    """

    name: str = field()
    shape: tuple[int, ...] = field(converter=_tuple)
    trainable: bool = True
    group: int = 0
    state_format: str = "fp32"  # a row of `zfunc.core.optimizer_state.STATE_FORMATS`
    work: UpdateWork = ELEMENTWISE
    fp32_in: tuple[str, ...] = field(
        default=(), converter=_tuple
    )  # precisions in which it is fp32 on the device
    encodes: int = 0

    def __attrs_post_init__(self) -> None:
        if self.encodes and self.trainable:
            raise ValueError(
                f"parameter {self.name!r}: got one of bytes that is trained, expected it frozen: pass "
                "trainable=False"
            )

    @name.validator  # pyright: ignore
    def _check_name(self, _: object, name: Any) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"parameter: got the name {name!r}, expected a text: pass such as 'head.weight'")

    @shape.validator  # pyright: ignore
    def _check_shape(self, _: object, shape: Any) -> None:
        if not isinstance(shape, tuple) or not all(isinstance(n, Integral) and n >= 0 for n in shape):  # pyright: ignore
            raise ValueError(
                f"parameter {self.name!r}: got the shape {shape!r}, expected a tuple of sizes: pass such as "
                "(8, 4), or (8,) for a vector"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the parameter; 1 for a scalar."""
        return prod(self.shape)


@frozen
class Span:
    """Elements `start` to `stop` of the flat buffer of parameters, which hold one parameter of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    group: int = 0
    work: UpdateWork = ELEMENTWISE
    encodes: int = 0  # as of its parameter

    @property
    def numel(self) -> int:
        """Number of elements of the span."""
        return self.stop - self.start


@frozen(cache_hash=True)  # a dictionary key with hundreds of spans
class Bucket:
    """Elements `start` to `stop` of the flat buffer of parameters: a group of parameters (`spans`) whose
    gradients are reduced, and whose state is updated, together.

    `deliveries` has the segments with gradients for the bucket, in groups: the gradients of a group are
    packed into one slot and leave the device as one. An ordinary bucket has one group, a bucket of tied
    parameters one for each segment. A `persistent` bucket is never streamed. The parameters of an `in_fp32`
    bucket are fp32 on the device in any precision. All state of a bucket has one format.
    """

    index: int
    start: int
    stop: int
    spans: tuple[Span, ...]
    deliveries: tuple[tuple[int, ...], ...]
    persistent: bool = False
    state_format: str = "fp32"
    in_fp32: bool = False

    def __repr__(self) -> str:
        return brief(self, "index", "start", "stop", "spans")

    @property
    def numel(self) -> int:
        """Number of elements of the bucket, with the padding that aligns every rank's slice."""
        return self.stop - self.start

    @property
    def is_bytes(self) -> bool:
        """Whether the elements of the bucket are bytes of encoded weights."""
        return any(x.encodes for x in self.spans)

    def slice_of(self, rank: int, world: int) -> tuple[int, int]:
        """Start and stop, relative to the bucket, of the slice that `rank` of `world` ranks updates."""
        size = self.numel // world
        return rank * size, (rank + 1) * size

    def runs_within(
        self, start: int, stop: int, unused: Collection[str] = ()
    ) -> tuple[tuple[int, int, int], ...]:
        """The part of `runs` between elements `start` and `stop` of the bucket, as (start, stop, optimizer
        group). Parameters named in `unused` get group -1, which no update touches."""
        runs = self._runs_beside({*unused}) if unused else self.runs
        clipped = ((max(start, a), min(stop, b), group) for a, b, group in runs)
        return tuple(run for run in clipped if run[0] < run[1])

    def spans_within(self, start: int, stop: int) -> tuple[tuple[int, int, Span], ...]:
        """`(start, stop, span)` for each parameter with elements between `start` and `stop` of the bucket:
        the range of its elements there, and its span."""
        edges = ((max(start, x.start - self.start), min(stop, x.stop - self.start), x) for x in self.spans)
        return tuple(part for part in edges if part[0] < part[1])

    def _ranks_of(self, span: Span, world: int) -> range:
        """The ranks, of `world`, whose slices of the bucket have elements of the parameter `span`."""
        size = self.numel // world
        return range((span.start - self.start) // size, -(-(span.stop - self.start) // size))

    def work(self, world: int) -> UpdateWork:
        """The update's cost in addition to the element-wise part, on that of `world` ranks where it is
        highest. A rank whose slice has a part of a matrix updates the whole matrix."""
        if all(x.work == ELEMENTWISE for x in self.spans):
            return ELEMENTWISE
        flops, launches = [0] * world, [0] * world
        for x in self.spans:
            for rank in self._ranks_of(x, world):
                flops[rank] += x.work.flops
                launches[rank] += x.work.launches
        return UpdateWork(max(flops), max(x.work.workspace for x in self.spans), max(launches))

    @cached_property
    def parts(self) -> tuple[tuple[int, int, Span], ...]:
        """`(start, stop, span)` of each parameter, in elements from the bucket's start; a range includes the
        padding behind the parameter, so the ranges cover the bucket."""
        starts = [x.start - self.start for x in self.spans]
        return tuple(zip(starts, [*starts[1:], self.numel], self.spans, strict=True))

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """`(start, stop, group)`: the bucket's elements, cut where the optimizer group changes."""
        return self._runs_beside(set())

    def _runs_beside(self, unused: set[str]) -> tuple[tuple[int, int, int], ...]:
        runs: list[tuple[int, int, int]] = []
        for start, stop, span in self.parts:
            group = LEFT if span.name in unused else span.group
            if runs and runs[-1][2] == group:
                start = runs.pop()[0]
            runs.append((start, stop, group))
        return tuple(runs)


@frozen
class Piece:
    """The elements `start` to `stop` of a parameter that lie in one rank's slice of the parameter's bucket,
    and the offset `at` of the first in the slice; start equals stop if there are none."""

    start: int
    stop: int
    at: int


@frozen
class Layout:
    """All buckets of a model's parameters, and the parameter names of each segment.

    Frozen parameters have a flat buffer and buckets of their own, numbered after the trainable ones: they are read
    and fetched like trainable ones, but neither delivered nor updated.
    """

    segments: tuple[tuple[str, ...], ...]
    buckets: tuple[Bucket, ...]
    frozen_buckets: tuple[Bucket, ...]

    def __repr__(self) -> str:
        sizes = counted(len(self.spans), "parameter"), counted(len(self.buckets), "bucket")
        return f"Layout({' in '.join(sizes)}, {counted(len(self.segments), 'segment')})"

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the trainable parameters in their flat buffer."""
        return tuple(span for bucket in self.buckets for span in bucket.spans)

    @cached_property
    def frozen(self) -> tuple[Span, ...]:
        """The spans of the frozen parameters in their flat buffer."""
        return tuple(span for bucket in self.frozen_buckets for span in bucket.spans)

    @property
    def state_format(self) -> str:
        """The name of the optimizer state's format; if buckets have several formats, the first bucket's."""
        return self.buckets[0].state_format

    @property
    def numel(self) -> int:
        """Elements of the flat buffer of trainable parameters, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @cached_property
    def num_trainable(self) -> int:
        """Trainable elements of the model: tied parameters counted once, no padding."""
        return sum(span.stop - span.start for span in self.spans)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of the model: the trainable and the frozen ones, without padding; tied parameters are counted
        once, a quantized parameter as the weights that it encodes."""
        return self.num_trainable + sum(x.encodes or x.numel for x in self.frozen)

    @cached_property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of trainable parameters, then those of frozen parameters, each at its index."""
        return (*self.buckets, *self.frozen_buckets)

    @cached_property
    def _bucket_of(self) -> dict[str, Bucket]:
        return {span.name: bucket for bucket in self.all_buckets for span in bucket.spans}

    @cached_property
    def _read(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({self._bucket_of[x].index for x in names})) for names in self.segments)

    @cached_property
    def _used(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(b for b in read if b < len(self.buckets)) for read in self._read)

    @cached_property
    def parameters(self) -> tuple[tuple[Parameter, ...], ...]:
        """The parameters of each segment, as passed to `make_layout`.

        >>> layout = make_layout([[Parameter("a", (4, 4)), Parameter("b", (2,), trainable=False)]], bucket_size=64)
        >>> [p.name for p in layout.parameters[0]], layout.parameters[0][1].trainable
        (['a', 'b'], False)
        """
        fp32 = {True: ("bf16", "fp16"), False: ()}  # at least in the one that the layout is for
        known = {
            span.name: Parameter(
                *(span.name, span.shape, b.index < len(self.buckets), span.group, b.state_format, span.work),
                fp32_in=fp32[b.in_fp32],
                encodes=span.encodes,
            )
            for b in self.all_buckets
            for span in b.spans
        }
        return tuple(tuple(known[name] for name in names) for names in self.segments)

    def weights_of(self, segment: int) -> tuple[int, ...]:
        """Ascending indices of the buckets that a segment reads, trainable (`buckets_of`) and frozen.

        >>> layout = make_layout([[Parameter("a", (4,), False)], [Parameter("b", (2,))]], bucket_size=64)
        >>> [(b.index, b.start, b.stop) for b in layout.frozen_buckets], layout.weights_of(0), layout.weights_of(1)
        ([(1, 0, 64)], (1,), (0,))
        """
        return self._read[segment]

    def buckets_of(self, segment: int) -> tuple[int, ...]:
        """Ascending indices of the trainable buckets with parameters of segment number `segment`."""
        return self._used[segment]

    def contributions(self, segment: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """`(bucket, delivery, segments)` for each bucket that gets gradients from `segment`, in the order in
        which they are packed: the bucket's index; the number of the delivery (0, or for tied parameters one
        for each segment); all segments whose gradients make up the delivery.

        The bucket that the next higher segment began comes first, and the one that the next lower segment
        continues comes last, so at most one bucket is incomplete at a time.
        """
        parts = [
            (b, d, group)
            for b in self.buckets_of(segment)
            for d, group in enumerate(self.buckets[b].deliveries)
            if segment in group
        ]
        return sorted(parts, key=lambda part: (segment == part[2][0], segment != part[2][-1], -part[0]))

    def bucket_of(self, span: Span) -> Bucket:
        """The bucket that contains the parameter of `span`."""
        return self._bucket_of[span.name]

    def piece(self, span: Span, rank: int, world: int) -> Piece:
        """The part of the parameter of `span` that is in the bucket slice of `rank`, of `world` ranks; empty
        if the slice has none of its elements."""
        bucket = self.bucket_of(span)
        first, last = (bucket.start + edge for edge in bucket.slice_of(rank, world))
        start, stop = max(span.start, first), min(span.stop, last)
        return Piece(start - span.start, max(start, stop) - span.start, start - first)

    @cached_property
    def first_trainable(self) -> int:
        """The number of the first segment with a trainable parameter, at which backward stops."""
        return next(s for s, used in enumerate(self._used) if used)


def make_layout(
    segments: Sequence[Sequence[Parameter]],
    *,
    bucket_size: int,
    world: int = 1,
    within_segments: bool = False,
    persistent: Collection[str] = (),
    in_fp32: Collection[str] = (),
) -> Layout:
    """Lay out `segments` (the parameters of each) in buckets of at most `bucket_size` elements.

    A parameter larger than `bucket_size` has a bucket of its own. Bucket ends are padded so that each of `world`
    ranks has an equal, aligned slice. Buckets fill from the last segment backwards, the order in which gradients
    arrive, so the first bucket may be short. Tied and untied parameters never share a bucket, nor do those
    whose state has another format; with `within_segments`, nor do those of two segments. The frozen parameters of a
    segment are one bucket.

    `persistent` names the parameters that stay on the device where the others are streamed. They have buckets of
    their own, the first ones. `in_fp32` names those that are fp32 on the device: a bucket has them alone, or none.

    Raises TypeError for segments that are no lists of Parameters, ValueError for a bucket size or world below 1,
    for one name declared in two ways, and for a model without a trainable parameter.

    >>> layout = make_layout([[Parameter("a", (4, 4))], [Parameter("b", (100,))]], bucket_size=128)
    >>> [(b.start, b.stop, [s.name for s in b.spans]) for b in layout.buckets]
    [(0, 64, ['a']), (64, 192, ['b'])]
    """
    for what, value in (("bucket_size", bucket_size), ("world", world)):
        whole(what, value, 1)
    contributors = _contributors(segments)

    def kind(p: Parameter) -> Kind:
        return p.state_format if p.trainable else "", p.name in in_fp32, bool(p.encodes)

    owned = _owned(segments, kind)
    if not any(p.trainable for own in owned for p in own):
        raise ValueError("no parameter is trainable: set requires_grad=True on at least one")

    quantum = ALIGNMENT * world

    def stays(p: Parameter) -> bool:
        return p.name in persistent

    def cut(groups: Sequence[Sequence[Parameter]], first: int) -> Iterator[Bucket]:
        offset = 0
        for index, group in enumerate(groups, first):
            spans, stop = _place(group, offset)
            stop = round_up(stop - offset, quantum) + offset
            deliveries = _deliveries(group, contributors) if group[0].trainable else ()
            alike = stays(group[0]), group[0].state_format, group[0].name in in_fp32
            yield Bucket(index, offset, stop, spans, deliveries, *alike)
            offset = stop

    def grouped(trained: bool, size: int, within: bool) -> list[list[Parameter]]:
        parts = (
            [[p for p in own if (p.trainable, stays(p)) == (trained, x)] for own in owned]
            for x in (True, False)
        )
        return [group for own in parts for group in _group(own, kind, contributors, size, within)]

    groups = grouped(True, bucket_size, within_segments)
    return Layout(
        segments=tuple(tuple(p.name for p in used) for used in segments),
        buckets=tuple(cut(groups, 0)),
        frozen_buckets=tuple(cut(grouped(False, sys.maxsize, True), len(groups))),
    )


def _contributors(segments: Sequence[Sequence[Parameter]]) -> dict[str, list[int]]:
    contributors: dict[str, list[int]] = {}
    nested = "the parameters of each segment: pass such as [[Parameter(name, tuple(tensor.shape))]]"
    of_type("segments", segments, Sequence, nested)
    for s, used in enumerate(segments):
        of_type(f"segments[{s}]", used, Sequence, nested)
        for p in used:
            of_type(f"segments[{s}]", p, Parameter, f"a zfunc.core.layout.Parameter, in {nested}")
            contributors.setdefault(p.name, []).append(s)
    return contributors


def _owned(
    segments: Sequence[Sequence[Parameter]], kind: Callable[[Parameter], Kind]
) -> list[list[Parameter]]:
    """For each segment, the parameters that no earlier segment declares, sorted by kind (state format, dtype)
    and optimizer group, matrices before vectors.

    Every second segment is sorted in reverse, so that a segment begins with the kind that the one before it
    ended with: buckets and runs are then few.
    """
    seen: dict[str, Parameter] = {}
    owned: list[list[Parameter]] = []
    for used in segments:
        new: list[Parameter] = []
        for p in used:
            if (first := seen.get(p.name)) is None:
                seen[p.name] = p
                new.append(p)
            elif first != p:
                raise ValueError(
                    f"parameter {p.name!r} is declared twice, as {first} and as {p}: "
                    "a tied parameter has one shape, trainable flag and optimizer"
                )
        new.sort(key=lambda p: (p.group, len(p.shape) < 2))
        owned.append(sorted(new, key=kind, reverse=len(owned) % 2 == 1))
    return owned


def _group(
    owned: Sequence[Sequence[Parameter]],
    kind: Callable[[Parameter], Kind],
    contributors: dict[str, list[int]],
    bucket_size: int,
    within_segments: bool,
) -> list[list[Parameter]]:
    """Divide `owned`, the parameters of each segment, into buckets of at most `bucket_size` elements, filled
    from the last parameter back. `contributors` has, by parameter name, the segments that use it."""

    def tie(p: Parameter) -> tuple[int, ...]:
        used_by = tuple(contributors[p.name])
        return used_by if len(used_by) > 1 else ()

    def joins(p: Parameter, group: list[Parameter]) -> bool:
        """Whether `p` may be added to the bucket `group`: same state format and dtype, and either tied to the
        same segments or untied, with no tied segment in between (`within_segments`: of one segment)."""
        if kind(p) != kind(group[-1]):
            return False
        if tie(p) or tie(group[-1]):
            return tie(p) == tie(group[-1])
        if within_segments:
            return contributors[p.name] == contributors[group[-1].name]
        highest, lowest = contributors[group[0].name][0], contributors[group[-1].name][0]
        between = range(contributors[p.name][0] + 1, min(lowest + 1, highest))
        return tied_segments.isdisjoint(between)

    tied_segments = {s for used_by in contributors.values() if len(used_by) > 1 for s in used_by}
    groups: list[list[Parameter]] = []
    filled = 0
    for p in reversed([p for own in owned for p in own]):
        size = _room(p)
        if groups and filled + size <= bucket_size and joins(p, groups[-1]):
            groups[-1].append(p)
            filled += size
        else:
            groups.append([p])
            filled = size
    return [group[::-1] for group in reversed(groups)]


def _deliveries(
    group: Sequence[Parameter], contributors: dict[str, list[int]]
) -> tuple[tuple[int, ...], ...]:
    segments = sorted({s for p in group for s in contributors[p.name]}, reverse=True)
    if len(contributors[group[0].name]) > 1:
        return tuple((s,) for s in segments)
    return (tuple(segments),)


def _place(parameters: Sequence[Parameter], offset: int) -> tuple[tuple[Span, ...], int]:
    spans: list[Span] = []
    for p in parameters:
        spans.append(Span(p.name, p.shape, offset, offset + p.numel, p.group, p.work, p.encodes))
        offset += _room(p)
    return tuple(spans), offset


def _room(p: Parameter) -> int:
    """The number of elements that parameter `p` takes in the flat buffer: its own, rounded up to the
    alignment, at least one unit of it."""
    return round_up(max(1, p.numel), ALIGNMENT)


def round_up(value: int, quantum: int) -> int:
    """The smallest multiple of `quantum` that is at least `value`."""
    return -(-value // quantum) * quantum
