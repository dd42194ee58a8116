"""Batches in any order, from the position alone; and long texts, tokenized in pieces."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc.train.data.corpus import batch_at, held_out_batches
from zfunc.train.data.tokenizer import Located, in_calls, in_pieces


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


# --- long texts ------------------------------------------------------------------------------------------

WORDS = [
    "the",
    "of",
    "schedule",
    "gradient",
    "über",
    "日本語のテキスト",
    "🙂",
    "x=1;",
    "\n\n",
    "    ",
    "1,024",
    "don't",
]


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

    def encode(texts: Sequence[str]) -> list[str]:
        calls.append(list(texts))
        return [text.upper() for text in texts]

    texts = ["a" * (n % 13) for n in range(40)]
    assert in_calls(encode, str.title, texts) == [x.upper() if len(x) <= 10 else x.title() for x in texts]
    assert all(sum(map(len, call)) <= 30 + 10 for call in calls)
