"""Data on disk as a corpus: files, documents, what of them is learned and what is held out, and what is refused."""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_data import loss_mask_of, opened, save_tokenizer, tokens_of, trained, write_jsonl

from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.documents import is_held_out, stdlib_files
from zfunc.train.data.tokenizer import BYTES, open_tokenizer

WORDS = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(50))]
END = WORDS.index("</s>")


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
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
    for name, content in texts.items():
        write(folder / name, content)
    for name in (".git/config", ".hidden", "sub0/.hidden/file"):
        write(folder / name, b"hidden")
    write(folder / "binary", b"text at first" * 100_000 + b"\0")
    write(folder / "empty", b"")
    (folder / "broken").symlink_to("nowhere")
    corpus = opened(folder, tmp_path)
    for part, held_out in ((corpus.train, False), (corpus.held_out, True)):
        assert isinstance(part.tokens, np.memmap)
        expected = (texts[name] + b"\0" for name in sorted(texts) if is_held_out(name) == held_out)
        assert part.tokens.tobytes() == b"".join(expected)
    num_held_out = sum(map(is_held_out, texts))
    assert (corpus.vocab_size, corpus.train.tokens.dtype) == (256, np.uint8)
    assert str(corpus).splitlines() == [
        f"{folder}: 80 files, 80 documents, {sum(map(len, texts.values())) + 80:,} bytes",
        f"held out: {num_held_out} of the files, by a hash of their names, {len(corpus.held_out)} bytes",
        "left out: 1 empty and 1 binary files",
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
    assert corpus.train.tokens.tobytes() + corpus.held_out.tokens.tobytes() == path.read_bytes()
    assert len(corpus.held_out) == 25
    assert isinstance(corpus.train.tokens, np.memmap)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_with_and_without_a_held_out_file(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(1000, dtype=dtype)
    path = write(tmp_path / "train.bin", tokens.tobytes())
    alone = opened(path, tmp_path, dtype=dtype, vocab_size=1000)
    assert alone.train.tokens.tolist() == list(range(900))
    assert alone.held_out.tokens.tolist() == list(range(900, 1000))
    write(tmp_path / "val.bin", tokens[:50].tobytes())
    for where in (path, tmp_path):
        corpus = opened(where, tmp_path, dtype=dtype, vocab_size=1000)
        assert corpus.train.tokens.tolist() == tokens.tolist()
        assert corpus.held_out.tokens.tolist() == list(range(50))
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


# --- documents --------------------------------------------------------------------------------------------


def test_texts_are_bytes_with_a_zero_after_each(tmp_path: Path) -> None:
    texts = [f"line {n} of ü" for n in range(40)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *({"text": t} for t in texts)), tmp_path)
    assert bytes(tokens_of(corpus)) == b"".join(t.encode() + b"\0" for t in texts)
    assert (corpus.train.tokens.dtype, corpus.vocab_size, corpus.train.loss_mask) == (np.uint8, 256, None)
    assert corpus.train.tokens[-1] == 0, "whole documents are held out"
    assert 0.05 < len(corpus.held_out) / len(tokens_of(corpus)) <= 0.1


def test_of_a_pair_the_completion_and_its_end_are_learned_in_every_batch(tmp_path: Path) -> None:
    pairs = [{"prompt": "ab" * (n % 5), "completion": "XY" * (1 + n % 3)} for n in range(60)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *pairs), tmp_path)
    expected = [x for p in pairs for x in [0] * len(p["prompt"]) + [1] * (len(p["completion"]) + 1)]
    assert loss_mask_of(corpus) == expected
    assert bytes(tokens_of(corpus)).decode() == "".join(p["prompt"] + p["completion"] + "\0" for p in pairs)
    assert f"learned: {sum(expected)} bytes, without the prompts of 48 documents" in str(corpus)
    first, held_out = trained(corpus.train, 5, 8, 7), corpus.held_out
    for inputs, targets in (first, held_out.read(held_out.spread(8, seq_length=7), seq_length=7)):
        assert set(targets.unique().tolist()) == {IGNORE_INDEX, 0, ord("X"), ord("Y")}
        assert torch.equal(
            targets[:, :-1] == IGNORE_INDEX, (inputs[:, 1:] == ord("a")) | (inputs[:, 1:] == ord("b"))
        )
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
    assert "left out: 1 keys of records" in str(corpus)


def test_a_tokenizer_makes_tokens_with_its_end_after_each_document(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(tokenizer_file)
    assert (tokenizer.end, tokenizer.vocab_size, tokenizer.dtype) == (END, len(WORDS), np.uint16)
    assert tokenizer.decode([3, 4]) == "w0 w1"
    folder = tmp_path / "folder"
    documents = [[n, n + 1, n + 2] for n in range(20)]
    write_jsonl(folder / "a.jsonl", *({"text": words(*d)} for d in documents[:10]))
    for n, d in enumerate(documents[10:]):
        folder.joinpath(f"b{n}.txt").write_text(words(*d) + "\n")
    write(folder / "c.txt", b"")
    write(folder / "d.txt", b"w1 \0")
    corpus = opened(folder, tmp_path, tokenizer=tokenizer)
    expected = [x for d in documents for x in (*(n + 3 for n in d), END)]
    assert sorted(tokens_of(corpus)) == sorted(expected)
    assert "left out: 1 empty and 1 binary files" in str(corpus)
    assert f"tokenizer: {tokenizer_file}, vocabulary 53, end token 2" in str(corpus)
    whole = opened(folder, tmp_path, tokenizer=tokenizer, whole_documents=9)
    assert (tokens_of(whole), whole.train.num_sequences(9)) == (tokens_of(corpus), len(whole.train) // 8)
    alone = opened(folder, tmp_path, tokenizer=tokenizer, whole_documents=9, split=False)
    assert (len(alone.train), alone.held_out.num_sequences(9)) == (len(tokens_of(corpus)), 0)


def test_a_long_text_is_split_by_position(tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(*(n % 50 for n in range(999))))
    corpus = opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    assert (len(corpus.train), len(corpus.held_out), corpus.held_out.tokens[-1]) == (900, 100, END)
    few = write(tmp_path / "few" / "a.txt", b"x" * 999)
    corpus = opened(few.parent, tmp_path)
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)
    assert corpus.description[1] == "held out: the end (too few files to hold whole ones out), 100 bytes"


def test_data_is_packed_once_and_again_after_a_change(tokenizer_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "in" / "cache"  # in the folder itself: must not be read back
    path = write_jsonl(tmp_path / "in" / "a.jsonl", {"text": words(*range(30))}, {"text": "w1"})
    tokenizer = open_tokenizer(tokenizer_file)

    def again(**more: Any) -> list[int]:
        return tokens_of(opened(path.parent, path.parent, **more))

    first = again(tokenizer=tokenizer)
    assert again(tokenizer=tokenizer) == first
    assert len(list(cache.iterdir())) == 1
    tokenizer_file.with_name("tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    assert again(tokenizer=open_tokenizer(tokenizer_file))[-1] == 1
    modified = path.stat().st_mtime_ns
    write_jsonl(path, {"text": words(*range(30))}, {"text": "w2"})
    os.utime(path, ns=(modified, modified + 1))
    assert again(tokenizer=tokenizer) == [*first[:-2], first[-2] + 1, END]
    assert len(list(cache.iterdir())) == 3


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


SHAPES: dict[str, Callable[[list[dict[str, str]]], str]] = {
    "a.ndjson": lambda rows: "\n".join(map(json.dumps, rows)),
    "a.JSONL": lambda rows: "\n".join(map(json.dumps, rows)) + "\n",
    "array.json": json.dumps,
    "indented.json": lambda rows: "\ufeff \n" + json.dumps(rows, indent=2) + "\n\n",
    "lines.json": lambda rows: "\n".join(map(json.dumps, rows)) + "\n",
    "objects.json": lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows),
}


@pytest.mark.parametrize("name", SHAPES)
def test_records_are_the_same_in_every_shape(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "completion": "größer [1, {" * n + "]}"} for n in range(12)]
    expected = opened(write_jsonl(tmp_path / "a.jsonl", *rows), tmp_path)
    path = write(tmp_path / "in" / name, SHAPES[name](rows).encode())
    for got in (opened(path.parent, tmp_path), opened(path, tmp_path)):
        assert tokens_of(got) == tokens_of(expected)
        assert loss_mask_of(got) == loss_mask_of(expected)


def test_a_single_object_is_a_record_and_other_json_in_a_folder_is_text(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", b'{"text": "just this"}')
    assert tokens_of(opened(one, tmp_path)) == [*b"just this", 0]
    for text in (b'{"name": "x", "scripts": []}', b'[{"name": 1}]', b"[1,", b"[" * 100_000):
        path = write(tmp_path / "in" / "package.json", text)
        assert bytes(tokens_of(opened(path.parent, tmp_path))) == text + b"\0"


# --- what is refused --------------------------------------------------------------------------------------

LINE = "a.jsonl, line 2"
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.jsonl", '{"text": "a', rf"{LINE}: got invalid JSON \(Unterminated string starting at, column 10\)"),
    ("a.jsonl", b'{"text": "\xff"}', f"{LINE}: got invalid JSON .*utf-8"),
    ("a.jsonl", "[1]", rf"{LINE}: got \[1\], expected .*write one object a document"),
    ("a.jsonl", '{"txt": "a"}', f"{LINE}: got an object with txt, expected .*rename its keys"),
    ("a.jsonl", '{"prompt": "a"}', f"{LINE}: got an object with prompt, expected"),
    ("a.jsonl", '{"text": "", "prompt": "", "completion": ""}', "with completion, prompt, text"),
    ("a.jsonl", '{"text": 5}', f"{LINE}, 'text': got 5, expected a string"),
    ("a.jsonl", '{"prompt": null, "completion": ""}', "'prompt': got None, expected a string"),
    ("a.jsonl", '{"text": "a", "text": "b"}', "the name 'text' twice in one object"),
    ("a.jsonl", '{"text": "a\\ud800"}', f"{LINE}: got half a surrogate pair"),
    ("a.jsonl", '{"text": "a"} {"text": "b"}', "Extra data"),
    ("a.jsonl", "[" * 100_000, f"{LINE}: got invalid JSON"),
    ("a.json", "so it goes", "record 1: got invalid JSON .*Expecting value.*name it .txt"),
    ("a.json", "[1, 2]", "record 1: got 1, expected .*write one object a document"),
    ("a.json", '[{"text": "a"}, {"txt": "a"}]', "record 2: got an object with txt, expected"),
    ("a.json", '[{"text": "a"}, {"text": "b"', "got invalid JSON"),
    ("a.json", '[{"text": "a"} {"text": "b"}]', "got invalid JSON .*delimiter"),
    ("a.json", '[{"text": "a"}][{"text": "b"}]', "got invalid JSON .*Extra data"),
    ("a.json", '[{"text": "a", "text": "b"}]', "the name 'text' twice in one object"),
    ("a.json", "[" * 100_000, "record 1: got invalid JSON"),
    ("a.json", b'[{"text": "\xff"}]', "record 1: got invalid JSON .*utf-8"),
    ("a.jsonl", "", "got no text in .*, expected at least one document"),
    ("empty.txt", b"", "empty.txt, which is empty; expected data"),
    ("empty.bin", b"", "empty.bin, which is empty; expected data"),
    ("odd.bin", b"abc", r"odd.bin of 3 bytes; .* multiple of 2 \(uint16\); check that"),
    ("in/.hidden", b"text", r"got no text in .*in \(0 empty and 0 binary files\), expected"),
    ("in/empty", b"", r"got no text in .*in \(1 empty and 0 binary files\), expected"),
    ("in/binary", b"\0\1", r"got no text in .*in \(0 empty and 1 binary files\), expected"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_unusable_data_is_refused_with_its_place(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    content = content.encode() if isinstance(content, str) else content
    path = write(tmp_path / name, b'{"text": ""}\n' + content if name == "a.jsonl" else content)
    with pytest.raises(ValueError, match=message):
        opened(path if path.parent == tmp_path else path.parent, tmp_path)
    assert not list(tmp_path.glob("cache/*")), "nothing is left of it"


def test_missing_and_unreadable_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("missing", "missing.bin", "missing.jsonl"):
        with pytest.raises(FileNotFoundError, match=f"{name}, which does not exist; expected a text file"):
            opened(tmp_path / name, tmp_path)
    write(tmp_path / "in" / "a.txt", b"text")

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"got .*a\.txt, which cannot be read \(Permission denied\)"):
        opened(tmp_path / "in", tmp_path)


def test_a_tokenizer_takes_text_in_utf8(tokenizer_file: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"w1 \xe9")
    with pytest.raises(ValueError, match=f"got {path}, which is not UTF-8 at byte 3"):
        opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    with pytest.raises(ValueError, match="which holds tokens, expected text or JSONL"):
        opened(write(tmp_path / "a.bin", b"1234"), tmp_path, tokenizer=BYTES)


FLAWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "which cannot be read .*expected a tokenizer.json"),
    "no tokenizer": (lambda path: path.write_text("{}"), "which cannot be read .*expected a tokenizer.json"),
    "no end": (lambda path: path.write_text(path.read_text().replace("</s>", "<z>")), "without an end token"),
    "bad configuration": (
        lambda path: path.with_name("tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json: got a file that cannot be read",
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
