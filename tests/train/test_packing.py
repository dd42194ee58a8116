"""Data on disk as a corpus: files, records, datasets; what is learned, what is held out, what is refused."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainings import losses, train
from text_data import loss_mask_of, opened, save_tokenizer, tokens_of, trained, write_jsonl

from zfunc.models.loss import IGNORE_INDEX
from zfunc.planner.kept_costs import code_digest
from zfunc.train.data import documents, packing
from zfunc.train.data.documents import first_look, holds_tokens, is_held_out, stdlib_files
from zfunc.train.data.tokenizer import BYTES, open_tokenizer

WORDS = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(50))]
END = WORDS.index("</s>")


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def dataset(columns: dict[str, Any]) -> Any:
    datasets = pytest.importorskip("datasets", reason='pip install ".[datasets]"')
    return datasets.Dataset.from_dict(columns)


def save(path: Path, columns: dict[str, Any], **more: Any) -> Path:
    dataset(columns).save_to_disk(path, **more)
    return path


def save_splits(path: Path, **columns: dict[str, Any]) -> Path:
    datasets = pytest.importorskip("datasets", reason='pip install ".[datasets]"')
    datasets.DatasetDict({name: dataset(one) for name, one in columns.items()}).save_to_disk(path)
    return path


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tok" / "tokenizer.json", WORDS, special=["<s>", "</s>"])


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
        "left out: 1 empty and 1 binary files: binary",
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


def test_one_file_is_mapped_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt", bytes(range(250)))
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
    "one of each": ({"test.jsonl": RECORD, "LICENSE": b"mine"}, "from records", "LICENSE"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_of_a_folder_records_are_read_and_what_is_left_out_is_named(name: str, tmp_path: Path) -> None:
    files, documents, left_out = FOLDERS[name]
    for file, content in files.items():
        write(tmp_path / "in" / file, content)
    corpus = opened(tmp_path / "in", tmp_path)
    assert bytes(tokens_of(corpus)).decode().rstrip("\0").split("\0") == documents.split("|")
    assert f"left out: {left_out}" in str(corpus).splitlines()
    assert ("held out: the split" in str(corpus)) == (name in ("as downloaded", "splits"))


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
    assert "left out: 1 empty and 1 binary files: d.txt" in str(corpus)
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


# --- datasets ---------------------------------------------------------------------------------------------

IDS = [[(n * k) % 300 for k in range(n % 7)] for n in range(40)]
CHAT = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", "tool_calls": None}]


def test_pairs_and_the_split_that_is_held_out(tmp_path: Path) -> None:
    def pairs(*numbers: int) -> dict[str, Any]:
        return {"completion": [str(2 * n) for n in numbers], "prompt": [f"{n}=" for n in numbers]}

    path = save_splits(tmp_path / "d", train=pairs(*range(20)), test=pairs(1), validation=pairs(7, 8))
    corpus = opened(path, tmp_path)
    assert bytes(corpus.held_out.tokens.tolist()) == b"7=14\x008=16\0"
    assert loss_mask_of(corpus)[-10:] == [0, 0, 1, 1, 1] * 2
    assert bytes(corpus.train.tokens.tolist()) == b"".join(b"%d=%d\0" % (n, 2 * n) for n in range(20))
    assert "held out: the split validation" in str(corpus)
    assert "left out: the splits test" in str(corpus)
    alone = opened(path / "train", tmp_path)
    assert tokens_of(alone) == corpus.train.tokens.tolist()
    assert "held out: the end" in str(alone)


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"input_ids": IDS, "text": ["a"] * 40}, num_shards=2)
    assert holds_tokens(path)
    corpus = opened(path, tmp_path, vocab_size=300)
    assert tokens_of(corpus) == [x for row in IDS for x in row]
    stream = corpus.train
    assert (stream.tokens.dtype, corpus.vocab_size, stream.loss_mask) == (np.uint16, 300, None)
    assert len(stream) in np.cumsum([len(row) for row in IDS]), "whole rows are held out"
    assert opened(path, tmp_path, vocab_size=70_000).train.tokens.dtype == np.uint32


def test_labels_give_the_loss_mask_and_padding_is_dropped(tmp_path: Path) -> None:
    ids = [[n, n + 1, n + 2, 0] for n in range(30)]
    labels = [[-100, row[1], row[2], -100] for row in ids]
    columns = {"attention_mask": [[1, 1, 1, 0]] * 30, "input_ids": ids, "labels": labels}
    corpus = opened(save(tmp_path / "d", columns), tmp_path)
    assert tokens_of(corpus) == [x for row in ids for x in row[:3]]
    assert loss_mask_of(corpus) == [0, 1, 1] * 30
    assert "learned: 60 of 90, in 30 documents not all" in str(corpus)


def test_rows_that_were_selected_are_the_rows(tmp_path: Path) -> None:
    dataset({"text": ["a", "b", "c", "d"]}).select([3, 1, 2]).save_to_disk(tmp_path / "d")
    assert bytes(tokens_of(opened(tmp_path / "d", tmp_path))) == b"d\0b\0c\0"


def test_what_datasets_wrote_is_read(tmp_path: Path) -> None:
    """A DatasetDict of version 5.2, with 20 and 2 rows of prompt, completion and number."""
    pytest.importorskip("datasets")
    corpus = opened(Path(__file__).parents[1] / "goldens/saved_dataset", tmp_path)
    assert bytes(corpus.train.tokens.tolist()) == b"".join(b"%d+%d=%d\0" % (n, n, 2 * n) for n in range(20))
    assert bytes(corpus.held_out.tokens.tolist()) == b"3+3=6\x009+9=18\0"
    assert "left out: the columns number" in str(corpus)


def test_parquet_files_of_chats_as_the_hub_has_them(tokenizer_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template = "{% for m in messages %}{{ m.content }} {{ m.tool_calls | default('</s>') }} {% endfor %}"
    tokenizer_file.with_name("chat_template.jinja").write_text(template)
    tokenizer = open_tokenizer(tokenizer_file)
    (tmp_path / "d" / "data").mkdir(parents=True)
    (tmp_path / "d" / "README.md").write_text("a card")
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("test-00000-of-00001", 1)):
        rows = dataset({"id": range(count), "messages": [CHAT] * count})
        rows.to_parquet(tmp_path / "d" / "data" / f"{name}.parquet")
    corpus = opened(tmp_path / "d", tmp_path, tokenizer=tokenizer)
    assert corpus.train.tokens.tolist() == [4, END, 5, END] * 5
    assert loss_mask_of(corpus) == [0, 0, 1, 1] * 6
    assert corpus.held_out.tokens.tolist() == [4, END, 5, END]
    assert "held out: the split test" in str(corpus)
    assert "left out: the columns id" in str(corpus)
    file = tmp_path / "d" / "data" / "test-00000-of-00001.parquet"
    assert tokens_of(opened(file, tmp_path, tokenizer=tokenizer)) == corpus.held_out.tokens.tolist()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="which datasets cannot read .*copy or save it again"):
        opened(tmp_path / "d", tmp_path, tokenizer=tokenizer)


def test_of_parquet_a_few_rows_are_in_memory_and_a_large_row_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one group of 4,000 rows, 24 MB with a column that is not read; and of 64 rows, one of them of 8 MB."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    monkeypatch.setattr(documents, "_BATCH", 1 << 20)
    rows = [f"{n:06}" * 512 for n in range(4000)]
    many, one = pa.table({"text": rows, "id": rows}), pa.table({"text": ["x" * 8_000_000, *["y"] * 63]})
    pa.set_memory_pool(pool)
    try:
        for table, of_arrow, of_python in ((many, 6e6, 4e6), (one, 24e6, 40e6)):
            parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
            del table
            before = pool.bytes_allocated(), pool.max_memory()
            tracemalloc.start()
            corpus = opened(tmp_path / "a.parquet", tmp_path)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < of_python
            assert pool.max_memory() <= max(before[1], before[0] + of_arrow)
            texts = bytes(tokens_of(corpus)).split(b"\0")[:-1]
            assert [len(x) for x in texts] == ([3072] * 4000 if len(texts) > 64 else [8_000_000, *[1] * 63])
    finally:
        pa.set_memory_pool(usual)


@pytest.mark.usefixtures("own_folder")
def test_a_training_on_tokens_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [[(n * k + n) % 300 for k in range(40)] for n in range(60)]
    save(Path("d"), {"input_ids": ids, "labels": [[-100] * 20 + row[20:] for row in ids]})
    job = ("--data", "d", "--vocab-size", 300, "--steps", 6)
    assert train(*job, "--save-every", 3, "--out", "first") == 0
    assert train(*job, "--resume", "first/checkpoints/step-00000003", "--out", "second") == 0
    assert losses("second") == losses("first")[3:]
    assert "bits per token" in capsys.readouterr().out
    assert train(*job, "--tokenizer", "tokenizer.json", "--out", "no") == 2


# --- what is refused --------------------------------------------------------------------------------------

LINE = "a.jsonl, line 2"
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud800"}


def call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


REFUSED: dict[
    str, list[tuple[Any, str]]
] = {  # by the file: its content (of a.jsonl its second line), or columns
    "a.jsonl": [
        ('{"text": "a', rf"{LINE}: got invalid JSON \(Unterminated string starting at: line 1 column 10"),
        (b'{"text": "\xff"}', f"{LINE}: got invalid JSON .*utf-8"),
        ([1], rf"{LINE}: got \[1\], expected .*write one object a document"),
        ({"txt": "a"}, f"{LINE}: got an object with txt, expected .*rename its keys"),
        ({"prompt": "a"}, f"{LINE}: got an object with prompt, expected"),
        ({"text": 5}, f"{LINE}, 'text': got 5, expected a string"),
        ({"prompt": None, "completion": ""}, "'prompt': got None, expected a string"),
        ({"prompt": "a", "completion": [USER]}, "expected a string: write both of the pair as texts or as"),
        ('{"text": "a", "text": "b"}', "the name 'text' twice in one object"),
        ({"text": "a\ud800"}, f"{LINE}: got invalid JSON .*surrogates"),
        ('{"text": "a"} {"text": "b"}', "Extra data"),
        ("[" * 100_000, f"{LINE}: got invalid JSON"),
        ({"messages": [USER]}, f"{LINE}: got a chat without a turn of the assistant to learn, expected one"),
        ({"messages": []}, f"{LINE}: got a chat without a turn of the assistant"),
        ({"messages": "hi"}, f"{LINE}: got 'hi', expected JSON"),
        ({"messages": {"a": 1}}, f"{LINE}: got .*'a': 1.*, expected a list of objects, as in"),
        ({"messages": [USER, call("{")]}, f"{LINE}, message 2: got '{{', expected JSON"),
        (
            {"messages": [USER, call("[1]")]},
            f"{LINE}, message 2: got the arguments .1., expected a JSON object",
        ),
        ({"messages": [USER, call("{}")], "tools": "x"}, f"{LINE}: got 'x', expected JSON"),
        (
            {"conversations": [{"from": "bing", "value": "a"}]},
            "message 1: got 'bing' as role, expected .*human, ",
        ),
        ({"prompt": [USER, call("{}")], "completion": [USER]}, "without a turn of the assistant to learn"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
            "message 1: got ..f.., expected a li",
        ),
        ({"prompt": [USER], "completion": "a"}, f"{LINE}: got 'a', expected JSON"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, rf"{LINE}: got a preference \(chosen, rejected\)"),
        ({"prompt": "a", "completion": "b", "label": False}, r"got a preference \(completion, label\)"),
        ({"messages": [USER | {"weight": "0"}]}, f"{LINE}, message 1: got '0' as weight, expected 0 or 1"),
        (
            {"instruction": "a", "input": ["b"], "output": "c"},
            f"{LINE}, message 1: got .*b.* as content, exp",
        ),
        ({"messages": [{"content": "a"}]}, f"{LINE}, message 1: got None as role, expected text, as in"),
        ({"messages": [{"role": "user"}]}, f"{LINE}, message 1: got None as content, expected text"),
        ({"messages": [USER | {"content": [{"type": "image"}]}]}, "message 1: got .*image.* as content, exp"),
        ({"input_ids": [1]}, "got an object with input_ids, expected text, or"),
        ({"question": "a", "answer": "b"}, "got an object with answer, question, expected text, or"),
        ({"messages": [ANSWER]}, f"{LINE}: .*surrogates"),
        ("", "got no text in .*, expected at least one document"),
    ],
    "a.json": [
        ([{"txt": "a"}], r"a\.json, record 1: got an object with txt, expected .*rename its keys"),
        ("[1", r"a\.json: got invalid JSON"),
        ({"train": []}, r"a\.json, line 1: got an object with train"),
    ],
    "a.csv": [
        (b"a,b\n1,2\n", "a.csv, line 2: got an object with a, b, expected"),
        (b"text\n1,2\n", "a.csv, line 2: got 2 cells for the columns text, expected one each"),
        (b'text\n"1', "a.csv, which cannot be read after line 2 .unexpected end.*expected a table in UTF-8"),
        (
            b"text\ngr\xf6sse\n",
            r"a.csv, which cannot be read after line 0 .'utf-8' codec.*save it again as UTF",
        ),
    ],
    "a.jsonl.gz": [(b'{"text": "a"}', r"a\.jsonl\.gz, which cannot be read \(Not a gzipped file")],
    "a.zip": [(b"PK\3\4", "a.zip, which is compressed, expected what is in it: unpack it")],
    "in/a.csv": [(b"a,b\n1,2\n", "line 2: got an object with a, b, expected")],
    "in/data.jsonl.zst": [(b"\x28\xb5\x2f\xfd", r"got no text in .*0 empty and 1 binary")],
    "empty.txt": [(b"", "empty.txt, which is empty; expected data")],
    "empty.bin": [(b"", "empty.bin, which is empty; expected data")],
    "odd.bin": [(b"abc", r"odd.bin of 3 bytes; .* multiple of 2 \(uint16\); check that")],
    "in/.hidden": [(b"text", r"got no text in .*in \(0 empty and 0 binary files\), expected")],
    "in/empty": [(b"", r"got no text in .*in \(1 empty and 0 binary files\), expected")],
    "in/binary": [(b"\0\1", r"got no text in .*in \(0 empty and 1 binary files\), expected")],
    "dataset": [
        ({"txt": ["a"], "id": [1]}, "with the columns txt, id, expected text"),
        ({"prompt": ["a"]}, "with the columns prompt, expected text"),
        ({"text": ["a", None]}, "row 1: got an object with nothing, expected text"),
        ({"text": [1, 2]}, "row 0, 'text': got 1, expected a string"),
        ({"prompt": [CHAT], "completion": ["b"]}, "row 0: got 'b', expected JSON"),
        ({"input_ids": [[[1, 2]], [[3]]]}, "row 0: got input_ids .*, expected a list of whole numbers"),
        ({"input_ids": [[1, 2]], "labels": [1]}, "row 0: got labels 1, expected a list of whole"),
        ({"input_ids": [[1, None]]}, "row 0: got input_ids .*None.*, expected a list of whole"),
        ({"input_ids": [["a"]]}, "row 0: got input_ids .*, expected a list of whole"),
        ({"input_ids": [[1], None]}, "row 1: got an object with nothing, expected"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [4, -100]]}, "row 1: got the label 4 for the"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]}, "row 1: got 1 labels for 2 input_ids"),
        ({"input_ids": [[1], [99_999]]}, "row 1: got tokens from 99999 to 99999, expected .* below 50257"),
        ({"input_ids": [[1], [-1, 3]]}, "row 1: got tokens from -1 to 3"),
        ({"text": [""]}, "got no text in"),
        ({"input_ids": [[]]}, "got no text in"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "message"), [(x, *row) for x, rows in REFUSED.items() for row in rows]
)
def test_unusable_data_is_refused_with_its_place(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    if name == "dataset":
        path = save(tmp_path / "d", content)
    else:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        raw = text.encode() if isinstance(text, str) else text
        path = write(tmp_path / name, b'{"text": ""}\n' + raw if name == "a.jsonl" else raw)
        path = path if path.parent == tmp_path else path.parent
    with pytest.raises(ValueError, match=message):
        opened(path, tmp_path)
    assert not list(tmp_path.glob("cache/*")), "nothing is left of it"


def test_unusable_splits_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = {"text": ["a"] * 40}, {"prompt": ["a"], "completion": ["b"]}
    with pytest.raises(ValueError, match="with the splits a, b, expected one called train: name the folder"):
        opened(save_splits(tmp_path / "x", a=one, b=one), tmp_path)
    with pytest.raises(
        ValueError, match="y, which datasets cannot read .*expected Parquet files or what save"
    ):
        opened(save_splits(tmp_path / "y", train=one, test=other), tmp_path)
    assert tokens_of(opened(save_splits(tmp_path / "z", a=one), tmp_path))
    (tmp_path / "z" / "a" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}]}))
    with pytest.raises(ValueError, match="z, which datasets cannot read .*save it again"):
        opened(tmp_path / "z", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'needs datasets .*: pip install "\.\[datasets\]"'):
        opened(tmp_path / "y", tmp_path)


@pytest.mark.usefixtures("own_folder")
def test_missing_and_unreadable_data_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("missing", "missing.bin", "missing.jsonl"):
        assert train("--data", name) == 2
        message = f"--data: got {name}, which does not exist, expected what is to be trained on"
        assert message in capsys.readouterr().err
    write(Path("in/a.txt"), b"text")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("zfunc.train.data.documents.opened", refuse)
    monkeypatch.setattr(np, "memmap", lambda *_, **__: os.fstat(-1))  # an error without a name
    assert train("--data", "in/a.txt") == 2
    assert "--data: got in/a.txt, which cannot be read (Bad file descriptor)" in capsys.readouterr().err
    assert train("--data", "in") == 2
    message = "--data: got in/a.txt, which cannot be read (Permission denied), expected"
    assert message in capsys.readouterr().err


def test_a_tokenizer_takes_text_in_utf8(tokenizer_file: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"w1 \xe9")
    with pytest.raises(ValueError, match=f"got {path}, which is not UTF-8 at byte 3"):
        opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    tokens = write(tmp_path / "a.bin", b"1234")
    with pytest.raises(ValueError, match="which holds tokens, expected text or JSONL"):
        opened(tokens, tmp_path, tokenizer=BYTES)
    with pytest.raises(ValueError, match=r"a\.bin, which does not say where documents end, expected text"):
        opened(tokens, tmp_path, whole_documents=16)


FLAWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "which cannot be read .*expected a tokenizer.json"),
    "no tokenizer": (lambda path: path.write_text("{}"), "which cannot be read .*expected a tokenizer.json"),
    "no end": (lambda path: path.write_text(path.read_text().replace("</s>", "<z>")), "without an end token"),
    "bad configuration": (
        lambda path: path.with_name("tokenizer_config.json").write_text("["),
        "which cannot be read .*expected a tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", FLAWS)
def test_an_unusable_tokenizer_is_refused(name: str, tokenizer_file: Path) -> None:
    flaw, message = FLAWS[name]
    flaw(tokenizer_file)
    with pytest.raises(ValueError, match=message):
        open_tokenizer(tokenizer_file)
    if name == "no end":
        assert open_tokenizer(tokenizer_file, end=7).end == 7, "the caller may give it"


def test_a_first_look_ends_behind_its_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that books do not take minutes before a training."""
    path = tmp_path / "books.jsonl"
    path.write_text(json.dumps({"text": "a" * 90}) + '\n{"title": 1}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2: got an object with title"):
        first_look(path)
    monkeypatch.setattr(documents, "_CHARACTERS", 90)
    assert [x.kind for x in first_look(path)] == ["text", "text"]  # and the last


def test_a_first_look_takes_texts_that_are_no_utf_8_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes(b'{"name": "\xe9"}')
    assert [x.kind for x in first_look(tmp_path)] == ["bytes"]
