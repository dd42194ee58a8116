"""Long texts, tokenized in pieces and in calls that are bounded."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from zfunc.train.data.tokenizer import BYTES, Located, in_calls, in_pieces

WORDS = ["the", "of", "schedule", "gradient", "über", "日本語のテキスト", "🙂", "x=1;", "1,024", "don't"]
WORDS += ["\n\n", "    "]


def byte_pairs(kind: str) -> Any:
    """A tokenizer trained on such words: of bytes as GPT-2's, or of characters as SentencePiece's."""
    tokenizers = pytest.importorskip("tokenizers")
    parts = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    of_bytes = parts.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = of_bytes if kind == "bytes" else parts.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=parts.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_a_long_text_has_the_tokens_of_the_whole_from_pieces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of the library is longer than CALL, unless the text is the same everywhere."""
    library, calls = byte_pairs(kind), list[int]()

    def locate(texts: Sequence[str]) -> list[Located]:
        calls.append(sum(map(len, texts)))
        made = library.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(x.ids), np.array(x.offsets).reshape(-1, 2)) for x in made]

    monkeypatch.setattr("zfunc.train.data.tokenizer.PIECE", 4096)
    monkeypatch.setattr("zfunc.train.data.tokenizer.CALL", 16384)
    rng = random.Random(kind)
    usual = " ".join(rng.choice(WORDS) for _ in range(12_000))
    for text, bounded in (
        (usual, True),
        (usual.replace(" ", ""), kind == "bytes"),  # SentencePiece's has no place to cut it then
        (f"{usual[:9000]}{' ' * 6000}{usual[:9000]}", False),
        ("a" * 20_000, False),
    ):
        (whole,) = locate([text])
        calls.clear()
        ids, spans = in_pieces(locate, text)
        assert ids.tolist() == whole[0].tolist()
        assert spans.tolist() == whole[1].tolist()
        assert not bounded or max(calls) <= 16384


def test_texts_are_tokenized_in_calls_that_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.train.data.tokenizer.PIECE", 10)
    monkeypatch.setattr("zfunc.train.data.tokenizer.CALL", 30)
    calls = list[list[str]]()

    def locate(texts: Sequence[str]) -> list[Located]:
        calls.append(list(texts))
        places = (np.arange(len(text)) for text in texts)
        return [(BYTES.encode(["a" * len(at)])[0], np.stack([at, at + 1], 1)) for at in places]

    texts = ["a" * (n % 13) for n in range(40)]
    found = [(ids.tolist(), spans.tolist()) for ids, spans in in_calls(locate, texts)]
    assert found == [([97] * n, [[at, at + 1] for at in range(n)]) for n in map(len, texts)]
    assert all(sum(map(len, call)) <= 30 + 10 for call in calls)
