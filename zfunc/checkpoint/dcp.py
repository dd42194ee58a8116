"""Checkpoints of torch.distributed.checkpoint (DCP), of FSDP2, torchtitan and Trainer, in one process.

The `.metadata` of a DCP is a pickle. An unpickler reads it that knows the classes of DCP's metadata and no other,
and `torch.load(weights_only=True)` reads tensors: nothing that a checkpoint says is executed.
"""

import io
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.durable_files import reject
from zfunc.checkpoint.export import ExportedWeights
from zfunc.checkpoint.foreign_run import (
    MOMENTS,
    ForeignRun,
    ForeignTensor,
    one_step,
    own_name,
    reading_pickle,
    torn,
)
from zfunc.checkpoint.manifest import BUFFER, ParameterEntry
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.torchtitan import without_fused
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.optimizer_state import FROZEN, STATE_FORMATS, owner_of
from zfunc.errors import refuse
from zfunc.optim.formats import unpack_moments
from zfunc.runtime.torch_dtypes import SAFETENSORS_TYPES

METADATA = ".metadata"
PARTS = ("pytorch_model_fsdp_0", "optimizer_0")  # folders that Trainer and Accelerate save with FSDP
_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    *(
        (f"{_CHECKPOINT}.metadata", x)
        for x in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    ),
    *((f"{_CHECKPOINT}.metadata", f"{x}StorageMetadata") for x in ("Tensor", "Bytes", "Chunk")),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
}
_MOMENT = re.compile(r"(?:.+?\.)??state\.(?P<name>.+)\.(?P<kind>exp_avg|exp_avg_sq|step|max_exp_avg_sq)")
_OF_LOOPS = re.compile(r"(train_state|lr_scheduler|dataloader)\.")  # what torchtitan has beside the weights


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):  # where it was saved
            return PurePath
        if (module, name) in _CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no class of DCP's metadata")


@frozen(eq=False)
class _Folder:
    path: Path
    metadata: Any

    def read(self, key: str) -> Any:
        """The value saved under `key` in this DCP; a tensor is assembled from its chunks."""
        stored = self.metadata.state_dict_metadata[key]
        if not hasattr(stored, "chunks"):
            return self._load(key, None)
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        seen = torch.zeros(stored.size, dtype=torch.bool)
        for chunk in stored.chunks:
            place = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            value = self._load(key, chunk.offsets)
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (chunk.sizes, whole.dtype):
                torn(self.path, f"another piece of {key!r} than {METADATA} says", "that one")
            whole[place], seen[place] = value, True
        if not seen.all():
            torn(self.path, f"pieces of {key!r} with gaps", f"all {whole.numel()} elements")
        return whole

    def _load(self, key: str, offset: Any) -> Any:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        stored: dict[Any, Any] = self.metadata.storage_data or {}
        info = stored.get(MetadataIndex(key, offset))
        if (
            info is None
            or PurePath(info.relative_path).name != info.relative_path
            or info.transform_descriptors
        ):
            do = "save it with torch.distributed.checkpoint.save and its FileSystemWriter"
            reject(self.path / METADATA, f"no file of {key!r} that can be read", "one in its folder", do)
        file = self.path / info.relative_path
        with reading_pickle(file), file.open("rb") as data:
            data.seek(info.offset)
            return torch.load(io.BytesIO(data.read(info.length)), map_location="cpu", weights_only=True)

    def check_files(self) -> None:
        """Raise TornError for a file of this DCP that is missing or shorter than the metadata say."""
        stored: dict[Any, Any] = self.metadata.storage_data or {}
        ends: dict[str, tuple[int, str]] = {}  # of each file, and what is there
        for at, info in stored.items():
            there = info.offset + info.length, at.fqn
            ends[info.relative_path] = max(there, ends.get(info.relative_path, there))
        for name, (end, key) in ends.items():
            file = self.path / name
            if not file.is_file():
                do = "copy the files of all ranks into one folder"
                torn(file, "no such file", f"the one with a piece of {key!r}", do)
            if (size := file.stat().st_size) < end:
                torn(file, f"{size} bytes", f"{end} with {key!r}")


def open_dcp(folder: Path, *, head_dim: int | None = None) -> ForeignRun:
    """Open the DCP (torch.distributed.checkpoint) in `folder`; with FSDP a Trainer has two there, of model and
    optimizer. Raises CheckpointError, with what to do.

    `head_dim`, the size of an attention head, says how torchtitan's moments of queries, keys and values lie in one
    tensor.
    """
    paths = [folder / x for x in PARTS] if (folder / PARTS[0]).is_dir() else [folder]
    places: dict[str, _Folder] = {}
    for path in paths:
        opened = _open_metadata(path)
        opened.check_files()
        places |= dict.fromkeys(opened.metadata.state_dict_metadata, opened)
    found = {key: m for key in places if (m := _MOMENT.fullmatch(key))}
    weights = {key: x for key in places if key not in found and (x := _tensor(places[key], key))}
    if amsgrad := next((key for key, m in found.items() if m["kind"] == "max_exp_avg_sq"), None):
        reject(
            folder, f"{amsgrad!r} of AMSGrad", "Adam or AdamW without it", "train on without amsgrad first"
        )
    steps = ((m["name"], places[key].read(key)) for key, m in found.items() if m["kind"] == "step")
    step = one_step(folder, steps)
    moments: dict[str, dict[str, ForeignTensor]] = {}
    for key, m in found.items():
        if m["kind"] in MOMENTS and (x := _tensor(places[key], key)):
            moments.setdefault(m["name"], {})[m["kind"]] = x
    moments = without_fused(folder, moments, weights, head_dim)
    prefix = _prefix(folder, {*weights}, {*moments})
    model = {key.removeprefix(prefix): x for key, x in weights.items() if key.startswith(prefix)}
    own = {own_name(x): t for x, t in model.items() if prefix or not _OF_LOOPS.match(x)}
    return ForeignRun(folder, step, own, {own_name(x): m for x, m in moments.items()})


def _open_metadata(path: Path) -> _Folder:
    file = path / METADATA
    with disk.os_errors_as(file, "reading it"):
        raw = file.read_bytes()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(raw)).load()
        assert all(isinstance(x, str) for x in metadata.state_dict_metadata), "it has names that are no texts"
    except Exception as error:  # a torn pickle raises anything
        expected = "the metadata of torch.distributed.checkpoint"
        torn(file, f"metadata that cannot be read ({error!s:.200})", expected)
    return _Folder(path, metadata)


def _tensor(place: _Folder, key: str) -> ForeignTensor | None:
    stored = place.metadata.state_dict_metadata[key]
    if not hasattr(stored, "chunks"):
        return None
    return ForeignTensor(stored.size, stored.properties.dtype, partial(place.read, key))


def _prefix(folder: Path, weights: set[str], named: set[str]) -> str:
    """The prefix before parameter names in the keys `weights`: "model.", or else the shortest that makes
    every name of a moment in `named` the key of a weight. Raises CheckpointError if there is none."""
    first = min(named, default="")
    ends = {x.removesuffix(first) for x in weights if first and (x == first or x.endswith(f".{first}"))}
    fits = sorted(
        (x for x in ends if {x + n for n in named} <= weights), key=lambda x: (x != "model.", len(x))
    )
    if not fits and (plain := [{*map(own_name, x)} for x in (weights, named)]) != [weights, named]:
        return _prefix(folder, *plain)
    if not fits:
        got = f"moments of {first!r}, and weights such as {min(weights, default='none')!r}"
        do = "save what torch.distributed.checkpoint.state_dict.get_state_dict returns, which has names"
        reject(folder, got, "exp_avg and exp_avg_sq by the names of the weights", do)
    return fits[0]


# --- writing --------------------------------------------------------------------------------------------------


def export_dcp(source: Path, out: Path) -> ExportedWeights:
    """Write the fp32 weights and moments of a checkpoint of zfunc as a DCP in the new folder `out`.

    Keys are those of FSDP2: `model.NAME`, `optimizer.state.NAME.exp_avg`, `.exp_avg_sq` and `.step`, which
    `torch.distributed.checkpoint.load` reads into any number of ranks; with
    `DefaultLoadPlanner(allow_partial_load=True)` where the state to load into has `param_groups`, which a load then
    leaves unchanged. Takes twice the memory of the largest parameter. Raises ValueError where `out` exists or the
    optimizer is not Adam; CheckpointError for a damaged checkpoint.
    """
    dcp: Any = import_module("torch.distributed.checkpoint")
    if out.exists():
        refuse("out", f"{out}, which exists", "a new folder", "name another, or move that one")
    checkpoint = checkpoints.open_checkpoint(checkpoints.locate_checkpoint(source))
    manifest, step = checkpoint.manifest, checkpoint.manifest.position.step
    with CheckpointReader(checkpoint) as reader:
        reads = {key: read for x in manifest.parameters for key, read in _saved(reader, x)}
        state = {key: x if isinstance(x, Tensor) else x[0] for key, x in reads.items()}

        class Planner(dcp.DefaultSavePlanner):
            """A DCP save planner for meta tensors, whose values are read only when they are written."""

            def lookup_object(self, index: Any) -> Any:
                found = reads[index.fqn]
                return found if isinstance(found, Tensor) else found[1]().view(found[0].shape)

        unfinished = out.with_name(f"{disk.UNFINISHED}{out.name}")
        writer = dcp.FileSystemWriter(unfinished, single_file_per_rank=True)
        try:
            with disk.os_errors_as(out, "writing a DCP"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
                dcp.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
                unfinished.rename(out)
        except dcp.CheckpointException as error:  # a BaseException
            ((cause, _),) = error.failures.values()
            if type(cause) is RuntimeError and isinstance(cause.__context__, OSError):  # of torch.save
                cause = cause.__context__
            with disk.os_errors_as(out, "writing a DCP"):
                raise cause from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(x.stat().st_size for x in out.iterdir())
    return ExportedWeights(out, len(manifest.parameters), size, step, "fp32")


def _saved(reader: CheckpointReader, entry: ParameterEntry) -> Iterator[tuple[str, Any]]:
    """Yield a parameter's DCP keys, each with its value, or a meta tensor and a function to read it."""
    name, numel, own = entry.name, entry.numel, reader.manifest.format_of(entry)
    if not entry.trainable:
        kind = BUFFER if BUFFER in entry.pieces else FROZEN
        stored = next((reader.manifest.tensor(x).dtype for x in entry.pieces[kind]), "F32")
        dtype = next(x for x, there in SAFETENSORS_TYPES.items() if there == stored)
        yield f"model.{name}", (_empty(entry, dtype), partial(_as_stored, reader, entry, kind, dtype))
        return
    if owner_of(own):
        got = f"{name!r} with the optimizer state {own!r}"
        refuse("format", got, "moments of Adam or AdamW", "export the weights alone, as safetensors")
    yield f"model.{name}", (_empty(entry, torch.float32), partial(reader.weights, name, 0, numel))
    wanted = [WantedSlice(x.name, name, 0, x.numel(numel)) for x in STATE_FORMATS[own]]

    def moment(n: int) -> Tensor:
        return unpack_moments(reader.tensors(wanted), own)[n]

    for n, kind in enumerate(MOMENTS):
        yield f"optimizer.state.{name}.{kind}", (_empty(entry, torch.float32), partial(moment, n))
    yield f"optimizer.state.{name}.step", torch.tensor(float(reader.manifest.position.step))


def _as_stored(reader: CheckpointReader, entry: ParameterEntry, kind: str, dtype: torch.dtype) -> Tensor:
    values = torch.empty(entry.numel, dtype=dtype)
    reader.read([(WantedSlice(kind, entry.name, 0, entry.numel), as_bytes(values))])
    return values


def _empty(entry: ParameterEntry, dtype: torch.dtype) -> Tensor:
    return torch.empty(entry.shape, dtype=dtype, device="meta")
