"""A checkpoint is data: a hostile file is refused with its reason, soon, and before anything is allocated."""

import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_checkpoint
import pytest
from fuzz_checkpoint import Sample, sample, try_manifest, try_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from zfunc.checkpoint import manifest_json as manifest_file
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.manifest import FILE
from zfunc.errors import CheckpointError


@pytest.fixture(scope="module")
def known() -> Iterator[Sample]:
    with sample() as checkpoint:
        yield checkpoint


def edited(raw: bytes, path: str, value: Any) -> bytes:
    """The JSON with the value at a path like "shards.0.file" replaced; by None it is removed.

    Without its checksum: an enemy would have written the right one.
    """
    root = json.loads(raw)
    root.pop("checksum", None)
    *parents, last = (int(x) if x.isdigit() else x for x in path.split("/"))
    holder = root
    for key in parents:
        holder = holder[key]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    return json.dumps(root).encode()


PIECES = "parameters/0/pieces/master_high"
MANIFESTS: list[tuple[str, Any, str]] = [
    # path escapes
    ("shards/0/file", "../x", r"manifest.json: shards: got the file name '../x', expected letters, digits"),
    ("shards/0/file", "/etc/passwd", r"got the file name '/etc/passwd'"),
    ("shards/0/file", ".", r"got the file name '.'"),
    ("shards/0/file", "a\0b", r"got the file name 'a\\x00b'"),
    ("shards/0/file", "manifest.json", r"got the file name 'manifest.json'"),
    (
        "shards/0/file",
        "rank-00001-of-00002.safetensors",
        r"shard 'rank-00001-of-00002.safetensors': got it twice",
    ),
    # huge sizes
    (
        "shards/0/size",
        1 << 20,
        r"rank-00000-of-00002.safetensors: got \d+ bytes, expected 1048576: the file is truncated",
    ),
    (
        "shards/0/size",
        2**62,
        r"rank-00000-of-00002.safetensors: got a header of 46116860184273\d+ bytes, expected at most 16777224",
    ),
    (
        "shards/0/size",
        2**63,
        r"manifest.json: got a number of 19 digits, above 64 bits, expected strict JSON",
    ),
    ("shards/0/size", 10**400, r"got a number of 401 digits, above 64 bits"),
    (
        "shards/0/chunk",
        2**40,
        r"manifest.json.shards\[0\].chunk: got 1099511627776, expected an integer of 1 to 67108864",
    ),
    ("shards/0/chunk", 0, r"shards\[0\].chunk: got 0, expected an integer of 1 to"),
    (
        "shards/0/tensors/0/shape",
        [2**40],
        r"safetensors: got tensors larger than the file, expected them to fit in",
    ),
    (
        "shards/0/tensors/0/shape",
        [2**31, 2**31, 2**31],
        r"tensors\[0\].shape: got .* expected at most 64 dimensions",
    ),
    (
        "shards/0/tensors/0/shape",
        [0, 2**62],
        r"tensors\[0\].shape: got .* expected at most 64 dimensions and 2^60",
    ),
    ("shards/0/tensors/0/shape", [1] * 65, r"tensors\[0\].shape: got .* expected at most 64 dimensions"),
    ("shards/0/tensors/0/shape", [-1], r"tensors\[0\].shape\[0\]: got -1, expected an integer of 0 to"),
    (
        "parameters/0/shape",
        [2**40],
        r"'embed.weight', master_high: got 130 elements, expected pieces that tile its 1",
    ),
    ("world", 0, r"manifest.json.world: got 0, expected an integer of 1 to 1048576"),
    # overlapping and missing pieces
    (
        f"{PIECES}/0/1",
        127,
        r"'embed.weight', master_high: got no elements 127 to 128, expected pieces that tile",
    ),
    (f"{PIECES}/0/1", 129, r"'embed.weight', master_high: got elements 128 to 129 twice"),
    (f"{PIECES}/0/1", 0, r"'embed.weight', master_high: got an empty range, 0 to 0"),
    (
        f"{PIECES}/1",
        None,
        r"'embed.weight', master_high: got 128 elements, expected pieces that tile its 130",
    ),
    (
        f"{PIECES}/0/4",
        2,
        r"master_high'?: got no elements 0 to 2, expected each of 128 to be one parameter's",
    ),
    (f"{PIECES}/0/4", 2**62, r"embed.weight/master_high'?: got no elements 0 to 4611686018427387904"),
    (
        f"{PIECES}/0/2",
        2,
        r"'embed.weight', master_high: got tensor 'embed.weight/master_high' of shard 2, expec",
    ),
    (f"{PIECES}/0/2", -1, r"pieces.master_high\[0\]\[2\]: got -1, expected an integer of 0 to"),
    (
        f"{PIECES}/0/3",
        "head.bias/master_high",
        r"'embed.weight/master_high': got 0 elements, expected each of 128",
    ),
    (f"{PIECES}/0/3", "embed.weight/exp_avg", r"elements of U8 in 'embed.weight/exp_avg', expected BF16"),
    (
        f"{PIECES}/0",
        [0, 128, 0, "x"],
        r"master_high\[0\]: got a list of 4, expected start, stop, shard, tensor, off",
    ),
    (
        PIECES,
        None,
        r"'embed.weight': got the state master_low, exp_avg, .*, expected master_high, master_low",
    ),
    ("parameters/0/pieces/momentum", [], r"'embed.weight': got the state .*momentum, expected"),
    ("parameters/0/name", "head.bias", r"parameter 'head.bias': got it twice"),
    ("shards/0/tensors/0/name", "embed.weight/exp_avg", r"tensor 'embed.weight/exp_avg': got it twice"),
    # wrong types
    (
        "shards/0/tensors/0/dtype",
        "F31",
        r"tensors\[0\].dtype: got 'F31' \(did you mean 'F32'\?\), expected one of",
    ),
    (
        "shards/0/tensors/0/dtype",
        "F64",
        r"safetensors: got tensors larger|another number of checksums|elements of F64",
    ),
    ("shards/0/tensors/0/checksums", [1], r"master_high': got another number of checksums, expected 4"),
    (
        "shards/0/tensors/0/checksums/0",
        2**32,
        r"checksums\[0\]: got 4294967296, expected an integer of 0 to 4294",
    ),
    ("shards/0/tensors/0/checksums/0", True, r"checksums\[0\]: got True, expected an integer"),
    (
        "moments",
        "4bit",
        r"manifest.json.moments: got '4bit' \(did you mean '(8|16)bit'\?\), expected one of fp32, fp32-split",
    ),
    (
        "moments",
        "fp32",
        r"'embed.weight': got the state master_high, .*, expected master, exp_avg, exp_avg_sq",
    ),
    ("parameters/0/trainable", 1, r"parameters\[0\].trainable: got 1, expected true or false"),
    ("parameters/0/name", "", r"parameters\[0\].name: got '', expected a text of 1 to 1000 characters"),
    ("parameters/0/name", "x" * 1001, r"parameters\[0\].name: got 'x+...x+', expected a text of 1 to 1000"),
    ("parameters/0/name", "\ud800", r"manifest.json: got text that is not UTF-8, expected strict JSON"),
    ("position/step", True, r"manifest.json.position.step: got True, expected an integer of 0 to"),
    ("position/step", 3.0, r"manifest.json.position.step: got 3.0, expected an integer"),
    ("position/step", None, r"manifest.json.position: got none, expected a field named 'step'"),
    (
        "position/stp",
        1,
        r"position: got a field 'stp' \(did you mean 'step'\?\), expected only step, batches",
    ),
    (
        "position/loss_scale/scale",
        0,
        r"position.loss_scale: got .*scale.*, expected the counters of a loss scale",
    ),
    ("position/loss_scale/scale", "big", r"loss_scale.scale: got 'big', expected a number"),
    ("position/loss_scale/scale", float("nan"), r"manifest.json: got NaN, which JSON does not have"),
    ("position/loss_scale/left", 1.5, r"loss_scale.left: got 1.5, expected an integer of -1 to"),
    ("optimizer", [], r"manifest.json.optimizer: got \[\], expected an object"),
    ("extra", "x", r"manifest.json.extra: got 'x', expected an object"),
    ("version", 2, r"manifest.json: got version 2, expected version 1, the one that this zfunc reads"),
    ("version", None, r"manifest.json: got no version, expected version 1"),
    ("parameters", {}, r"manifest.json.parameters: got {}, expected a list"),
]


@pytest.mark.parametrize(("path", "value", "message"), MANIFESTS)
def test_a_hostile_manifest_is_refused_with_its_reason(
    known: Sample, path: str, value: Any, message: str
) -> None:
    raw = edited(known.manifest, path, value)
    with pytest.raises(CheckpointError, match=message.replace("^", r"\^")) as caught:
        refused_by_open(known, raw)
    assert str(caught.value).startswith(str(known.folder))
    assert not try_manifest(known, raw)


def refused_by_open(known: Sample, raw: bytes) -> None:
    path = known.folder / FILE
    path.write_bytes(raw)
    try:
        open_checkpoint(known.folder)
    finally:
        path.write_bytes(known.manifest)


TEXTS: list[tuple[bytes, str]] = [
    (b"", "invalid JSON"),
    (b"\xff\xfe", "text that is not UTF-8"),
    (b"[" * 1_000_000, "a value nested too deep"),
    (b'{"a":' * 1_000_000, "a value nested too deep"),
    (b'"' + b'\\"' * 1_000_000, "invalid JSON"),
    (b'"' + b"\\" * 1_000_001, "invalid JSON"),
    (b"1" * 1_000_000, "a number of 1000000 digits, above 64 bits"),
    (b"-" + b"1" * 21, "a number of 22 digits"),
    (b"1e999", "the number '1e999', above all floats"),
    (b"1." + b"1" * 1_000_000, "1.111111111111111., expected an object"),
    (b"-Infinity", "-Infinity, which JSON does not have"),
    (b'{"version":1,"version":1}', "the name 'version' twice in one object"),
    (b'{"version":1}{}', "invalid JSON"),
    (b'{"' + b"x" * 1_000_000 + b'":1}', "no version"),
    (b'{"version":1,"' + b"x" * 1_000_000 + b'":1}', "a field 'xxx"),
    (b"[1]", r"\[1\], expected an object"),
    (b"null", "None, expected an object"),
    (b'"\xed\xa0\x80"', "text that is not UTF-8"),
]


@pytest.mark.parametrize(("raw", "message"), TEXTS, ids=[str(n) for n in range(len(TEXTS))])
def test_text_that_is_not_strict_json_is_refused_with_its_reason(raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"manifest.json: got {message}") as caught:
        manifest_file.from_json(raw)
    assert len(str(caught.value)) < 1000


def test_false_sizes_allocate_nothing_large(known: Sample) -> None:
    """A header of 8 TiB, in a file that is one hole; parameters of 2^40 elements."""
    tracemalloc.start()
    try:
        with sample() as huge:
            os.truncate(huge.folder / huge.shard.file, 8 << 40)
            raw = edited(huge.manifest, "shards/0/size", 8 << 40)
            with pytest.raises(
                CheckpointError, match=r"got a header of 8796\d+ bytes, expected at most 16777224"
            ):
                refused_by_open(huge, raw)
        for change, value in (("parameters/0/shape", [2**40]), ("shards/0/size", 2**62)):
            assert not try_manifest(known, edited(known.manifest, change, value))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", ["manifest.json", "rank-00000-of-00002.safetensors"])
@pytest.mark.parametrize("what", ["link", "link to a folder", "loop", "pipe", "device", "folder"])
def test_links_pipes_devices_and_folders_are_refused(tmp_path: Path, place: str, what: str) -> None:
    """A link out of the folder, though it leads to the right bytes; a pipe does not hang."""
    with sample() as known:
        path, away = known.folder / place, tmp_path / "away"
        path.rename(away)
        match what:
            case "link":
                path.symlink_to(away)
            case "link to a folder":
                path.symlink_to(tmp_path)
            case "loop":
                path.symlink_to(path)
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case _:
                path.mkdir()
        with pytest.raises(
            CheckpointError,
            match=rf"{place}: got ('Too many levels.*links'|something else than a regular file)",
        ):
            open_checkpoint(known.folder)


def test_a_manifest_of_a_gigabyte_is_not_read(known: Sample) -> None:
    path = known.folder / FILE
    try:
        os.truncate(path, 1 << 30)
        with pytest.raises(
            CheckpointError, match="manifest.json: got 1073741824 bytes, expected at most 67108864"
        ):
            open_checkpoint(known.folder)
    finally:
        path.write_bytes(known.manifest)


def test_the_sample_itself_is_read(known: Sample) -> None:
    """Or every test of this file would pass for the wrong reason."""
    assert try_manifest(known, known.manifest)
    assert try_shard(known, known.shard_bytes)


@pytest.mark.parametrize("what", fuzz_checkpoint.KINDS)
def test_a_mutated_file_is_refused_or_read(known: Sample, what: str) -> None:
    @settings(max_examples=150)
    @given(st.randoms(use_true_random=False))
    def attempt(by: random.Random) -> None:
        fuzz_checkpoint.KINDS[what](known, by)

    attempt()


def test_the_longer_run_counts_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_checkpoint.main(["--inputs", "60", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("60 inputs in ")
    counts = [line.split() for line in lines[:-1]]
    assert [int(x[2]) + int(x[4]) for x in counts] == [12] * 5
    assert all(int(x[2]) > 3 for x in counts)
