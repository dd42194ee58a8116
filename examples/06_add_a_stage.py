# # 6. Add a stage
#
# Run it with `python examples/06_add_a_stage.py`.
#
# The link from the device to the host is slow, and a gradient is not that precise a thing. So: compress it before
# the copy, to 8 bits an element and a scale for every 64, and widen it again on the host. It takes a recipe, which
# is the plain one with three operations where `to_host` was, and a function for each of them. Everything else
# follows from what the operations say they touch: waits, memory, the check for races, the picture, any schedule.

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc
from zfunc.core.graph import Op, Region
from zfunc.core.recipes import zero_offload
from zfunc.core.spec import StepSpec

torch.set_num_threads(1)  # the tensors here are small
BLOCK, WIDTH, ROWS = 64, 256, 128

# ## The recipe
#
# A region is a buffer and an index, with a size, a tier, and the type of a buffer that the program is to make. An
# operation says what it reads and writes, and how many bytes it moves. There is one buffer on each side, so the
# next bucket is compressed when the last one has left: nobody has to write that down either.


def small(where: str, tier: str, spec: StepSpec) -> Region:
    """Room for the codes of the largest bucket, and behind them its scales, as bytes seen through fp32."""
    nbytes = spec.slot_numel + 4 * (spec.slot_numel // BLOCK)
    return Region(f"small_{where}", (), nbytes, tier, lifetime="program", dtype="fp32")


def compressed(spec: StepSpec) -> Iterator[Op]:
    device, host = small("device", "device", spec), small("host", "pinned", spec)
    for op in zero_offload(spec):
        if op.verb != "to_host":
            yield op
            continue
        yield Op("compress", op.index, "compute", op.reads, (device,), nbytes=op.nbytes)
        yield Op("send", op.index, "d2h", (device,), (host,), nbytes=device.nbytes)
        yield Op("widen", op.index, "host", (host,), op.writes, nbytes=op.nbytes)


# ## The stages
#
# A stage is handed the operation, the memory it declared, and the constants of the step. The buffers are the
# program's and not the State's: nothing in them may matter from one step to the next.


def halves(mem: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    return mem.view(torch.int8)[:numel].view(-1, BLOCK), mem[-(mem.numel() // 17) :][: numel // BLOCK, None]


def compress(op: Op, mem: dict, step: object) -> None:
    grad = mem[op.read("grad_slot")][: step.spec.layout.buckets[op.index[1]].numel].view(-1, BLOCK).float()
    codes, scale = halves(mem[op.write("small_device")], grad.numel())
    scale.copy_(grad.abs().amax(dim=1, keepdim=True) / 127)
    codes.copy_(torch.round(grad / scale.clamp(min=1e-30)))


def send(op: Op, mem: dict, _: object) -> None:
    mem[op.write("small_host")].copy_(mem[op.read("small_device")], non_blocking=True)


def widen(op: Op, mem: dict, step: object) -> None:
    (into,) = op.writes
    codes, scale = halves(mem[op.read("small_host")], step.spec.layout.buckets[op.index[1]].numel)
    mem[into][: codes.numel()].copy_((codes * scale).view(-1))


STAGES = {"compress": compress, "send": send, "widen": widen}

# ## With and without


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), targets)


def compiled(**more: object):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    pieces = {**{f"layer{i}": x for i, x in enumerate(layers)}, "loss": Loss(WIDTH, 10)}
    segments = [zfunc.segment(name, module) for name, module in pieces.items()]
    settings = {"precision": "fp32", "clip_norm": 1.0, "bucket_size": 70_000, "example": batch}
    settings = {"schedule": "Overlapped", **settings, **more}  # as with an accelerator
    return zfunc.compile(segments, optimizer=zfunc.AdamW(lr=1e-3), device="cpu", **settings)


batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 10
plain = compiled()
mine = compiled(recipe=compressed, stages=STAGES)

# On hardware that is made up, with a slow link. The copies are a quarter as long; compressing is on the lane that
# computes, widening on the host's.

rates = {
    "compute": 20e9,
    "network": 1e9,
    "d2h": 6e7,
    "h2d": 4e8,
    "host": 4e9,
    "read": 1e9,
    "write": 1e9,
}  # bytes a second
slow = zfunc.Hardware("made up", flops=60e9, rates=rates)
for program in (plain, mine):
    print(f"\n{program.plan.simulate(slow).text()}")

# Trained, it goes the same way, though not bit by bit: this recipe computes something else. Its own laws hold: here
# every stage is given only what its operation declared, and the serial schedule gives the same bits.

print()
for name, program in (("plain", plain), ("compressed", mine)):
    state = zfunc.init(program)
    for _ in range(8):
        state, metrics = zfunc.train_step(program, state, batch, debug=True)
    print(f"{name:<12} loss after 8 steps {metrics.loss:.4f}")

weights = []
for program in (mine, compiled(recipe=compressed, stages=STAGES, schedule="Serial")):
    state = zfunc.init(program)
    for _ in range(4):
        state, _ = zfunc.train_step(program, state, batch)
    weights.append(zfunc.params(program, state))
print("same bits as Serial:", all(torch.equal(weights[1][k], v) for k, v in weights[0].items()))
