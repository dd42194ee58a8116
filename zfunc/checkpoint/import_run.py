"""A run of another program as a checkpoint of zfunc: weights, both moments and the step, each to the bit.

A tensor at a time is read and written. The checkpoint has its name when all of it is on the disk.
"""

import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint.dcp import METADATA, PARTS, open_dcp
from zfunc.checkpoint.deepspeed_files import is_deepspeed, open_deepspeed
from zfunc.checkpoint.durable_files import os_errors_as, reject
from zfunc.checkpoint.foreign_run import (
    MOMENTS,
    NEW_MOMENTS,
    ForeignRun,
    ForeignTensor,
    TornError,
    is_adapter,
    own_name,
    reading_records,
)
from zfunc.checkpoint.manifest import BUFFER, Manifest, ParameterEntry, StateSlice, TrainingPosition
from zfunc.checkpoint.safetensors_file import TensorInfo, create_shard, cut
from zfunc.checkpoint.strict_json import MAX_INT
from zfunc.checkpoint.torchtitan import EMBEDDING, as_transformers, head_dim_of
from zfunc.checkpoint.trainer_files import adapters_in, is_trainer, open_trainer
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.optimizer_state import FROZEN, MASTER
from zfunc.errors import CheckpointError, did_you_mean, refuse
from zfunc.optim.loss_scale import UNSCALED
from zfunc.runtime.torch_dtypes import SAFETENSORS_TYPES
from zfunc.values import whole

_POINTERS = ("latest_universal", "latest")  # files of DeepSpeed with the name of the folder of the last step
# A folder with one step: of torchtitan, of Trainer, and of DeepSpeed where its pointer was not copied.
_STEP = re.compile(r"(?:step-|checkpoint-|global_step)(\d+)(?:_universal)?")
_EXPECTED = "a DCP, or a checkpoint of DeepSpeed or Trainer"
_EXACT = (torch.float32, torch.bfloat16, torch.float16)  # what fp32 holds exactly
log = logging.getLogger("zfunc")

__all__ = ["FoundRun", "ImportedRun", "adapters_in", "check_new", "find_run", "import_run"]


@frozen
class ImportedRun:
    """A checkpoint that `import_run` wrote: its folder, number of parameters, step, and sequences trained on."""

    path: Path
    parameters: int
    step: int
    sequences: int


@frozen(eq=False)
class _Entry:
    """A parameter or module buffer to write: its tensors by kind of state, such as "exp_avg"."""

    name: str
    trainable: bool
    kinds: dict[str, ForeignTensor]


@frozen(eq=False)
class FoundRun:
    """A checkpoint of another program: the folder of its step; the folder in it, or itself, that has the files; the
    function that reads their format; and which of the arguments `groups`, `head_dim` and `allow_pickle` of
    `import_run` this function takes."""

    folder: Path
    files: Path
    reader: Callable[..., ForeignRun]
    takes: tuple[str, ...]

    def open(self, **given: Any) -> ForeignRun:
        """Open the checkpoint with those of the arguments `given` that its format takes. Raises CheckpointError."""
        with reading_records(self.files):
            return self.reader(self.files, **{x: given[x] for x in self.takes})

    def lacks(self, *, allow_pickle: bool) -> str | None:
        """What this checkpoint lacks if it is torn, else None, also if it cannot be opened without other arguments.
        `allow_pickle` is that of `import_run`."""
        try:
            self.open(groups=(), head_dim=None, allow_pickle=allow_pickle)
        except TornError as error:
            return str(error)
        except CheckpointError:  # raised again when it is taken up, unless that is given what it needs
            pass
        return None


def find_run(source: str | os.PathLike[str], *, allow_pickle: bool = False) -> FoundRun:
    """Find the checkpoint of another program in folder `source`: a DCP, or one of DeepSpeed or Trainer. Of a
    folder with folders such as step-500 (torchtitan), checkpoint-500 (Trainer) or global_step500 (DeepSpeed), the
    last with a complete checkpoint is taken; a warning says what later ones lack. Raises CheckpointError, with what
    to do, if there is none. `allow_pickle` is that of `import_run`."""
    source = Path(source)
    if source.is_file():
        do = "name the checkpoint's folder; save what torch.save wrote as a DCP"
        reject(source, "a file", _EXPECTED, do)
    if not source.is_dir():
        reject(source, "no such folder", _EXPECTED, "check the path")
    with os_errors_as(source, "looking for a checkpoint there"):
        return _complete_run(source, allow_pickle)


def _complete_run(source: Path, allow_pickle: bool) -> FoundRun:
    runs = _runs_in(source)
    if runs and runs[0].files == source:
        return runs[0]
    named = ((_STEP.fullmatch(x.name), x) for x in source.iterdir() if x.is_dir())
    steps = sorted(((int(step[1]), x) for step, x in named if step), reverse=True)
    # What DeepSpeed's pointers name comes first.
    tries: dict[Path, FoundRun | None] = {x.files: x for x in runs}
    for _, x in steps:
        for files, run in {run.files: run for run in _runs_in(x)}.items() or [(x, None)]:
            tries.setdefault(files, run)
    none = f"neither {' nor '.join(checkpoints.OF_OTHERS)}"
    if not any(tries.values()):
        got = none
        do = "name the folder of one step, such as checkpoint-500"
        with suppress(CheckpointError):
            checkpoints.open_checkpoint(checkpoints.locate_checkpoint(source))
            got, do = "a checkpoint of zfunc", "go on from it as it is, by zfunc train --resume or zfunc.load"
        reject(source, got, _EXPECTED, do)
    refused: list[str] = []
    for files, run in tries.items():
        why = run.lacks(allow_pickle=allow_pickle) if run else f"{files} has {none}"
        if run and why is None:
            break
        refused += [why or ""]
    else:
        reject(source, "no complete checkpoint", "one", "; ".join(refused))
    several = len({step for step, x in steps if tries.get(x)})  # one may be there in two forms
    which = "which a pointer of DeepSpeed names" if runs else f"the last of {several:,} steps"
    if refused:
        log.warning("import: %s is the last complete one: %s", files, "; ".join(refused))
    else:
        log.info("import: %s%s", files, f", {which}; to take another, name its folder" if several > 1 else "")
    return run


def _runs_in(folder: Path) -> list[FoundRun]:
    """The checkpoints that `folder` has without looking for steps, that to take first: those that DeepSpeed's
    pointers name, then its own files."""
    places = [folder] if _is_dcp(folder) else [*_pointed_at(folder), folder]
    formats = {files: next((x for x in _FORMATS if x[0](files)), None) for files in places}
    return [FoundRun(folder, files, *x[1:]) for files, x in formats.items() if x]


def _is_dcp(folder: Path) -> bool:
    return any((folder / x / METADATA).exists() for x in ("", *PARTS))


def _pointed_at(folder: Path) -> Iterator[Path]:
    """Yield the subfolders of `folder` that DeepSpeed's `latest_universal` and `latest` name, if they exist."""
    for pointer in (folder / x for x in _POINTERS if (folder / x).is_file()):
        with os_errors_as(pointer, "reading it"):
            tag = pointer.read_text("utf-8", errors="replace").strip()
        if Path(tag).name == tag not in ("", "..") and os.path.isdir(folder / tag):  # no way back to here
            yield folder / tag


_FORMATS = (  # whether a folder has a checkpoint of a format, its reader, and what this takes; the first is taken
    (_is_dcp, open_dcp, ("head_dim",)),
    (is_deepspeed, open_deepspeed, ("allow_pickle",)),
    (is_trainer, open_trainer, ("groups", "allow_pickle")),
)


def check_new(out: Path) -> None:
    """Raise ValueError if the folder `out` holds anything."""
    if out.exists() and any(out.iterdir()):
        refuse("out", f"{out}, which holds files", "a new folder", "name another")


def import_run(
    source: str | os.PathLike[str] | FoundRun,
    out: str | os.PathLike[str],
    *,
    segments: Iterable[Any] = (),
    groups: Sequence[Sequence[str]] = (),
    head_dim: int | None = None,
    sequences: int | None = None,
    allow_pickle: bool = False,
) -> ImportedRun:
    """Write the run of Adam or AdamW in folder `source` as a checkpoint of zfunc in the new folder `out`.

    `source` has a DCP (FSDP2, torchtitan, a checkpoint of Trainer with FSDP), files of DeepSpeed's ZeRO or a
    universal checkpoint, or a Trainer's optimizer.pt beside safetensors of weights or adapters. `segments` are of
    the model that goes on (`zfunc.segments`, `zfunc.hf.load`): they say which parameters are trained, frozen, tied
    or buffers, and have the base of adapters. Without them every parameter is trained but for those that
    DeepSpeed's files call frozen. Of a folder of steps (step-500, checkpoint-500) the last complete one is taken,
    as by `find_run`, whose result `source` may be. `groups`, which optimizer.pt needs, are the names of the
    parameters in each group of the optimizer, in its order (`zfunc.hf.trainer_groups`). `head_dim` is the size of
    an attention head, by default that of the modules of `segments`: torchtitan's moments of queries, keys and
    values in one tensor need it, and a Llama of torchtitan that goes on as that of transformers. `sequences` is
    where the data goes on, by default what the files say, or 0.

    `zfunc.load` reads the checkpoint into any ranks, precision and kind of moments. The learning rate and other
    settings of the optimizer are those of the program. A loss scale begins anew.

    Raises ValueError if `out` holds anything, for a bad `sequences` and for another `head_dim` than the model's;
    CheckpointError, with what to do, for files that are missing or torn, a parameter without moments, one of
    another shape, one that the model does not have, and a pickle of more than tensors and numbers unless
    `allow_pickle`. Then `out` has no checkpoint.
    """
    if sequences is not None:
        whole("sequences", sequences, 0, MAX_INT)
    found = source if isinstance(source, FoundRun) else find_run(source, allow_pickle=allow_pickle)
    out = Path(out)
    check_new(out)
    segments = [*segments]
    head_dim = head_dim_of(segments, head_dim)
    run = found.open(groups=groups, head_dim=head_dim, allow_pickle=allow_pickle)
    if run.adapters and not any(is_adapter(p.name) for s in segments for p in s.parameters):
        do = "write adapter_config.json into the folder that you name, by peft_config.save_pretrained(folder), and "
        do += "pass `hf`; in Python pass segments, of zfunc.hf.load(hf, lora=peft_config)"
        reject(run.place, "adapters of peft", "their configuration and their base beside them", do)
    wanted = {p.name for s in segments for p in s.parameters}
    if wanted and EMBEDDING in run.weights.keys() - wanted:
        run = as_transformers(run, head_dim)
    entries = _of_model(run, segments) if segments else _of_all(run)
    known = run.sequences if sequences is None else sequences
    if known is None:
        log.warning("import: the files do not say which data was seen: it begins anew; pass `sequences`")
    position = TrainingPosition(run.step, run.step, known or 0, 0, UNSCALED)
    path = _write(out, entries, position)
    return ImportedRun(path, sum(BUFFER not in x.kinds for x in entries), run.step, known or 0)


def _of_all(run: ForeignRun) -> list[_Entry]:
    """The entries to write without a model: all weights, tied ones once; trained unless in `run.frozen`."""
    owners = {x: x if x in run.frozen else _owner(run, x) for x in run.weights}
    _log_tied({x: owner for x, owner in owners.items() if x != owner})
    own = {x: run.weights[x] for x, owner in owners.items() if x == owner}
    return [_entry(run, x, x, weight.shape, trainable=x not in run.frozen) for x, weight in own.items()]


def _of_model(run: ForeignRun, segments: Sequence[Any]) -> list[_Entry]:
    """The entries to write of the model `segments`: all its parameters and buffers, from `run`. Raises
    CheckpointError where `run` has those of another model."""
    wanted = {p.name: p for s in segments for p in s.parameters}
    buffers = {s.buffer_name(x): t for s in segments for x, t in s.buffers.items()}
    constants = {s.buffer_name(x) for s in segments for x in s.constants}
    used = {name: _named(run, name) for name in (*wanted, *buffers)}
    apart = {*used.values()}  # the model does not tie these
    used |= {name: _owner(run, name, apart) for name, p in wanted.items() if p.trainable}
    base = _base(segments) if run.adapters else {}
    entries = [
        base[x]
        if x in base and used[x] not in run.weights
        else _entry(run, x, used[x], p.shape, trainable=p.trainable)
        for x, p in wanted.items()
    ]
    for name, t in buffers.items():
        entries.append(_Entry(name, False, {BUFFER: _weight(run, name, used[name], tuple(t.shape))}))
    for name in run.weights.keys() - {*used.values()} - constants:
        owner = run.tied.get(name) or _twin(run, name, run.weights.keys() & {*used.values()})
        if owner is None:
            near = did_you_mean(name, [*wanted])
            do = "name the model that was trained"
            reject(run.place, f"{name!r}, which the model does not have{near}", "its parameters alone", do)
        _log_tied({name: owner})
    return entries


def _base(segments: Sequence[Any]) -> dict[str, _Entry]:
    """The entries, by name, of the frozen parameters of `segments`, with initial values: adapters' base."""

    @lru_cache(maxsize=1)  # of one segment: what it encodes it has in memory
    def first(n: int) -> Mapping[str, Tensor]:
        return segments[n].initial(0)

    found: dict[str, _Entry] = {}
    for n, segment in enumerate(segments):
        for p in segment.parameters:
            if not p.trainable and p.name not in segment.shared:
                value = ForeignTensor(p.shape, first(n)[p.name].dtype, partial(_first, first, n, p.name))
                found[p.name] = _Entry(p.name, False, {FROZEN: value})
    return found


def _first(first: Callable[[int], Mapping[str, Tensor]], n: int, name: str) -> Tensor:
    return first(n)[name]


def _log_tied(owners: Mapping[str, str]) -> None:
    for name, owner in owners.items():
        log.info("import: %r is tied to %r", name, owner)


def _named(run: ForeignRun, name: str) -> str:
    """The name in `run` of the model's tensor `name`; if `run` lists it as tied, that of its owner."""
    there = own_name(name)
    return there if there in run.weights else run.tied.get(there, there)


def _owner(run: ForeignRun, name: str, apart: Set[str] = frozenset()) -> str:
    """The name under which `run` has the moments of the trained tensor `name`: its own, or, if that has none,
    the name of a tensor with the same bits, so tied to it. `apart` are names that the model does not tie."""
    there = _named(run, name)
    if there not in run.weights or run.moments.get(there):
        return there
    others = (x for x, own in run.moments.items() if own and x in run.weights and x not in apart)
    return _twin(run, there, others) or there


def _twin(run: ForeignRun, name: str, others: Iterable[str]) -> str | None:
    """The first of `others` whose weight in `run` has the same bits as weight `name`: a tied tensor. None if
    there is none, or if `name` has moments of its own."""
    own = run.weights[name]
    if run.moments.get(name):
        return None
    alike = (x for x in sorted(others) if run.weights[x].shape == own.shape)
    return next((x for x in alike if torch.equal(run.weights[x].read(), own.read())), None)


def _entry(run: ForeignRun, name: str, there: str, shape: tuple[int, ...], *, trainable: bool) -> _Entry:
    """The entry to write for parameter `name`, in `run` called `there`; with moments if `trainable`."""
    weight = _weight(run, name, there, shape)
    if weight.dtype not in _EXACT:
        got = f"{name!r} in {str(weight.dtype).removeprefix('torch.')}"
        reject(run.place, got, "fp32, bf16 or fp16", "convert it before it is saved")
    if not trainable:
        return _Entry(name, False, {FROZEN: weight})
    kinds = {MASTER: weight}
    for kind in MOMENTS:
        if (moment := run.moments.get(there, {}).get(kind)) is None:
            do = "save the optimizer's state too; if it is frozen, or a buffer, name the model, which says so; or "
            do += NEW_MOMENTS
            reject(
                run.place, f"no {kind} of {name!r}", f"{' and '.join(MOMENTS)} of each trained parameter", do
            )
        if moment.shape != weight.shape:
            reject(run.place, f"{kind} of {name!r} with shape {[*moment.shape]}", f"{[*weight.shape]}")
        kinds[kind] = moment
    return _Entry(name, True, {kind: evolve(x, dtype=torch.float32) for kind, x in kinds.items()})


def _weight(run: ForeignRun, name: str, there: str, shape: tuple[int, ...]) -> ForeignTensor:
    if (found := run.weights.get(there)) is None:
        near = did_you_mean(name, [*run.weights])
        got, do = f"no {name!r}{near}", "name the model that was trained"
        reject(run.place, got, "each parameter of the model", do)
    if found.shape != shape:
        got, do = f"{name!r} of shape {[*found.shape]}", "name the model that was trained"
        reject(run.place, got, f"{[*shape]}, as in the model", do)
    return found


def _write(out: Path, entries: list[_Entry], position: TrainingPosition) -> Path:
    pending = checkpoints.begin_checkpoint(out, position.step)
    try:
        stored = {f"{x.name}/{kind}": t for x in entries for kind, t in x.kinds.items() if prod(t.shape)}
        infos = [TensorInfo(name, SAFETENSORS_TYPES[t.dtype], t.shape) for name, t in stored.items()]
        writer = create_shard(pending.path / checkpoints.shard_name(0, 1), infos)
        try:
            checksums: dict[str, list[int]] = {}
            for name, t in stored.items():
                data = as_bytes(_values(t).flatten())
                writer.write_at(name, 0, data)
                ends = cut(0, len(data), writer.shard.chunk)
                checksums[name] = [zlib.crc32(data[start:stop]) for start, stop in ends]
            writer.finish()
        finally:
            writer.close()
        parameters = tuple(
            ParameterEntry(x.name, next(iter(x.kinds.values())).shape, x.trainable, _pieces(x))
            for x in entries
        )
        shards = (writer.shard.summed(checksums),)
        manifest = Manifest(1, "fp32", shards, parameters, position, {}, {})
        return checkpoints.publish_checkpoint(pending, manifest)
    finally:
        checkpoints.abandon_checkpoint(pending)


def _values(t: ForeignTensor) -> Tensor:
    return t.read().detach().to(t.dtype).contiguous()


def _pieces(entry: _Entry) -> Mapping[str, tuple[StateSlice, ...]]:
    sizes = {kind: prod(t.shape) for kind, t in entry.kinds.items()}
    return {kind: (StateSlice(0, n, 0, f"{entry.name}/{kind}", 0),) if n else () for kind, n in sizes.items()}
