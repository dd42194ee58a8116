# # 10. A state larger than memory
#
# Run it with `python examples/10_state_on_disk.py`.
#
# Where host memory ends, optimizer state, parameters and waiting gradients can live on NVMe drives. A bucket's
# state is read into a slot before its update and written back after it, into a *swap space* that is a checkpoint
# after every step. This file plans what memory that takes and what it moves, trains with equal bits, and lets a
# step fail in the middle: training goes on from the step before.

import logging
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.core.hardware import ROUND
from zfunc.runtime.fault_injection import Fault, InjectedFault

torch.set_num_threads(1)  # the tensors here are small
WIDTH, ROWS, DEPTH = 128, 64, 12


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x).float(), targets)


def model() -> list[zfunc.Segment]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    pieces = {**{f"layer{n}": x for n, x in enumerate(layers)}, "loss": Loss(WIDTH, 10)}
    return [zfunc.segment(name, module) for name, module in pieces.items()]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS) % 10


# ## What it takes
#
# Name a folder on each drive. One in memory (tmpfs) is refused, so these are in the folder where this file runs.

drive = tempfile.TemporaryDirectory(prefix=".swap-", dir=Path.cwd())
swap = {name: Path(drive.name, name) for name in ("state", "all")}
for folder in swap.values():
    folder.mkdir()
COMMON = {"precision": "bf16", "bucket_size": 20_000, "clip_norm": 1.0}
STATE = {"params_on": "host", "state_on": "disk", "swap": [str(swap["state"])]}
ALL = {"params_on": "disk", "state_on": "disk", "grads_on": "disk", "swap": [str(swap["all"])]}
MODES = {"in memory": {"params_on": "host"}, "state on the disk": STATE, "everything": ALL}

plans = {
    name: zfunc.plan(model(), batch(1), hardware=ROUND, advice=False, **COMMON, **settings)
    for name, settings in MODES.items()
}
print(f"{'kB':<20} {'memory':>8} {'disk':>8} {'read':>8} {'written':>8}")
for name, plan in plans.items():
    memory = sum(plan.memory[tier] for tier in ("device", "pinned", "host"))
    moved = [sum(op.nbytes for op in plan.plan.graph if op.kind == kind) for kind in ("read", "write")]
    print(f"{name:<20}", *(f"{n / 1e3:8.0f}" for n in (memory, plan.memory["disk"], *moved)))

# What memory has of what is on the disk are slots, and these do not grow with depth. The disk has every bucket
# twice: a step writes beside the state of the last commit, never over it.
#
# A step as a picture. The updates come last here, because clipping waits for the norm: while one bucket is updated,
# the state of the next is read and that of the one before is written. Then the step is committed.

print(f"\n{plans['everything'].timeline.text()}")

# ## The same training, and a failure in the middle
#
# Where a state lives is no part of what a step computes. In the third step with everything on the disk something
# fails before a bucket is written: that State is lost, as it would be with the process.

logging.disable(logging.WARNING)  # the failure is logged, too
STEPS = 3
results = {}
for name, settings in MODES.items():
    program = zfunc.compile(model(), device="cpu", **COMMON, **settings)
    state, losses = zfunc.init(program), []
    faults = [Fault(rank=0, step=3, op="page_out[5]", action="raise")] if name == "everything" else []
    while state.step < STEPS:
        try:
            state, metrics = zfunc.train_step(program, state, batch(state.step + 1), faults=faults)
        except InjectedFault as error:
            print(f"\n{type(error).__name__}: {error}")
            state, faults = zfunc.load(swap["all"], program), []
            print(f"the last commit is of step {state.step}: training goes on from there")
            continue
        losses.append(metrics.loss)
    results[name] = losses, zfunc.params(program, state)

# A process that was killed leaves the same, whenever that was: the next one calls `zfunc.load` instead of
# `zfunc.init`, as `zfunc train --resume auto` does.

print()
for name, (losses, weights) in results.items():
    same = losses == results["in memory"][0]
    same &= all(torch.equal(weights[k], x) for k, x in results["in memory"][1].items())
    print(f"{name:<20} first loss {losses[0]:.6f}  last {losses[-1]:.6f}  same bits: {same}")

drive.cleanup()
logging.disable(logging.NOTSET)
