"""What the operations that update parameters do: Adam where the state is, and the new parameters to every device.

The invariant: whichever of them makes an update, a bucket's state, gradient and decision determine its bits.
"""

from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Role
from zfunc.core.optimizer_state import HIGH_HALF, state_slice
from zfunc.core.regions import SHADOW
from zfunc.engine.stage_context import Memory, StepContext
from zfunc.engine.state import Flat
from zfunc.runtime.accelerator import on_accelerator


def adam(op: Op, mem: Memory, step: StepContext) -> None:
    """Update this rank's slice of a bucket in one sweep, and leave the copy for the device in its slot."""
    decision: StepDecision = mem[op.read("decision")]
    if not decision.skip:
        _update(op, mem, step, decision)


def speculate(op: Op, mem: Memory, step: StepContext) -> None:
    """The update as it is if nothing is clipped or skipped, into the shadow: nothing is lost if that is wrong."""
    _update(op, mem, step, step.decision(), into="shadow")


def confirm(op: Op, mem: Memory, step: StepContext) -> None:
    """Swap the shadow in if the update in it is the right one; else make that from the old state."""
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    if decision.grad_scale != 1.0 / step.loss_scale:
        _update(op, mem, step, decision)
        return
    for old, new in zip(op.operands("state"), op.operands("shadow"), strict=True):
        mem[old], mem[new] = mem[new], mem[old]


def adam_on_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Update this rank's slice of a bucket whose state is on the device, and of its parameters."""
    (b,) = op.index
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip:
        return
    params = mem[op.write("params")].flat[step.slice_of(b)]
    if op.touches(HIGH_HALF) and params.dtype == mem[op.write(HIGH_HALF)].dtype:
        _update(op, mem, step, decision)
        params.copy_(mem[op.write(HIGH_HALF)])  # as the host would have sent it
    else:
        _update(op, mem, step, decision, copy=params)


def _update(
    op: Op,
    mem: Memory,
    step: StepContext,
    decision: StepDecision,
    *,
    into: Role = "state",
    copy: Tensor | None = None,
) -> None:
    """Update a bucket with the gradient the operation reads: its state or its shadow, and `copy`."""
    (b,) = op.index
    optimizer, mine = step.optimizer, step.slice_of(b)
    grad = mem[op.read("grad")][mine] if op.touches("grad") else mem[op.read("grad_shard")]
    kept = {r.buffer: mem[r] for r in op.operands("state")}
    new = {r.buffer.removeprefix(SHADOW): mem[r] for r in op.operands("shadow")} if into == "shadow" else None
    if op.touches("copy"):
        copy = mem[op.write("copy")]
    update = optimizer.device_update if on_accelerator(grad.device) else optimizer.host_update
    for first, last, decayed in step.layout.buckets[b].runs_within(mine.start, mine.stop):
        start, stop = first - mine.start, last - mine.start
        update(
            state_slice(optimizer.state_format, kept, start, stop),
            grad[start:stop],
            decision,
            decayed=decayed,
            out=None if copy is None else copy[start:stop],
            **({} if new is None else {"into": state_slice(optimizer.state_format, new, start, stop)}),
        )


def to_device(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy the new parameters of this rank's slice of a bucket to the device, if the step counts."""
    if not mem[op.read("decision")].skip:
        (b,) = op.index
        params = mem[op.write("params")].flat[step.slice_of(b)]
        (copy,) = (mem[r] for r in op.reads if r.role in ("copy", "state"))
        params.copy_(copy[: params.numel()], non_blocking=True)


def all_gather(op: Op, mem: Memory, step: StepContext) -> None:
    """Exchange the slices of a bucket's parameters; those of a skipped step are the old ones."""
    (b,) = op.index
    params: Flat = mem[op.write("params")]
    step.ranks.all_gather(params.flat, params.flat[step.slice_of(b)])
