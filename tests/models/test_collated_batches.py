"""What a collator of transformers makes is a batch, with the model's own loss."""

import pytest
import torch

import zfunc

transformers = pytest.importorskip("transformers")


def test_a_collators_dict_is_a_batch_and_its_loss_is_the_models() -> None:
    config = transformers.LlamaConfig(
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
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
    program = zfunc.compile(zfunc.hf.segments(model), precision="fp32", micro_batches=2, device="cpu")
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
