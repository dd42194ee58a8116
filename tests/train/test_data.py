"""Batches in any order, from the position alone; and long texts, tokenized in pieces."""

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_data import trained

from zfunc.train.data.corpus import TokenStream
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
    inputs, targets = trained(np.arange(num_tokens), epoch * count, count, seq, seed=seed)
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
    once, _ = trained(tokens, position, sum(batch_sizes), seq, seed=seed)
    firsts = itertools.accumulate([position, *batch_sizes])
    parts = [trained(tokens, at, n, seq, seed=seed)[0] for at, n in zip(firsts, batch_sizes, strict=False)]
    assert torch.equal(once, torch.cat(parts))


def test_batches_are_the_same_on_every_machine() -> None:
    inputs, targets = trained(np.arange(10_000), 7, 6, 3, seed=1)
    assert inputs[:, 0].tolist() == [358, 2122, 5053, 7369, 8371, 7096]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 3)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_epochs_and_seeds_have_their_own_order_and_offset() -> None:
    stream, count = TokenStream(np.arange(64 * 101)), windows(64 * 101, 64)
    orders = [
        stream.order(epoch * count, count, seq_length=64, seed=n) for epoch in range(3) for n in range(3)
    ]
    assert len({tuple(order) for order in orders}) == 9
    assert len({min(order) for order in orders}) >= 6
    steps = np.abs(np.diff([start // 64 for start in orders[0]]))
    assert steps.mean() == pytest.approx(count / 3, rel=0.25)  # of a random permutation


@pytest.mark.parametrize(
    ("num_tokens", "limit", "count", "apart"),
    [(1001, 46, 46, {20, 30}), (31, 9, 3, {10}), (1001, 10**9, 100, {10})],
)
def test_held_out_windows_are_spread_evenly(num_tokens: int, limit: int, count: int, apart: set[int]) -> None:
    """And are the same in batches of any size: test_finetuning."""
    starts = TokenStream(np.arange(num_tokens)).spread(limit, seq_length=10)
    assert (len(starts), set(np.diff(starts).tolist())) == (count, apart)
    assert all(start % 10 == 0 for start in starts)


@pytest.mark.parametrize("num_tokens", [8, 0])
def test_data_shorter_than_a_sequence_is_refused(num_tokens: int) -> None:
    stream = TokenStream(np.zeros(num_tokens))
    for call in (partial(stream.order, 0, 1, seed=0), partial(stream.spread, 1)):
        with pytest.raises(
            ValueError, match=f"got {num_tokens} tokens for seq_length=8, expected at least 9"
        ):
            call(seq_length=8)


def test_a_token_beyond_the_vocabulary_raises_with_its_position() -> None:
    tokens = np.zeros(1000, np.uint16)
    tokens[777] = 300
    with pytest.raises(
        ValueError, match=r"got token 300 at position 777 .* below 300: pass the `vocab_size`"
    ):
        trained(tokens, 0, 99, 10, vocab_size=300)
    trained(tokens, 0, 99, 10, vocab_size=301)


# --- long texts ------------------------------------------------------------------------------------------

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

    def encode(texts: Sequence[str]) -> list[str]:
        calls.append(list(texts))
        return [text.upper() for text in texts]

    texts = ["a" * (n % 13) for n in range(40)]
    assert in_calls(encode, str.title, texts) == [x.upper() if len(x) <= 10 else x.title() for x in texts]
    assert all(sum(map(len, call)) <= 30 + 10 for call in calls)
