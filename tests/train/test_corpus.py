"""Batches in any order, from the position alone; sequences of whole documents, each as if it were alone."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_trainings import config, measured, train
from text_data import opened, trained, write_jsonl
from torch.nn.utils.rnn import pad_sequence

import zfunc
from zfunc.models.gpt import GPTConfig, gpt_segments
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.corpus import TokenStream
from zfunc.train.settings import LONG


def windows(num_tokens: int, seq_length: int) -> int:
    return max(1, (num_tokens - seq_length) // seq_length)


lengths = st.integers(1, 9).flatmap(lambda seq: st.tuples(st.just(seq), st.integers(seq + 1, 300)))
seeds = st.integers(-(2**70), 2**70)


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
        ValueError, match=r"got token 300 at position 777 .* tokens below 300: pass the `vocab_size`"
    ):
        trained(tokens, 0, 99, 10, vocab_size=300)
    trained(tokens, 0, 99, 10, vocab_size=301)


# --- sequences of whole documents -------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(LONG[:3]),
)
def test_every_token_with_a_label_in_its_piece_is_there_once_in_its_own_document(
    lengths: list[int], seq_length: int, masked: bool, long: str
) -> None:
    tokens, ends = np.arange(sum(lengths)) + 1, np.cumsum(lengths)
    mask = tokens % 7 > 4 if masked else np.ones(len(tokens), bool)
    # The pieces of each document, one by one
    pieces = list[np.ndarray]()
    for document in np.split(tokens, ends[:-1]):
        kept = document[-seq_length:] if long == "keep-end" else document
        kept = kept[:0] if long == "drop" and len(document) > seq_length else kept
        pieces += [kept[n : n + seq_length] for n in range(0, len(kept), seq_length)]
    pieces = [x for x in pieces if mask[x[1:] - 1].any()]
    stream = TokenStream(tokens, mask if masked else None).of_whole_documents(ends, seq_length, long)
    count, firsts = stream.num_sequences(seq_length), stream.firsts
    inputs, labels = stream.read(range(count), seq_length=seq_length)
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    real = ids > 0
    assert ids[real].tolist() == [token for piece in pieces for token in piece]
    assert (real.int().diff(dim=1) <= 0).all(), "padding is at the end"
    assert positions[real].tolist() == [n for piece in pieces for n in range(len(piece))]
    following = [
        int(x) if mask[x - 1] and n < len(piece) else IGNORE_INDEX
        for piece in pieces
        for n, x in enumerate([*piece[1:], piece[0]], 1)
    ]
    assert labels[real].tolist() == following
    assert (labels[~real] == IGNORE_INDEX).all()
    assert (labels != IGNORE_INDEX).any(1).all(), "every sequence has a label"
    assert firsts is not None
    used, each = real.sum(1).numpy(), np.array([len(x) for x in pieces], np.int64)
    assert (used[:-1] + each[firsts[1:-1]] > seq_length).all(), "the next one does not fit"


def test_windows_without_a_label_are_counted() -> None:
    mask = np.zeros(41, bool)
    mask[[4, 11, 40]] = True
    assert (
        TokenStream(np.arange(41), mask).unlearned(4) == 9 - 2
    )  # of windows whose labels are 1 to 4, 5 to 8, ...
    assert TokenStream(np.arange(41)).unlearned(4) == 0


def gpt() -> tuple[Any, ...]:
    return gpt_segments(GPTConfig(50, 16, num_layers=2, hidden_size=16, num_attention_heads=2))


def hf(name: str, **more: Any) -> Callable[[], tuple[Any, ...]]:
    def segments() -> tuple[Any, ...]:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = getattr(transformers, f"{name}Config")(
            **sizes, max_position_embeddings=16, bos_token_id=1, eos_token_id=1, pad_token_id=0, **more
        )
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        return zfunc.hf.segments(getattr(transformers, name + head)(config).eval())

    return segments


MODELS = {
    "gpt": gpt,
    "gpt2": hf("GPT2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "llama": hf("Llama", intermediate_size=24, num_key_value_heads=1),
    "gemma2": hf("Gemma2", intermediate_size=24, num_key_value_heads=1, head_dim=8, sliding_window=4),
}


@pytest.fixture
def batches() -> list[Any]:
    """Documents in three sequences; the same, one in each; and in three, as if they were one document each."""
    torch.manual_seed(0)
    documents = [torch.randint(2, 50, (n,)) for n in (5, 7, 3, 9, 2, 12, 4)]
    stream = TokenStream(torch.cat(documents).numpy())
    stream = stream.of_whole_documents(np.cumsum([len(d) for d in documents]), 16)
    inputs, labels = stream.read(range(3), seq_length=16)
    assert stream.num_sequences(16) == 3
    ids = pad_sequence([d[:-1] for d in documents], batch_first=True)
    following = pad_sequence([d[1:] for d in documents], batch_first=True, padding_value=IGNORE_INDEX)
    across = {**inputs, "position_ids": torch.arange(16).repeat(3, 1)}
    return [zfunc.hf.batch(inputs, labels), zfunc.hf.batch(ids, following), zfunc.hf.batch(across, labels)]


@pytest.mark.parametrize("name", MODELS)
def test_packed_losses_are_those_of_the_documents_alone(name: str, batches: list[Any]) -> None:
    program = zfunc.compile(MODELS[name](), precision="fp32", device="cpu")
    state = zfunc.init(program)
    packed, alone, across = (zfunc.evaluate(program, state, batch) for batch in batches)
    assert packed == pytest.approx(alone, rel=1e-6)
    assert abs(across - alone) > 1e-4
    assert zfunc.train_step(program, state, batches[0])[1].loss == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("recompute", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_packed_gradients_are_those_of_the_documents_alone(recompute: str, batches: list[Any]) -> None:
    optimizer = zfunc.SGD(lr=1.0, momentum=0.0, weight_decay=0.0)
    program = zfunc.compile(gpt(), optimizer=optimizer, precision="fp32", recompute=recompute, device="cpu")
    packed, alone = (
        zfunc.params(program, zfunc.train_step(program, zfunc.init(program), batch)[0])
        for batch in batches[:2]
    )
    for name, value in packed.items():
        assert torch.allclose(value, alone[name], atol=2e-6), name


@pytest.mark.usefixtures("own_folder")
def test_a_training_packs_documents_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = ({"prompt": "ab" * (n % 3), "completion": "XY" * (1 + n % 4)} for n in range(60))
    write_jsonl(Path("pairs.jsonl"), *pairs)
    given = ("--data", "pairs.jsonl", "--packing", "documents", "--epochs", 1, "--micro-batches", 2)
    given = (*given, "--keep", 9)
    assert train(*given, "--save-every", 3, "--out", "first") == 0
    assert "of 16 tokens, of whole documents," in capsys.readouterr().out
    assert train(*given, "--resume", "first/checkpoints/step-00000003", "--out", "second") == 0
    assert measured("second")[-2:] == measured("first")[-2:]
    corpus = opened(Path("pairs.jsonl"), Path(), whole_documents=16)
    assert config("first")["settings"]["steps"] == -(-corpus.train.num_sequences(16) // 4)
