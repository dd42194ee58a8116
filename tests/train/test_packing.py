"""Files and records as a corpus: what is learned, what is held out, what is packed and when again."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_data import (
    END,
    WORDS,
    dataset,
    loss_mask_of,
    opened,
    save,
    tokens_of,
    trained,
    words,
    write,
    write_jsonl,
)

from zfunc.models.loss import IGNORE_INDEX
from zfunc.planner.kept_costs import code_digest
from zfunc.train.data import packing
from zfunc.train.data.files import is_held_out, stdlib_files, stream_files
from zfunc.train.data.tokenizer import open_tokenizer

# --- files ------------------------------------------------------------------------------------------------


def test_the_split_of_names_never_changes() -> None:
    assert sum(is_held_out(f"file{index}.py") for index in range(10_000)) == 814


def test_a_folder_becomes_its_text_files_some_of_them_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    texts = {f"sub{index % 3}/file{index}.txt": f"text {index}\n".encode() * 9 for index in range(80)}
    hidden = dict.fromkeys((".git/config", ".hidden", "sub0/.hidden/file"), b"hidden")
    for name, content in (texts | hidden | {"binary": b"text" * 100_000 + b"\0", "empty": b""}).items():
        write(folder / name, content)
    (folder / "broken").symlink_to("nowhere")
    corpus = opened(folder, tmp_path)
    for part, held_out in ((corpus.train, False), (corpus.held_out, True)):
        assert isinstance(part.tokens, np.memmap)
        expected = (texts[name] + b"\0" for name in sorted(texts) if is_held_out(name) == held_out)
        assert part.tokens.tobytes() == b"".join(expected)
    num_held_out = sum(map(is_held_out, texts))
    assert (corpus.vocab_size, corpus.train.tokens.dtype) == (256, np.uint8)
    assert num_held_out
    assert str(corpus).splitlines() == [
        f"{folder}: 80 files, 80 documents, {sum(map(len, texts.values())) + 80:,} bytes",
        "left out: 1 empty file and 1 binary file: binary",
        f"held out: files, by a hash of their names, {len(corpus.held_out)} bytes",
    ]


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py", "turtle.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    corpus = opened(None, tmp_path)
    assert len(corpus.train) > 4_000_000
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.15
    assert b"class TurtleScreen" in corpus.held_out.tokens.tobytes()
    assert b"class TurtleScreen" not in corpus.train.tokens.tobytes()


def test_one_file_of_records_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "README.jsonl", {"text": "ab"})
    assert tokens_of(opened(path, tmp_path)) == [*b"ab", 0]


def test_one_file_is_mapped_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt", b"text " * 50)
    corpus = opened(path, tmp_path)
    assert bytes(tokens_of(corpus)) == path.read_bytes()
    assert len(corpus.held_out) == 25
    assert isinstance(corpus.train.tokens, np.memmap)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_with_and_without_a_held_out_file(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(1000, dtype=dtype)
    path = write(tmp_path / "train.bin", tokens.tobytes())
    alone = opened(path, tmp_path, dtype=dtype, vocab_size=1000)
    assert (tokens_of(alone), len(alone.train)) == (tokens.tolist(), 900)
    write(tmp_path / "val.bin", tokens[:50].tobytes())
    for where in (path, tmp_path):
        corpus = opened(where, tmp_path, dtype=dtype, vocab_size=1000)
        assert tokens_of(corpus) == [*tokens.tolist(), *range(50)]
        assert isinstance(corpus.held_out.tokens, np.memmap)
        assert corpus.vocab_size == 1000
        assert str(tmp_path / "val.bin") in str(corpus)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_large_file_is_mapped_and_not_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", b"")
    os.truncate(path, 2 << 30)  # sparse: no blocks on the disk
    before = resident_bytes()
    corpus = opened(path, tmp_path)
    trained(corpus.train, 123, 32, 1024, vocab_size=corpus.vocab_size)
    assert len(corpus.train) + len(corpus.held_out) == 1 << 30
    assert resident_bytes() - before < 50 << 20


RECORD = b'{"text": "from records"}\n'
ZSTD = b"\x28\xb5\x2f\xfd"
FOLDERS: dict[
    str, tuple[dict[str, bytes], str, str]
] = {  # files; the documents, held out last; what is left out
    "as downloaded": (
        {
            **{
                "README.md": b"# card",
                "dataset_infos.json": b"{}",
                "data/train.jsonl.gz": gzip.compress(RECORD),
            },
            **{
                "data/test.jsonl.gz": gzip.compress(b'{"text": "held"}\n'),
                "train.csv": b"text\nfrom a table\n",
            },
        },
        "from records|held",
        "README.md, dataset_infos.json, train.csv",
    ),
    "splits": (
        {
            "train.json": b'[{"text": "a"},\n{"text": "b"}]',
            "val.json": b'{"text": "c"}\n',
            "test.json": b'[{"text": "d"}]',
        },
        "a|b|c",
        "test.json",
    ),
    "tables": (
        {"a.csv.xz": lzma.compress(b'text,id\n"x, ""y""",1\n'), "b.csv": b"id\n1\n", "c.txt": b"c"},
        'x, "y"',
        "b.csv, c.txt",
    ),
    "texts": (
        {"README.md": b"r", "a.txt.bz2": bz2.compress(b"text"), "b.csv": b"id\n1\n", "package.json": b"{\n}"},
        "r|text|{\n}",
        "b.csv",
    ),
    "texts in splits": (
        {"README.md": b"r", "a-train.txt": b"a", "a-valid.txt": b"b", "a-test.txt": b"c"},
        "a|b",
        "README.md, a-test.txt",
    ),
    "a test among texts": (
        {"train.py": b"a", "test.py": b"b", "setup.py": b"c", "a.csv": b"id\n1\n"},
        "c|b|a",
        "a.csv",
    ),
    "unpacked, with the old names": (
        {"a.jsonl.gz": b'{"text": "a"}\n', "b.jsonl.zst": b'{"text": "b"}\n', "c.txt.xz": b"c"},
        "a|b",
        "c.txt.xz",
    ),
    "packed in ways that are not read": (
        {"a.jsonl": RECORD, "b.jsonl.zst": ZSTD, "c.json.zst": ZSTD, "d.csv.zst": ZSTD},
        "from records",
        "b.jsonl.zst, c.json.zst, d.csv.zst",
    ),
    "such, beside a text that begins as bzip2": ({"a.txt": b"BZhang", "b.json": ZSTD}, "BZhang", "b.json"),
    "a table that begins as Parquet": ({"a.csv": b"PAR1,text\n1,a\n"}, "a", ""),
    "empty, packed": ({"a.jsonl": RECORD, "b.jsonl.bz2": bz2.compress(b"")}, "from records", ""),
    "packed, without a suffix": ({"a.jsonl": gzip.compress(RECORD)}, "from records", ""),
    "one of each": ({"test.jsonl": RECORD, "LICENSE": b"mine"}, "from records", "LICENSE"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_of_a_folder_records_are_read_and_what_is_left_out_is_named(name: str, tmp_path: Path) -> None:
    files, documents, left_out = FOLDERS[name]
    for file, content in files.items():
        write(tmp_path / "in" / file, content)
    corpus = opened(tmp_path / "in", tmp_path)
    assert bytes(tokens_of(corpus)).decode().rstrip("\0").split("\0") == documents.split("|")
    assert not left_out or f"left out: {left_out}" in str(corpus).splitlines()
    assert ("held out: the split" in str(corpus)) == ("splits" in name or name == "as downloaded")


def test_a_linked_folder_is_named_as_left_out_and_a_linked_file_is_read(tmp_path: Path) -> None:
    write(tmp_path / "there" / "a.jsonl", RECORD)
    folder = write(tmp_path / "in" / "b.jsonl", RECORD).parent
    (folder / "c.jsonl").symlink_to(tmp_path / "there" / "a.jsonl")
    (folder / "more").symlink_to(tmp_path / "there")
    corpus = opened(folder, tmp_path)
    assert bytes(tokens_of(corpus)) == 2 * b"from records\0"
    assert "left out: more" in str(corpus).splitlines()
    assert stream_files(folder)[1] == ["more"]


def test_a_byte_order_mark_is_no_text(tokenizer_file: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "w1 w2".encode("utf-8-sig"))
    corpus = opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    assert tokens_of(corpus) == [WORDS.index("w1"), WORDS.index("w2"), END]


def test_a_cell_of_a_million_characters_and_a_pipe(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"text\n" + b"x" * 10**6 + b"\n")
    assert len(tokens_of(opened(path, tmp_path))) == 10**6 + 1
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(
        ValueError, match=r"pipe.jsonl, which is no file .*expected a file or a folder: write it to one"
    ):
        opened(tmp_path / "pipe.jsonl", tmp_path)


def test_longer_documents_are_said_and_what_becomes_of_them(tmp_path: Path) -> None:
    pairs = [{"prompt": "q" * n, "completion": "yes"} for n in (2, 3, 40)]
    path = write_jsonl(tmp_path / "a.jsonl", *pairs)
    for long, lines in {
        "cut": [
            "longer than that: 1 of 3 documents: cut into pieces",
            "left out: 40 tokens that no label needs",
        ],
        "drop": ["longer than that: 1 of 3 documents: dropped", "left out: 44 tokens that no label needs"],
        "keep-end": ["longer than that: 1 of 3 documents: their ends alone are kept", "left out: 34 tokens"],
    }.items():
        corpus = opened(path, tmp_path, whole_documents=10, long_documents=long, split=False)
        assert all(line in str(corpus) for line in lines), (long, str(corpus))
    with pytest.raises(
        ValueError, match="got 1 of 3 documents longer than seq_length=10 .the longest has 44"
    ):
        opened(path, tmp_path, whole_documents=10, long_documents="refuse", split=False)
    with pytest.raises(
        ValueError, match="got 3 documents, 3 of them longer than seq_length=4, and none with a label"
    ):
        opened(path, tmp_path, whole_documents=4, long_documents="drop", split=False)
    firsts = save(tmp_path / "firsts", {"input_ids": [[1, 2]], "labels": [[1, -100]]})
    with pytest.raises(ValueError, match="0 of them longer than seq_length=4, and none .*give it a label"):
        opened(firsts, tmp_path, whole_documents=4, split=False)


# --- records ----------------------------------------------------------------------------------------------


def lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows))


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "marked.jsonl", "marked.json", "saved", "parquet"])
@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_records_are_the_same_in_every_shape(name: str, kind: str, tmp_path: Path) -> None:
    texts = [{"text": f"line {n} of ü", "id": n} for n in range(40)]
    pairs = [{"prompt": "p" * n, "completion": "größer [1, {" * n + "]}", "id": n} for n in range(12)]
    rows: list[dict[str, Any]] = texts if kind == "text" else pairs
    expected = opened(write_jsonl(tmp_path / "a.jsonl", *rows), tmp_path)
    folder = tmp_path / "in"
    if name == "saved":
        read = [save(folder, columns_of(rows), num_shards=3)]
    elif name == "parquet":
        folder.mkdir()
        dataset(columns_of(rows)).to_parquet(folder / "train.parquet")
        read = [folder, folder / "train.parquet"]
    else:
        text = json.dumps(rows) if name == "marked.json" else lines(rows)
        encoding = "utf-8-sig" if "marked" in name else "utf-8"  # as programs of Windows write it
        read = [folder, write(folder / name, text.encode(encoding))]
    for got in (opened(path, tmp_path) for path in read):
        assert tokens_of(got) == tokens_of(expected)
        assert loss_mask_of(got) == loss_mask_of(expected)
        assert (len(got.train), got.train.tokens.dtype, got.vocab_size) == (
            len(expected.train),
            np.uint8,
            256,
        )
        assert "left out: " in str(got)


def test_texts_are_bytes_with_a_zero_after_each(tmp_path: Path) -> None:
    texts = [f"line {n} of ü" for n in range(40)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *({"text": t} for t in texts)), tmp_path)
    assert bytes(tokens_of(corpus)) == b"".join(t.encode() + b"\0" for t in texts)
    assert corpus.train.loss_mask is None
    assert corpus.train.tokens[-1] == 0, "whole documents are held out"
    assert 0.05 < len(corpus.held_out) / len(tokens_of(corpus)) <= 0.1


def test_of_a_pair_the_completion_and_its_end_are_learned_in_every_batch(tmp_path: Path) -> None:
    pairs = [{"prompt": "ab" * (n % 5), "completion": "XY" * (1 + n % 3)} for n in range(60)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *pairs), tmp_path)
    expected = [x for p in pairs for x in [0] * len(p["prompt"]) + [1] * (len(p["completion"]) + 1)]
    assert loss_mask_of(corpus) == expected
    assert bytes(tokens_of(corpus)).decode() == "".join(p["prompt"] + p["completion"] + "\0" for p in pairs)
    assert f"learned: {sum(expected)} of {len(expected)}, in 48 documents not all" in str(corpus)
    first, held_out = trained(corpus.train, 5, 8, 7), corpus.held_out
    for inputs, targets in (first, held_out.read(held_out.spread(8, seq_length=7), seq_length=7)):
        assert set(targets.unique().tolist()) == {IGNORE_INDEX, 0, ord("X"), ord("Y")}
        of_prompts = (inputs[:, 1:] == ord("a")) | (inputs[:, 1:] == ord("b"))
        assert torch.equal(targets[:, :-1] == IGNORE_INDEX, of_prompts)
    plain, kept = trained(corpus.train.tokens, 5, 8, 7), first[1] != IGNORE_INDEX
    assert torch.equal(plain[0], first[0])
    assert torch.equal(plain[1][kept], first[1][kept])
    later = trained(corpus.train, 9, 4, 7)
    assert torch.equal(later[1], first[1][4:]), "position is all there is to resume from"


def test_packed_documents_are_numpys_files(tmp_path: Path) -> None:
    records = [{"text": "free"}, {"prompt": "1+1=", "completion": "2"}, {"text": "more", "id": 3}]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *records), tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    tokens, offsets, mask = (np.load(folder / f"{name}.npy") for name in ("tokens", "offsets", "mask"))
    ends = itertools.pairwise(offsets)
    assert [bytes(tokens[a:b]) for a, b in ends] == [b"free\0", b"1+1=2\0", b"more\0"]
    assert mask.astype(int).tolist() == [1] * 5 + [0] * 4 + [1] * 7 == loss_mask_of(corpus)
    assert "left out: keys of records that are not read: id" in str(corpus)


def test_a_tokenizer_makes_tokens_with_its_end_after_each_document(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(tokenizer_file)
    assert (tokenizer.end, tokenizer.vocab_size, tokenizer.dtype) == (END, len(WORDS), np.uint16)
    assert tokenizer.decode([3, 4]) == "w0 w1"
    folder = tmp_path / "folder"
    documents = [[n, n + 1, n + 2] for n in range(20)]
    for n, d in enumerate(documents):
        write(folder / f"b{n}.txt", words(*d).encode() + b"\n")
    write(folder / "c.txt", b"")
    write(folder / "d.txt", b"w1 \0")
    corpus = opened(folder, tmp_path, tokenizer=tokenizer)
    expected = [x for d in documents for x in (*(n + 3 for n in d), END)]
    assert sorted(tokens_of(corpus)) == sorted(expected)
    assert "left out: 1 empty file and 1 binary file: d.txt" in str(corpus)
    assert f"tokenizer: {tokenizer_file}, vocabulary 53, end token 2" in str(corpus)
    whole = opened(folder, tmp_path, tokenizer=tokenizer, whole_documents=9)
    assert (tokens_of(whole), whole.train.num_sequences(9)) == (tokens_of(corpus), len(whole.train) // 8)
    alone = opened(folder, tmp_path, tokenizer=tokenizer, whole_documents=9, split=False)
    assert (len(alone.train), alone.held_out.num_sequences(9)) == (len(tokens_of(corpus)), 0)


def test_a_long_text_is_split_by_position(tokenizer_file: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", words(*(n % 50 for n in range(999))).encode())
    corpus = opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    assert (len(corpus.train), len(corpus.held_out), corpus.held_out.tokens[-1]) == (900, 100, END)
    corpus = opened(write(tmp_path / "few" / "a.txt", b"x" * 999).parent, tmp_path)
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)
    assert corpus.description[1] == "held out: the end, 100 bytes"


def test_data_is_packed_once_and_again_after_a_change(tokenizer_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "in" / "cache"  # in the folder itself: must not be read back
    path = write_jsonl(tmp_path / "in" / "a.jsonl", {"text": words(*range(30))}, {"text": "w1"})
    tokenizer = open_tokenizer(tokenizer_file)

    def again(**more: Any) -> list[int]:
        return tokens_of(opened(path.parent, path.parent, **more))

    first = again(tokenizer=tokenizer)
    assert again(tokenizer=tokenizer) == first
    assert len(list(cache.iterdir())) == 1
    tokenizer_file.with_name("tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert again(tokenizer=open_tokenizer(tokenizer_file))[-1] == 1
    modified = path.stat().st_mtime_ns
    write_jsonl(path, {"text": words(*range(30))}, {"text": "w2"})
    os.utime(path, ns=(modified, modified + 1))
    assert again(tokenizer=tokenizer) == [*first[:-2], first[-2] + 1, END]
    assert len(list(cache.iterdir())) == 2, "one for each tokenizer, none of the data as it was"


def test_data_is_packed_again_by_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was read by older code may have had other tokens."""
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "free"})
    sources = shutil.copytree(packing.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(packing, "SOURCES", sources)

    def folder() -> Path:
        code_digest.cache_clear()  # of a process, whose code stays
        assert tokens_of(opened(path, tmp_path)) == [*b"free\0"]
        (packed,) = (tmp_path / "cache").iterdir()
        return packed

    first = folder()
    assert folder() == first
    write(sources / "records.py", sources.joinpath("records.py").read_bytes() + b"# changed\n")
    second = folder()
    assert second != first
    newer = {"transformers": "99", "tokenizers": "99"}
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: newer.get(name) or version(name))
    assert folder() not in (first, second)
    monkeypatch.undo()
    code_digest.cache_clear()


def test_an_interrupted_packing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "corpus" / "a.txt", b"text")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path / "corpus", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    assert opened(tmp_path / "corpus", tmp_path).train.tokens.tobytes() == b"text"
