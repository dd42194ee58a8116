# # 7. Fine-tune a Hugging Face model
#
# Run it with `python examples/07_finetune_hf.py`; it needs transformers (`pip install "zfunc[hf]"`) and no network.
#
# A causal language model in a local folder becomes segments, is trained, and goes back into a folder that
# `from_pretrained` loads. The model here is a Llama of two layers with random weights, made and saved first, so
# that everything runs in seconds; with a real one, only the folder's name differs, and the tokenizer.

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import zfunc
from zfunc.engine.program import Program

torch.set_num_threads(1)  # the tensors here are small
transformers.utils.logging.disable_progress_bar()
room = TemporaryDirectory()
base, tuned = Path(room.name, "base"), Path(room.name, "tuned")

torch.manual_seed(0)
config = transformers.LlamaConfig(
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True},
)
transformers.LlamaForCausalLM(config).save_pretrained(base)

# ## From a folder to segments
#
# `load` looks at names and shapes alone. The weights are read by `zfunc.init`, a segment at a time, straight from
# the mapped file into the fp32 master weights; a model larger than the device, or one that fits into the host's
# memory once and not twice, is no special case. Parameters keep their names, and the tied head is one parameter.

config, segments = zfunc.hf.load(base)
for segment in segments:
    tied = ", ".join(segment.shared)
    print(f"{segment.name:<20} {len(segment.parameters)} parameters{f', {tied} shared' if tied else ''}")

# ## What to learn
#
# Prompts and completions, of unequal lengths, as bytes. Labels are shifted already: `labels[:, t]` follows
# `input_ids[:, t]`. Those of the prompt and of the padding are -100, which is "not to be predicted".

DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
PAIRS = [(f"after {day} comes ", DAYS[(i + 1) % 7]) for i, day in enumerate(DAYS)] + [("days? ", "7")]


def row(prompt: str, completion: str) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([*f"{prompt}{completion}".encode(), 0])
    labels = tokens[1:].clone()
    labels[: len(prompt) - 1] = -100
    pad = 40 - len(labels)
    return F.pad(tokens[:-1], (0, pad)), F.pad(labels, (0, pad), value=-100)


input_ids, labels = (torch.stack(x) for x in zip(*(row(*pair) for pair in PAIRS), strict=True))
print(f"\ntokens that count, by row: {(labels != -100).sum(dim=1).tolist()}")

# Rows hold unequally many tokens that count, so the mean over micro-batches of their means is not the mean over
# the batch. `zfunc.hf.batch` gives every row a weight that makes it so, however the batch is cut. Here is the loss
# that transformers computes of the whole batch, and that of the same batch in 1, 2 and 4 parts, with and without.

batch = zfunc.hf.batch(input_ids, labels)
with torch.no_grad():
    logits = transformers.AutoModelForCausalLM.from_pretrained(base)(input_ids).logits
print(f"transformers     {F.cross_entropy(logits.flatten(0, 1), labels.flatten()):.5f}")


def compiled(micro_batches: int) -> Program:
    optimizer = zfunc.AdamW(lr=zfunc.lr.warmup_cosine(5e-3, warmup=10, total=120), weight_decay=0.0)
    settings = {"precision": "fp32", "clip_norm": 1.0, "device": "cpu", "bucket_size": 50_000}
    return zfunc.compile(segments, optimizer=optimizer, micro_batches=micro_batches, **settings)


for parts in (1, 2, 4):
    program = compiled(parts)
    weighed, plain = (
        zfunc.train_step(program, zfunc.init(program), given)[1].loss
        for given in (batch, (input_ids, labels))
    )
    print(f"in {parts} parts       {weighed:.5f}  plain labels {plain:.5f}")

# ## Train, save, use

program = compiled(4)
state = zfunc.init(program)
print()
for step in range(120):
    state, metrics = zfunc.train_step(program, state, batch)
    if step % 30 == 0:
        print(f"step {step:>3}  loss {metrics.loss:.4f}")
print(f"at the end  {zfunc.evaluate(program, state, batch):.4f}")

# The folder has what the first one had, but for the weights: config.json, the tokenizer's files if there were any.
# `zfunc export CHECKPOINT --hf base --out tuned` does the same for a checkpoint of a training.

zfunc.hf.save(tuned, program, state, config=base)
model = transformers.AutoModelForCausalLM.from_pretrained(tuned).eval()
with torch.no_grad():
    print(
        "\nequal logits:",
        torch.allclose(model(input_ids).logits, zfunc.apply(program, state, input_ids), atol=1e-4),
    )
for prompt in ("after friday comes ", "after sunday comes ", "days? "):
    ids = torch.tensor([[*prompt.encode()]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    print(bytes(out[0].tolist()).decode().rstrip("\0"))
room.cleanup()
