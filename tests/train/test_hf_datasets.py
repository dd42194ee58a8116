"""What Hugging Face's datasets reads as training data: which rows, which are learned, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trainings import losses, train
from text_data import loss_mask_of, opened, tokens_of

from zfunc.train.data.documents import holds_tokens

datasets = pytest.importorskip("datasets", reason="pip install 'zfunc[datasets]'")


def save(path: Path, columns: dict[str, Any], **more: Any) -> Path:
    datasets.Dataset.from_dict(columns).save_to_disk(path, **more)
    return path


def save_splits(path: Path, **columns: dict[str, Any]) -> Path:
    of = {name: datasets.Dataset.from_dict(one) for name, one in columns.items()}
    datasets.DatasetDict(of).save_to_disk(path)
    return path


TEXTS = [f"line {n} of ü" for n in range(40)]
IDS = [[(n * k) % 300 for k in range(n % 7)] for n in range(40)]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]


def test_texts_in_the_order_of_files_and_rows(tmp_path: Path) -> None:
    corpus = opened(save(tmp_path / "d", {"text": TEXTS, "id": range(40)}, num_shards=3), tmp_path)
    assert bytes(tokens_of(corpus)) == b"".join(t.encode() + b"\0" for t in TEXTS)
    assert (corpus.train.tokens.dtype, corpus.train.loss_mask) == (np.uint8, None)
    assert corpus.train.tokens[-1] == 0, "whole rows are held out"
    assert 0.05 < len(corpus.held_out) / len(tokens_of(corpus)) <= 0.1
    assert "left out: the columns id" in str(corpus)


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
    path = save(tmp_path / "d", {"input_ids": IDS, "text": TEXTS}, num_shards=2)
    assert holds_tokens(path)
    corpus = opened(path, tmp_path, vocab_size=300)
    assert tokens_of(corpus) == [x for row in IDS for x in row]
    assert (corpus.train.tokens.dtype, corpus.vocab_size, corpus.train.loss_mask) == (np.uint16, 300, None)
    assert len(corpus.train) in np.cumsum([len(row) for row in IDS]), "whole rows are held out"
    assert opened(path, tmp_path, vocab_size=70_000).train.tokens.dtype == np.uint32


def test_labels_give_the_loss_mask_and_padding_is_dropped(tmp_path: Path) -> None:
    ids = [[n, n + 1, n + 2, 0] for n in range(30)]
    labels = [[-100, row[1], row[2], -100] for row in ids]
    columns = {"attention_mask": [[1, 1, 1, 0]] * 30, "input_ids": ids, "labels": labels}
    corpus = opened(save(tmp_path / "d", columns), tmp_path)
    assert tokens_of(corpus) == [x for row in ids for x in row[:3]]
    assert loss_mask_of(corpus) == [0, 1, 1] * 30
    assert "learned: 60 tokens, the labels of the others, in 30 documents, are -100" in str(corpus)


def test_rows_that_were_selected_are_the_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).select([3, 1, 2]).save_to_disk(tmp_path / "d")
    assert bytes(tokens_of(opened(tmp_path / "d", tmp_path))).decode().split("\0")[:-1] == [
        TEXTS[n] for n in (3, 1, 2)
    ]


def test_what_datasets_wrote_is_read(tmp_path: Path) -> None:
    """A DatasetDict of version 5.2, with 20 and 2 rows of prompt, completion and number."""
    corpus = opened(Path(__file__).parents[1] / "goldens/saved_dataset", tmp_path)
    assert bytes(corpus.train.tokens.tolist()) == b"".join(b"%d+%d=%d\0" % (n, n, 2 * n) for n in range(20))
    assert bytes(corpus.held_out.tokens.tolist()) == b"3+3=6\x009+9=18\0"
    assert "left out: the columns number" in str(corpus)


def test_parquet_files_of_chats_as_the_hub_has_them(tmp_path: Path) -> None:
    (tmp_path / "d" / "data").mkdir(parents=True)
    (tmp_path / "d" / "README.md").write_text("a card")
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("test-00000-of-00001", 1)):
        rows = datasets.Dataset.from_dict({"id": range(count), "messages": [CHAT] * count})
        rows.to_parquet(tmp_path / "d" / "data" / f"{name}.parquet")
    corpus = opened(tmp_path / "d", tmp_path)
    assert bytes(corpus.train.tokens.tolist()) == b"User: a\n\nAssistant: b\0" * 5
    assert bytes(corpus.held_out.tokens.tolist()) == b"User: a\n\nAssistant: b\0"
    assert "held out: the split test" in str(corpus)
    assert "left out: the columns id" in str(corpus)
    file = tmp_path / "d" / "data" / "test-00000-of-00001.parquet"
    assert len(tokens_of(opened(file, tmp_path))) == len(corpus.held_out)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="which datasets cannot read .*copy or save it again"):
        opened(tmp_path / "d", tmp_path)


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

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"txt": ["a"], "id": [1]}, "with the columns txt, id, expected text"),
    ({"prompt": ["a"]}, "with the columns prompt, expected text"),
    ({"text": ["a", None]}, "row 1: got an object with nothing, expected text"),
    ({"text": [1, 2]}, "row 0, 'text': got 1, expected a string"),
    ({"prompt": [CHAT], "completion": ["b"]}, "row 0, 'prompt': got .*role.*, expected a string"),
    ({"input_ids": [[[1, 2]], [[3]]]}, "row 0: got input_ids .*, expected a list of whole numbers"),
    ({"input_ids": [[1, 2]], "labels": [1]}, "row 0: got labels 1, expected a list of whole"),
    ({"input_ids": [[1, None]]}, "row 0: got input_ids .*None.*, expected a list of whole"),
    ({"input_ids": [["a"]]}, "row 0: got input_ids .*, expected a list of whole"),
    ({"input_ids": [[1], None]}, "row 1: got input_ids None, expected a list of whole"),
    ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [4, -100]]}, "row 1: got the label 4 for the"),
    ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]}, "row 1: got 1 labels for 2 input_ids"),
    ({"input_ids": [[1], [99_999]]}, "row 1: got tokens from 99999 to 99999, expected .* below 50257"),
    ({"input_ids": [[1], [-1, 3]]}, "row 1: got tokens from -1 to 3"),
    ({"text": [""]}, "got no text in"),
    ({"input_ids": [[]]}, "got no text in"),
]


@pytest.mark.parametrize(("columns", "message"), REFUSED)
def test_unusable_columns_are_refused(columns: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        opened(save(tmp_path / "d", columns), tmp_path)
    assert not list(tmp_path.glob("cache/*"))


def test_unusable_splits_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = {"text": TEXTS}, {"prompt": ["a"], "completion": ["b"]}
    with pytest.raises(ValueError, match="with the splits a, b, expected one called train: name the folder"):
        opened(save_splits(tmp_path / "x", a=one, b=one), tmp_path)
    with pytest.raises(ValueError, match="with text in train and prompt, completion in test"):
        opened(save_splits(tmp_path / "y", train=one, test=other), tmp_path)
    assert tokens_of(opened(save_splits(tmp_path / "z", a=one), tmp_path))
    (tmp_path / "z" / "a" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}]}))
    with pytest.raises(ValueError, match="z, which datasets cannot read .*save it again"):
        opened(tmp_path / "z", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"needs datasets .*: pip install 'zfunc\[datasets\]'"):
        opened(tmp_path / "y", tmp_path)
