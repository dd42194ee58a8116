"""Laws of a shard: what is written in any order is read back in any slice, and no wrong byte gets through."""

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from bad_disks import full_once
from hypothesis import given
from hypothesis import strategies as st
from saved import checksummed, content, refused, write_shard

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.safetensors_file import (
    BYTES,
    Shape,
    Shard,
    ShardReader,
    ShardWriter,
    TensorInfo,
    create_shard,
    cut_elements,
    open_shard,
)
from zfunc.checkpoint.strict_json import JsonNode

TENSORS = TensorInfo("codes", "U8", (5, 7)), TensorInfo("w", "F32", (3, 11)), TensorInfo("half", "BF16", (9,))


def contents(tensors: tuple[TensorInfo, ...] = TENSORS) -> dict[str, bytes]:
    return {t.name: content(t.name, t.dtype, t.nbytes) for t in tensors}


def written(path: Path, tensors: tuple[TensorInfo, ...] = TENSORS) -> Shard:
    return write_shard(path, {t: contents(tensors)[t.name] for t in tensors}, chunk=32)


@contextmanager
def opened(path: Path, shard: Shard) -> Iterator[ShardReader]:
    with closing(open_shard(path, shard)) as reader:
        yield reader


def read_all(path: Path, shard: Shard) -> dict[str, bytes]:
    buffers = {t.name: bytearray(t.nbytes) for t in shard.tensors}
    with opened(path, shard) as reader:
        for name, buffer in buffers.items():
            reader.read_into(name, 0, shard.by_name[name].numel, buffer)
    return {name: bytes(x) for name, x in buffers.items()}


@st.composite
def tables(draw: st.DrawFn) -> tuple[TensorInfo, ...]:
    shapes = st.lists(st.integers(0, 12), max_size=3)
    drawn = draw(st.lists(st.tuples(st.sampled_from(sorted(BYTES)), shapes), max_size=5))
    return tuple(TensorInfo(f"t{n}", dtype, shape) for n, (dtype, shape) in enumerate(drawn))


@given(tables(), st.sampled_from([8, 24, 64, 1 << 20]), st.data())
def test_any_writes_in_any_order_are_read_in_any_slices(
    tensors: tuple[TensorInfo, ...], chunk: int, data: st.DataObject
) -> None:
    wanted = contents(tensors)
    parts = []
    for t in tensors:
        cuts = data.draw(st.sets(st.integers(0, t.numel), max_size=4))
        parts += [(t, a, b) for a, b in pairwise(sorted({0, t.numel} | cuts))]
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        writer = create_shard(path, tensors)
        for t, a, b in data.draw(st.permutations(parts)):
            item = BYTES[t.dtype]
            writer.write_at(t.name, a, wanted[t.name][a * item : b * item])
        writer.finish()
        shard = checksummed(writer.shard, wanted, chunk)
        assert read_all(path, shard) == wanted
        for t in tensors:
            a, b = sorted(data.draw(st.tuples(*[st.integers(0, t.numel)] * 2)))
            buffer = bytearray((b - a) * BYTES[t.dtype])
            with opened(path, shard) as reader:
                reader.read_into(t.name, a, b, buffer)
            assert buffer == wanted[t.name][a * BYTES[t.dtype] : b * BYTES[t.dtype]]


@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from([1, 2, 4, 8]), st.integers(1, 40))
def test_a_range_is_cut_where_chunks_meet(start: int, length: int, item: int, chunk: int) -> None:
    cuts = cut_elements(start, start + length, item, chunk * item)
    assert [n for a, b in cuts for n in range(a, b)] == [*range(start, start + length)]
    assert all(a // chunk == (b - 1) // chunk for a, b in cuts)


def test_threads_write_at_once(tmp_path: Path) -> None:
    t = TensorInfo("w", "F32", (4096,))
    data = contents((t,))["w"]
    writer = create_shard(tmp_path / "x", [t])
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda n: writer.write_at("w", n, data[n * 4 : n * 4 + 64]), range(0, 4096, 16))]
    writer.finish()
    assert (tmp_path / "x").read_bytes().endswith(data)


def test_the_file_is_as_the_format_says(tmp_path: Path) -> None:
    shard = written(tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 64 == 0
    assert raw[8:9] == b"{"
    assert raw[8 : 8 + length].rstrip(b" ")[-1:] == b"}"
    assert list(header) == ["w", "half", "codes"]  # larger elements first: each aligned to its own size
    assert header["half"] == {"dtype": "BF16", "shape": [9], "data_offsets": [132, 150]}
    assert raw[8 + length :] == b"".join(contents()[name] for name in header)
    assert (shard.file, shard.size, shard.header) == ("x", len(raw), zlib.crc32(raw[: 8 + length]))


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "codes": np.arange(5, dtype=np.uint8),
        "low": np.int16([-1, 2]),
        "nothing": np.zeros((0, 3), np.float32),
        "scalar": np.array(7, np.float32),
    }
    names = {"float32": "F32", "uint8": "U8", "int16": "I16"}
    tensors = [TensorInfo(name, names[x.dtype.name], x.shape) for name, x in arrays.items()]
    writer = create_shard(tmp_path / "ours", tensors, metadata={"format": "np", "note": ""})
    for name, x in arrays.items():
        writer.write_at(name, 0, x)
    writer.finish()
    loaded = safetensors.load_file(tmp_path / "ours")
    assert all(
        np.array_equal(loaded[name], x) and loaded[name].shape == x.shape for name, x in arrays.items()
    )


# --- no wrong byte --------------------------------------------------------------------------------------------


def test_no_flipped_byte_gets_through_and_no_truncated_or_grown_file(tmp_path: Path) -> None:
    """Every byte of the file, its header and padding included."""
    path = tmp_path / "x"
    shard, raw = written(path), path.read_bytes()
    wrong = [raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :] for at in range(len(raw))]
    wrong += [(raw + b" ")[:size] for size in (*range(len(raw)), len(raw) + 1)]
    for changed in wrong:
        path.write_bytes(changed)
        with refused(r"/x: got"):
            read_all(path, shard)


def test_a_flipped_byte_is_named_and_other_slices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    shard, raw = written(path), bytearray(path.read_bytes())
    at = shard.begins["w"] + 70  # in its third chunk of 32
    raw[at] ^= 4
    path.write_bytes(raw)
    said = (
        rf"/x: got other bytes than were written in 'w', elements 16 to 24 \(bytes {at - 6} to {at + 26} of"
    )
    with opened(path, shard) as reader:
        for start, stop in ((0, 33), (16, 24), (20, 21)):
            with refused(said):
                reader.read_into("w", start, stop, bytearray(4 * (stop - start)))
        reader.read_into("w", 0, 16, bytearray(64))
        reader.read_into("w", 24, 33, bytearray(36))


def test_a_file_that_shrinks_while_it_is_read_and_another_of_its_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    shard = written(path)
    with opened(path, shard) as reader:
        path.write_bytes(path.read_bytes()[:-1])
        with refused(r"ended early' while reading bytes 32 to 35 of 'codes'"):
            reader.read_into("codes", 0, 35, bytearray(35))
    written(tmp_path / "y", tuple(TensorInfo(t.name.swapcase(), t.dtype, t.shape) for t in TENSORS))
    with refused(r"/y: got another header than was written, in bytes 0 to"):
        open_shard(tmp_path / "y", shard)


# --- what is not written or read ------------------------------------------------------------------------------

WRITES: list[tuple[tuple[str, int, Any], str]] = [
    (("w", 0, bytes(6)), r"'w': got 6 bytes for element 0, expected whole F32 elements within 33: pass"),
    (("w", 32, bytes(8)), r"'w': got 8 bytes for element 32"),
    (("w", -1, bytes(4)), r"'w': got 4 bytes for element -1"),
    (("w", 20, np.zeros((8, 2), np.float32)[:, 0]), r"got a buffer with gaps, expected a contiguous one"),
]


@pytest.mark.parametrize(("arguments", "message"), WRITES)
def test_bad_writes_are_refused(tmp_path: Path, arguments: Any, message: str) -> None:
    with closing(create_shard(tmp_path / "x", TENSORS)) as writer:
        writer.write_at("w", 4, bytes(8))
        with pytest.raises(ValueError, match=message):
            writer.write_at(*arguments)


@pytest.mark.parametrize(("start", "stop", "size"), [(0, 4, 15), (3, 2, 0), (0, 34, 136), (-1, 0, 4)])
def test_bad_reads_are_refused(tmp_path: Path, start: int, stop: int, size: int) -> None:
    with opened(tmp_path / "x", written(tmp_path / "x")) as reader:
        said = rf"'w': got elements {start} to {stop} for {size} bytes, expected a"
        with pytest.raises(ValueError, match=said):
            reader.read_into("w", start, stop, bytearray(size))
        with pytest.raises(ValueError, match="writable"):
            reader.read_into("w", 0, 1, bytes(4))


def test_a_file_in_which_bytes_are_missing_twice_or_failed_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new(name: str, numel: int) -> ShardWriter:
        return create_shard(tmp_path / name, [TensorInfo("w", "U8", (numel,))])

    with closing(new("missing", 100)) as writer:
        writer.write_at("w", 0, bytes(20))
        writer.write_at("w", 24, bytes(76))
        with refused(r"/missing: got 96 bytes of 'w', expected 100: call write_at once"):
            writer.finish()
        writer.write_at("w", 20, bytes(4))
        writer.finish()
    with closing(new("failed", 64)) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(disk, "write_all", full_once(disk.write_all, 1))
            with refused("'No space left on device' while writing bytes 0 to 64 of 'w'"):
                writer.write_at("w", 0, bytes(64))
        with refused("got 0 bytes of 'w', expected 64"):
            writer.finish()
        writer.write_at("w", 0, bytes(64))
        writer.write_at("w", 60, bytes(4))
        with refused("got 68 bytes of 'w', expected 64"):
            writer.finish()


def test_no_file_is_overwritten_and_no_name_is_there_twice(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with refused(r"/x: got 'File exists' while making a file of 128 bytes: name"):
        create_shard(tmp_path / "x", [TensorInfo("w", "U8", (64,))])
    assert (tmp_path / "x").read_text() == "mine"
    with pytest.raises(ValueError, match="two tensors of one name"):
        create_shard(tmp_path / "y", [TensorInfo("w", "U8", ()), TensorInfo("w", "U8", ())])
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    "stored", [("", "F32", ()), ("a", "F31", ()), ("a", "F32", (-1,)), ("__metadata__", "U8", ())]
)
def test_bad_tensors_are_refused(stored: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        TensorInfo(*stored)


def test_a_shape_may_have_64_dimensions_and_sizes_of_64_bits() -> None:
    for shape in ((1,) * 64, (0,) * 64, (1 << 57,), (0, 1 << 57)):
        assert JsonNode([*shape], "shape").read(Shape) == shape
    for shape in ((1,) * 65, (1 << 60,), (0, 1 << 60)):
        with refused("expected at most 64 dimensions"):
            JsonNode([*shape], "shape").read(Shape)
