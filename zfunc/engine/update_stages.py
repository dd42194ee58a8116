"""The stages that update parameters: the optimizer on host or device, and the new parameters to every device.

A bucket's state, gradient and decision determine the bits of its update, whichever stage makes it.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Role
from zfunc.core.layout import Bucket, Span
from zfunc.core.optimizer_state import (
    HIGH_HALF,
    needs_whole_parameters,
    state_slice,
    updates_each_parameter,
)
from zfunc.core.regions import SHADOW
from zfunc.core.spec import PARAMS
from zfunc.engine.stage_context import Memory, StepContext
from zfunc.engine.state import Flat
from zfunc.optim.base import ParameterPart
from zfunc.optim.compact import master_weights
from zfunc.optim.ema import average_
from zfunc.runtime.accelerator import on_accelerator


def adam(op: Op, mem: Memory, step: StepContext) -> None:
    """Update this rank's slice of a bucket on the host, and write the device's copy to its slot."""
    (b,) = op.index
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    if b not in step.updated:
        _update(op, mem, step, decision)
    elif op.touches("copy"):
        state, shard = state_of(op, mem), step.slice_of(b)
        numel = shard.stop - shard.start
        mem[op.write("copy")][:numel].copy_(master_weights(state, 0, numel))


def speculate(op: Op, mem: Memory, step: StepContext) -> None:
    """Update into the shadow as if nothing were clipped or skipped; the state stays as it is."""
    _update(op, mem, step, step.decision(), into="shadow")


def confirm(op: Op, mem: Memory, step: StepContext) -> None:
    """Swap state and shadow if the speculative update was right; else update the state again."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    if decision.grad_scale != 1.0 / step.loss_scale:
        _update(op, mem, step, decision)
        return
    for old, new in zip(op.operands("state"), op.operands("shadow"), strict=True):
        mem[old], mem[new] = mem[new], mem[old]


def adam_on_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Update this rank's slice of a bucket and of its parameters, with the state on the device."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    params = _own_slice(op, mem, step)
    if op.touches(HIGH_HALF) and params.dtype == mem[op.write(HIGH_HALF)].dtype:
        _update(op, mem, step, decision)
        params.copy_(mem[op.write(HIGH_HALF)])  # as `to_device` would send it
    else:
        _update(op, mem, step, decision, copy=params)


def average(op: Op, mem: Memory, step: StepContext) -> None:
    """Move the average of a bucket's weights towards the new ones, unless the step is skipped."""
    (b,) = op.index
    if not mem[op.read("decision")].skip and b not in step.averaged:
        assert step.ema is not None
        average_(mem[op.write("ema")], state_of(op, mem), step.ema)


def _update(
    op: Op,
    mem: Memory,
    step: StepContext,
    decision: StepDecision,
    *,
    into: Role = "state",
    copy: Tensor | None = None,
) -> None:
    """Update the state, or `into` its shadow, with the gradient that the operation reads; and `copy`."""
    (b,) = op.index
    optimizer, shard = step.optimizer, step.slice_of(b)
    grad, state = gradient_of(op, mem, shard), state_of(op, mem)
    new = {r.buffer.removeprefix(SHADOW): mem[r] for r in op.operands("shadow")} if into == "shadow" else None
    if op.touches("copy"):
        copy = mem[op.write("copy")]
    elif copy is None and op.touches("params"):
        copy = _own_slice(op, mem, step)
    elif copy is None:
        copy = state.pop(PARAMS, None)
    update = optimizer.device_update if on_accelerator(grad.device) else optimizer.host_update
    bucket = step.layout.buckets[b]
    by_parameter = updates_each_parameter(bucket.state_format)
    joined = joined_measures(op, mem, bucket, step)
    for start, stop, given in _parameters(bucket, shard, joined) if by_parameter else _runs(bucket, shard):
        update(
            state_slice(bucket.state_format, state, start, stop),
            grad[start:stop],
            decision,
            out=None if copy is None else copy[start:stop],
            **given,
            **({} if new is None else {"into": state_slice(bucket.state_format, new, start, stop)}),
        )
    for start, stop in _gaps(bucket, shard) if by_parameter else ():
        padding = [] if new is None else [*state_slice(bucket.state_format, new, start, stop).values()]
        for x in (*padding, *(() if copy is None else (copy[start:stop],))):
            x.zero_()


def _runs(bucket: Bucket, shard: slice) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Of one group each, as elements of this rank's slice, and what the optimizer is told of them."""
    for start, stop, group in bucket.runs_within(shard.start, shard.stop):
        yield start - shard.start, stop - shard.start, {"group": group}


def _parameters(
    bucket: Bucket, shard: slice, joined: Mapping[str, tuple[Tensor, ...]]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The same of single parameters, or of what this rank has of them."""
    for first, last, span in bucket.spans_within(shard.start, shard.stop):
        part = part_of(bucket, span, first, last, joined.get(span.name, ()))
        yield first - shard.start, last - shard.start, {"group": span.group, "part": part}


def part_of(
    bucket: Bucket,
    span: Span,
    first: int,
    last: int,
    measures: tuple[Tensor, ...],
    room: Tensor | None = None,
) -> ParameterPart:
    """Elements `first` to `last` of a bucket, which are of one parameter."""
    before = bucket.start - span.start
    return ParameterPart(span.shape, first + before, last + before, measures, room)


def measured_places(bucket: Bucket, step: StepContext) -> dict[str, list[slice]]:
    """Where the ranks' measures of each parameter lie in each round; of those that lie in several slices."""
    whole = needs_whole_parameters(bucket.state_format)
    places: dict[str, list[slice]] = {}
    ends: Iterable[int] = itertools.repeat(0)
    for span in bucket.cut_by(step.ranks.world) if whole else ():
        counts = step.measuring.num_measures(span.shape, group=span.group)
        places[span.name] = [slice(start, start + n) for start, n in zip(ends, counts, strict=False)]
        ends = [x.stop for x in places[span.name]]
    return places


def joined_measures(op: Op, mem: Memory, bucket: Bucket, step: StepContext) -> dict[str, tuple[Tensor, ...]]:
    """What all ranks have measured of these parameters in the rounds that the operation reads."""
    rounds = [mem[r] for r in op.operands("measures") if r not in op.writes]
    return {
        name: tuple(x[at] for x, at in zip(rounds, places, strict=False))
        for name, places in measured_places(bucket, step).items()
    }


def _gaps(bucket: Bucket, shard: slice) -> Iterator[tuple[int, int]]:
    """The padding behind parameters, as elements of this rank's slice."""
    spans = bucket.spans_within(shard.start, shard.stop)
    edges = [shard.start, *(edge for first, last, _ in spans for edge in (first, last)), shard.stop]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return ((start - shard.start, stop - shard.start) for start, stop in gaps if start < stop)


def gradient_of(op: Op, mem: Memory, shard: slice) -> Tensor:
    """This rank's slice of the gradient that the operation reads; a slot has room for more."""
    return mem[op.read("grad")][shard] if op.touches("grad") else mem[op.read("grad_shard")]


def state_of(op: Op, mem: Memory) -> dict[str, Tensor]:
    """The state of a bucket by name: in memory, and in the slot it was paged into."""
    state = {r.buffer: mem[r] for r in op.operands("state")}
    for r in op.operands("paged"):
        state |= mem[r].state
    return state


def _own_slice(op: Op, mem: Memory, step: StepContext) -> Tensor:
    """This rank's slice of the parameters that the operation writes."""
    (b,) = op.index
    return step.ranks.own_slice(step.layout.weights(b), mem[op.write("params")].flat)


def to_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy this rank's slice of the new parameters to the device, unless the step is skipped."""
    if not mem[op.read("decision")].skip:
        params = _own_slice(op, mem, step)
        copy = mem[op.read("copy")] if op.touches("copy") else state_of(op, mem)[HIGH_HALF]
        params.copy_(copy[: params.numel()], non_blocking=True)


def all_gather(op: Op, mem: Memory, step: StepContext) -> None:
    """Gather a bucket's parameters from the slices of all ranks; after a skipped step, the old ones."""
    (b,) = op.index
    params: Flat = mem[op.write("params")]
    step.ranks.all_gather(params.flat, params.flat[step.slice_of(b)])
