"""Folders of datasets' save_to_disk as training data: which rows, which are learned, and what is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trainings import losses, train
from text_data import loss_mask_of, opened, tokens_of

from zfunc.train.data.arrow_dataset import Tokens, rows
from zfunc.train.data.packing import holds_tokens

pa = pytest.importorskip("pyarrow", reason="pip install 'zfunc[datasets]'")


def save(path: Path, columns: dict[str, Any], *, files: int = 1, batch: int = 7) -> Path:
    """As `Dataset.save_to_disk` writes it."""
    path.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    names = [f"data-{n:05}-of-{files:05}.arrow" for n in range(files)]
    per = -(-table.num_rows // files)
    for n, name in enumerate(names):
        with pa.ipc.new_stream(path / name, table.schema) as out:
            out.write_table(table.slice(n * per, per), max_chunksize=batch)
    features = {name: {"_type": "Value"} for name in table.column_names}
    path.joinpath("state.json").write_text(json.dumps({"_data_files": [{"filename": x} for x in names]}))
    path.joinpath("dataset_info.json").write_text(json.dumps({"features": features}))
    return path


def splits(path: Path, **columns: dict[str, Any]) -> Path:
    """As `DatasetDict.save_to_disk` writes it."""
    for name, one in columns.items():
        save(path / name, one)
    path.joinpath("dataset_dict.json").write_text(json.dumps({"splits": list(columns)}))
    return path


FILE = "data-00000-of-00001.arrow"
TEXTS = [f"line {n} of ü" for n in range(40)]
IDS = [[(n * k) % 300 for k in range(n % 7)] for n in range(40)]


# --- what is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_texts_in_the_order_of_files_and_rows(kind: str, tmp_path: Path) -> None:
    of_numbers = pa.dictionary(pa.int32(), pa.string())
    column = pa.array(TEXTS, of_numbers if kind == "dictionary" else getattr(pa, kind)())
    corpus = opened(save(tmp_path / "d", {"text": column, "id": range(40)}, files=3), tmp_path)
    assert bytes(tokens_of(corpus)) == b"".join(t.encode() + b"\0" for t in TEXTS)
    assert (corpus.train.dtype, corpus.loss_mask) == (np.uint8, None)
    assert corpus.train[-1] == 0, "whole rows are held out"
    assert 0.05 < len(corpus.held_out) / len(tokens_of(corpus)) <= 0.1
    assert f"{tmp_path / 'd'}: 3 files, 40 documents" in str(corpus)
    assert "left out: the columns id" in str(corpus)


def test_pairs_and_the_split_that_is_held_out(tmp_path: Path) -> None:
    def pairs(*numbers: int) -> dict[str, Any]:
        return {"completion": [str(2 * n) for n in numbers], "prompt": [f"{n}=" for n in numbers]}

    path = splits(tmp_path / "d", train=pairs(*range(20)), test=pairs(1), validation=pairs(7, 8))
    corpus = opened(path, tmp_path)
    assert bytes(corpus.held_out.tolist()) == b"7=14\x008=16\0"
    assert loss_mask_of(corpus)[-10:] == [0, 0, 1, 1, 1] * 2
    assert bytes(corpus.train.tolist()) == b"".join(b"%d=%d\0" % (n, 2 * n) for n in range(20))
    assert "held out: the split validation" in str(corpus)
    assert "left out: the splits test" in str(corpus)
    alone = opened(path / "train", tmp_path)
    assert tokens_of(alone) == corpus.train.tolist()
    assert "held out: the end" in str(alone)


@pytest.mark.parametrize("number", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("kind", ["list_", "large_list"])
def test_tokens_are_taken_as_they_are(kind: str, number: str, tmp_path: Path) -> None:
    column = pa.array(IDS, getattr(pa, kind)(getattr(pa, number)()))
    path = save(tmp_path / "d", {"input_ids": column, "text": TEXTS}, files=2)
    assert holds_tokens(path)
    corpus = opened(path, tmp_path, vocab_size=300)
    assert tokens_of(corpus) == [x for row in IDS for x in row]
    assert (corpus.train.dtype, corpus.vocab_size, corpus.loss_mask) == (np.uint16, 300, None)
    assert len(corpus.train) in np.cumsum([len(row) for row in IDS]), "whole rows are held out"
    assert opened(path, tmp_path, vocab_size=70_000).train.dtype == np.uint32


def test_rows_of_one_length(tmp_path: Path) -> None:
    column = pa.array([[n, n + 1] for n in range(30)], pa.list_(pa.int32(), 2))
    corpus = opened(save(tmp_path / "d", {"input_ids": column}), tmp_path)
    assert tokens_of(corpus) == [x for n in range(30) for x in (n, n + 1)]


def test_labels_give_the_loss_mask_and_padding_is_dropped(tmp_path: Path) -> None:
    ids = [[n, n + 1, n + 2, 0] for n in range(30)]
    labels = [[-100, row[1], row[2], -100] for row in ids]
    columns = {"attention_mask": [[1, 1, 1, 0]] * 30, "input_ids": ids, "labels": labels}
    corpus = opened(save(tmp_path / "d", columns), tmp_path)
    assert tokens_of(corpus) == [x for row in ids for x in row[:3]]
    assert loss_mask_of(corpus) == [0, 1, 1] * 30
    assert "learned: 60 tokens, the labels of the others, in 30 documents, are -100" in str(corpus)


def test_it_is_packed_once_and_read_by_batches(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"input_ids": IDS}, batch=5)
    assert all(isinstance(x, Tokens) for x in rows(path / FILE, ("input_ids",)))
    first = opened(path, tmp_path)
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 1
    assert isinstance(first.train.base, np.memmap) or isinstance(first.train, np.memmap)
    assert tokens_of(opened(path, tmp_path)) == tokens_of(first)
    assert sorted((tmp_path / "cache").iterdir()) == files
    save(path, {"input_ids": [*IDS, [7]]}, batch=5)
    assert tokens_of(opened(path, tmp_path))[-1] == 7


def test_what_datasets_wrote_is_read(tmp_path: Path) -> None:
    """A DatasetDict of version 5.2, with 20 and 2 rows of prompt, completion and number."""
    corpus = opened(Path(__file__).parents[1] / "goldens/saved_dataset", tmp_path)
    assert bytes(corpus.train.tolist()) == b"".join(b"%d+%d=%d\0" % (n, n, 2 * n) for n in range(20))
    assert bytes(corpus.held_out.tolist()) == b"3+3=6\x009+9=18\0"
    assert "left out: the columns number" in str(corpus)


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]


def test_parquet_files_of_chats_as_the_hub_has_them(tmp_path: Path) -> None:
    from pyarrow import parquet

    (tmp_path / "d" / "data").mkdir(parents=True)
    (tmp_path / "d" / "README.md").write_text("a card")
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("test-00000-of-00001", 1)):
        columns = {"id": range(count), "messages": [CHAT] * count}
        parquet.write_table(pa.table(columns), tmp_path / "d" / "data" / f"{name}.parquet")
    corpus = opened(tmp_path / "d", tmp_path)
    assert bytes(corpus.train.tolist()) == b"User: a\n\nAssistant: b\0" * 5
    assert bytes(corpus.held_out.tolist()) == b"User: a\n\nAssistant: b\0"
    assert "held out: the split test" in str(corpus)
    assert "left out: the columns id" in str(corpus)
    file = tmp_path / "d" / "data" / "test-00000-of-00001.parquet"
    assert len(tokens_of(opened(file, tmp_path))) == len(corpus.held_out)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="test-00000-of-00001.parquet: got no Parquet file"):
        opened(tmp_path / "d", tmp_path)


# --- trained on -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_folder")
def test_a_training_on_tokens_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [[(n * k + n) % 300 for k in range(40)] for n in range(60)]
    labels = [[-100] * 20 + row[20:] for row in ids]
    save(Path("d"), {"input_ids": ids, "labels": labels})
    job = ("--data", "d", "--vocab-size", 300, "--steps", 6)
    assert train(*job, "--save-every", 3, "--out", "first") == 0
    assert train(*job, "--resume", "first/checkpoints/step-00000003", "--out", "second") == 0
    assert losses("second") == losses("first")[3:]
    assert "bits per token" in capsys.readouterr().out
    assert train(*job, "--tokenizer", "tokenizer.json", "--out", "no") == 2


# --- what is refused --------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "other columns": ({"txt": ["a"], "id": [1]}, "with the columns txt, id, expected text"),
    "half a pair": ({"prompt": ["a"]}, "with the columns prompt, expected text"),
    "no text": ({"text": ["a", None]}, r"row 1: got no text"),
    "text that is none": ({"text": [1, 2]}, "got text of type int64, expected text"),
    "chats": (
        {"prompt": [[{"role": "user", "content": "a"}]], "completion": ["b"]},
        "got prompt of type list<.*struct<.*>>, expected text: make one column messages of a chat",
    ),
    "lists of text": ({"text": [["a", "b"]]}, "got text of type list<.*>, expected text: map it to text"),
    "nested tokens": (
        {"input_ids": [[[1, 2]], [[3]]]},
        r"data-00000-of-00001.arrow: got input_ids of type list<.*list<.*int64>>, expected lists of whole",
    ),
    "a label a row": (
        {"input_ids": [[1, 2]], "labels": [1]},
        "got labels of type int64, expected lists of whole",
    ),
    "a token that is none": ({"input_ids": [[1, None]]}, r"list<.*> with 1 empty numbers, expected"),
    "words for tokens": ({"input_ids": [["a"]]}, "got input_ids of type .*string.*expected lists of whole"),
    "no tokens": ({"input_ids": [[1], None]}, r"list<.*> with 1 empty rows, expected lists of whole"),
    "other labels": (
        {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [4, -100]]},
        "row 1: got the label 4 for the",
    ),
    "fewer labels": (
        {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]},
        "row 1: got 1 labels for 2 input_ids",
    ),
    "too high": (
        {"input_ids": [[1], [99_999]]},
        "row 1: got tokens from 99999 to 99999, expected .* below 50257",
    ),
    "below zero": ({"input_ids": [[1], [-1, 3]]}, "row 1: got tokens from -1 to 3"),
    "no rows": ({"text": pa.array([], pa.string())}, "got no text in"),
    "empty rows": ({"input_ids": pa.array([[]], pa.list_(pa.int32()))}, "got no text in"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_unusable_columns_are_refused(name: str, tmp_path: Path) -> None:
    columns, message = COLUMNS[name]
    with pytest.raises(ValueError, match=message):
        opened(save(tmp_path / "d", columns), tmp_path)
    assert not list(tmp_path.glob("cache/*"))


FLAWS: dict[str, tuple[str, bytes | None, str]] = {
    "no file": (FILE, None, f"without {FILE}, which its state.json lists"),
    "no files": ("state.json", b'{"_data_files": []}', "without data files"),
    "broken JSON": ("state.json", b"{", "state.json: got a file that cannot be read"),
    "another list": ("state.json", b'{"_data_files": [3]}', "for a list of names"),
    "indices": ("state.json", b'{"_indices_data_files": [{"filename": "x"}]}', "call flatten_indices"),
    "another schema": (
        "dataset_info.json",
        b'{"features": {"text": {}}}',
        f"{FILE}: got no complete Arrow stream with text",
    ),
    "no features": ("dataset_info.json", b"{}", "with the columns none"),
    "no Arrow": (FILE, b"words" + b"\xff\xff\xff\xff\0\0\0\0", f"{FILE}: got no complete Arrow stream"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_a_broken_folder_is_refused(name: str, tmp_path: Path) -> None:
    file, content, message = FLAWS[name]
    path = save(tmp_path / "d", {"input_ids": IDS})
    path.joinpath(file).unlink() if content is None else path.joinpath(file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        opened(path, tmp_path)
    assert not list(tmp_path.glob("cache/*"))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"text": TEXTS}, batch=10)
    content = path.joinpath(FILE).read_bytes()
    for size in (0, 1, 8, 100, *range(200, len(content) - 8, 97), len(content) - 8, len(content) - 1):
        path.joinpath(FILE).write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"{FILE}: got {size:,} bytes without an end"):
            opened(path, tmp_path)


def test_a_byte_changed_anywhere_is_text_or_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"text": TEXTS}, batch=10)
    content = path.joinpath(FILE).read_bytes()
    for at in range(0, len(content), 11):
        path.joinpath(FILE).write_bytes(content[:at] + bytes([content[at] ^ 0x5A]) + content[at + 1 :])
        with suppress(ValueError):
            assert len(list(rows(path / FILE, ("text",)))) <= len(TEXTS)


def test_unusable_splits_are_refused(tmp_path: Path) -> None:
    one, other = {"text": TEXTS}, {"prompt": ["a"], "completion": ["b"]}
    with pytest.raises(
        ValueError, match="with the splits a, b, expected one called train: name the folder of one"
    ):
        opened(splits(tmp_path / "x", a=one, b=one), tmp_path)
    with pytest.raises(ValueError, match="with text in train and prompt, completion in test"):
        opened(splits(tmp_path / "y", train=one, test=other), tmp_path)
    assert tokens_of(opened(splits(tmp_path / "z", a=one), tmp_path))


def test_a_missing_package_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "d", {"text": TEXTS})
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow .*: pip install 'zfunc\[datasets\]'"):
        opened(path, tmp_path)
