"""A program's swap space on the disk: made for a new State, reopened by a later process, committed to by steps."""

import json
import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from zfunc.checkpoint.strict_json import JsonNode, to_plain
from zfunc.checkpoint.swap_checkpoint import CommitMetadata, swap_identity
from zfunc.checkpoint.swap_file import SwapHeader, new_header
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.checkpoint.writer import all_or_none
from zfunc.core.layout import Bucket, Layout
from zfunc.core.optimizer_state import FROZEN, MASTER
from zfunc.core.spec import StepSpec
from zfunc.engine.program.program import Program
from zfunc.engine.stages.move_stages import commit_on_all
from zfunc.engine.state.state import Buffers, State
from zfunc.engine.trace.tensor_memory import own_part
from zfunc.errors import CheckpointError
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.host_memory import alloc_host


def create_swap(program: Program, spec: StepSpec) -> SwapSpace | None:
    """Make a new swap space (files of training state on disk) on every rank for a State with `spec`; None if
    no state is on the disk. A collective.

    If the new one is refused, the program's former swap space, which has a commit, stays in use. Raises
    CheckpointError for folders that cannot have a swap space.
    """
    ranks, former = program.ranks, program.cache.swap
    if not program.spec.swaps:
        return None
    if former is not None and not former.number:
        program.close_swap()  # it makes room
    run = ranks.texts(os.urandom(8).hex())[0]
    make = partial(SwapSpace.create, _header(program, spec, run))
    swap = all_or_none(ranks, make)
    program.close_swap()
    program.cache.swap = swap
    return swap


def open_swap(program: Program) -> SwapSpace:
    """Open the program's swap space at the last commit that all ranks have. A collective.

    Raises CheckpointError, on every rank, for a missing space, another layout or damage.
    """
    ranks = program.ranks
    program.close_swap()
    kept = evolve(program.spec, frozen_masters=frozenset(x.index for x in program.layout.frozen_buckets))
    make = partial(SwapSpace.open, _header(program, program.spec), instead=kept.swapped)
    program.cache.swap = swap = all_or_none(ranks, make)
    numbers = [int(number) for number in ranks.texts(str(swap.number))]
    if max(numbers) > min(numbers):  # some were killed before their last commit
        swap.close()
        program.cache.swap = swap = all_or_none(ranks, partial(make, at=min(numbers)))
    return swap


def commit_state(
    program: Program, state: State, extra: Mapping[str, Any] | None = None, *, changed: Collection[int] = ()
) -> None:
    """Commit `state`, with `extra`, to the program's swap space, if it has one. First writes what the disk
    lacks: the state that steps have updated since the last commit, and that of the buckets `changed`. A
    collective."""
    if (swap := state.buffers.swap) is None:
        return
    all_or_none(program.ranks, partial(_write_missing, program, state, swap, changed))
    commit_on_all(program.ranks, swap, commit_metadata(program, state, extra or {}))


def commit_again(program: Program, state: State, *, changed: Collection[int] = ()) -> None:
    """Commit `state`, with buckets `changed`, to its swap space, if any, with the last `extra`: a
    collective."""
    if (swap := state.buffers.swap) is not None:
        last = swap.record()
        commit_state(program, state, last and last["extra"], changed=changed)


def _write_missing(program: Program, state: State, swap: SwapSpace, changed: Collection[int]) -> None:
    """Write to `swap` the buffers of `state` that the disk lacks or has outdated, and `changed` buckets."""
    state.buffers.close()
    committed = swap.record()
    updated = committed is not None and committed["position"]["step"] != state.step
    for b, on_disk in state.buffers.on_disk.items():
        now = b in changed or (updated and b in program.spec.offloaded)
        stale = on_disk.all if now and on_disk.in_memory else []
        if missing := stale or swap.missing(b):
            flat = alloc_host(on_disk.extent.nbytes, torch.uint8)
            if on_disk.is_written and not set(missing).isdisjoint(on_disk.moved):
                on_disk.read(flat, on_disk.moved)
            places = on_disk.views(flat)
            for name, values in _in_memory(
                state.buffers, program.layout.all_buckets[b], program.ranks
            ).items():
                places[name].copy_(values)
            on_disk.write(flat, missing)


def read_memory(buffers: Buffers, layout: Layout, ranks: RankGroup) -> None:
    """Read the optimizer state that is kept in memory, and this rank's frozen parameters, from the disk."""
    for b, on_disk in buffers.on_disk.items():
        if names := on_disk.in_memory:
            flat = alloc_host(on_disk.extent.nbytes, torch.uint8)
            on_disk.read(flat, names)
            places = on_disk.views(flat)
            for name, values in _in_memory(buffers, layout.all_buckets[b], ranks).items():
                values.copy_(places[name])


def gather_frozen(buffers: Buffers, layout: Layout, ranks: RankGroup) -> None:
    """Gather the frozen parameters that every rank keeps whole in memory: a collective for each bucket."""
    for bucket in (x for x in layout.frozen_buckets if x.index in buffers.weights):
        flat = buffers.weights[bucket.index].flat
        if flat.numel() > bucket.numel // ranks.world:
            ranks.all_gather(flat, _in_memory(buffers, bucket, ranks)[FROZEN])


def _in_memory(buffers: Buffers, bucket: Bucket, ranks: RankGroup) -> dict[str, Tensor]:
    """A bucket's optimizer state in memory, by buffer name; of a frozen bucket this rank's parameters."""
    if FROZEN in buffers.on_disk[bucket.index].in_memory:
        return {FROZEN: own_part(ranks.shard(bucket), buffers.weights[bucket.index].flat)}
    return buffers.state_in_memory(bucket.index)


def masters_in(swap: SwapSpace, spec: StepSpec, ranks: RankGroup) -> frozenset[int]:
    """The indices of frozen buckets whose fp32 weights a swap space also has, on any rank: a collective."""
    frozen, extents = [x.index for x in spec.layout.frozen_buckets], swap.header.extents
    own = [b for b in frozen if b in extents and any(part.name == MASTER for part in extents[b].parts)]
    return frozenset(b for text in ranks.texts(json.dumps(own)) for b in json.loads(text))


def _header(program: Program, spec: StepSpec, run: str = "any") -> SwapHeader:
    """The header of this rank's swap space for a State of this spec; `run` is an id that all ranks share."""
    settings, ranks = program.settings, program.ranks.job
    identity = swap_identity(program.layout, settings.precision, settings.pp)
    return new_header(
        program.swap_folders,
        identity=identity,
        extents=spec.swapped,
        run=run,
        rank=ranks.rank,
        world=ranks.world,
    )


def read_commit(swap: SwapSpace) -> CommitMetadata:
    """The metadata of a swap space's last commit; raises CheckpointError if nothing was committed."""
    where, metadata = swap.header.folders[0], swap.record()
    if metadata is None:
        raise CheckpointError(
            f"{where}: got a swap space that nothing was committed to: start again with init, which replaces it"
        )
    return JsonNode(metadata, where).read(CommitMetadata)


def commit_metadata(program: Program, state: State, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a commit of `state`, in JSON's own types: position, optimizer settings, and `extra`."""
    return to_plain(CommitMetadata(state.position, optimizer_settings(program, state.step), extra))


def optimizer_settings(program: Program, step: int) -> dict[str, Any]:
    """The optimizer's settings as JSON values; those that change by step, such as the learning rate, as of
    update max(1, `step`)."""
    optimizer, update = program.optimizer, max(1, step)
    return {
        **to_plain(optimizer.factors(update)),
        **optimizer.describe(),
        "clip_norm": program.settings.clip_norm,
        "precision": program.settings.precision,
        "micro_batches": program.settings.micro_batches,
    }
