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

# ## The model, in pieces
#
# A model is a tuple of segments that run one after another. Any `nn.Module` is one; the last takes the
# targets too and returns the mean loss. Segments are what gradients stream by: when the backward of one is
# done, its gradients leave for the host while the next is still at work.


class Loss(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.out(x).float(), targets)


torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors here are tiny: a team of threads would spend its time waiting
pieces = {
    "inlet": nn.Sequential(nn.Linear(2, 64), nn.Tanh()),
    "body": nn.Sequential(nn.Linear(64, 64), nn.Tanh()),
    "loss": Loss(64),
}

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
# `segment` takes a module apart into a pure function and initial values; the module is only read. `compile`
# lays the parameters out, plans the step and checks the plan. `train_step` is a function of program, state
# and batch: it returns the next state and what happened. The state it was given is used up.

LR, CLIP, STEPS = 5e-3, 1.0, 100

segments = [zfunc.segment(name, module) for name, module in pieces.items()]
program = zfunc.compile(
    segments,
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
# The modules still hold their initial values, so a copy starts where the loop above did: autograd, two
# micro-batches, `clip_grad_norm_`, AdamW.

model = nn.ModuleDict(copy.deepcopy(pieces))
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
theirs = []
for number in range(STEPS):
    total = 0.0
    for x, targets in zip(*(t.chunk(2) for t in batch(number)), strict=True):
        loss = model["loss"](model["body"](model["inlet"](x)), targets) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
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
# they go into the module as any state dict does.

held_out = batch(10_000)
print(f"\nheld out: {zfunc.evaluate(program, state, held_out):.3f}")
weights = zfunc.params(program, state)
print(*sorted(weights))
model.load_state_dict(weights)

# A state that was used up says so. Written `state, metrics = train_step(...)`, a loop never meets this.

old = state
state, metrics = zfunc.train_step(program, old, batch(STEPS))
try:
    zfunc.train_step(program, old, batch(STEPS))
except RuntimeError as error:
    print(f"\n{type(error).__name__}: {error}")
