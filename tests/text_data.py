"""Data to train on, written and read back: JSONL, tokenizers, corpora."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zfunc.train.data.corpus import Corpus, TokenStream
from zfunc.train.data.opening import open_data

WORDS = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(50))]
END = WORDS.index("</s>")
CHAT = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", "tool_calls": None}]


def write_jsonl(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def save_tokenizer(path: Path, words: Sequence[str], special: Sequence[str] = ()) -> Path:
    """A tokenizer.json of these words, numbered as they come, apart by spaces; the unknown one is <unk>."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {word: n for n, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*special])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def opened(path: Path | None, tmp_path: Path, **more: Any) -> Corpus:
    return open_data(path, cache=tmp_path / "cache", **more)


def tokens_of(corpus: Corpus) -> list[int]:
    """Those trained on, then those held out."""
    return [*corpus.train.tokens.tolist(), *corpus.held_out.tokens.tolist()]


def loss_mask_of(corpus: Corpus) -> list[int]:
    """Likewise, whether each is learned."""
    masks = corpus.train.loss_mask, corpus.held_out.loss_mask
    return [x for mask in masks for x in ([] if mask is None else mask.tolist())]


def trained(tokens: Any, position: int, count: int, seq_length: int, **more: Any) -> tuple[Any, Any]:
    """The batch of so many sequences at a position."""
    stream = tokens if isinstance(tokens, TokenStream) else TokenStream(tokens)
    places = stream.order(position, count, seq_length=seq_length, seed=more.pop("seed", 0))
    return stream.read(places, seq_length=seq_length, **more)


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def dataset(columns: dict[str, Any]) -> Any:
    datasets = pytest.importorskip("datasets", reason='pip install -e ".[datasets]"')
    return datasets.Dataset.from_dict(columns)


def save(path: Path, columns: dict[str, Any], **more: Any) -> Path:
    dataset(columns).save_to_disk(path, **more)
    return path


def save_splits(path: Path, **columns: dict[str, Any]) -> Path:
    datasets = pytest.importorskip("datasets", reason='pip install -e ".[datasets]"')
    datasets.DatasetDict({name: dataset(one) for name, one in columns.items()}).save_to_disk(path)
    return path


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tok" / "tokenizer.json", WORDS, special=["<s>", "</s>"])
