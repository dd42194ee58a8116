# # 0. zfunc in 200 lines
#
# Run it with `python examples/00_zfunc_in_200_lines.py`. A whole offload engine, which imports nothing of zfunc:
# weights and activations are on the device (here the CPU too), fp32 master weights and Adam's moments on the host.
#
#     recipe    -> operations   what a step means: each operation, and the regions of memory it reads and writes
#     schedule  -> plan         when they run: lanes, and which operation waits for which
#     verify                    finds every race: a plan without one gives the bits of the serial step

import math
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from itertools import pairwise

import torch
from torch import nn
from torch.func import functional_call, vjp

# ## What a step means
#
# `index` has the micro-batch and the segment, `kind` is the resource in use: compute, copies to the host (d2h) and
# the device (h2d), host. A region is memory, not a value: gradients leave through two slots that take turns.

Op = namedtuple("Op", "verb index kind reads writes")
MICRO_BATCHES, SLOTS = 2, 2


def zero_offload(segments):
    """The operations of a step with clipping, in serial order (ZeRO-Offload: Ren et al. 2021)."""
    for m in range(MICRO_BATCHES):
        for s in range(segments):
            output = ("act", s + 1) if s < segments - 1 else ("loss", m)
            yield Op("forward", (m, s), "compute", {("params", s), ("act", s)}, {output, ("residuals", s)})
        for s in reversed(range(segments)):
            slot, total = ("host_slot", s % SLOTS), ("host_grad", s)
            reads = {("params", s), ("residuals", s), ("grad_act", s + 1)}
            yield Op("backward", (m, s), "compute", reads, {("grad_act", s), ("grad", s)})
            yield Op("to_host", (m, s), "d2h", {("grad", s)}, {slot})
            yield Op("accumulate", (m, s), "host", {slot, total}, {total})
    yield Op("decide", (), "host", {("host_grad", s) for s in range(segments)}, {("clip_factor", 0)})
    for s in reversed(range(segments)):
        state = {("master", s), ("exp_avg", s), ("exp_avg_sq", s), ("host_grad", s)}
        yield Op("update", (s,), "host", {*state, ("clip_factor", 0)}, state)
        yield Op("to_device", (s,), "h2d", {("master", s)}, {("params", s)})


def conflicts(ops):
    """For each operation the earlier ones with a region in common that one of both writes."""
    for j, b in enumerate(ops):
        yield {i for i, a in enumerate(ops[:j]) if a.writes & (b.reads | b.writes) or a.reads & b.writes}


# ## When it runs
#
# A lane is a queue of operations, by number. Nobody writes a wait: those that conflict wait for one another.

Plan = namedtuple("Plan", "ops lanes waits")  # waits: for each operation, those of other lanes it waits for


def happens_before(plan):
    """For each operation those that have surely ended when it begins; CycleError for a deadlock."""
    before = [set(waits) for waits in plan.waits]
    for i, j in (pair for lane in plan.lanes.values() for pair in pairwise(lane)):
        before[j].add(i)
    for j in TopologicalSorter(dict(enumerate(before))).static_order():
        before[j] = before[j].union(*(before[i] for i in before[j]))
    return before


def verify(plan):
    """The races of a plan: pairs of operations that conflict, and that it does not keep in serial order."""
    for b, earlier, before in zip(plan.ops, conflicts(plan.ops), happens_before(plan), strict=True):
        yield from ((plan.ops[i], b) for i in earlier - before)


def build(ops, lanes):
    """The plan of these lanes that has the fewest waits."""
    lane_of = {i: name for name, lane in lanes.items() for i in lane}
    waits = [{i for i in some if lane_of[i] != lane_of[j]} for j, some in enumerate(conflicts(ops))]
    before = happens_before(Plan(ops, lanes, waits))
    implied = [set().union(*(before[i] for i in some)) for some in before]
    return Plan(ops, lanes, [a - b for a, b in zip(waits, implied, strict=True)])


def serial(ops):
    return build(ops, {"all": [*range(len(ops))]})


def overlapped(ops):
    return build(ops, {a.kind: [i for i, b in enumerate(ops) if b.kind == a.kind] for a in ops})


# ## What each operation does
#
# A method for each verb. `vjp` returns an output and the function that takes its gradient back. AdamW rounds as
# zfunc's kernel does (the root in fp64, as torch's of fp32 is not the nearest number on every CPU).

LR, BETA1, BETA2, EPS, DECAY, CLIP = 5e-3, 0.9, 0.999, 1e-8, 0.01, 1.0


class Training:
    def __init__(self, model):
        self.model, self.step, self.mem = model, 0, {}
        for s, segment in enumerate(model):
            self.mem["params", s] = {name: p.detach().clone() for name, p in segment.named_parameters()}
            self.mem["master", s] = nn.utils.parameters_to_vector(self.mem["params", s].values())
            for name in ("exp_avg", "exp_avg_sq", "host_grad"):
                self.mem[name, s] = torch.zeros_like(self.mem["master", s])

    def forward(self, m, s):
        x, targets = (t.chunk(MICRO_BATCHES)[m] for t in self.batch)
        last = s == len(self.model) - 1

        def segment(params, x):
            y = functional_call(self.model[s], params, x)
            return nn.functional.cross_entropy(y, targets) if last else y

        y, pull = vjp(segment, self.mem["params", s], self.mem["act", s] if s else x)
        self.mem[("loss", m) if last else ("act", s + 1)], self.mem["residuals", s] = y, pull

    def backward(self, m, s):
        above = self.mem.get(
            ("grad_act", s + 1), torch.tensor(1 / MICRO_BATCHES)
        )  # of the loss, if it is the last
        grads, self.mem["grad_act", s] = self.mem["residuals", s](above)
        self.mem["grad", s] = nn.utils.parameters_to_vector(grads.values())

    def to_host(self, m, s):
        self.mem["host_slot", s % SLOTS] = self.mem["grad", s].clone()

    def accumulate(self, m, s):
        self.mem["host_grad", s] += self.mem["host_slot", s % SLOTS]

    def decide(self):
        squares = (x * x for s in range(len(self.model)) for x in self.mem["host_grad", s].tolist())
        self.mem["clip_factor", 0] = min(1.0, CLIP / (math.sqrt(math.fsum(squares)) + 1e-6))

    def update(self, s):
        p, m, v, g = (self.mem[name, s] for name in ("master", "exp_avg", "exp_avg_sq", "host_grad"))
        rate, scale = LR / (1 - BETA1**self.step), 1 / math.sqrt(1 - BETA2**self.step)
        g *= self.mem["clip_factor", 0]
        m.copy_(BETA1 * m + (1 - BETA1) * g)
        v.copy_(BETA2 * v + (1 - BETA2) * (g * g))
        p -= rate * (m / (v.double().sqrt().float() * scale + EPS)) + LR * DECAY * p
        g.zero_()

    def to_device(self, s):
        nn.utils.vector_to_parameters(self.mem["master", s].clone(), self.mem["params", s].values())


def execute(plan, training, batch):
    """Run a step, and return its loss. Lanes go on after an error in one, which is then raised."""
    training.batch, training.step = batch, training.step + 1
    ended = [threading.Event() for _ in plan.ops]

    def run(lane):
        try:
            for j in lane:
                _ = [ended[i].wait() for i in plan.waits[j]]
                getattr(training, plan.ops[j].verb)(*plan.ops[j].index)
                ended[j].set()
        finally:
            _ = [ended[j].set() for j in lane]

    with ThreadPoolExecutor(len(plan.lanes)) as threads:
        _ = [*threads.map(run, plan.lanes.values())]
    return sum(training.mem["loss", m].item() for m in range(MICRO_BATCHES)) / MICRO_BATCHES


# ## Train
#
# The model and the data of 01_plain_loop.py, where zfunc makes the same losses and weights, bit for bit.


def batch(number):
    generator, label = torch.Generator().manual_seed(number), torch.arange(256) % 2
    along = torch.rand(256, generator=generator)
    angle = 4 * along + torch.pi * label
    points = along[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.02 * torch.randn(256, 2, generator=generator), label


torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors here are tiny
model = [*(nn.Sequential(nn.Linear(n, 64), nn.Tanh()) for n in (2, 64)), nn.Linear(64, 2)]
ops, losses, weights = [*zero_offload(len(model))], [], []
for plan in (serial(ops), overlapped(ops)):
    training = Training(model)
    losses.append([execute(plan, training, batch(number)) for number in range(100)])
    weights.append(torch.cat([training.mem["master", s] for s in range(len(model))]))
    print(f"lanes: {', '.join(plan.lanes)}; races: {len([*verify(plan)])}; last loss: {losses[-1][-1]:.4f}")
print("same bits:", losses[0] == losses[1] and weights[0].equal(weights[1]))

# `build` left the waits that are needed. Delete any of them, and `verify` finds operations that race.
for j, i in [(j, i) for j, waits in enumerate(plan.waits) for i in waits]:
    broken = plan._replace(waits=[some - {i} if k == j else some for k, some in enumerate(plan.waits)])
    first, second = next(verify(broken))
    print(f"race: {second.verb}{[*second.index]} does not wait for {first.verb}{[*first.index]}")
