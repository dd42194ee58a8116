"""A checkpoint is data: a hostile file is refused with its reason, soon, and before anything is allocated."""

import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fuzz_checkpoint
import pytest
from fuzz_checkpoint import Sample, sample, try_manifest, try_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from zfunc.checkpoint import manifest as manifest_file
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


PIECES, SHARD = "parameters/0/pieces/master_high", "shards/0"
MANIFESTS: list[tuple[str, Any, str]] = [
    # path escapes
    *((f"{SHARD}/file", x, f"shards: got the file name {x!r}") for x in ("../x", "/etc/passwd", ".", FILE)),
    (f"{SHARD}/file", "a\0b", r"shards: got the file name 'a\\x00b', expected letters, digits"),
    (
        f"{SHARD}/file",
        "rank-00001-of-00002.safetensors",
        "shard 'rank-00001-of-00002.safetensors': got it twice",
    ),
    # huge sizes
    (f"{SHARD}/size", 1 << 20, r"safetensors: got \d+ bytes, expected 1048576: the file is truncated"),
    (
        f"{SHARD}/size",
        2**62,
        r"safetensors: got a header of 46116860184273\d+ bytes, expected at most 16777224",
    ),
    (f"{SHARD}/size", 2**63, "got a number of 19 digits, above 64 bits, expected strict JSON"),
    (f"{SHARD}/size", 10**400, "got a number of 401 digits, above 64 bits"),
    (f"{SHARD}/chunk", 2**40, r"shards\[0\].chunk: got 1099511627776, expected an integer of 1 to 67108864"),
    (f"{SHARD}/chunk", 0, r"shards\[0\].chunk: got 0, expected an integer of 1 to"),
    (f"{SHARD}/tensors/0/shape", [2**40], "got tensors larger than the file, expected them to fit in"),
    *(
        (f"{SHARD}/tensors/0/shape", x, r"tensors\[0\].shape: got .* expected at most 64 dimensions and 2^60")
        for x in ([2**31, 2**31, 2**31], [0, 2**62], [1] * 65)
    ),
    (f"{SHARD}/tensors/0/shape", [-1], r"tensors\[0\].shape\[0\]: got -1, expected an integer of 0 to"),
    (
        "parameters/0/shape",
        [2**40],
        "'embed.weight', master_high: got 130 elements, expected pieces",
    ),
    ("world", 0, "world: got 0, expected an integer of 1 to 1048576"),
    # overlapping and missing pieces
    (
        f"{PIECES}/0/1",
        127,
        "'embed.weight', master_high: got no elements 127 to 128, expected pieces that tile",
    ),
    (f"{PIECES}/0/1", 129, "'embed.weight', master_high: got elements 128 to 129 twice"),
    (f"{PIECES}/0/1", 0, "'embed.weight', master_high: got an empty range, 0 to 0"),
    (f"{PIECES}/1", None, "'embed.weight', master_high: got 128 elements, expected pieces that tile its 130"),
    (f"{PIECES}/0/4", 2, "master_high'?: got no elements 0 to 2, expected each of 128 to be one parameter's"),
    (f"{PIECES}/0/4", 2**62, "embed.weight/master_high'?: got no elements 0 to 4611686018427387904"),
    (
        f"{PIECES}/0/2",
        2,
        "'embed.weight', master_high: got tensor 'embed.weight/master_high' of shard 2, expec",
    ),
    (f"{PIECES}/0/2", -1, r"pieces.master_high\[0\]\[2\]: got -1, expected an integer of 0 to"),
    (
        f"{PIECES}/0/3",
        "head.bias/master_high",
        "'embed.weight/master_high': got 0 elements, expected each of 128",
    ),
    (f"{PIECES}/0/3", "embed.weight/exp_avg", "elements of U8 in 'embed.weight/exp_avg', expected BF16"),
    (f"{PIECES}/0", [0, 128, 0, "x"], r"master_high\[0\]: got a list of 4, expected one of 5"),
    (PIECES, None, "'embed.weight': got the state master_low, exp_avg, .*, expected master_high, master_low"),
    ("parameters/0/pieces/momentum", [], "'embed.weight': got the state .*momentum, expected"),
    ("parameters/0/name", "head.bias", "parameter 'head.bias': got it twice"),
    (f"{SHARD}/tensors/0/name", "embed.weight/exp_avg", "tensor 'embed.weight/exp_avg': got it twice"),
    # values of the right type
    (
        f"{SHARD}/tensors/0/dtype",
        "F31",
        r"tensors\[0\].dtype: got 'F31' \(did you mean 'F32'\?\), expected one of",
    ),
    (f"{SHARD}/tensors/0/dtype", "F64", "got tensors larger|another number of checksums|elements of F64"),
    (f"{SHARD}/tensors/0/checksums", [1], "master_high': got another number of checksums, expected 4"),
    (
        f"{SHARD}/tensors/0/checksums/0",
        2**32,
        r"checksums\[0\]: got 4294967296, expected an integer of 0 to 4294",
    ),
    (
        "moments",
        "4bit",
        r"moments: got '4bit' \(did you mean '(8|16)bit'\?\), expected one of fp32, fp32-split",
    ),
    (
        "moments",
        "fp32",
        "'embed.weight': got the state master_high, .*, expected master, exp_avg, exp_avg_sq",
    ),
    ("parameters/0/name", "", r"parameters\[0\].name: got '', expected a text of 1 to 1000 characters"),
    ("parameters/0/name", "x" * 1001, r"parameters\[0\].name: got 'x+...x+', expected a text of 1 to 1000"),
    ("parameters/0/name", "\ud800", "got text that is not UTF-8, expected strict JSON"),
    (
        "position/stp",
        1,
        r"position: got a field 'stp' \(did you mean 'step'\?\), expected only step, batches",
    ),
    (
        "position/loss_scale/scale",
        0,
        "position.loss_scale: got .*scale.*, expected the counters of a loss scale",
    ),
    ("position/loss_scale/scale", float("nan"), "got NaN, which JSON does not have"),
    ("version", 2, "got version 2, expected version 1, the one that this zfunc reads"),
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


WRONG = {int: "7", float: "0.5", str: 7, bool: 1, list: {}, dict: []}
FREE = ("optimizer", "extra", "pieces")  # objects with any names, and values of theirs


def fields(value: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Each field below, as what holds it, its key and its place; of a list the first element."""
    keys = list(value) if isinstance(value, dict) else [0][: len(value)] if isinstance(value, list) else []
    for key in keys:
        yield value, key, (own := f"{place}.{key}" if isinstance(key, str) else f"{place}[{key}]")
        if key not in FREE:
            yield from fields(value[key], own)


@pytest.mark.parametrize("part", ["manifest", "swap_header", "swap_record"])
def test_a_field_that_is_missing_or_of_another_type_is_refused_by_its_name(
    known: Sample, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one of them, in every file that has JSON."""
    messages, raw = list[str](), getattr(known, part)
    monkeypatch.setattr(fuzz_checkpoint, "check_message", lambda error: messages.append(str(error)))
    for n, (_, key, place) in enumerate(fields(json.loads(raw))):
        for missing in {False, isinstance(key, str) and key != "consecutive"}:  # new in version 1
            root = json.loads(raw)
            holder = next(islice(fields(root), n, None))[0]
            if missing:
                del holder[key]
            else:
                holder[key] = WRONG[type(holder[key])]
            assert not getattr(fuzz_checkpoint, f"try_{part}")(known, json.dumps(root).encode()), place
            assert (key if missing else place) in messages[-1]
    assert len(messages) > 10


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
