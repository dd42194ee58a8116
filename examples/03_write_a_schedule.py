# # 3. Write a schedule
#
# Run it with `python examples/03_write_a_schedule.py`.
#
# A schedule is anything callable `Graph -> Plan`. It chooses lanes and the order on each; the waits are
# derived. The first half of this file needs no torch: a schedule can be written, checked, timed and drawn
# on any laptop. The second half trains with it.

import sys

import zfunc
from zfunc import schedules
from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build

# ## A graph without a model
#
# The graph of a step needs to know how large things are, not what they are. Here are four segments of fifty
# million parameters, a bucket each, and 4096 tokens.

graph = zfunc.step_graph(segments=4, parameters=12 * 2048**2, tokens=4096)

# An operation says what it reads and writes. `update` of bucket 3 reads the decision on this step and the
# gradient's slot; it updates the master weights and moments, and leaves a copy for the device. The slot is the
# one that `to_host` has given the gradient:

for name in ("pack[0,3,3]", "to_host[0,3,0]", "update[3]"):
    op = graph.ops[graph.position[name]]
    print(f"{op} reads {', '.join(map(str, op.reads))}")
    print(f"{op} writes {', '.join(map(str, op.writes))}")

# The operations are in serial order. That is the meaning of the step, and what two operations both touch is all
# there is to know about their order.

print(f"{len(graph)} operations, {len(graph.conflicts)} pairs whose order counts")

# ## A schedule for one copy engine
#
# `Overlapped` gives copies out and copies in a lane each. Some machines have one engine for both. So: a
# lane named "copies" for the two kinds, graph order on every lane.

LANES = {"compute": "compute", "host": "host", "d2h": "copies", "h2d": "copies"}


def in_graph_order(graph: Graph) -> Plan:
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(graph):
        lanes.setdefault(LANES[op.kind], []).append(i)
    return build(graph, lanes)


print(f"\nin graph order\n{in_graph_order(graph).verify().simulate().text()}")

# The picture shows what is wrong with it. The copy of a bucket's new parameters waits for its Adam, and
# behind it stand gradients that could leave at once. Compute is done early and the lane of copies is idle
# for most of the step.
#
# ## A wrong one
#
# All copies out before all copies in, then? `build` finds that this order cannot start: the batch comes in
# by a copy too. The error names the circle and marks the operations in it; here are its first lines.


def out_before_in(graph: Graph) -> Plan:
    lanes: dict[str, list[int]] = {}
    for i in sorted(range(len(graph)), key=lambda i: graph.ops[i].kind == "h2d"):
        lanes.setdefault(LANES[graph.ops[i].kind], []).append(i)
    return build(graph, lanes)


def first_lines(error: zfunc.PlanError, count: int) -> str:
    return "\n".join([*str(error).splitlines()[:count], "   ..."])


try:
    out_before_in(graph)
except zfunc.PlanError as error:
    print(f"\n{first_lines(error, 8)}")

# And one that forgets something. It looks fast; `verify` says what is missing.


def without_copies_in(graph: Graph) -> Plan:
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(graph):
        if op.kind != "h2d":
            lanes.setdefault(LANES[op.kind], []).append(i)
    return build(graph, lanes)


try:
    without_copies_in(graph).verify()
except zfunc.PlanError as error:
    print(f"\n{first_lines(error, 3)}")

# ## A better one
#
# A plan can be simulated, so a schedule may ask the simulation: each operation takes its place by when it
# would start if there were two engines. Such an order cannot deadlock, because nothing starts before what
# it depends on.


def as_it_would_start(graph: Graph) -> Plan:
    start = {e.op: e.start for e in schedules.Overlapped()(graph).simulate().events}
    lanes: dict[str, list[int]] = {}
    for i in sorted(range(len(graph)), key=lambda i: start[graph.ops[i].name]):
        lanes.setdefault(LANES[graph.ops[i].kind], []).append(i)
    return build(graph, lanes)


print(f"\nas it would start\n{as_it_would_start(graph).verify().simulate().text()}")

# Beside the shipped ones: one engine in this order is as fast as two. The memory it takes on the device is
# known too, before anything has run.

print("\n                      simulated   device memory")
for schedule in (schedules.Serial(), in_graph_order, as_it_would_start, schedules.Overlapped()):
    plan = schedule(graph).verify()
    name = getattr(schedule, "__name__", type(schedule).__name__)
    print(
        f"{name:<20} {plan.simulate().seconds * 1e3:7.1f} ms   {plan.peak_bytes()['device'] / 2**20:6.0f} MiB"
    )
print(f"torch imported so far: {'torch' in sys.modules}")

# ## Train with it
#
# `zfunc.compile` takes the function as it is and verifies the plan it makes for the real model. Ten steps
# of a small one, under the new schedule and under `Serial`: the same bits.

import torch
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors here are tiny


class Loss(torch.nn.Linear):
    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(super().forward(x), targets)


body = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(3)]
segments = [zfunc.segment(f"layer{i}", module) for i, module in enumerate((*body, Loss(32, 1)))]
x = torch.randn(64, 32)
batch = x, x.sum(dim=1, keepdim=True).sin()

weights = []
for schedule in (schedules.Serial(), as_it_would_start):
    program = zfunc.compile(segments, schedule=schedule, precision="fp32", bucket_size=1500, device="cpu")
    state = zfunc.init(program)
    for _ in range(10):
        state, metrics = zfunc.train_step(program, state, batch)
    weights.append(zfunc.params(program, state))
print(f"\nlanes: {', '.join(lane.name for lane in program.plan.lanes)}; loss {metrics.loss:.4f}")
print(f"same bits as Serial: {all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])}")
