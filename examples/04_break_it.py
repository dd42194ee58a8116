# # 4. Break it
#
# Run it with `python examples/04_break_it.py`.
#
# A race is the worst bug a training step can have: nothing crashes, the loss goes down, and the weights are
# wrong. This file makes one. It deletes a wait from a good plan, shows how `verify` finds it, then runs the
# broken plan all the same and looks at what it does.

import torch
from attrs import evolve
from torch import Tensor, nn

import zfunc
from zfunc.core.plan import Plan
from zfunc.core.verifier import races
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.runtime.fault_injection import Jitter
from zfunc.runtime.prepared_plan import prepare_plan

torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors here are tiny


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(super().forward(x), targets)


body = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
segments = [zfunc.segment(f"layer{i}", module) for i, module in enumerate((*body, Loss(32, 1)))]
x = torch.randn(64, 32)
batch = x, x.sum(dim=1, keepdim=True).sin()


def compiled(schedule: str) -> Program:
    """One slot of each kind: every bucket's gradient goes through that on the device on its way to the host."""
    return zfunc.compile(
        segments,
        schedule=schedule,
        precision="fp32",
        bucket_size=1200,
        slots=1,
        device="cpu",
        example=batch,
    )


# ## The waits
#
# With one slot, a bucket may be packed into it only when the copy of the one before has left. That is a
# wait of the compute lane for the lane of copies: `pack` after `to_host`.

good = compiled("Overlapped")
print(good.plan)

# ## Delete one
#
# Nothing else changes: the same operations, the same lanes, the same order on each.


def without(plan: Plan, op: str, wait: str) -> Plan:
    """`plan`, with `op` not waiting for `wait`."""
    i, gone = plan.graph.position[op], plan.graph.position[wait]
    fewer = tuple(n for n in plan.waits[i] if n != gone)
    return evolve(plan, waits=(*plan.waits[:i], fewer, *plan.waits[i + 1 :]))


broken = without(good.plan, "pack[0,1,1]", "to_host[0,2,0]")

# `verify` does not look at how a plan was made. From lane order and waits it works out what is certain to
# happen before what, and holds that against what the operations touch. It names both operations and the
# region, and marks them in the plan:

try:
    broken.verify()
except zfunc.PlanError as error:
    print(f"\nPlanError: {error}")

# This was not luck. `build` leaves out every wait that follows from others, so each one left is needed;
# delete them one at a time and each deletion is a race:

ops = good.plan.graph.ops
waits = [(ops[i].name, ops[n].name) for i, needed in enumerate(good.plan.waits) for n in needed]
caught = sum(any(races(without(good.plan, op, wait))) for op, wait in waits)
print(f"\n{len(waits)} waits, {caught} deletions caught")

# ## Run it all the same
#
# `zfunc.compile` verifies every plan, so a broken one does not get in by the front door. A program keeps
# what it prepared for a batch's shapes; here the broken plan is put in its place, unverified.


def smuggle(program: Program, plan: Plan) -> None:
    special = specialize(program, batch)
    special = evolve(special, plan=plan, prepared=prepare_plan(plan, program.stages, program.device))
    for shape in program.cache.specialized:
        program.cache.specialized[shape] = special


bad = compiled("Overlapped")
smuggle(bad, broken)

# Without delays the result is right nearly every time, and wrong now and then on a busy machine, which is
# how such a bug survives its tests: the copy is quick, and the next bucket's gradient is seldom ready so
# soon. `Jitter` takes the luck away. It delays every operation by a random time, from a seed.


def trained(program: Program, steps: int, jitter: Jitter | None = None) -> tuple[float, dict[str, Tensor]]:
    state = zfunc.init(program)
    for _ in range(steps):
        state, metrics = zfunc.train_step(program, state, batch, jitter=jitter)
    return metrics.loss, zfunc.params(program, state)


def differing(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    return [name for name in reference if not torch.equal(weights[name], reference[name])]


# One step, and four, under each of up to thirty seeds, compared with `Serial` bit by bit, until both differ:

serial = compiled("Serial")
_, right = trained(serial, 1)
right_loss, right_later = trained(serial, 4)
for seed in range(30):
    jitter = Jitter(seed, seconds=0.01)
    _, wrong = trained(bad, 1, jitter)
    wrong_loss, wrong_later = trained(bad, 4, jitter)
    if differing(wrong, right) and differing(wrong_later, right_later):
        break
else:
    raise SystemExit("no seed showed the race: give the delays more time")
print(f"\nbucket 2 holds:           {', '.join(span.name for span in good.layout.buckets[2].spans)}")
print(f"differ after one step:    {', '.join(differing(wrong, right))}")

# No step failed. The slot held the gradient of bucket 1 when it was copied out, and Adam updated the
# parameters of bucket 2 with it. In later steps the error reaches all the others. The loss is an ordinary
# number all the while, and comes down:

print(f"differ after four steps:  {len(differing(wrong_later, right_later))} of {len(right)} parameters")
print(f"loss of Serial            {right_loss:.4f}")
print(f"loss of the broken plan   {wrong_loss:.4f}")

# And the plan that `verify` let through, under the same delays:

_, weights = trained(good, 4, jitter)
print(f"\nthe good plan under the same delays: same bits as Serial: {not differing(weights, right_later)}")
