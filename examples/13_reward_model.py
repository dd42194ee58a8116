# # 13. A reward model
#
# Run it with `python examples/13_reward_model.py`; it needs `pip install -e ".[hf]"`.
#
# A reward model gives an answer a number, and is trained on pairs: of two answers to a prompt, the one that people
# preferred is to get the larger one (Bradley and Terry's loss). With zfunc that is a model of transformers with one
# label, and a function of its output, which sees the chosen and the rejected answers in turn.

import torch
import transformers
from torch.nn import functional as F

import zfunc

torch.set_num_threads(1)  # the tensors here are small
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_labels=1, pad_token_id=0, use_cache=False,
)  # fmt: skip
model = transformers.LlamaForSequenceClassification(config)  # or from_pretrained(folder, num_labels=1)


def pairs_loss(output, _):
    chosen, rejected = output.logits.view(-1, 2).unbind(1)  # [pairs]
    return -F.logsigmoid(chosen - rejected).mean()


# ## Pairs
#
# The better answer is the one with larger tokens. Rows are padded at the end, with a mask, as a tokenizer does it.

answers = torch.randint(1, 32, (32, 8))
answers[0::2] += 32
answers[1::4, 6:] = 0
inputs = {"input_ids": answers, "attention_mask": (answers > 0).long()}
batch = (inputs, torch.zeros(32))  # this loss has no targets: a zero for each row

# ## Training
#
# Weights, gradients and optimizer state may be anywhere, as for any other model.

segments = zfunc.segments(model, batch, pairs_loss)
options = {"optimizer": zfunc.AdamW(lr=3e-3), "precision": "fp32", "micro_batches": 2, "params_on": "host"}
program = zfunc.compile(segments, **options)
state = zfunc.init(program)
for _ in range(30):
    state, metrics = zfunc.train_step(program, state, batch)
    if metrics.step in (1, 30):
        print(f"step {metrics.step:2}: loss {metrics.loss:.3f}")

rewards = zfunc.apply(program, state, inputs).logits.view(-1, 2)
print(f"chosen above rejected: {int((rewards[:, 0] > rewards[:, 1]).sum())} of 16 pairs")
