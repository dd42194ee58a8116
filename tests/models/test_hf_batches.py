"""Batches for models of transformers: labels weigh as in the model's own loss, whoever collated them."""

import pytest
import torch
from hf_models import IGNORED, compiled, random_model, transformers, unequal

import zfunc


def test_a_collators_dict_is_a_batch_and_its_loss_is_the_models() -> None:
    model = random_model("Llama")
    texts = [torch.randint(1, 50, (6,)).tolist() for _ in range(4)]
    rows = [
        {
            "input_ids": [*text[: 6 - pad], *[0] * pad],
            "attention_mask": [1] * (6 - pad) + [0] * pad,
            "labels": [*text[: 6 - pad], *[-100] * pad],
        }
        for pad, text in enumerate(texts)
    ]
    batch = transformers.default_data_collator(rows)
    program = compiled(zfunc.hf.segments(model), micro_batches=2)
    state = zfunc.init(program)
    expected = float(model(**batch).loss.detach())
    assert zfunc.evaluate(program, state, batch) == pytest.approx(expected, rel=1e-6)
    state, metrics = zfunc.train_step(program, state, transformers.BatchEncoding(batch))
    assert metrics.loss == pytest.approx(expected, rel=1e-6), (
        "the mean over tokens, in parts of unequally many"
    )
    with pytest.raises(ValueError, match="padded at the beginning.*padding_side = 'right'"):
        zfunc.train_step(program, state, {**batch, "attention_mask": batch["attention_mask"].flip(1)})
    with pytest.raises(ValueError, match="got a dict of .*'token_type_ids'.*expected input_ids and labels"):
        zfunc.train_step(program, state, {**batch, "token_type_ids": batch["labels"]})


@pytest.mark.parametrize("micro_batches", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 8))])
def test_the_loss_does_not_depend_on_micro_batches(micro_batches: int) -> None:
    model = random_model("Llama")
    ids, labels = unequal()
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    own = torch.autograd.grad(expected, list(model.parameters()))
    norm = float(torch.stack([g.square().sum() for g in own]).sum().sqrt())
    program = compiled(zfunc.hf.segments(model), micro_batches=micro_batches)
    batch = zfunc.hf.batch(ids, labels)
    state = zfunc.init(program)
    assert abs(zfunc.evaluate(program, state, batch) - float(expected.detach())) < 1e-6
    _, metrics = zfunc.train_step(program, state, batch)
    assert abs(metrics.loss - float(expected.detach())) < 1e-6
    assert abs(metrics.grad_norm - norm) < 1e-5 * norm


def test_losses_of_ranks_average_to_that_of_the_batch() -> None:
    ids, labels = unequal()
    program = compiled(zfunc.hf.segments(random_model("Llama")))
    state = zfunc.init(program)
    whole = zfunc.evaluate(program, state, zfunc.hf.batch(ids, labels))
    per_row = int((labels != IGNORED).sum()) / 8
    halves = [zfunc.hf.batch(ids[r], labels[r], tokens_per_row=per_row) for r in (slice(4), slice(4, 8))]
    assert abs(sum(zfunc.evaluate(program, state, half) for half in halves) / 2 - whole) < 1e-6


def test_invalid_batches_are_refused() -> None:
    ids, labels = unequal()
    with pytest.raises(ValueError, match=r"labels\[:, t\] is the token that follows"):
        zfunc.hf.batch(ids, labels[:, 1:])
    with pytest.raises(ValueError, match="no token that counts"):
        zfunc.hf.batch(ids[6:], labels[6:])
