"""The stages that only copy a thing from one tier to another, one for each thing of `zfunc.core.moves`; and the
stages that make state on the disk a commit.

On an accelerator, copies between the device and pinned memory are asynchronous.
"""

import math
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.checkpoint.writer import all_or_none
from zfunc.core.decision import StepDecision
from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Op, Region
from zfunc.core.moves import MOVES
from zfunc.core.optimizer_state import GRADIENT, HIGH_HALF, PARAMS
from zfunc.core.pipeline import B, F
from zfunc.core.places import BucketPlaces
from zfunc.core.region_table import FLOWS
from zfunc.engine.stages.clipping_stages import wait_for_copies
from zfunc.engine.stages.messages import as_message, from_message
from zfunc.engine.stages.stage_context import Memory, Stage, StepContext, named_like_verbs
from zfunc.engine.state.memory import ActivationSlot, Flat, StateOnDisk, copy_tree
from zfunc.engine.trace.tensor_memory import own_part
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


def weights(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy a bucket's parameters, or this rank's slice of them, one tier up: from the disk to a pinned slot,
    or from the host to a slot on the device."""
    _, b = op.index
    (source,), (target,) = op.reads, op.writes
    if source.tier == "disk":
        mem[source].read_weights(mem[target])
        return
    home, place = mem[source], step.spec.places[b]
    into = mem[target].hold(step.spec.layout.all_buckets[b])
    # Of the master's high half, the tensor itself.
    params = weights_in_page(home, place) if source.buffer == "weight_page" else getattr(home, "flat", home)
    if params.numel() < into.numel():
        into = into[step.shards[b]]
    into.copy_(params, non_blocking=True)


def weights_in_page(page: Tensor, place: BucketPlaces) -> Tensor:
    """This rank's slice of a bucket's parameters, as a view of `page`, the host memory into which they were
    read from the disk."""
    return page.view(TORCH_DTYPES[place.dtype])[: place.shard_numel]


def activations(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy what a segment's backward needs, a pytree of input and residuals, off the device. Tensors that inputs
    of several segments contain are copied with the first one alone, each apart from the pytree."""
    own, *apart = op.writes
    s, residuals = op.index[1], [mem[r] for r in op.reads if r.buffer == "residuals"]
    shared = step.spec.shared_stashes[s]
    leaves = mem[own].put([mem[Region("act", op.index)], *residuals], dict.fromkeys(shared))
    on_host = {r.index[1:]: mem[r] for r in apart}
    for at in dict.fromkeys((s, x.leaf) for x in shared.values() if x.first == s):
        (on_host.get(at) or mem[own].add_part(at)).put(leaves[at[1]])


def page_of_activations(op: Op, mem: Memory, step: StepContext) -> None:
    """Write the parts of a page, a segment's activations in pinned memory, to their places on the disk."""
    page: ActivationSlot = mem[op.reads[0]]
    for r in op.writes:
        part, place = page.parts.get(r.index[1:], page), mem[r]
        place.held = evolve(part)
        place.write(part.flat)


def page_for_backward(op: Op, mem: Memory, step: StepContext) -> None:
    """Read what a segment's backward needs from its places on the disk into the parts of a page."""
    page: ActivationSlot = mem[op.writes[0]]
    starts = accumulate((r.nbytes for r in op.reads), initial=0)
    parts = {r: ActivationSlot(page.flat[start:]) for r, start in zip(op.reads, starts, strict=False)}
    for r, part in parts.items():
        mem[r].read(part.flat)
        part.hold(mem[r].held)
    page.tree = parts[op.reads[0]].tree
    page.parts = {r.index[1:]: part for r, part in parts.items()}


def activations_for_backward(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy what a segment's backward needs back to the device, with the tensors that were copied apart."""
    (own, *apart), (target,) = op.reads, op.writes
    found = mem[own].parts | {r.index[1:]: mem[r] for r in apart}
    shared = step.spec.shared_stashes[op.index[1]]
    mem[target].put(mem[own].tree, {n: found[x.first, x.leaf].tree for n, x in shared.items()})


def sent(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy a pass's output (an activation or its gradient) to the device of the next pass, by one of the
    operations on the way: from device to pinned memory, from there to a device, from a peer device, or
    between ranks."""
    if op.kind == "network":
        _between_ranks(op, mem, step)
        return
    source, target = op.reads[0], op.writes[0]
    if target.tier == "pinned":
        mem[target].put(mem[source])
        return
    tree = mem[source] if source.tier == "device" else mem[source].tree
    mem[target] = _arrived(tree, step.devices[op.device])


def _arrived(tree: Any, device: torch.device) -> Any:
    """Copy a pytree of tensors on the host or a peer to new tensors on `device`, in memory of their own: passes
    keep some of them longer than others."""
    return copy_tree(tree, partial(torch.empty, dtype=torch.uint8, device=device), device)


def _between_ranks(op: Op, mem: Memory, step: StepContext) -> None:
    """Send a pass's output to the rank of another pipeline stage, or receive it there, as a message whose tag
    is unique in the step."""
    (m, s), source, target = op.index, op.reads[0], op.writes[0]  # others order it
    row = MOVES[op.verb]
    flow = FLOWS[F if row.thing == "input" else B]
    tag = 2 * (m * len(step.calls) + s) + flow.back
    apart = on_accelerator(step.devices[0])
    if row.to == "device":
        message = step.ranks.receive(flow.maker(step.spec, op.index), tag, op.nbytes, pinned=apart)  # pyright: ignore  # StageRanks
        mem[target] = _arrived(from_message(*message), step.devices[0])
        wait_for_copies(step)  # or what has come may be freed before
    else:
        head, flat = as_message(mem[source], op.nbytes, pinned=apart)
        wait_for_copies(step)
        step.ranks.send(flow.taker(step.spec, op.index), tag, head, flat)  # pyright: ignore
        mem[target] = None


def own_slice(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy this rank's slice of a bucket's gradient, update direction or new parameters between host and
    device; new parameters not in a skipped step."""
    if op.touches("decision") and mem[op.read("decision")].skip:
        return
    b = op.index[min(1, len(op.index) - 1)]  # of (bucket,), or (micro-batch, bucket, ...)
    source, target, shard = op.reads[-1], op.writes[0], step.shards[b]
    numel = shard.stop - shard.start  # a slot has room for more
    values, into = mem[source], mem[target]
    if source.role == "paged":
        values = values.views[HIGH_HALF]
    into = own_part(shard, into.flat) if target.role == "params" else into[:numel]
    into.copy_(values[shard] if source.role == "grad" else values[:numel], non_blocking=True)


def squares(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy a bucket's sums of squares, or norms in their place on accelerators, from device to host."""
    source, target = mem[op.read("squares")], mem[op.write("squares")]
    target.rows = source.rows
    target.flat.copy_(source.flat, non_blocking=True)


def waiting_gradient(op: Op, mem: Memory, step: StepContext) -> None:
    """Write a bucket's gradient to the disk, where it waits for its update, or read it back."""
    (source,), (target,) = op.reads, op.writes
    mem[target].write(mem[source]) if target.tier == "disk" else mem[source].read(mem[target])


def state(op: Op, mem: Memory, step: StepContext) -> None:
    """Read that part of a bucket's optimizer state that lives on the disk into a slot, or write it back
    unless the step is skipped."""
    if op.touches("decision"):
        if not mem[op.read("decision")].skip:
            on_disk: StateOnDisk = mem[op.write("extent")]
            on_disk.write(mem[op.read("state_slot")].flat, on_disk.moved)
        return
    on_disk, slot = mem[op.read("extent")], mem[op.write("state_slot")]
    places = on_disk.views(slot.flat)
    slot.views = {name: places[name] for name in on_disk.moved}
    on_disk.read(slot.flat, on_disk.moved)


def updated_state(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy a bucket's optimizer state to a slot on the device for its update, or back together with new
    parameters; nothing is copied back in a skipped step."""
    if op.touches("decision") and mem[op.read("decision")].skip:
        return
    (slot,) = (r for r in op.regions if r.buffer == "update_slot")
    home = {r.buffer: mem[r] for r in op.operands("state")}
    for r in op.operands("params"):
        home[PARAMS] = mem[r].flat
    for r in op.operands("grad_shard"):
        home[GRADIENT] = mem[r]
    for r in (r for r in op.operands("paged") if r != slot):
        home |= mem[r].views
    here: Flat = mem[slot]
    if slot not in op.writes:
        for name, values in here.views.items():
            if name != GRADIENT:
                home[name].copy_(values, non_blocking=True)
        return
    here.views, start = {}, 0
    for name, values in home.items():
        here.views[name] = here.flat[start : start + values.nbytes].view(values.dtype)
        start += whole_blocks(values.nbytes)
        if name != PARAMS:  # an update writes them only
            here.views[name].copy_(values, non_blocking=True)


def copy_state(op: Op, mem: Memory, step: StepContext) -> None:
    """Copy a bucket's optimizer state in memory into the slot that a commit writes to the disk."""
    on_disk: StateOnDisk = mem[op.read("extent")]
    slot: Flat = mem[op.write("state_slot")]
    for name, place in on_disk.views(slot.flat).items():
        if name in on_disk.in_memory:
            place.copy_(mem[op.read(name)])


def whole_state(op: Op, mem: Memory, step: StepContext) -> None:
    """Write a bucket's whole optimizer state to the disk for a commit, also in a skipped step, as that on
    disk may be older."""
    on_disk: StateOnDisk = mem[op.write("extent")]
    on_disk.write(mem[op.read("state_slot")].flat, on_disk.all)


def commit(op: Op, mem: Memory, step: StepContext) -> None:
    """Commit the training state that all ranks have written to the disk: a restart resumes from there."""
    decision: StepDecision = mem[op.read("decision")]
    if op.touches("norm") and not decision.skip and not math.isfinite(mem[op.read("norm")]):
        return  # the step will be refused, with its state
    swap, record = mem[op.read("position")]
    metadata: Any = record(decision)
    if metadata is not None:
        commit_on_all(step.ranks, swap, metadata)
    mem[op.write("committed")] = metadata


def commit_on_all(ranks: RankGroup, swap: SwapSpace, metadata: Mapping[str, Any]) -> None:
    """Commit the swap space of every rank, with `metadata`. If only some ranks succeed, their spaces refuse
    further writes, which could overwrite the last commit that all ranks have."""
    before = swap.number
    try:
        all_or_none(ranks, partial(swap.commit, metadata))
    except BaseException:
        if swap.number != before:
            swap.lose(f"commit {swap.number} is not on all ranks")
        raise


THINGS: dict[str, Stage] = {
    "weights": weights,
    "input": sent,
    "gradient of input": sent,
    "activations": activations,
    "page of activations": page_of_activations,
    "page for backward": page_for_backward,
    "activations for backward": activations_for_backward,
    "gradient": own_slice,
    "squares": squares,
    "waiting gradient": waiting_gradient,
    "state": state,
    "whole state": whole_state,
    "updated state": updated_state,
    "direction": own_slice,
    "new parameters": own_slice,
}
MOVE_STAGES = {verb: THINGS[row.thing] for verb, row in MOVES.items()} | named_like_verbs(copy_state, commit)
