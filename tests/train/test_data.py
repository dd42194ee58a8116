"""Corpora, their batches in any order, and what is held out."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc.train.data.corpus import batch_at, held_out_batches, is_held_out, open_corpus, stdlib_files


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def windows(num_tokens: int, seq_length: int) -> int:
    return max(1, (num_tokens - seq_length) // seq_length)


lengths = st.integers(1, 9).flatmap(lambda seq: st.tuples(st.just(seq), st.integers(seq + 1, 300)))
seeds = st.integers(-(2**70), 2**70)


# --- the order of batches


@given(lengths, seeds, st.integers(0, 5))
def test_an_epoch_sees_every_window_once(sizes: tuple[int, int], seed: int, epoch: int) -> None:
    seq, num_tokens = sizes
    count = windows(num_tokens, seq)
    inputs, targets = batch_at(
        np.arange(num_tokens), epoch * count, batch_size=count, seq_length=seq, seed=seed
    )
    starts = sorted(inputs[:, 0].tolist())
    assert starts == list(range(starts[0], starts[0] + count * seq, seq))
    assert starts[0] < seq
    assert torch.equal(targets, inputs + 1)
    assert targets.max() < num_tokens


@given(lengths, seeds, st.integers(0, 10**6), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_a_resume_needs_the_position_alone(
    sizes: tuple[int, int], seed: int, position: int, batch_sizes: list[int]
) -> None:
    seq, num_tokens = sizes
    tokens = np.arange(num_tokens, dtype=np.uint16)
    once, _ = batch_at(tokens, position, batch_size=sum(batch_sizes), seq_length=seq, seed=seed)
    parts = []
    for size in batch_sizes:
        parts.append(batch_at(tokens, position, batch_size=size, seq_length=seq, seed=seed)[0])
        position += size
    assert torch.equal(once, torch.cat(parts))


def test_batches_are_the_same_on_every_machine() -> None:
    inputs, targets = batch_at(np.arange(10_000), 7, batch_size=6, seq_length=3, seed=1)
    assert inputs[:, 0].tolist() == [358, 2122, 5053, 7369, 8371, 7096]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 3)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_epochs_and_seeds_have_their_own_order_and_offset() -> None:
    tokens, count = np.arange(64 * 101), windows(64 * 101, 64)

    def starts(epoch: int, seed: int) -> list[int]:
        inputs, _ = batch_at(tokens, epoch * count, batch_size=count, seq_length=64, seed=seed)
        return inputs[:, 0].tolist()

    orders = [starts(epoch, seed) for epoch in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert len({min(order) for order in orders}) >= 6
    steps = np.abs(np.diff([start // 64 for start in orders[0]]))
    assert steps.mean() == pytest.approx(count / 3, rel=0.25)  # of a random permutation


def test_held_out_windows_are_spread_evenly_and_the_same_in_batches_of_any_size() -> None:
    tokens = np.arange(1001)
    batches = list(held_out_batches(tokens, batch_size=4, seq_length=10, limit=46))
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches]).tolist()
    assert [len(inputs) for inputs, _ in batches] == [4] * 11 + [2]
    assert all(start % 10 == 0 for start in starts)
    assert set(np.diff(starts)) == {20, 30}
    for size in (1, 3, 46, 99):
        others = held_out_batches(tokens, batch_size=size, seq_length=10, limit=46)
        assert torch.cat([inputs[:, 0] for inputs, _ in others]).tolist() == starts
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)
    assert [len(x) for x, _ in held_out_batches(tokens[:31], batch_size=4, seq_length=10, limit=9)] == [3]
    assert len(list(held_out_batches(tokens, batch_size=4, seq_length=10, limit=10**9))) == 25


REQUESTS = [
    (batch_at, {"num_tokens": 8}, "got 8 tokens for seq_length=8, expected at least 9"),
    (batch_at, {"num_tokens": 0}, "got 0 tokens"),
    (batch_at, {"position": -1}, "got position=-1; expected 0 or more"),
    (batch_at, {"batch_size": 0}, "got batch_size=0, seq_length=8; expected 1 or more"),
    (batch_at, {"seq_length": 0}, "got batch_size=1, seq_length=0; expected 1 or more"),
    (held_out_batches, {"num_tokens": 3}, "got 3 tokens for seq_length=8"),
    (held_out_batches, {"limit": 0}, "got limit=0 windows; expected 1 or more"),
]


@pytest.mark.parametrize(("call", "change", "message"), REQUESTS)
def test_invalid_requests_raise_at_the_call(
    call: Callable[..., Any], change: dict[str, int], message: str
) -> None:
    own = {"position": 0, "seed": 0} if call is batch_at else {"limit": 1}
    given = {"batch_size": 1, "seq_length": 8, **own, **change}
    with pytest.raises(ValueError, match=message):
        call(np.zeros(given.pop("num_tokens", 30)), **given)


def test_a_token_beyond_the_vocabulary_raises_with_its_position() -> None:
    tokens = np.zeros(1000, np.uint16)
    tokens[777] = 300
    with pytest.raises(
        ValueError, match=r"got token 300 at position 777 .* below 300: pass the --vocab-size"
    ):
        batch_at(tokens, 0, batch_size=99, seq_length=10, seed=0, vocab_size=300)
    batch_at(tokens, 0, batch_size=99, seq_length=10, seed=0, vocab_size=301)
    with pytest.raises(ValueError, match="position 777"):
        list(held_out_batches(tokens, batch_size=9, seq_length=10, limit=99, vocab_size=300))


# --- folders and the standard library


def test_the_split_of_names_never_changes() -> None:
    assert is_held_out("turtle.py")
    assert not is_held_out("json/decoder.py")
    assert sum(is_held_out(f"file{index}.py") for index in range(10_000)) == 814


def test_a_folder_becomes_its_text_files_some_of_them_held_out(tmp_path: Path) -> None:
    folder, cache = tmp_path / "corpus", tmp_path / "cache"
    texts = {f"sub{index % 3}/file{index}.txt": f"text {index}\n".encode() * 9 for index in range(80)}
    for name, content in texts.items():
        write(folder / name, content)
    for name in (".git/config", ".hidden", "sub0/.hidden/file"):
        write(folder / name, b"hidden")
    write(folder / "binary", b"text at first" * 100_000 + b"\0")
    write(folder / "empty", b"")
    (folder / "broken").symlink_to("nowhere")

    corpus = open_corpus(folder, cache=cache)
    for part, held_out in ((corpus.train, False), (corpus.held_out, True)):
        assert isinstance(part, np.memmap)
        assert part.dtype == np.uint8
        expected = (texts[name] + b"\0" for name in sorted(texts) if is_held_out(name) == held_out)
        assert part.tobytes() == b"".join(expected)
    num_held_out = sum(map(is_held_out, texts))
    assert corpus.vocab_size == 256
    assert str(corpus).splitlines() == [
        f"{folder}: 80 files, {sum(map(len, texts.values())) + 80:,} bytes",
        f"held out: {num_held_out} of the files, by a hash of their names, {len(corpus.held_out)} bytes",
        "left out: 1 empty and 1 binary files",
    ]


def test_gathering_happens_once_until_a_file_changes(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", b"one " * 100)
    first = open_corpus(tmp_path, cache=tmp_path)  # in the folder itself: must not be read back
    for _ in range(2):
        assert open_corpus(tmp_path, cache=tmp_path).train.tobytes() == first.train.tobytes()
    assert len(list(tmp_path.iterdir())) == 2
    modified = source.stat().st_mtime_ns
    source.write_bytes(b"two " * 100)
    os.utime(source, ns=(modified, modified + 1))
    changed = open_corpus(tmp_path, cache=tmp_path)
    assert changed.train.tobytes() == (b"two " * 100)[:361]
    assert first.train.tobytes() == (b"one " * 100)[:361]
    assert len(list(tmp_path.iterdir())) == 3


def test_few_files_are_split_by_position_and_the_description_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"x" * 999)
    corpus = open_corpus(tmp_path, cache=tmp_path / "cache")
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)
    assert corpus.description[1] == "held out: the end (too few files to hold whole ones out), 100 bytes"


def test_an_interrupted_gathering_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "corpus" / "a.txt", b"text")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(tmp_path / "corpus", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert open_corpus(tmp_path / "corpus", cache=tmp_path / "cache").train.tobytes() == b"text"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", b"text")

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"got .*a\.txt, which cannot be read \(Permission denied\)"):
        open_corpus(tmp_path, cache=tmp_path)


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py", "turtle.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    corpus = open_corpus(cache=tmp_path)
    assert len(corpus.train) > 4_000_000
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.15
    assert b"class TurtleScreen" in corpus.held_out.tobytes()
    assert b"class TurtleScreen" not in corpus.train.tobytes()


# --- single files and tokens


def test_one_file_is_mapped_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt", bytes(range(250)))
    corpus = open_corpus(path, cache=tmp_path / "cache")
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == path.read_bytes()
    assert len(corpus.held_out) == 25
    assert isinstance(corpus.train, np.memmap)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_with_and_without_a_held_out_file(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(1000, dtype=dtype)
    path = write(tmp_path / "train.bin", tokens.tobytes())
    alone = open_corpus(path, cache=tmp_path, dtype=dtype, vocab_size=1000)
    assert alone.train.tolist() == list(range(900))
    assert alone.held_out.tolist() == list(range(900, 1000))
    write(tmp_path / "val.bin", tokens[:50].tobytes())
    for where in (path, tmp_path):
        corpus = open_corpus(where, cache=tmp_path, dtype=dtype, vocab_size=1000)
        assert corpus.train.tolist() == tokens.tolist()
        assert corpus.held_out.tolist() == list(range(50))
        assert isinstance(corpus.held_out, np.memmap)
        assert corpus.vocab_size == 1000
        assert str(tmp_path / "val.bin") in str(corpus)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_large_file_is_mapped_and_not_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", b"")
    os.truncate(path, 2 << 30)  # sparse: no blocks on the disk
    before = resident_bytes()
    corpus = open_corpus(path, cache=tmp_path)
    inputs, _ = batch_at(
        corpus.train, 123, batch_size=32, seq_length=1024, seed=0, vocab_size=corpus.vocab_size
    )
    assert inputs.shape == (32, 1024)
    assert len(corpus.train) + len(corpus.held_out) == 1 << 30
    assert resident_bytes() - before < 50 << 20


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("missing", None, FileNotFoundError, "missing, which does not exist; expected a text file, a folder"),
        ("missing.bin", None, FileNotFoundError, "which does not exist"),
        ("empty.txt", b"", ValueError, "empty.txt, which is empty; expected data"),
        ("empty.bin", b"", ValueError, "empty.bin, which is empty; expected data"),
        ("odd.bin", b"abc", ValueError, r"odd.bin of 3 bytes; .* multiple of 2 \(uint16\); check that"),
        (
            "folder/.hidden",
            b"text",
            ValueError,
            r"got no text in .*folder \(0 empty and 0 binary files\); exp",
        ),
        (
            "folder/empty",
            b"",
            ValueError,
            r"got no text in .*folder \(1 empty and 0 binary files\); expected",
        ),
        (
            "folder/binary",
            b"\0\1",
            ValueError,
            r"got no text in .*folder \(0 empty and 1 binary files\); exp",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_says_why(
    tmp_path: Path, name: str, content: bytes | None, error: type[Exception], message: str
) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(error, match=message):
        open_corpus(tmp_path / name.partition("/")[0], cache=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


def test_an_unknown_dtype_says_which_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", b"abcd")
    with pytest.raises(ValueError, match='got dtype=\'int64\'; expected "uint16" or "uint32"'):
        open_corpus(path, cache=tmp_path, dtype="int64")
