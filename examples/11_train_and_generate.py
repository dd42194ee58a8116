# # 11. Training and generating in turns
#
# Run it with `python examples/11_train_and_generate.py`.
#
# Reinforcement learning trains a model and generates with it in turns, on one device. Between two steps zfunc lends
# its part of the device out: `zfunc.weights` hands the weights to whatever generates, a bucket at a time, and
# `zfunc.release` frees the rest. The next step takes it all back, with the bits it would have had.

import gc

import torch
from torch import Tensor

import zfunc
from zfunc.engine.state.state import State
from zfunc.models.gpt import gpt_segments, modules
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.sequences import KVCache

torch.set_num_threads(1)  # the tensors here are small
TURNS, STEPS, ROWS, LENGTH = 10, 6, 32, 12
CONFIG = GPTConfig(vocab_size=10, seq_length=LENGTH, num_layers=1, hidden_size=32, num_attention_heads=2)

# ## Two models in one process
#
# One is a program and its State. The other is plain PyTorch, and stands for an inference engine: its modules get
# memory on the device when they are needed, with no gradients and no state beside.

program = zfunc.compile(
    gpt_segments(CONFIG),
    optimizer=zfunc.AdamW(1e-2),
    precision="bf16",
    state_on="device,host",
    bucket_size=8192,
)
DEVICE = program.device


def counting(rows: int, seed: int) -> Tensor:
    """Rows that count in steps of their first number, 1 to 3, from the second one on, modulo 10."""
    drawn = torch.randint(0, 30, (rows, 1), generator=torch.Generator().manual_seed(seed))
    step = 1 + drawn % 3
    return torch.cat([step, (drawn // 3 + step * torch.arange(LENGTH)) % 10], dim=1)


def engine(weights: dict[str, Tensor]) -> list[torch.nn.Module]:
    """The modules of the model with these weights; the head is tied to the embedding, so it is not among them."""
    with torch.device("meta"):
        made = dict(modules(CONFIG))
    made["head"].out.weight = made["embed"].tok.weight
    for full, t in weights.items():
        name, _, short = full.partition(".")
        owner, _, last = short.rpartition(".")
        setattr(made[name].get_submodule(owner), last, torch.nn.Parameter(t, requires_grad=False))
    made["head"].out.weight = made["embed"].tok.weight
    return list(made.values())


def generate(parts: list[torch.nn.Module], prompt: Tensor) -> Tensor:
    """The prompt and what follows it, token by token, with the keys and values of those before kept."""
    caches, tokens, x = [KVCache() for _ in parts[:-1]], [prompt], prompt
    for _ in range(LENGTH - prompt.shape[1]):
        for part, cache in zip(parts[:-1], caches, strict=True):
            x = part(x, cache)
        x = parts[-1](x)[:, -1:].argmax(-1)
        tokens.append(x)
    return torch.cat(tokens, dim=1)


def device_bytes() -> int:
    """What tensors have on the device; on a CPU, where nobody counts, on the host."""
    if DEVICE.type != "cpu":
        return torch.accelerator.memory_allocated()
    found = (x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter))
    return sum({s.data_ptr(): s.nbytes() for s in found if s.device.type == "cpu"}.values())


# ## Ten turns
#
# Each turn trains a few steps, hands the weights over, releases, and generates: of two numbers, the step and the
# start, the rest of the row. What is printed is the device's memory while the one trains and while the other
# generates. Neither grows.


def train(state: State, turn: int) -> tuple[State, float]:
    for n in range(STEPS):
        rows = counting(ROWS, TURNS + turn * STEPS + n)
        state, metrics = zfunc.train_step(program, state, (rows[:, :-1], rows[:, 1:]))
    return state, metrics.loss


def share_right(state: State, turn: int) -> tuple[float, int]:
    """The share of numbers that the other model generates right, and the device's memory meanwhile."""
    parts = engine({name: t.clone() for name, t in zfunc.weights(program, state)})
    zfunc.release(program, state)
    rows = counting(ROWS, turn)[:, :LENGTH]
    right = generate(parts, rows[:, :2].to(DEVICE)).cpu() == rows
    return float(right[:, 2:].float().mean()), device_bytes()


state = zfunc.init(program)
print(f"{'turn':>4} {'loss':>6} {'right':>6} {'bytes: training':>16} {'generating':>11}")
for turn in range(TURNS):
    state, loss = train(state, turn)
    training = device_bytes()
    right, generating = share_right(state, turn)
    print(f"{turn:4} {loss:6.3f} {right:6.0%} {training:16,} {generating:11,}")

# ## The same training
#
# A training that was never released has the same bits.

undisturbed = zfunc.init(program)
for turn in range(TURNS):
    undisturbed, _ = train(undisturbed, turn)
mine, other = (zfunc.params(program, x) for x in (state, undisturbed))
print(f"\nsame bits as without generating: {all(torch.equal(mine[name], t) for name, t in other.items())}")

# What a release copies, and how long that takes on some machine, is in its plan.

rows = counting(ROWS, 0)
plan = zfunc.plan(gpt_segments(CONFIG), (rows[:, :-1], rows[:, 1:]), hardware="h100", state_on="device,host")
print(f"\n{plan.release}")
