# # 2. One program, three schedules
#
# Run it with `python examples/02_swap_schedules.py`.
#
# What a step computes is a graph: operations in serial order, each with what it reads and writes. When an
# operation runs is a plan: lanes, the order on each, and waits between them. A schedule is a function from
# the one to the other. This file puts the same program under three of them and looks at the plans, at
# pictures of them, at the results, and at a measured step.

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc import schedules

torch.set_num_threads(1)  # the tensors here are small
WIDTH, ROWS = 256, 512


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.out(x).float(), targets)


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


torch.manual_seed(0)
pieces = {"first": layer(), "second": layer(), "third": layer(), "loss": Loss()}
segments = [zfunc.segment(name, module) for name, module in pieces.items()]
inputs, targets = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 10

# Three programs that differ in the schedule alone. A bucket is what leaves for the host, is updated and
# comes back as a unit: here there are three, the last two segments sharing one. The example batch lets
# `compile` plan with real sizes.

programs = {
    name: zfunc.compile(
        segments,
        schedule=getattr(schedules, name)(),
        precision="fp32",
        bucket_size=68_500,
        device="cpu",
        example=(inputs, targets),
    )
    for name in ("Serial", "Overlapped", "Interleaved")
}

# ## The plans, as text
#
# `Serial` is one lane in graph order. Read it from top to bottom and you have read the training step.

serial, overlapped = programs["Serial"].plan, programs["Overlapped"].plan
print(serial)

# `Overlapped` has a lane for each kind of work: compute, copies to the host and back, the host itself. Now
# an operation may have to wait for one on another lane: "after" says for which. Nobody wrote these waits
# down. They follow from what the operations read and write, and those that follow from others are left out.

print(f"\n{overlapped}")
print(f"\n{len(overlapped.graph)} operations, {overlapped.num_waits} waits")

# `pack[0,0,0]` (micro-batch 0, bucket 0, segment 0) after `to_host[0,2,0]` (micro-batch 0, bucket 2,
# delivery 0) is a slot that is used again: there are two on the device, for the gradients of three buckets.
#
# `Interleaved` orders the copies by when they become possible: a gradient before its squares, which the device has
# yet to sum. In one process nothing else differs. A plan has a digest, by which ranks compare theirs:

print()
print(*(f"{name:<12} {program.plan.digest}" for name, program in programs.items()), sep="\n")

# ## The plans, as pictures
#
# `simulate` says when each operation runs on given hardware; `text` draws that. This machine is made up, and
# slow enough for a model this small. A capital is where an operation begins. In `Serial` everything waits
# for everything; in `Overlapped` Adam of the last bucket begins while backward is still at the first
# segments.

rates = {
    "compute": 20e9,
    "network": 1e9,
    "d2h": 2e8,
    "h2d": 2e8,
    "host": 1e9,
    "read": 1e9,
    "write": 1e9,
}  # bytes a second
slow = zfunc.Hardware("made up", flops=60e9, rates=rates)
for plan in (serial, overlapped):
    print(f"\n{plan.simulate(slow).text()}")
print(f"\nno schedule is faster than {serial.lower_bound(slow) * 1e3:.1f} ms")

# ## Two ranks
#
# Between ranks `Interleaved` has something to do. The same recipe, for four large segments on two ranks,
# simulated, because this file runs in one process. In graph order the all_gather of one bucket, which
# waits for its Adam, holds up the reduce_scatter of the next.

ranks = zfunc.step_graph(segments=4, parameters=12 * 2048**2, tokens=4096, world=2)
for schedule in (schedules.Overlapped(), schedules.Interleaved()):
    print(f"\n{schedule}\n{schedule(ranks).simulate().text()}")

# ## The results
#
# A schedule can make a step faster or slower. It cannot change one bit of the result. Five steps under
# each, then every parameter compared with `torch.equal`:

results = {}
for name, program in programs.items():
    state = zfunc.init(program)
    for _ in range(5):
        state, metrics = zfunc.train_step(program, state, (inputs, targets), trace=True)
    results[name] = metrics, zfunc.params(program, state)

print()
for name, (metrics, weights) in results.items():
    same = all(torch.equal(weights[k], v) for k, v in results["Serial"][1].items())
    print(f"{name:<12} loss {metrics.loss:.6f}  same bits as Serial: {same}")

# ## A step, measured
#
# With `trace=True` the metrics hold a timeline of what happened: the same type as a simulated one, so the
# same picture. On a CPU the lanes are threads on the same cores, and a "copy to the device" is a copy in
# memory: there is less to gain than with a GPU, where the copies and compute have hardware of their own.

timeline = results["Overlapped"][0].timeline
print(f"\n{timeline.text()}")
