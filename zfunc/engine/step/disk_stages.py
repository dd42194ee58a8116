"""The stages that move what lives on the disk: optimizer state, parameters, waiting gradients, and the commit."""

import math
from typing import Any

from attrs import evolve

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op
from zfunc.engine.state.disk_memory import StateOnDisk, StateSlot
from zfunc.engine.state.swap_state import commit_on_all
from zfunc.engine.step.stage_context import Memory, StepContext


def page_in(op: Op, mem: Memory, step: StepContext) -> None:
    """Read what memory does not have of a bucket's state."""
    on_disk: StateOnDisk = mem[op.read("extent")]
    slot: StateSlot = mem[op.write("state_slot")]
    places = on_disk.views(slot.flat)
    slot.state = {name: places[name] for name in on_disk.moved}
    on_disk.read(slot.flat, on_disk.moved)


def page_out(op: Op, mem: Memory, step: StepContext) -> None:
    """Write a bucket's state to the disk; with what memory has of it, if the operation reads that for a commit."""
    on_disk: StateOnDisk = mem[op.write("extent")]
    (slot,) = (mem[r] for r in op.regions if r.role == "paged")
    in_memory = {r.buffer: mem[r] for r in op.reads if r.role == "state"}
    decision: StepDecision = mem[op.read("decision")]
    if decision.skip and not in_memory:
        return
    places = on_disk.views(slot.flat)
    for name, values in in_memory.items():
        places[name].copy_(values)
    on_disk.write(slot.flat, on_disk.all if in_memory else on_disk.moved)


def commit(op: Op, mem: Memory, step: StepContext) -> None:
    """Make what all ranks have written the state that training goes on from after a crash."""
    decision: StepDecision = mem[op.read("decision")]
    if op.touches("norm") and not decision.skip and not math.isfinite(mem[op.read("norm")]):
        return  # the step will be refused, with its state
    swap = next(mem[r] for r in op.reads if r.buffer == "extent").swap
    metadata: Any = mem[op.read("position")](decision)
    if metadata is not None:
        commit_on_all(step.ranks, swap, metadata)
    mem[op.write("committed")] = metadata


def page_in_weights(op: Op, mem: Memory, step: StepContext) -> None:
    """Read a bucket's parameters, or this rank's slice of them."""
    on_disk: StateOnDisk = mem[op.read("extent")]
    on_disk.read_weights(mem[op.write("weight_page")])


def spill(op: Op, mem: Memory, step: StepContext) -> None:
    """Write a gradient to where it waits."""
    mem[op.write("spilled")].write(mem[op.read("grad_page")])


def unspill(op: Op, mem: Memory, step: StepContext) -> None:
    """Read a waiting gradient back."""
    mem[op.read("spilled")].read(mem[op.write("grad_page")])


def spill_act(op: Op, mem: Memory, step: StepContext) -> None:
    """Write what backward of a segment needs to where it waits."""
    page, place = mem[op.read("act_page")], mem[op.write("disk_act")]
    place.held = evolve(page)
    place.write(page.flat)


def unspill_act(op: Op, mem: Memory, step: StepContext) -> None:
    """Read it back."""
    page, place = mem[op.write("act_page")], mem[op.read("disk_act")]
    place.read(page.flat)
    page.hold(place.held)
