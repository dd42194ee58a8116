"""`save` and `load`: a State to a folder and back, by one process or by all ranks together.

Training continues from a checkpoint as if it had never stopped, to the bit if the number of ranks and the
format of the state are the same.
"""

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import asdict, frozen

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.manifest import Manifest, Snapshot, check_model, stored_kinds
from zfunc.checkpoint.safetensors_file import TensorInfo
from zfunc.checkpoint.swap_checkpoint import CommitMetadata
from zfunc.checkpoint.writer import CheckpointWriter, Save, SaveResult, all_or_none, begin_writing
from zfunc.core.dtypes import Dtype
from zfunc.core.graph import Region
from zfunc.core.layout import Parameter
from zfunc.core.pipeline import F
from zfunc.core.recipes import checkpoint
from zfunc.engine.program.program import (
    Program,
    check_program,
    lock_staging,
    module_buffers,
    staging_buffers,
)
from zfunc.engine.program.specialize import specialize_without_batch
from zfunc.engine.state.restore import fill_buffers, fill_state, kept_frozen
from zfunc.engine.state.state import Buffers, State
from zfunc.engine.state.weights import kept_of_frozen, send_weights
from zfunc.engine.step.flush import make_deferred_update
from zfunc.engine.step.init import allocate_state
from zfunc.engine.step.run import check_state, prepare_step
from zfunc.engine.step.swap_state import (
    commit_state,
    gather_frozen,
    open_swap,
    optimizer_settings,
    read_commit,
    read_memory,
)
from zfunc.engine.trace.module_buffers import copy_buffers
from zfunc.engine.trace.thread_modes import refuse_inference_mode
from zfunc.errors import CheckpointError
from zfunc.optim.loss_scale import UNSCALED, LossScale
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.executor import RunOptions
from zfunc.runtime.torch_dtypes import SAFETENSORS_TYPES

log = logging.getLogger("zfunc")


def save(
    folder: str | os.PathLike[str],
    program: Program,
    state: State,
    *,
    keep: int = 2,
    spare: str = "",
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a checkpoint of `state` in a new folder inside `folder`, and return its path once it is on the disk.

    Nothing is overwritten; the newest `keep` checkpoints stay, and the one named `spare`. If `folder` is in the
    program's swap space, what the space lacks of `state` is written and committed there. `extra`, a dict of JSON's
    own types, is saved too. With several ranks all of them have to call this, on one file system. To save during
    the next step, pass `save=` to `train_step`. Raises CheckpointError, on every rank, if the checkpoint cannot be
    written; older checkpoints are unchanged then.
    """
    check_state(program, state, "save")
    make_deferred_update(program, state, "save")
    with lock_staging(program, "save"):
        position = (
            f"step {state.step}, {state.batches} batches, {state.sequences} sequences, seed {state.seed}"
        )
        program.ranks.agree("save", "what is to be saved", position)
        path = Path(os.fspath(folder)).expanduser().absolute()
        if path in program.swap_folders:
            commit_state(program, state, dict(extra or {}))
            return path
        request = all_or_none(
            program.ranks, lambda: Save(folder, keep=keep, spare=spare, extra=dict(extra or {}))
        )
        special = specialize_without_batch(program, checkpoint)
        writer = begin_save(program, state, request)
        step, mem = prepare_step(program, special, state, max(1, state.step))
        mem[Region("checkpoint")] = writer
        try:
            program.executor.run(special.prepared, mem, step, RunOptions(), {})
        finally:
            writer.abandon()
    result: SaveResult = mem[Region("published")]
    if result.path is None:
        raise CheckpointError(result.failure)
    return result.path


def begin_save(program: Program, state: State, save: Save) -> CheckpointWriter:
    """Reserve disk space for the checkpoint `save` of `state`, or raise CheckpointError, on every rank."""
    places = program.spec.places
    frozen: dict[int, Dtype] = {x.index: places[x.index].dtype for x in program.layout.frozen_buckets}
    frozen |= dict.fromkeys(state.buffers.masters, "fp32")
    homes = dict(state.buffers.homes)
    if homes:
        of_buffers = [
            program.spec.mesh.device_of(F, 0, s) for s, x in enumerate(program.segments) for _ in x.buffers
        ]
        homes |= enumerate(of_buffers, len(program.layout.all_buckets))
    snapshot = Snapshot(
        layout=program.layout,
        kinds=stored_kinds(
            program.layout, frozen, ema=program.spec.settings.ema is not None, averaged=state.buffers.averages
        ),
        position=state.position,
        optimizer=optimizer_settings(program, state.step),
        homes=homes,
        pp=program.settings.pp,
        buffers=[
            TensorInfo(name, SAFETENSORS_TYPES[t.dtype], t.shape)
            for name, t in _named(program, "buffers").items()
        ],
    )
    return begin_writing(
        snapshot,
        save,
        program.ranks.job,
        lambda b: kept_of_frozen(state.buffers, program.layout.all_buckets[b], program.ranks),
    )


def load(path: str | os.PathLike[str], program: Program, *, strict: bool = True) -> State:
    """Load the State of a checkpoint. `path` is its folder, or a folder of checkpoints, whose newest is loaded.

    The checkpoint may have any other number of ranks, bucket size, stage, schedule, precision or state format; each
    rank reads only the slices it keeps. Frozen parameters that the precision rounds are kept in fp32 too, on the
    host or in the swap space: later checkpoints have these values. The optimizer's settings are the program's; a
    warning is logged if they differ from the saved settings. If the newest checkpoint of a folder is damaged, the
    one before is loaded, with a warning. With several ranks all of them have to call this.

    Unless `strict`, the program may train other parameters of the same model, and with another optimizer: where a
    parameter is trained in both and its optimizer can read the saved moments, these are kept. Others begin with
    their weights and moments of 0, which is logged. The step count goes on: Adam corrects the bias of a moment that
    begins later as if it had begun with the training, so let the learning rate of such parameters warm up. A module
    may be in eval mode from now on, with the saved statistics, or no longer be in eval mode.

    Raises CheckpointError, on every rank, for another model, and for damage with file, tensor and offset;
    OutOfMemory before anything is allocated; ValueError for a swap space if not `strict`.
    """
    return restore(path, program, strict=strict).state


@frozen(eq=False)
class Restored:
    """A State that was loaded, the path of its checkpoint, and the `extra` data that was saved with it."""

    state: State
    path: Path
    extra: Mapping[str, Any]


def restore(path: str | os.PathLike[str], program: Program, *, strict: bool = True) -> Restored:
    """Load the checkpoint at `path`, as `zfunc.load` does; `strict` has the same meaning. Returns the State,
    the checkpoint's path and `extra`."""
    refuse_inference_mode("load")
    check_program(program, "load")
    ranks, damaged = program.ranks, list[str]()
    buffers, kept = None, None
    ranks.agree("load")
    path = Path(os.fspath(path)).expanduser().absolute()
    if path in program.swap_folders:
        if not strict:
            raise ValueError(
                f"load: got strict=False for {path}, the program's own swap space, which has one layout, expected "
                "a checkpoint: load it with the program that trained, and zfunc.save it in another folder"
            )
        return _resume_swap(program)
    for folder in _folders(path, ranks):
        checkpoint = all_or_none(ranks, partial(_open, folder, program, strict=strict))
        if buffers is None or kept != kept_frozen(checkpoint.manifest, program.spec):
            buffers = None  # before others are allocated
            kept = kept_frozen(checkpoint.manifest, program.spec)
            buffers = all_or_none(ranks, partial(allocate_state, program, "load", kept=kept))
        fill = partial(_fill, program, buffers, checkpoint, strict=strict)
        try:
            begun = all_or_none(ranks, fill)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for failure in damaged:
            log.warning("checkpoint: %s is loaded instead of a later one: %s", checkpoint.path, failure)
        _log_begun(begun, ranks)
        restored = _restored(program, buffers, checkpoint.manifest, checkpoint.path)
        commit_state(program, restored.state, restored.extra)
        return restored
    raise CheckpointError("; ".join(damaged))


def _fill(program: Program, buffers: Buffers, checkpoint: Checkpoint, *, strict: bool) -> list[str]:
    """Fill a State's buffers from a checkpoint; unless `strict`, parameters may be trained in one and frozen
    in the other. Returns the names of parameters whose moments begin at 0."""
    saved = checkpoint.manifest.buffers
    for s, segment in enumerate(program.segments):
        if into := module_buffers(program, buffers, s):
            copy_buffers(into, segment.buffers)
        fill_buffers(
            checkpoint, {x: t for short, t in into.items() if (x := segment.buffer_name(short)) in saved}
        )
    return fill_state(buffers, program.layout, program.optimizer, checkpoint, program.ranks, strict=strict)


def _resume_swap(program: Program) -> Restored:
    """Load the State of the last commit of the program's own swap space: a collective."""
    ranks, swap = program.ranks, open_swap(program)
    said = all_or_none(ranks, partial(read_commit, swap))
    buffers = all_or_none(ranks, partial(allocate_state, program, "load", swap))
    all_or_none(ranks, partial(read_memory, buffers, program.layout, ranks))
    gather_frozen(buffers, program.layout, ranks)
    return _restored(program, buffers, said, program.swap_folders[0])


def _restored(program: Program, buffers: Buffers, saved: Manifest | CommitMetadata, path: Path) -> Restored:
    """Make a State of filled `buffers` at the saved position; sets device parameters, allocates staging."""
    send_weights(buffers, program.layout.buckets, program.ranks)
    all_or_none(program.ranks, partial(staging_buffers, program))
    _log_changed_settings(path, saved.optimizer, saved.position.step, program)
    scale, scaled = saved.position.loss_scale, program.settings.precision == "fp16"
    if scaled != (saved.optimizer.get("precision") == "fp16"):
        scale = LossScale() if scaled else UNSCALED
    counters = {**asdict(saved.position, recurse=False), "loss_scale": scale}
    return Restored(State(buffers, program.identity, buffers.owner.generation, **counters), path, saved.extra)


def _folders(path: Path, ranks: RankGroup) -> list[Path]:
    """The folders of checkpoints in `path` to try to load, newest first, as rank 0 sees them."""

    def candidates() -> list[str]:
        if ranks.rank:
            return []
        newest = checkpoints.locate_checkpoint(path)
        if newest == path:  # no other one was asked for
            return [str(path)]
        return [str(x.path) for x in checkpoints.complete_checkpoints(newest.parent, [])]

    return [Path(x) for x in json.loads(ranks.texts(json.dumps(all_or_none(ranks, candidates)))[0])]


def _open(folder: Path, program: Program, *, strict: bool) -> Checkpoint:
    checkpoint = checkpoints.open_checkpoint(folder)
    try:
        own = _named(program, "buffers")
        if not strict:  # they may be constants in one of the two
            either = own | _named(program, "constants")
            own = {name: t for name, t in either.items() if name in checkpoint.manifest.buffers}
        parameters = [x for s in program.segments for x in s.parameters]
        parameters += (Parameter(name, tuple(t.shape), trainable=False) for name, t in own.items())
        check_model(checkpoint.manifest, parameters, strict=strict)
        _check_constants(checkpoint, program)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return checkpoint


def _named(program: Program, kind: Literal["buffers", "constants"]) -> dict[str, torch.Tensor]:
    """Module buffers of all segments by full name: "buffers", which forward changes, or "constants"."""
    return {s.buffer_name(short): t for s in program.segments for short, t in getattr(s, kind).items()}


def _check_constants(checkpoint: Checkpoint, program: Program) -> None:
    """Raise CheckpointError if module buffers in a checkpoint differ from the program's constants."""
    for name, t in _named(program, "constants").items():
        if name in checkpoint.manifest.buffers:
            fill_buffers(checkpoint, {name: (saved := torch.empty_like(t))})
            if not torch.equal(saved, t):
                raise CheckpointError(
                    f"{name!r}: got other values than those of the module, in which it is constant (eval mode), "
                    "expected the same: call load_state_dict with those of zfunc.buffers before zfunc.segment"
                )


def _log_begun(own: list[str], ranks: RankGroup) -> None:
    """Log all ranks' parameters whose moments begin at 0; `own` are those with a slice on this rank."""
    begun = [*dict.fromkeys(name for text in ranks.texts(json.dumps(own)) for name in json.loads(text))]
    if begun and not ranks.job.rank:
        more = f" and {len(begun) - 3} more" if begun[3:] else ""
        log.warning("load: the moments of %s%s begin at 0", ", ".join(map(repr, begun[:3])), more)


def _log_changed_settings(path: Path, saved: Mapping[str, Any], step: int, program: Program) -> None:
    if program.ranks.job.rank:
        return
    current = optimizer_settings(program, step)
    pairs = ((k, _shown(saved[k]), _shown(v)) for k, v in current.items() if k in saved)
    changed = [f"{k} {before} is now {now}" for k, before, now in pairs if before != now]
    if changed:
        text = "checkpoint: %s: settings of step %d differ from the saved ones: %s"
        log.warning(text, path, step, ", ".join(changed))


def _shown(value: Any) -> str:
    """The text of a setting for messages; a float has at most six digits."""
    return repr(float(f"{value:.6g}") if isinstance(value, float) else value)
