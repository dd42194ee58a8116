"""The stages before an update of parameters that lie in the slices of several ranks, and that it needs numbers of.

In each round a rank measures its parts of them, and the ranks join what they have. A parameter that lies in one
slice needs none of this: its rank does it all in its update.
"""

import torch

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op
from zfunc.core.optimizer_state import measuring_room, state_slice
from zfunc.engine.stage_context import Memory, StepContext
from zfunc.engine.update_stages import gradient_of, joined_measures, measured_places, part_of, state_of


def measure(op: Op, mem: Memory, step: StepContext) -> None:
    """Measure this rank's part of each such parameter of a bucket."""
    i, b = op.index
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    bucket, shard = step.layout.buckets[b], step.slice_of(b)
    grad, state = gradient_of(op, mem, shard), state_of(op, mem)
    places, joined = measured_places(bucket, step), joined_measures(op, mem, bucket, step)
    measured, room = (mem[r] for r in op.writes)
    measured.zero_()
    for first, last, span in bucket.spans_within(shard.start, shard.stop):
        if span.name in places:
            start, stop = first - shard.start, last - shard.start
            own = step.measuring.measure(
                state_slice(bucket.state_format, state, start, stop),
                grad[start:stop],
                decision,
                group=span.group,
                part=part_of(bucket, span, first, last, joined[span.name], room[measuring_room(start, stop)]),
            )
            measured[places[span.name][i]].copy_(own)


def join_measures(op: Op, mem: Memory, step: StepContext) -> None:
    """Make the largest of every number that ranks have measured known to all, or the sum."""
    i, b = op.index
    if mem[op.read("decision")].skip:
        return
    numel = max(x[i].stop for x in measured_places(step.layout.buckets[b], step).values())
    joined = mem[op.write("measures")][:numel]
    joined.copy_(mem[op.read("measures")][:numel])
    if i % 2 == 0:  # as integers, of which NaN is the largest: a MAX of floats may lose it, as gloo's does
        step.ranks.all_reduce(joined.abs_().view(torch.int64), largest=True)
    else:
        step.ranks.all_reduce(joined)
