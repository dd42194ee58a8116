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
from zfunc.checkpoint.manifest import (
    FROZEN,
    Checkpoint,
    Manifest,
    ParameterEntry,
    StateSlice,
    TrainingPosition,
    check_model,
    slices_of,
    stored_kinds,
)
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.safetensors_file import Shard, TensorInfo
from zfunc.core.dtypes import DTYPES
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.optimizer_state import STATE_FORMATS, Moments
from zfunc.optim.loss_scale import LossScale

MOMENTS: list[Moments] = ["fp32", "16bit", "8bit"]
KINDS = ["master", "exp_avg", "exp_avg_sq"]
EMPTY = Manifest(1, "fp32", (), (), TrainingPosition(0, 0, 0, 0, LossScale()), {}, {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoints.open_checkpoint(save(tmp_path_factory.mktemp("a"), moments="8bit"))


@settings(max_examples=40)
@given(
    st.sampled_from(MOMENTS),
    st.just(MODEL) | layouts().map(lambda drawn: drawn[0]),
    *[st.integers(1, 7)] * 2,
    *[st.integers(1, 400)] * 2,
)
def test_any_ranks_read_what_any_others_wrote(
    moments: Moments, model: Any, writers: int, readers: int, their_bucket: int, our_bucket: int
) -> None:
    """Each slice is filled with its own elements; and no shard has padding."""
    with TemporaryDirectory() as folder:
        path = save(Path(folder), world=writers, bucket_size=their_bucket, moments=moments, model=model)
        manifest = manifest_file.read_manifest(path)
        layout = make_layout(in_format(model, moments), bucket_size=our_bucket, world=readers)
        sizes = {span.name: span.stop - span.start for span in layout.spans}
        for rank in range(readers):
            slices = slices_of(layout, stored_kinds(layout, {}), rank, readers)
            wanted = [WantedSlice(x.kind, x.parameter, x.start, x.stop) for x in slices]
            for w, got in zip(wanted, fill(Checkpoint(path, manifest), wanted), strict=True):
                (buffer,) = (x for x in STATE_FORMATS[moments] if x.name == w.kind)
                item = DTYPES[buffer.dtype].nbytes
                original = content(w.parameter, w.kind, buffer.nbytes(sizes[w.parameter]))
                assert got == original[w.start * item : w.stop * item]
        stored = sum(t.nbytes for x in manifest.shards for t in x.tensors)
        frozen = 4 * sum(span.stop - span.start for span in layout.frozen)
        assert stored - frozen == sum(x.nbytes(n) for n in sizes.values() for x in STATE_FORMATS[moments])


@pytest.mark.parametrize(
    ("kind", "start", "stop", "numel"),
    [
        ("exp_avg", 0, 131, 130),
        ("exp_avg", 2, 1, 130),
        ("exp_avg_sq_scale", 0, 4, 3),
        ("exp_avg", -1, 1, 130),
    ],
)
def test_bad_slices_are_not_read(saved: Checkpoint, kind: str, start: int, stop: int, numel: int) -> None:
    wanted = WantedSlice(kind, "embed.weight", start, stop)
    with CheckpointReader(saved) as reader, pytest.raises(ValueError, match=f"a slice of {numel} elements"):
        reader.read([(wanted, bytearray(1))])


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_manifest_reads_back_equal(tmp_path: Path, moments: Moments) -> None:
    checkpoint = checkpoints.open_checkpoint(save(tmp_path, moments=moments, salt=5))
    assert manifest_file.from_json(manifest_file.to_json(checkpoint.manifest)) == checkpoint.manifest
    assert {w.kind for w in everything(checkpoint.manifest)} == {x.name for x in STATE_FORMATS[moments]}
    assert_complete(checkpoint)


def one_frozen(*tensors: TensorInfo, trainable: bool = False) -> Manifest:
    """A manifest of the frozen parameter "stem", whose values lie in these tensors."""
    ends = [0, *(sum(t.numel for t in tensors[: n + 1]) for n in range(len(tensors)))]
    pieces = tuple(StateSlice(ends[n], ends[n + 1], 0, t.name, 0) for n, t in enumerate(tensors))
    entry = ParameterEntry("stem", (ends[-1],), trainable, {FROZEN: pieces})
    return evolve(EMPTY, shards=(Shard("a", 1000, 0, 64, tensors),), parameters=(entry,))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_frozen_parameters_are_kept_as_they_are_in_one_type(dtype: str) -> None:
    tensor, other = TensorInfo("x", dtype, (5,), (0,)), TensorInfo("y", "F32", (3,), (0,))
    assert manifest_file.from_json(manifest_file.to_json(made := one_frozen(tensor))) == made
    with refused("'stem': got the state frozen, expected master, exp_avg, exp"):
        one_frozen(tensor, trainable=True)
    if dtype != "F32":
        with refused(f"'stem', frozen: got elements of {dtype} and F32, expected one type"):
            one_frozen(tensor, other)


def test_a_parameter_of_no_elements_has_no_pieces() -> None:
    made = evolve(EMPTY, parameters=(ParameterEntry("none", (0, 3), True, dict.fromkeys(KINDS, ())),))
    assert manifest_file.from_json(manifest_file.to_json(made)) == made
    nothing = Checkpoint(Path("nowhere"), made)
    assert fill(nothing, [WantedSlice("master", "none", 0, 0)]) == [b""]
    with pytest.raises(ValueError, match="expected a slice of 0 elements"):
        fill(nothing, [WantedSlice("master", "none", 0, 1)])


(EMBED,), (HEAD, BIAS) = MODEL
SHAPES = r"model: 'embed.weight' has shape \[10, 13\] in it and \[10, 12\] in the model\."
MODELS: list[tuple[list[Parameter], str]] = [
    ([Parameter("embed.weight", (10, 12)), HEAD, BIAS], SHAPES),
    (
        [Parameter("embed.wght", (10, 13)), HEAD, BIAS],
        r"no 'embed.wght' \(did you mean 'embed.weight'\?\); it has",
    ),
    (
        [EMBED, HEAD, BIAS, Parameter("new", ())],
        r"model: it has no 'new'\. Load it with the model that saved it",
    ),
    (
        [EMBED],
        "it has 'head.weight', which the model does not have; it has 'head.bias', which the model does not",
    ),
    (
        [EMBED, HEAD, Parameter("head.bias", (30,), trainable=False)],
        "'head.bias' is trained in it, not in the",
    ),
    ([Parameter(f"{n}", ()) for n in range(9)], "it has no '2', and 9 more. Load"),
]


@pytest.mark.parametrize(("parameters", "message"), MODELS)
def test_another_model_is_refused_by_its_first_differences(
    saved: Checkpoint, parameters: list[Parameter], message: str
) -> None:
    check_model(saved.manifest, [HEAD, BIAS, EMBED, EMBED])  # the same in any order
    with refused(message):
        check_model(saved.manifest, parameters)


ENDLESS: dict[Any, Any] = {}
ENDLESS["a"] = ENDLESS
CHANGED = [{"a": x} for x in (math.nan, [1, math.inf], (1, 2), {"b": 10**30}, b"", "\ud800")]


@pytest.mark.parametrize("extra", [*CHANGED, {1: 2}, [], ENDLESS], ids=str)
def test_values_that_json_would_change_are_refused(extra: Any) -> None:
    with refused("^extra: got .*, expected a dict of JSON's own types .*: write tensors"):
        evolve(EMPTY, extra=extra)


def test_an_update_that_is_still_to_be_applied_is_refused_with_what_to_do(saved: Checkpoint) -> None:
    """Checkpoints of the delayed updates of earlier versions."""
    fields = json.loads(manifest_file.to_json(saved.manifest))
    fields["position"]["pending"] = {"skip": False}
    with refused(
        "m.json.position.pending: got a gradient that is still .*, expected none: call zfunc.flush and"
    ):
        manifest_file.from_json(json.dumps(fields).encode(), "m.json")


def test_a_manifest_without_its_checksum_is_refused(saved: Checkpoint) -> None:
    fields = json.loads(manifest_file.to_json(saved.manifest))
    del fields["checksum"]
    with refused("m.json.checksum: got None, expected [0-9]+, the checksum of the other fields"):
        manifest_file.from_json(json.dumps(fields).encode(), "m.json")


def test_the_manifest_is_readable(saved: Checkpoint) -> None:
    fields = json.loads(manifest_file.to_json(saved.manifest))
    assert fields["version"] == 1
    assert fields["position"]["loss_scale"]["scale"] == 1024.0
    assert fields["optimizer"] == {"lr": 1e-3, "betas": [0.9, 0.999], "decoupled": True}
    assert [x["name"] for x in fields["parameters"]] == ["embed.weight", "head.weight", "head.bias"]
    assert fields["parameters"][0]["pieces"]["exp_avg_sq_scale"] == [
        [0, 2, 0, "embed.weight/exp_avg_sq_scale", 0],
        [2, 3, 1, "embed.weight/exp_avg_sq_scale", 0],
    ]
