# # 1. A training loop, and the same loop in plain PyTorch
#
# Run it with `python examples/01_plain_loop.py`. Prose is in the comments; what a piece of code prints is
# announced before it.
#
# zfunc keeps the parameters on the device and everything Adam needs on the host: fp32 master weights, both
# moments, and the update itself. A loop does not see much of that. It compiles a program, makes a state,
# and hands the state from step to step. This file writes such a loop and checks it against plain PyTorch.

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc

# ## The model
#
# Any `nn.Module` that returns its mean loss. `compile` traces it once and cuts it into segments, here one for
# each layer. Segments are what gradients stream by: when the backward of one is done, its gradients leave for
# the host while the next is still at work. 02_swap_schedules.py makes segments by hand.


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, width) for inputs in (2, width))
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.out(x).float(), targets)


torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors here are tiny: a team of threads would spend its time waiting
model = Model(64)

# The data: points on two spirals, 256 a batch, each batch a pure function of its number.


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    label = torch.arange(256) % 2
    along = torch.rand(256, generator=generator)
    angle = 4 * along + torch.pi * label
    points = along[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.02 * torch.randn(256, 2, generator=generator), label


# ## The loop
#
# `compile` cuts the model by a batch, lays its parameters out, plans the step and checks the plan; the model is
# only read. `train_step` is a function of program, state and batch: it returns the next state and what happened.
# The state it was given is used up.

LR, CLIP, STEPS = 5e-3, 1.0, 100

program = zfunc.compile(
    model,
    example=batch(0),
    optimizer=zfunc.AdamW(lr=LR, weight_decay=0.01),
    precision="fp32",
    clip_norm=CLIP,
    micro_batches=2,
    device="cpu",
)
state = zfunc.init(program)
ours = []
for number in range(STEPS):
    state, metrics = zfunc.train_step(program, state, batch(number))
    ours.append(metrics.loss)

# That was all of it. The last metrics, and the state, which knows where it is:

print(f"loss {metrics.loss:.3f}, gradient norm {metrics.grad_norm:.3f}, learning rate {metrics.lr}")
print(f"updates made: {state.step}, rows seen: {state.sequences}")

# ## The same in plain PyTorch
#
# The model still holds its initial values, so a copy starts where the loop above did: autograd, two
# micro-batches, `clip_grad_norm_`, AdamW.

plain = copy.deepcopy(model)
optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.01)
theirs = []
for number in range(STEPS):
    total = 0.0
    for x, targets in zip(*(t.chunk(2) for t in batch(number)), strict=True):
        loss = plain(x, targets) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    theirs.append(total)

# ## Side by side
#
# The losses of both, every 20 steps. They agree to fp32 rounding: additions are made in another order,
# nothing else differs.

print("\n step   zfunc     PyTorch")
for number in [*range(0, STEPS, 20), STEPS - 1]:
    print(f"{number + 1:5}   {ours[number]:.5f}   {theirs[number]:.5f}")
largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
print(f"largest difference below 1e-4: {largest < 1e-4}")

# ## What can be had from a state
#
# `evaluate` gives the loss of a batch, and changes nothing. `params` gives the fp32 master weights by name;
# they go into a model as any state dict does.

held_out = batch(10_000)
print(f"\nheld out: {zfunc.evaluate(program, state, held_out):.3f}")
weights = zfunc.params(program, state)
print(*sorted(weights))
plain.load_state_dict(weights)

# A state that was used up says so. Written `state, metrics = train_step(...)`, a loop never meets this.

old = state
state, metrics = zfunc.train_step(program, old, batch(STEPS))
try:
    zfunc.train_step(program, old, batch(STEPS))
except RuntimeError as error:
    print(f"\n{type(error).__name__}: {error}")
