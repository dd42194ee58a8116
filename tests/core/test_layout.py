"""Laws of the layout: spans and buckets tile the buffer, and depend on names, shapes and sizes alone."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from table import EMBED, SPANNING, TIED, Segments, layouts

from zfunc.core.layout import ALIGNMENT, Layout, Parameter, make_layout

Inputs = tuple[Segments, int, int]


def make(inputs: Inputs) -> Layout:
    segments, bucket_size, world = inputs
    return make_layout(segments, bucket_size=bucket_size, world=world)


def declared(segments: Segments, *, trainable: bool) -> dict[str, Parameter]:
    return {p.name: p for used in segments for p in used if p.trainable == trainable}


@given(layouts())
def test_every_parameter_has_one_span_of_its_shape(inputs: Inputs) -> None:
    layout = make(inputs)
    for spans, trainable in ((layout.spans, True), (layout.frozen, False)):
        wanted = declared(inputs[0], trainable=trainable)
        assert sorted(s.name for s in spans) == sorted(wanted)
        for span in spans:
            p = wanted[span.name]
            assert (span.shape, span.group) == (p.shape, p.group)
            assert span.stop - span.start == p.numel
    assert layout.num_trainable == sum(p.numel for p in declared(inputs[0], trainable=True).values())


@given(layouts())
def test_spans_are_aligned_and_disjoint_and_inside_their_bucket(inputs: Inputs) -> None:
    layout = make(inputs)
    for spans, buckets in ((layout.spans, layout.buckets), (layout.frozen, layout.frozen_buckets)):
        assert all(s.start % ALIGNMENT == 0 for s in spans)
        assert all(a.stop <= b.start for a, b in pairwise(spans))
        assert not spans or spans[-1].stop <= buckets[-1].stop
    for bucket in layout.all_buckets:
        assert all(bucket.start <= s.start and s.stop <= bucket.stop for s in bucket.spans)


@given(layouts())
def test_buckets_tile_the_buffer_in_whole_shards(inputs: Inputs) -> None:
    layout = make(inputs)
    for buckets in (layout.buckets, layout.frozen_buckets):
        edges = [0, *(b.stop for b in buckets)]
        assert [(b.start, b.stop) for b in buckets] == list(pairwise(edges))
    buckets = layout.all_buckets
    assert layout.numel == layout.buckets[-1].stop
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert all(b.numel % (ALIGNMENT * inputs[2]) == 0 for b in buckets)


@given(layouts())
def test_the_ranks_pieces_of_a_parameter_tile_it_and_begin_on_the_alignment(inputs: Inputs) -> None:
    layout, world = make(inputs), inputs[2]
    for span in (*layout.spans, *layout.frozen):
        end = 0
        for rank in range(world):
            piece = layout.piece(span, rank, world)
            if piece.start < piece.stop:
                assert piece.start == end
                assert piece.at % ALIGNMENT == piece.start % ALIGNMENT == 0
                end = piece.stop
        assert end == span.stop - span.start


@given(layouts())
def test_the_ranks_slices_of_the_runs_are_the_runs(inputs: Inputs) -> None:
    world = inputs[2]
    for bucket in make(inputs).buckets:
        for rank in range(world):
            start, stop = bucket.slice_of(rank, world)
            cut = bucket.runs_within(start, stop)
            assert [a for a, *_ in cut] == [start, *(b for _, b, _ in cut)][:-1]
            assert cut[-1][1] == stop
            assert all(
                any(a <= x and y <= b and kind == decay for a, b, decay in bucket.runs) for x, y, kind in cut
            )


@given(layouts())
def test_a_bucket_is_at_most_bucket_size_unless_one_parameter_is_larger(inputs: Inputs) -> None:
    _, bucket_size, world = inputs
    for bucket in make(inputs).buckets:
        content = -(-bucket.spans[-1].stop // ALIGNMENT) * ALIGNMENT - bucket.start
        assert content <= bucket_size or len(bucket.spans) == 1
        assert bucket.numel - content < ALIGNMENT * world


@given(layouts())
def test_runs_tile_the_bucket_and_agree_with_their_spans(inputs: Inputs) -> None:
    for bucket in make(inputs).buckets:
        starts, stops, decays = zip(*bucket.runs, strict=True)
        assert (0, *stops) == (*starts, bucket.numel)
        assert all(a != b for a, b in pairwise(decays))  # as few as there can be
        for span in bucket.spans:
            inside = [
                (a, b, d)
                for a, b, d in bucket.runs
                if a < span.stop - bucket.start and span.start - bucket.start < b
            ]
            assert [d for *_, d in inside] == [span.group]


@given(layouts())
def test_every_use_of_a_bucket_is_delivered_once_in_the_order_of_backward(inputs: Inputs) -> None:
    segments, layout = inputs[0], make(inputs)
    for bucket in layout.buckets:
        names = {s.name for s in bucket.spans}
        users = [s for s, used in enumerate(segments) if any(p.name in names for p in used)]
        assert [s for group in bucket.deliveries for s in group] == users[::-1]
        tied = {sum(name in [p.name for p in used] for used in segments) > 1 for name in names}
        assert len(tied) == 1  # all of a bucket, or none
        assert len(bucket.deliveries) == (len(users) if tied == {True} else 1)
        for group in bucket.deliveries:  # a delivery has all parameters, so packing zeroes padding alone
            assert names <= {p.name for s in group for p in segments[s]}
    for s in range(len(segments)):
        used = {p.name for p in segments[s]}
        assert layout.buckets_of(s) == tuple(
            b.index for b in layout.buckets if any(x.name in used for x in b.spans)
        )


@given(layouts())
def test_segments_inside_a_bucket_deliver_no_other_bucket(inputs: Inputs) -> None:
    """Between its first and its last segment a bucket holds a slot; with one slot nothing else may need it."""
    layout = make(inputs)
    for bucket in layout.buckets:
        for group in bucket.deliveries:
            for s in range(group[-1] + 1, group[0]):
                assert set(layout.buckets_of(s)) <= {bucket.index}


@given(layouts())
def test_buffer_order_is_segment_order(inputs: Inputs) -> None:
    segments, layout = inputs[0], make(inputs)
    first = {p.name: s for s, used in reversed([*enumerate(segments)]) for p in used}
    homes = [first[span.name] for span in layout.spans]
    assert homes == sorted(homes)
    assert layout.first_trainable == min(
        s for s, used in enumerate(segments) if any(p.trainable for p in used)
    )


def test_buckets_fill_from_the_back_so_the_short_one_is_at_the_front() -> None:
    buckets = make_layout([[Parameter(f"p{n}", (64,)) for n in range(5)]], bucket_size=128).buckets
    assert [len(b.spans) for b in buckets] == [1, 2, 2]


def test_one_bucket_may_span_segments() -> None:
    (bucket,) = make_layout(SPANNING, bucket_size=256).buckets
    assert bucket.deliveries == ((3, 2, 1, 0),)


def test_parameters_of_a_segment_are_in_the_order_of_their_groups() -> None:
    bias, weight, scale = (Parameter("b", (8,), group=1), Parameter("w", (8, 8)), Parameter("s", (), group=1))
    (bucket,) = make_layout([[bias, weight, scale]], bucket_size=1000).buckets
    assert [span.name for span in bucket.spans] == ["w", "b", "s"]
    assert bucket.runs == ((0, 64, 0), (64, 192, 1))


@pytest.mark.parametrize(
    ("segments", "sizes", "message"),
    [
        (TIED, {"bucket_size": 0}, "bucket_size: got 0, expected a whole number of at least 1: pass 1"),
        (TIED, {"bucket_size": 1, "world": 0}, "world: got 0, expected a whole number of at least 1: pass"),
        (TIED, {"bucket_size": "64"}, "bucket_size: got '64', expected a whole number"),
        (EMBED, {"bucket_size": 1}, "segments: got a Parameter, expected the parameters of each segment"),
        ([EMBED], {"bucket_size": 1}, r"segments\[0\]: got a Parameter, expected the parameters of each"),
        ([["embed"]], {"bucket_size": 1}, r"got a str, expected a zfunc.core.layout.Parameter, in the"),
        (
            [[EMBED], [Parameter("embed", (8, 10))]],
            {"bucket_size": 1},
            "'embed' is declared twice, as .* and as ",
        ),
        ([[Parameter("a", (2,), trainable=False)]], {"bucket_size": 1}, "no parameter is trainable: set"),
        ([[]], {"bucket_size": 1}, "no parameter is trainable: set"),
    ],
)
def test_bad_inputs_of_a_layout_are_refused(segments: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_layout(segments, **sizes)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("", (1,), "parameter: got the name '', expected a text: pass such as"),
        (3, (1,), "parameter: got the name 3"),
        (
            "a",
            (3),
            r"parameter 'a': got the shape 3, expected a tuple of sizes: pass such as .* or \(8,\) for a",
        ),
        ("a", (3.5,), r"got the shape \(3\.5,\), expected"),
        ("a", (-3,), r"got the shape \(-3,\), expected"),
        ("a", "33", "got the shape .*, expected a tuple of sizes"),
    ],
)
def test_a_parameter_has_a_name_and_a_shape(name: Any, shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parameter(name, shape)
