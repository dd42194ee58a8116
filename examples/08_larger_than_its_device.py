# # 8. A model larger than its device
#
# Run it with `python examples/08_larger_than_its_device.py`.
#
# With the optimizer's state on the host the 16-bit parameters are still on the device, and a model ends where
# they no longer fit. With `params_on="host"` they live on the host too: those of a segment are copied to the
# device before it runs, into slots that the next segments use again. This file plans a model for a device that is
# too small for it, then trains it and compares the bits. A CPU has one memory and no device to run out of, so what
# shows that the model fits is the plan: tests hold a step's memory to what its plan says.

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc

torch.set_num_threads(1)  # the tensors here are small
WIDTH, ROWS = 128, 64


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x).float(), targets)


def model(depth: int) -> list[zfunc.Segment]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)]
    pieces = {**{f"layer{n}": x for n, x in enumerate(layers)}, "loss": Loss(WIDTH, 10)}
    return [zfunc.segment(name, module) for name, module in pieces.items()]


batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 10

# ## A device of 800 kB
#
# Twenty-four layers of 128 x 128 take 800 kB in 16 bits. The device is made up, and has no more than that.

rates = {
    "compute": 2e10,
    "network": 1e9,
    "d2h": 3e8,
    "h2d": 1e8,
    "host": 1e9,
    "read": 1e9,
    "write": 1e9,
}  # bytes a second
small = zfunc.Hardware("small", flops=2e10, rates=rates, memory={"device": 800_000, "host": 10**9})
MODES = {
    "on the device": {},
    "parameters on the host": {"params_on": "host"},
    "activations too": {"params_on": "host", "activations_on": "host"},
}


def planned(depth: int, **settings: object):
    common = {"precision": "bf16", "bucket_size": 20_000, "clip_norm": 1.0, "micro_batches": 2}
    return zfunc.plan(model(depth), batch, hardware=small, advice=False, **common, **settings)


plans = {name: planned(24, **settings) for name, settings in MODES.items()}
print(f"{'kB':<24} {'device':>8} {'pinned':>8} {'host':>8}")
for name, plan in plans.items():
    memory = " ".join(f"{plan.memory[tier] / 1e3:8.0f}" for tier in ("device", "pinned", "host"))
    print(f"{name:<24} {memory}   {'fits' if plan.fits else 'does not fit'}")

# The master is kept in two halves, and the upper one *is* the bf16 parameter: it is pinned, and copied from there.
# So the host needs no more than before, though it has the parameters now.
#
# ## A deeper model
#
# The device has slots for the parameters of two segments and for the sums of two gradients, however many there are.
# What every segment keeps for backward still grows with depth, unless that waits on the host too:

print(f"\n{'kB of device':<24} {'24 layers':>10} {'48 layers':>10}")
for name, settings in MODES.items():
    shallow, deep = (plan.memory["device"] / 1e3 for plan in (plans[name], planned(48, **settings)))
    print(f"{name:<24} {shallow:10.0f} {deep:10.0f}")

# ## What it costs
#
# Parameters cross the bus before forward and again before backward, where the new ones crossed once before. The two
# micro-batches pass a segment together, so they share a copy: `order="horizontal"` copies for each of them.

print(f"\n{'kB over the bus':<24} {'up':>8} {'down':>8} {'ms':>8}")
together, apart = MODES["parameters on the host"], {"params_on": "host", "order": "horizontal"}
for name, plan in {**plans, "one by one": planned(24, **apart)}.items():
    up, down = (plan.bus_bytes[bus] / 1e3 for bus in ("h2d", "d2h"))
    print(f"{name:<24} {up:8.0f} {down:8.0f} {plan.step_seconds * 1e3:8.1f}")

# Six layers of it as a picture: while a segment computes, the next one's parameters are fetched. Forward ends with
# two segments in the slots, and backward begins with those, so they are not fetched again.

print(f"\n{planned(6, **together).timeline.text()}")

# ## The same training
#
# Where parameters live is no part of what a step computes.

results = {}
for name, plan in plans.items():
    program = zfunc.compile(model(24), device="cpu", example=batch, **plan.settings)
    state, losses = zfunc.init(program), []
    for _ in range(3):
        state, metrics = zfunc.train_step(program, state, batch)
        losses.append(metrics.loss)
    results[name] = losses, zfunc.params(program, state)

print()
for name, (losses, weights) in results.items():
    same = losses == results["on the device"][0]
    same &= all(torch.equal(weights[k], x) for k, x in results["on the device"][1].items())
    print(f"{name:<24} first loss {losses[0]:.6f}  last {losses[-1]:.6f}  same bits: {same}")
