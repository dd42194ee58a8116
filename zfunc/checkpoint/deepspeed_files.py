"""Checkpoints of DeepSpeed: ZeRO of stages 1 to 3, a file of each rank, and universal ones, a folder a parameter.

They are pickles. `torch.load(weights_only=True)` reads them, with values of DeepSpeed's own classes as plain
objects, and maps the files, so that a tensor is read when it is asked for. What else a pickle holds is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from zfunc.checkpoint.durable_files import reject
from zfunc.checkpoint.foreign_run import (
    MOMENTS,
    NEW_MOMENTS,
    ForeignRun,
    ForeignTensor,
    foreign_tensor,
    load_pickle,
    one_step,
    own_name,
    torn,
)
from zfunc.core.display import counted

FP32 = "fp32"  # beside MOMENTS: the master weights
_RANK = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_CLASSES = (  # their values are read as objects with the same attributes
    *("runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler"),
    *("runtime.zero.config.ZeroStageEnum", "utils.tensor_fragment.fragment_address"),
)
_UNIVERSAL = "convert it with DeepSpeed's ds_to_universal first, and name that folder"


class _Plain:
    def __init__(self, *_: Any) -> None: ...


Parts = Sequence[
    tuple[Sequence[Tensor], int, int]
]  # tensors that are one, and a first element and a number in them


@frozen(eq=False)
class _Shard:
    """One rank's ZeRO partition: fp32 weights and moments, each a flat tensor for every parameter group."""

    flat: Mapping[str, Sequence[Tensor]]
    steps: Sequence[Any]
    places: Sequence[Mapping[str, Any]]  # of stages 1 and 2: where a parameter's elements are in each group
    ranks: int


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder has files of a checkpoint of DeepSpeed."""
    return any(_RANK.fullmatch(x.name) for x in folder.iterdir())


def open_deepspeed(folder: Path, *, allow_pickle: bool = False) -> ForeignRun:
    """Open the DeepSpeed checkpoint in a folder such as global_step100. Raises CheckpointError, with what to do."""
    models = [_load(x, allow_pickle) for x in _files(folder, "model")]
    model: Any = models[0]
    if model.get("param_shapes") is None:
        reject(folder, "a checkpoint with no ZeRO", "stage 1, 2 or 3", NEW_MOMENTS)
    untrained: dict[str, Any] = model.get("frozen_param_shapes") or {}
    frozen, shapes = (
        {name: tuple(map(index, s)) for group in groups for name, s in group.items()}
        for groups in ([untrained], model["param_shapes"])
    )
    if (folder / "zero").is_dir():
        steps, parts = _universal(folder, shapes, allow_pickle)
        steps = steps or [("the run", model["global_steps"] - model["skipped_steps"])]
    else:
        steps, parts = _zero(folder, shapes, model.get("dp_world_size"), allow_pickle)
    kinds = {
        kind: {own_name(x): _tensor(folder, x, shapes[x], p) for x, p in own.items()}
        for kind, own in parts.items()
    }
    weights = kinds.pop(FP32)
    for name in frozen:
        own = [([x["frozen_param_fragments"][name].flatten()], 0, prod(frozen[name])) for x in models]
        weights[own_name(name)] = _tensor(folder, name, frozen[name], own)
    shared: Any = {} if model.get("shared_params") is None else model["shared_params"]
    tied = {own_name(x): own_name(y) for x, y in shared.items()}
    of_frozen, buffers = {*map(own_name, frozen)}, {*(model.get("buffer_names") or ())}
    for name, value in model["module"].items():  # stage 1 has frozen parameters here, stage 3 empty tensors
        own = own_name(name)
        if own not in weights and own not in tied and (value.numel() or name in buffers):
            weights[own] = foreign_tensor(value)
            of_frozen |= {own} - {*map(own_name, buffers)}
    moments = {x: {kind: own[x] for kind, own in kinds.items() if x in own} for x in weights}
    seen = model.get("global_samples")
    return ForeignRun(folder, one_step(folder, steps), weights, moments, seen, frozenset(of_frozen), tied)


def _files(folder: Path, kind: str) -> list[Path]:
    """The paths of the files of `kind`, "model" or "optim", in the order of their ranks. Raises
    CheckpointError if a file is missing, or if tensor parallelism was used."""
    found = {x: m for x in folder.iterdir() if (m := _RANK.fullmatch(x.name)) and m[3] == kind}
    if not found:
        torn(folder, f"no file *mp_rank_00_{kind}_states.pt", "those of all ranks")
    if other := next((x.name for x, m in found.items() if int(m[2])), None):
        reject(
            folder,
            f"{other} of tensor parallelism",
            "a model that is not divided",
            "save it with one model rank",
        )
    files = sorted(found, key=lambda x: int(found[x][1] or 0))
    if [int(found[x][1] or 0) for x in files] != [*range(len(files))]:
        got = f"{counted(len(files), 'file')} up to {files[-1].name}"
        torn(folder, got, "those of all ranks")
    return files


def _load(file: Path, allow_pickle: bool, *kinds: type[Any]) -> Any:
    plain = [(type("Plain", (_Plain,), {}), f"deepspeed.{x}") for x in _CLASSES]
    return load_pickle(file, allow_pickle=allow_pickle, classes=plain, kinds=(dict, *kinds))


def _zero(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], world: int | None, allow_pickle: bool
) -> tuple[list[tuple[str, Any]], dict[str, dict[str, Parts]]]:
    """Read the ZeRO files of `world` ranks (None: as many as the files say). Returns pairs ("rank N", step),
    for each parameter group of a rank; and the ranks' parts by kind of state ("exp_avg") and parameter."""
    files = _files(folder, "optim")
    shards = [_shard(x, _load(x, allow_pickle)["optimizer_state_dict"]) for x in files]
    world = world or shards[0].ranks
    if len(files) != world:
        got, do = f"optimizer states of {counted(len(files), 'rank')}", "copy the files of all ranks"
        torn(folder, got, f"those of {world}", do)
    steps = [(f"rank {n}", step) for n, x in enumerate(shards) for step in x.steps]
    parts: dict[str, dict[str, Parts]] = {kind: {} for kind in (FP32, *MOMENTS)}
    at = accumulate((-(-prod(s) // world) for s in shapes.values()), initial=0)
    for (name, shape), start in zip(shapes.items(), at, strict=False):
        size = -(-prod(shape) // world)
        for kind, own in parts.items():
            if shards[0].places:
                spread = [(x.flat[kind], p) for x in shards for p in _places(x, name)]
                own[name] = [([flat[g]], start, numel) for flat, (g, start, numel) in spread]
            else:
                own[name] = [(x.flat[kind], start, size) for x in shards]
    return steps, parts


def _places(shard: _Shard, name: str) -> Iterator[tuple[int, int, int]]:
    for g, group in enumerate(shard.places):
        if (place := group.get(name)) is not None:
            yield g, index(place.start), index(place.numel)


def _shard(file: Path, saved: Any) -> _Shard:
    third = "fp32_flat_groups" in saved
    weights = saved.get("fp32_flat_groups" if third else "single_partition_of_fp32_groups")
    inner: Any = saved.get("optimizer_state_dict" if third else "base_optimizer_state")
    places: Any = () if third else saved.get("param_slice_mappings")
    if weights is None or not hasattr(inner, "get") or places is None:
        reject(file, "optimizer state in another layout", "that of ZeRO since DeepSpeed 0.9", _UNIVERSAL)
    states: list[Any] = [x for _, x in sorted(inner["state"].items())]
    for kind in MOMENTS:
        if len(states) != len(weights) or any(kind not in x for x in states):
            do = "import takes up Adam and AdamW; begin others from their weights"
            reject(file, f"no {kind} of each group of parameters", f"{', '.join(MOMENTS)}", do)
    groups: list[Any] = inner.get("param_groups") or [{}]
    steps = [x.get("step", groups[min(n, len(groups) - 1)].get("step", -1)) for n, x in enumerate(states)]
    ranks: Any = saved.get("partition_count", 1)
    flat = {FP32: weights, **{kind: [x[kind] for x in states] for kind in MOMENTS}}
    if other := [x for own in flat.values() for x in own if not isinstance(x, Tensor) or x.ndim != 1]:
        torn(file, f"a group of {type(other[0]).__name__}", "a flat tensor of each group")
    return _Shard(flat, steps, [*places], index(ranks if isinstance(ranks, int) else ranks[0]))


def _universal(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], allow_pickle: bool
) -> tuple[list[tuple[str, Any]], dict[str, dict[str, Parts]]]:
    """Read a universal checkpoint. Returns pairs (parameter name, step), one for each parameter with a step;
    and by kind of state ("exp_avg", say), then parameter name, the values, as a single part."""
    steps: list[tuple[str, Any]] = []
    parts: dict[str, dict[str, Parts]] = {kind: {} for kind in (FP32, *MOMENTS)}
    for name in shapes:
        for kind, own in parts.items():
            file = folder / "zero" / name / f"{kind}.pt"
            if file.is_file():
                saved: Any = _load(file, allow_pickle, Tensor)
                value: Tensor = saved if isinstance(saved, Tensor) else saved["param"]
                own[name] = [([value.flatten()], 0, value.numel())]
            elif kind == FP32:
                torn(file, "no such file", "the fp32 weights of each trained parameter")
        file = folder / "zero" / name / "step.pt"
        steps += [(name, _load(file, allow_pickle, Tensor, int, float))] if file.is_file() else []
    return steps, parts


def _tensor(folder: Path, name: str, shape: tuple[int, ...], parts: Parts) -> ForeignTensor:
    dtype = parts[0][0][0].dtype if parts else torch.float32
    return ForeignTensor(shape, dtype, partial(_joined, folder, name, shape, parts))


def _joined(folder: Path, name: str, shape: tuple[int, ...], parts: Parts) -> Tensor:
    """Join the ranks' `parts` of parameter `name`, without padding at the end, to a tensor of `shape`."""
    flat, numel = (
        torch.cat([*map(_cut, *zip(*parts, strict=True))] if parts else [torch.empty(0)]),
        prod(shape),
    )
    if not numel <= flat.numel() < numel + max(1, len(parts)) * len(parts):
        torn(folder, f"{flat.numel()} elements of {name!r}", f"{numel} of shape {[*shape]}")
    return flat[:numel].view(shape)


def _cut(flat: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """`numel` elements from `start` on, fewer at the end, of the tensors in `flat`, as if concatenated."""
    found: list[Tensor] = []
    for x in flat:
        found.append(x[max(start, 0) : max(start + numel, 0)])
        start -= len(x)
    return torch.cat(found)
