# # 5. A step late, a step ahead, or not at all
#
# Run it with `python examples/05_delayed_update.py`.
#
# With clipping, no parameter may be updated before the norm of the whole gradient is known. So the host waits
# while the device computes, and then the device waits while the host runs Adam. A schedule cannot help: the waits
# are what the recipe means. This file looks at three others: one that makes the update at the beginning of the
# next step, one that applies every gradient a step late, and one that leaves part of Adam on the device. Two are
# settings. The delayed one is written beside this file, with zfunc's operations: `systems/delayed_update.py`.

import torch
from systems.delayed_update import delayed
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc

torch.set_num_threads(1)  # the tensors here are small
WIDTH, ROWS = 256, 512


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), targets)


def compiled(**recipe: object):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    pieces = {**{f"layer{i}": x for i, x in enumerate(layers)}, "loss": Loss(WIDTH, 10)}
    return zfunc.compile(
        [zfunc.segment(name, module) for name, module in pieces.items()],
        optimizer=zfunc.AdamW(lr=1e-3),
        schedule="Overlapped",  # as with an accelerator
        precision="fp32",
        clip_norm=0.4,
        bucket_size=70_000,
        device="cpu",
        example=(inputs, targets),
        **recipe,
    )


inputs, targets = (
    torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)),
    torch.arange(ROWS) % 10,
)
programs = {
    "plain": compiled(),
    "deferred": compiled(defer=True),
    "delayed": compiled(recipe=delayed, defer=True),
    "partial": compiled(state_on="device:0.6,host"),
}

# ## What they look like
#
# On hardware that is made up, with a slow host. In the plain step `update` begins when `decide` has the norm. The
# deferred one opens with the `update` of the step before, and forward follows it. In the delayed one the host
# applies the gradient of the step before during forward, and nothing waits for a norm. In the partial one most
# buckets never leave: `update_on_device` is on the lane that computes.

rates = {
    "compute": 20e9,
    "network": 1e9,
    "d2h": 4e8,
    "h2d": 4e8,
    "host": 6e8,
    "read": 1e9,
    "write": 1e9,
}  # bytes a second
slow = zfunc.Hardware("made up", flops=60e9, rates=rates)
for name, program in programs.items():
    print(f"\n{name}\n{program.plan.simulate(slow).text()}")

# ## What they cost
#
# What waits for a step is on the host too: a gradient, and new parameters until backward is done with the old
# ones. What stays on the device needs room there.

print(f"\n{'':<12} {'time':>8} {'device':>10} {'pinned':>10} {'host':>10}   of the plain step")
plain = programs["plain"].plan
for name, program in programs.items():
    ratios = [program.plan.peak_bytes()[x] / plain.peak_bytes()[x] for x in ("device", "pinned", "host")]
    time = program.plan.simulate(slow).seconds / plain.simulate(slow).seconds
    print(f"{name:<12} {time:8.2f} " + " ".join(f"{ratio:10.2f}" for ratio in ratios))

# ## What they compute
#
# Twenty steps each. Deferral and residence change no bit. The delayed update is another algorithm, if a close
# one. What reads a State makes the update that waits: `zfunc.params` here.

results = {}
for name, program in programs.items():
    state, losses = zfunc.init(program), []
    for _ in range(20):
        state, metrics = zfunc.train_step(program, state, (inputs, targets))
        losses.append(metrics.loss)
    results[name] = losses, zfunc.params(program, state)
print()
for name, (losses, weights) in results.items():
    same = all(torch.equal(weights[k], v) for k, v in results["plain"][1].items())
    print(f"{name:<12} first loss {losses[0]:.6f}  last {losses[-1]:.6f}  same bits as plain: {same}")

# ## What they mean
#
# The plain recipe is in `zfunc/core/recipes.py`, which reads like the loop it stands for; the others change its
# order. Here is the graph of the delayed step, in serial order, by verb: every bucket's `update` comes first, with
# a gradient that this step did not compute, and `to_device` comes after the backward that still needs the old
# parameters.

verbs = list(dict.fromkeys(op.verb for op in programs["delayed"].plan.graph))
print("\n" + " ".join(verbs))
