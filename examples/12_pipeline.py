# # 12. A pipeline in an order of your own
#
# Run it with `python examples/12_pipeline.py`.
#
# Several devices of one process train one model: each makes the passes of some segments. In which order is data:
# for each device its passes, (way, micro-batch, segment). It cannot change a result, and what cannot work is
# refused before anything runs. Here the CPU stands for each of the four devices.

from typing import Any

import torch
from torch.utils.data import DistributedSampler
from zfunc.schedules.stages import Passes, cut_in_stages, of_segments

import zfunc
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig

config = GPTConfig(vocab_size=64, seq_length=16, num_layers=6, hidden_size=32, num_attention_heads=2)
segments = gpt_segments(config)
tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
batch = tokens[:, :-1], tokens[:, 1:]


def trained(**settings: Any) -> tuple[Any, list[float]]:
    """A program of eight micro-batches, and its losses."""
    program = zfunc.compile(
        segments,
        device="cpu",
        precision="fp32",
        micro_batches=8,
        schedule="Overlapped",
        example=batch,
        **settings,
    )
    state, losses = zfunc.init(program, seed=0), []
    for _ in range(3):
        state, metrics = zfunc.train_step(program, state, batch)
        losses.append(metrics.loss)
    return program, losses


# ## What does not fit
#
# The embedding's weight is the output's, too. 1F1B places the first segment on the first device and the last on the
# last, and a weight that lives on a device lives on one.

_, alone = trained()
try:
    trained(devices=4)
except zfunc.PlanError as error:
    print(error)

# ## An order of your own
#
# Cut the segments in eight stages and lay them down as a V: the first device has the first stage and the last, the
# second one the second and the seventh. Then the tied weight has one home. Each device makes all its forwards,
# then all its backwards.


def v_shaped(devices: int, segments: int, micro_batches: int) -> list[Passes]:
    order: list[Passes] = []
    for d in range(devices):
        there = d, 2 * devices - 1 - d
        ways = ("F", there), ("B", there[::-1])
        order.append([(way, m, k) for way, own in ways for k in own for m in range(micro_batches)])
    return of_segments(order, cut_in_stages(segments, 2 * devices))


program, losses = trained(devices=4, order=v_shaped)
print(f"same losses as on one device: {losses == alone}")
print(program.plan.simulate().text())

# ## The rows of ranks
#
# With `pp` stages are processes, which torchrun starts. The n-th ranks of all stages need the same rows, of which
# one takes the inputs and another the targets: data is divided by the ranks of a stage, not by the world.

pp, world = 2, 4
ranks = world // pp  # of a stage
for rank in range(world):  # in a program of its own: dist.get_rank(), of dist.get_world_size()
    sampler = DistributedSampler(tokens, num_replicas=ranks, rank=rank % ranks, shuffle=False)
    print(f"rank {rank}: stage {rank // ranks}, rows {[*sampler]}")

# ## What is wrong with it is said
#
# Were the second device to begin with its backward, both would wait for ever.


def crossed(devices: int, segments: int, micro_batches: int) -> list[Passes]:
    first, second, *others = v_shaped(devices, segments, micro_batches)
    return [first, second[::-1], *others]


try:
    trained(devices=4, order=crossed)
except zfunc.PlanError as error:
    print(error)
