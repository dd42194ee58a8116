"""What TRL's DPOTrainer makes of preferences and a tiny model, as JSON: `python tests/trl_reference.py`, with TRL
installed, prints tests/goldens/trl.json. Nothing of zfunc is used here.
"""

import json
import tempfile
from typing import Any

import torch

WORDS = ["<unk>", "</s>", *(f"w{n}" for n in range(45))]
SIZE: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": True},
}
BETA = 0.2
RECORDS = [
    {"prompt": "w1 w2", "chosen": " w3", "rejected": " w4 w5 w6 w7"},
    {"prompt": "w8 w9 w10", "chosen": " w11 w12 w13", "rejected": " w14 w15 w16"},
    {"prompt": "w17", "chosen": " w18 w19 w20 w21 w22", "rejected": " w23 w24"},
    {"prompt": "w25 w26", "chosen": " w27 w28 w29", "rejected": " w30"},
]


def model(seed: int) -> Any:
    """A Llama of these sizes, whose weights are numpy's for the seed: the same with any version of torch."""
    import numpy as np
    import transformers

    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))
    numbers = np.random.RandomState(seed)  # whose stream never changes
    with torch.no_grad():
        for name, p in made.named_parameters():
            drawn = torch.from_numpy(numbers.standard_normal(p.shape).astype(np.float32))
            p.copy_(drawn * 0.2 + ("norm" in name))
    return made


def main() -> None:
    """Print tokens, losses, rewards and the norms of all gradients, for both types."""
    import datasets
    import tokenizers
    import transformers
    import trl

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({x: n for n, x in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "pad_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    found: dict[str, Any] = {"trl": trl.__version__}
    for kind in ("sigmoid", "ipo"):
        with tempfile.TemporaryDirectory() as folder:
            plain = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
            args = trl.DPOConfig(folder, loss_type=kind, beta=BETA, disable_dropout=True, **plain)
            policy, data = model(1), datasets.Dataset.from_list(RECORDS)
            given = {"processing_class": tokenizer, "train_dataset": data, "args": args}
            trainer = trl.DPOTrainer(policy, model(2), **given)
            batch = trainer.data_collator([*trainer.train_dataset])
        loss = trainer.compute_loss(policy, batch)
        loss.backward()
        found |= {x: batch[x].tolist() for x in ("input_ids", "completion_mask")}
        rewards = {k: x for k, x in trainer._metrics["train"].items() if k.startswith("rewards/")}
        norms = {name: float(p.grad.double().norm()) for name, p in policy.named_parameters()}
        found[kind] = {"loss": float(loss), "rewards": {k: x[-1] for k, x in rewards.items()}, "norms": norms}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
