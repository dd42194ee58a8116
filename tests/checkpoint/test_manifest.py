"""Laws of the manifest: any partition is read by any other, and what is written reads back equal."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import MODEL, assert_complete, content, everything, fill, in_format, refused, save
from table import layouts

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import manifest as manifest_file
from zfunc.checkpoint.manifest import FROZEN, Checkpoint, Manifest, ParameterEntry, StateSlice, check_model
from zfunc.checkpoint.reader import WantedSlice, plan_reads
from zfunc.checkpoint.safetensors_file import Shard, TensorInfo
from zfunc.checkpoint.snapshot import slices_of, stored_kinds
from zfunc.core.dtypes import DTYPES
from zfunc.core.layout import Layout, Parameter, make_layout
from zfunc.core.optimizer_state import STATE_FORMATS, Moments

MOMENTS: list[Moments] = ["fp32", "16bit", "8bit"]
KINDS = ["master", "exp_avg", "exp_avg_sq"]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return checkpoints.open_checkpoint(save(tmp_path_factory.mktemp("a"), moments="8bit")).manifest


def wanted_by(layout: Layout, world: int, rank: int) -> list[WantedSlice]:
    return [
        WantedSlice(x.kind, x.parameter, x.start, x.stop)
        for x in slices_of(layout, stored_kinds(layout, {}), rank, world)
    ]


@settings(max_examples=25)
@given(
    st.sampled_from(MOMENTS), st.integers(1, 7), st.integers(1, 7), st.integers(1, 400), st.integers(1, 400)
)
def test_any_ranks_read_what_any_others_wrote(
    moments: Moments, writers: int, readers: int, their_bucket: int, our_bucket: int
) -> None:
    with TemporaryDirectory() as folder:
        path = save(Path(folder), world=writers, bucket_size=their_bucket, moments=moments)
        manifest = manifest_file.read_manifest(path)
        layout = make_layout(in_format(MODEL, moments), bucket_size=our_bucket, world=readers)
        sizes = {span.name: span.stop - span.start for span in layout.spans}
        for rank in range(readers):
            wanted = wanted_by(layout, readers, rank)
            for w, got in zip(wanted, fill(Checkpoint(path, manifest), wanted), strict=True):
                (buffer,) = (x for x in STATE_FORMATS[moments] if x.name == w.kind)
                item = DTYPES[buffer.dtype].nbytes
                original = content(w.parameter, w.kind, buffer.nbytes(sizes[w.parameter]))
                assert got == original[w.start * item : w.stop * item]


def partition(layout: Layout, world: int) -> Manifest:
    """A manifest of fp32 state, no file behind it: a rank's pieces of all parameters share a tensor."""
    pieces: dict[str, dict[str, list[StateSlice]]] = {}
    for span in layout.spans:
        pieces[span.name] = {kind: [] for kind in KINDS}
    shards = []
    for rank in range(world):
        ends = dict.fromkeys(KINDS, 0)
        for x in slices_of(layout, stored_kinds(layout, {}), rank, world):
            pieces[x.parameter][x.kind].append(StateSlice(x.start, x.stop, rank, x.kind, ends[x.kind]))
            ends[x.kind] += x.stop - x.start
        end = ends["master"]
        tensors = tuple(TensorInfo(kind, "F32", (end,), (0,) if end else ()) for kind in KINDS)
        shards.append(Shard(f"rank{rank}", end * 12 + 64, 0, 1 << 20, tensors))
    entries = tuple(
        ParameterEntry(s.name, s.shape, True, {k: tuple(x) for k, x in pieces[s.name].items()})
        for s in layout.spans
    )
    return evolve(EMPTY, world=world, shards=tuple(shards), parameters=entries)


EMPTY = manifest_file.from_json(
    b'{"version":1,"world":1,"moments":"fp32","position":{"step":0,"batches":0,"sequences":0,"seed":0,"loss_scale":'
    b'{"scale":1,"window":0,"hysteresis":1,"minimum":1,"left":1,"steps":0,"last_overflow":-1}},"optimizer":{},'
    b'"extra":{},"shards":[],"parameters":[]}'
)


@given(layouts(), st.integers(1, 7), st.integers(1, 7), st.integers(1, 300))
def test_reads_fill_every_wanted_slice_once_with_its_own_elements(
    inputs: Any, writers: int, readers: int, bucket_size: int
) -> None:
    segments, their_bucket, _ = inputs
    segments = in_format(segments, "fp32")
    manifest = partition(make_layout(segments, bucket_size=their_bucket, world=writers), writers)
    layout = make_layout(segments, bucket_size=bucket_size, world=readers)
    for rank in range(readers):
        wanted = wanted_by(layout, readers, rank)
        reads = plan_reads(manifest, wanted)
        assert [(r.shard, r.tensor) for r in reads] == sorted(
            [(r.shard, r.tensor) for r in reads], key=lambda x: (x[0], KINDS.index(x[1]))
        )
        for n, w in enumerate(wanted):
            filled = sorted((r.to, r.to + r.stop - r.start, r) for r in reads if r.wanted == n)
            assert [a for a, *_ in filled] == [0, *(b for _, b, _ in filled[:-1])]
            assert filled[-1][1] == w.stop - w.start
            for to, _, r in filled:
                (piece,) = (
                    x
                    for x in manifest.by_name[w.parameter].pieces[w.kind]
                    if (x.shard, x.tensor) == (r.shard, r.tensor)
                    and x.offset <= r.start < x.offset + x.stop - x.start
                )
                assert piece.start + r.start - piece.offset == w.start + to
                assert r.stop <= piece.offset + piece.stop - piece.start


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            WantedSlice("master", "embed.wieght", 0, 1),
            r"got 'embed.wieght' \(did you mean 'embed.weight'\?\), expected",
        ),
        (WantedSlice("exp_avg", "embed.weight", 0, 131), "expected a slice of 130 elements"),
        (WantedSlice("exp_avg", "embed.weight", 2, 1), "expected a slice of 130 elements"),
        (WantedSlice("exp_avg_sq_scale", "embed.weight", 0, 4), "expected a slice of 3 elements"),
        (WantedSlice("master", "embed.weight", 0, 1), r"got 'master' \(did you mean 'master_"),
    ],
)
def test_bad_slices_are_not_planned(manifest: Manifest, wanted: WantedSlice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_reads(manifest, [wanted])


def test_of_a_parameter_without_elements_nothing_is_planned() -> None:
    manifest = partition(make_layout([[Parameter("a", (0,)), Parameter("b", (3,))]], bucket_size=64), 1)
    assert plan_reads(manifest, [WantedSlice("master", "a", 0, 0)]) == ()
    with pytest.raises(ValueError, match="expected a slice of 0 elements"):
        plan_reads(manifest, [WantedSlice("master", "a", 0, 1)])


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_manifest_reads_back_equal(tmp_path: Path, moments: Moments) -> None:
    checkpoint = checkpoints.open_checkpoint(save(tmp_path, moments=moments, salt=5))
    assert manifest_file.from_json(manifest_file.to_json(checkpoint.manifest)) == checkpoint.manifest
    assert {w.kind for w in everything(checkpoint.manifest)} == {x.name for x in STATE_FORMATS[moments]}
    assert_complete(checkpoint)


def test_shards_have_no_padding(tmp_path: Path) -> None:
    """No padding: the shards hold as many bytes of data as the parameters have state."""
    for world, bucket_size in ((1, 50), (3, 1000), (7, 1)):
        manifest = manifest_file.read_manifest(save(tmp_path, world=world, bucket_size=bucket_size))
        assert sum(t.nbytes for x in manifest.shards for t in x.tensors) == (130 + 210 + 30) * 12


def test_frozen_parameters_are_kept_as_they_are() -> None:
    for dtype in ("F32", "BF16", "F16"):
        shard = Shard("a", 1000, 0, 64, (TensorInfo("x", dtype, (5,), (0,)),))
        entry = ParameterEntry("stem", (5,), False, {FROZEN: (StateSlice(0, 5, 0, "x", 0),)})
        other = evolve(EMPTY, shards=(shard,), parameters=(entry,))
        assert manifest_file.from_json(manifest_file.to_json(other)) == other
        with refused("'stem': got the state frozen, expected master, exp_avg, exp"):
            evolve(other, parameters=(evolve(entry, trainable=True),))


def test_the_pieces_of_one_kind_have_one_type() -> None:
    tensors = TensorInfo("x", "F32", (2,), (0,)), TensorInfo("y", "BF16", (3,), (0,))
    shard = Shard("a", 1000, 0, 64, tensors)
    pieces = StateSlice(0, 2, 0, "x", 0), StateSlice(2, 5, 0, "y", 0)
    entry = ParameterEntry("stem", (5,), False, {FROZEN: pieces})
    with refused("'stem', frozen: got elements of BF16 and F32, expected one type"):
        evolve(EMPTY, shards=(shard,), parameters=(entry,))


def test_a_parameter_of_no_elements_has_no_pieces() -> None:
    other = evolve(EMPTY, parameters=(ParameterEntry("none", (0, 3), True, dict.fromkeys(KINDS, ())),))
    assert manifest_file.from_json(manifest_file.to_json(other)) == other
    assert plan_reads(other, [WantedSlice("master", "none", 0, 0)]) == ()


MODELS: list[tuple[list[Parameter], str]] = [
    (
        [Parameter("embed.weight", (10, 12)), *MODEL[1]],
        r"model: 'embed.weight' has shape \[10, 13\] in it and \[10, 12\] in the model\.",
    ),
    (
        [Parameter("embed.wght", (10, 13)), *MODEL[1]],
        r"has no 'embed.wght' \(did you mean 'embed.weight'\?\); it has 'emb",
    ),
    (
        [*MODEL[0], *MODEL[1], Parameter("new", ())],
        r"model: it has no 'new'\. Load it with the model that saved it: with",
    ),
    (
        [MODEL[0][0]],
        "it has 'head.weight', which the model does not have; it has 'head.bias', which the model does not have",
    ),
    (
        [*MODEL[0], MODEL[1][0], Parameter("head.bias", (30,), trainable=False)],
        "'head.bias' is trained in it, not in the model",
    ),
    ([Parameter(f"{n}", ()) for n in range(9)], "it has no '2', and 9 more. Load"),
]


@pytest.mark.parametrize(("parameters", "message"), MODELS)
def test_another_model_is_refused_by_its_first_differences(
    manifest: Manifest, parameters: list[Parameter], message: str
) -> None:
    with refused(message):
        check_model(manifest, parameters)


def test_the_same_model_is_accepted_in_any_order(manifest: Manifest) -> None:
    check_model(manifest, [*MODEL[1], *MODEL[0], *MODEL[0]])


def endless() -> dict[str, Any]:
    itself: dict[str, Any] = {}
    itself["a"] = itself
    return itself


@pytest.mark.parametrize(
    "extra",
    [
        *({"a": x} for x in (math.nan, [1, math.inf], (1, 2), {"b": 10**30}, b"", "\ud800")),
        {1: 2},
        [],
        endless(),
    ],
)
def test_values_that_json_would_change_are_refused(extra: Any) -> None:
    with refused("^extra: got .*, expected a dict of JSON's own types"):
        evolve(EMPTY, extra=extra)


def test_the_manifest_is_readable(manifest: Manifest) -> None:
    fields = json.loads(manifest_file.to_json(manifest))
    assert fields["version"] == 1
    assert fields["position"]["loss_scale"]["scale"] == 1024.0
    assert fields["optimizer"] == {"lr": 1e-3, "betas": [0.9, 0.999], "decoupled": True}
    assert [x["name"] for x in fields["parameters"]] == ["embed.weight", "head.weight", "head.bias"]
    assert fields["parameters"][0]["pieces"]["exp_avg_sq_scale"] == [
        [0, 2, 0, "embed.weight/exp_avg_sq_scale", 0],
        [2, 3, 1, "embed.weight/exp_avg_sq_scale", 0],
    ]
