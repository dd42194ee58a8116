# # 7. Fine-tune a Hugging Face model on chats
#
# Run it with `python examples/07_finetune_hf.py`; it needs transformers (`pip install -e ".[hf]"`) and no network.
#
# A causal language model in a local folder is trained on chats, and goes back into a folder that `from_pretrained`
# loads. The model here is a Llama of two layers with random weights, made and saved first, so that everything runs
# in seconds; with a real one, only the folder's name differs.

import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
import torch
import transformers

import zfunc
from zfunc.cli.main import main

torch.set_num_threads(1)  # the tensors here are small
transformers.utils.logging.disable_progress_bar()
room = TemporaryDirectory()
base, tuned, run = (Path(room.name, name) for name in ("base", "tuned", "run"))

# ## What to learn
#
# A chat a line, with OpenAI's keys. Some are held out: the model never sees their answers, but it sees the same
# days asked for in other words.

DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
ASK = [
    "what comes after {}",
    "which day follows {}",
    "name the day after {}",
    "{} is over and then",
    "{} plus one day",
]


def chat(number: int, words: str) -> str:
    asked, answer = words.format(DAYS[number]), f"it is {DAYS[(number + 1) % 7]}"
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


chats = [chat(number, words) for number, words in product(range(7), ASK)]
train, held_out = Path(room.name, "train.jsonl"), Path(room.name, "held_out.jsonl")
train.write_text("\n".join(x for n, x in enumerate(chats) if n % 6))
held_out.write_text("\n".join(chats[::6]))

# ## The model
#
# With its tokenizer, whose chat template says how a chat is written. What the assistant writes is learned, from the
# end of the prompt to the end of its turn; the labels of everything else are -100.

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
words = sorted(
    {word for line in chats for m in json.loads(line)["messages"] for word in m["content"].split()}
)
special = ["<|end|>", "<|user|>", "<|assistant|>"]
level = tokenizers.models.WordLevel(
    {word: n for n, word in enumerate([*special, *words])}, unk_token="<|end|>"
)
tokenizer = tokenizers.Tokenizer(level)
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer.add_special_tokens(special)
fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
)
fast.save_pretrained(base)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    **{"vocab_size": len(fast), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.1},
)
transformers.LlamaForCausalLM(config).save_pretrained(base)
prompt = [{"role": "user", "content": "what comes after monday"}]  # the first of those that are held out
print(fast.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))

# ## Train
#
# `zfunc train --hf base --data train.jsonl ...` on the command line. Sequences have whole chats, which do not
# attend to each other; the steps follow from the epochs. Weights are read a segment at a time, straight from the
# mapped file into the fp32 master weights, so a model larger than the device is no special case.

given = {
    **{"hf": base, "data": train, "eval-data": held_out, "out": run, "packing": "documents", "epochs": 15},
    **{"seq-length": 32, "batch-size": 4, "lr": 1e-2, "lr-schedule": "linear", "eval-every": 25, "seed": 0},
}
main(["train", *(f"--{name}={value}" for name, value in given.items())])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [x["held_out_bits_per_token"] for x in lines if "held_out_bits_per_token" in x]
print(f"\nheld out: {losses[0]:.2f} bits per token before, {losses[-1]:.2f} after")

# ## Use it
#
# The new folder has what the first one had, but for the weights: its config, and the tokenizer with the template.

main(["export", str(run), "--hf", str(base), "--out", str(tuned)])
model = transformers.AutoModelForCausalLM.from_pretrained(tuned).eval()
ids = fast.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")["input_ids"]
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
print(f"\n{fast.decode(out[0])}")

# ## In a loop of your own
#
# `load` returns segments for `zfunc.compile`. Labels are shifted already: `labels[:, t]` follows `input_ids[:, t]`.
# Rows hold unequally many that count, so the mean over micro-batches of their means is not the mean over the batch;
# `zfunc.hf.batch` gives every row a weight that makes it so, however the batch is cut.

_, segments = zfunc.hf.load(tuned)
rows = torch.tensor(
    [fast.encode(f"<|user|> {words} <|end|>") for words in ("monday plus one day", "it is over and")]
)
labels = rows[:, 1:].clone()
labels[1, :3] = -100
batch = zfunc.hf.batch(rows[:, :-1], labels)
with torch.no_grad():
    logits = model(rows[:, :-1]).logits
print(f"\ntransformers  {torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()):.5f}")
for parts in (1, 2):
    program = zfunc.compile(segments, precision="fp32", micro_batches=parts, device="cpu")
    state, metrics = zfunc.train_step(program, zfunc.init(program), batch)
    print(f"in {parts} parts    {metrics.loss:.5f}")
zfunc.hf.save(Path(room.name, "again"), program, state, config=base)
room.cleanup()
