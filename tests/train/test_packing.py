"""Documents packed: JSONL, texts with a tokenizer, what of them is learned, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from text_data import loss_mask_of, opened, save_tokenizer, tokens_of, write_jsonl

from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.corpus import batch_at, held_out_batches
from zfunc.train.data.tokenizer import BYTES, open_tokenizer

WORDS = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(50))]
END = WORDS.index("</s>")


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tok" / "tokenizer.json", WORDS, special=["<s>", "</s>"])


# --- what is packed ---------------------------------------------------------------------------------------


def test_texts_are_bytes_with_a_zero_after_each(tmp_path: Path) -> None:
    texts = [f"line {n} of ü" for n in range(40)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *({"text": t} for t in texts)), tmp_path)
    assert bytes(tokens_of(corpus)) == b"".join(t.encode() + b"\0" for t in texts)
    assert (corpus.train.dtype, corpus.vocab_size, corpus.loss_mask) == (np.uint8, 256, None)
    assert corpus.train[-1] == 0, "whole documents are held out"
    assert 0.05 < len(corpus.held_out) / len(tokens_of(corpus)) <= 0.1


def test_of_a_pair_the_completion_and_its_end_are_learned(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(40)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *pairs, {"text": "free"}), tmp_path)
    expected = [x for p in pairs for x in [0] * len(p["prompt"]) + [1] * (len(p["completion"]) + 1)]
    assert loss_mask_of(corpus) == expected + [1] * 5
    text = "".join(p["prompt"] + p["completion"] + "\0" for p in pairs) + "free\0"
    assert bytes(tokens_of(corpus)).decode() == text
    assert f"learned: {sum(expected) + 5} bytes, without the prompts of 40 documents" in str(corpus)


def test_labels_of_prompts_do_not_count_in_any_batch(tmp_path: Path) -> None:
    pairs = [{"prompt": "ab" * (n % 5), "completion": "XY" * (1 + n % 3)} for n in range(60)]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *pairs), tmp_path)
    sizes = {"batch_size": 8, "seq_length": 7}
    trained = batch_at(corpus.train, 5, **sizes, seed=3, loss_mask=corpus.loss_mask)
    held_out = held_out_batches(corpus.held_out, **sizes, limit=8, loss_mask=corpus.held_out_loss_mask)
    for inputs, targets in (trained, *held_out):
        assert set(targets.unique().tolist()) == {IGNORE_INDEX, 0, ord("X"), ord("Y")}
        assert torch.equal(
            targets[:, :-1] == IGNORE_INDEX, (inputs[:, 1:] == ord("a")) | (inputs[:, 1:] == ord("b"))
        )
    plain = batch_at(corpus.train, 5, **sizes, seed=3)
    assert torch.equal(plain[0], trained[0])
    kept = trained[1] != IGNORE_INDEX
    assert torch.equal(plain[1][kept], trained[1][kept])
    later = batch_at(corpus.train, 9, batch_size=4, seq_length=7, seed=3, loss_mask=corpus.loss_mask)
    assert torch.equal(later[1], trained[1][4:]), "position is all there is to resume from"


def test_a_tokenizer_makes_tokens_with_its_end_after_each_document(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(tokenizer_file)
    assert (tokenizer.end, tokenizer.vocab_size, tokenizer.dtype) == (END, len(WORDS), np.uint16)
    folder = tmp_path / "folder"
    documents = [[n, n + 1, n + 2] for n in range(20)]
    write_jsonl(folder / "a.jsonl", *({"text": words(*d)} for d in documents[:10]))
    for n, d in enumerate(documents[10:]):
        folder.joinpath(f"b{n}.txt").write_text(words(*d) + "\n")
    folder.joinpath("c.txt").touch()
    folder.joinpath("d.txt").write_bytes(b"w1 \0")
    corpus = opened(folder, tmp_path, tokenizer=tokenizer)
    expected = [x for d in documents for x in (*(n + 3 for n in d), END)]
    assert sorted(tokens_of(corpus)) == sorted(expected)
    assert tokens_of(corpus).count(END) == 20
    assert "left out: 2 empty or binary files" in str(corpus)
    assert f"tokenizer: {tokenizer_file}, vocabulary 53, end token 2" in str(corpus)
    assert tokenizer.decode([3, 4]) == "w0 w1"


def test_a_long_text_is_split_by_position(tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(words(*(n % 50 for n in range(999))))
    corpus = opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)
    assert corpus.held_out[-1] == END


def test_data_is_packed_once_and_again_after_a_change(tokenizer_file: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"text": words(*range(30))}, {"text": "w1"})
    tokenizer = open_tokenizer(tokenizer_file)
    first = opened(path, tmp_path, tokenizer=tokenizer)
    files = sorted((tmp_path / "cache").iterdir())
    assert tokens_of(opened(path, tmp_path, tokenizer=tokenizer)) == tokens_of(first)
    assert sorted((tmp_path / "cache").iterdir()) == files
    tokenizer_file.with_name("tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    other = open_tokenizer(tokenizer_file)
    assert other.end == 1
    assert tokens_of(opened(path, tmp_path, tokenizer=other))[-1] == 1
    write_jsonl(path, {"text": words(*range(31))})
    assert len(tokens_of(opened(path, tmp_path, tokenizer=tokenizer))) == 32


def test_packed_data_has_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 256)))
    assert tokens_of(opened(path, tmp_path)) == list(range(1, 256))
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    assert opened(tmp_path / "a.bin", tmp_path).train.dtype == np.uint16
    with pytest.raises(ValueError, match="which holds tokens, expected text or JSONL"):
        opened(tmp_path / "a.bin", tmp_path, tokenizer=BYTES)


SHAPES: dict[str, Callable[[list[dict[str, str]]], str]] = {
    "a.ndjson": lambda rows: "\n".join(map(json.dumps, rows)),
    "a.JSONL": lambda rows: "\n".join(map(json.dumps, rows)) + "\n",
    "array.json": json.dumps,
    "indented.json": lambda rows: "\ufeff \n" + json.dumps(rows, indent=2) + "\n\n",
    "lines.json": lambda rows: "\n".join(map(json.dumps, rows)) + "\n",
    "objects.json": lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("folder", [False, True])
def test_records_are_the_same_in_every_shape(
    name: str, chunk: int, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "p" * n, "completion": "größer [1, {" * n + "]}"} for n in range(12)]
    expected = opened(write_jsonl(tmp_path / "a.jsonl", *rows), tmp_path)
    monkeypatch.setattr("zfunc.train.data.documents._CHUNK", chunk)
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / name
    path.write_text(SHAPES[name](rows))
    got = opened(path.parent if folder else path, tmp_path)
    assert tokens_of(got) == tokens_of(expected)
    assert loss_mask_of(got) == loss_mask_of(expected)


def test_a_single_object_is_a_record_and_other_json_in_a_folder_is_text(tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    one.write_text('{"text": "just this"}')
    assert tokens_of(opened(one, tmp_path)) == [*b"just this", 0]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "package.json").write_text('{"name": "x", "scripts": []}')
    assert tokens_of(opened(tmp_path / "in", tmp_path)) == [*b'{"name": "x", "scripts": []}', 0]


# --- what is refused --------------------------------------------------------------------------------------

BROKEN = {
    "cut off": ('{"text": "a', r"got invalid JSON \(Invalid control character at, column 12\)"),
    "no UTF-8": (b'{"text": "\xff"}', "got invalid JSON .*utf-8"),
    "a list": ("[1]", r"got \[1\], expected"),
    "another key": ('{"txt": "a"}', "got an object with txt, expected .*rename its keys"),
    "half a pair": ('{"prompt": "a"}', "got an object with prompt, expected"),
    "both": ('{"text": "a", "prompt": "b", "completion": "c"}', "with completion, prompt, text"),
    "a number": ('{"text": 5}', "'text': got 5, expected a string"),
    "null": ('{"prompt": null, "completion": ""}', "'prompt': got null, expected a string"),
    "twice": ('{"text": "a", "text": "b"}', "the name 'text' twice in one object"),
    "half a surrogate pair": ('{"text": "a\\ud800"}', "half a surrogate pair at character 1"),
    "two on a line": ('{"text": "a"} {"text": "b"}', "Extra data"),
    "deep": ("[" * 100_000, "got invalid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_refused_with_file_and_line(name: str, tmp_path: Path) -> None:
    line, message = BROKEN[name]
    path, fine = tmp_path / "a.jsonl", b'{"text": "fine"}'
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join([fine, b"", fine, bad, fine]))
    with pytest.raises(ValueError, match=f"{path}, line 4.*{message}"):
        opened(path, tmp_path)
    assert not list((tmp_path / "cache").iterdir()), "nothing is left of it"


BROKEN_JSON = {
    "text": ("so it goes", "record 1: got invalid JSON .*Expecting value.*name it .txt"),
    "numbers": ("[1, 2]", "record 1: got 1, expected .*write one object a document"),
    "another key": ('[{"text": "a"}, {"txt": "a"}]', "record 2: got an object with txt, expected"),
    "cut off": ('[{"text": "a"}, {"text": "b"', "record 2: got invalid JSON"),
    "no end": ('[{"text": "a"}', r"record 2: got invalid JSON \(the array has no end\)"),
    "no comma": ('[{"text": "a"} {"text": "b"}]', "record 2: got invalid JSON .*where a comma"),
    "comma": ('[{"text": "a"},]', "record 2: got invalid JSON"),
    "two arrays": (
        '[{"text": "a"}][{"text": "b"}]',
        "record 2: got invalid JSON .*something after the array",
    ),
    "twice": ('[{"text": "a", "text": "b"}]', "record 1: .*the name 'text' twice in one object"),
    "deep": ("[" * 100_000, "record 1: got invalid JSON"),
    "no UTF-8": (b'[{"text": "\xff"}]', "record 1: got invalid JSON .*utf-8"),
}


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_a_json_file_of_anything_else_is_refused_and_never_trained_on_as_text(
    name: str, tmp_path: Path
) -> None:
    content, message = BROKEN_JSON[name]
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"{path}, {message}"):
        opened(path, tmp_path)


def test_keys_that_are_not_used_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": "words", "id": n} for n in range(20)))
    assert "left out: 20 keys of records" in str(opened(path, tmp_path))


def test_data_without_text_is_refused(tmp_path: Path) -> None:
    for path in (write_jsonl(tmp_path / "a.jsonl"), write_jsonl(tmp_path / "b.jsonl", {"text": ""})):
        with pytest.raises(ValueError, match="got no text in .*, expected at least one document"):
            opened(path, tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        opened(tmp_path / "c.jsonl", tmp_path)


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


def test_the_caller_may_give_the_end_token(tokenizer_file: Path) -> None:
    tokenizer_file.write_text(tokenizer_file.read_text().replace("</s>", "<z>"))
    assert open_tokenizer(tokenizer_file, end=7).end == 7


def test_text_that_is_not_utf8_is_refused_by_name(tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"w1 \xe9")
    with pytest.raises(ValueError, match=f"got {path}, which is not UTF-8 at byte 3"):
        opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
