"""A manifest as strict JSON, in a file of the checkpoint's folder.

A manifest reads back equal to the one written; anything else is refused with its place in the file. Names and types
are checked here, how the parts fit together by Manifest itself.
"""

import reprlib
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.manifest import (
    FILE,
    Manifest,
    ParameterEntry,
    StateSlice,
    TrainingPosition,
    factor_kind,
)
from zfunc.checkpoint.safetensors_file import BYTES, CHUNK_LIMIT, Shard, TensorInfo
from zfunc.checkpoint.strict_json import CHECKSUM, COUNT, MAX_INT, TEXT, JsonNode, Refusal, Within, known
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import ADAM_FORMATS, FORMER_FORMATS, STATE_FORMATS
from zfunc.errors import CheckpointError
from zfunc.optim.loss_scale import LossScale

VERSION = 1
# State formats with another name in the file: "8bit" was the first format of 8-bit moments, and a zfunc that knows
# only that one has to refuse the current one.
_FORMAT_NAMES = {"8bit-1": "8bit", "8bit": "8bit-2"}
LIMIT = 64 << 20  # bytes of a manifest: 10,000 parameters on 64 ranks, of 10 TB


def shape(value: Any) -> tuple[int, ...]:
    """The kind of shapes whose bytes fit in 64 bits, at any precision, even if every 0 were 1."""
    dims: tuple[int, ...] = strict_json.of_kind(value, [COUNT])
    if len(dims) > 64 or prod(max(d, 1) for d in dims) * 8 > MAX_INT:
        raise Refusal(reprlib.repr(value), "at most 64 dimensions and 2^60 elements")
    return dims


# The kinds of what is in the file, for `strict_json.decode`.
_FORMAT = known(lambda: {_FORMAT_NAMES.get(name, name): name for name in (*STATE_FORMATS, *FORMER_FORMATS)})
_TENSOR = {"name": TEXT, "dtype": known([*BYTES]), "shape": shape, "checksums": [CHECKSUM]}
_SHARD = {
    **{"file": Within(str, 1, 200), "size": COUNT, "header": CHECKSUM, "chunk": Within(int, 1, CHUNK_LIMIT)},
    "tensors": [_TENSOR],
}
_PIECES = {str: [(COUNT, COUNT, COUNT, TEXT, COUNT)]}  # by kind: the fields of a StateSlice
_PARAMETER = {"name": TEXT, "shape": shape, "trainable": bool, "pieces": _PIECES, "moments?": _FORMAT}
_MANIFEST = {
    **{"version": int, "world": Within(int, 1, 1 << 20), "moments": _FORMAT, "position": dict},
    **{"optimizer": dict, "extra": dict, "shards": [_SHARD], "parameters": [_PARAMETER]},
}
_LOSS_SCALE = {
    **{"scale": float, "window": int, "hysteresis": int, "minimum": float, "left": int, "steps": int},
    **{"last_overflow": int, "consecutive?": bool},  # older versions did not write the last
}
_POSITION = {
    **{"step": COUNT, "batches": COUNT, "sequences": COUNT, "seed": int, "loss_scale": _LOSS_SCALE},
    "pending?": dict,
}
_DECISION = {"skip": bool, "grad_scale": float, "number": Within(int, 1, MAX_INT)}  # beside the factors
_FACTORS = {"lr": float, "betas": (float, float)}  # others are numbers, or lists of them


def to_json(manifest: Manifest) -> bytes:
    """The text of a manifest. Raises CheckpointError if it is larger than LIMIT."""
    fields: dict[str, Any] = {
        "version": VERSION,
        "world": manifest.world,
        "moments": _FORMAT_NAMES.get(manifest.state_format, manifest.state_format),
        "position": position_fields(manifest.position),
        "optimizer": manifest.optimizer,
        "extra": manifest.extra,
        "shards": [shard_fields(x) for x in manifest.shards],
        "parameters": [_entry_fields(x) for x in manifest.parameters],
    }
    raw = strict_json.render({**fields, "checksum": _checksum(fields)})
    if len(raw) > LIMIT:
        raise CheckpointError(
            f"{FILE}: got {len(raw)} bytes, expected at most {LIMIT}: save with fewer ranks"
        )
    return raw


def from_json(raw: bytes, where: str = FILE) -> Manifest:
    """Parse a manifest. Raises CheckpointError, which begins with `where`, for anything else."""
    root = strict_json.parse_json(raw, where)
    if (version := root.entries().get("version")) is None or version.read(int) != VERSION:
        got = "no version" if version is None else f"version {version.value}"
        root.refuse(f"version {VERSION}, the one that this zfunc reads", got)
    fields = {name: node.value for name, node in root.entries().items()}
    checksum = fields.pop("checksum", None)  # older versions did not write it
    x = strict_json.decode(fields, _MANIFEST, where)
    position = read_position(JsonNode(x["position"], f"{where}.position"), x["moments"])
    shards, parameters = tuple(map(_shard, x["shards"])), tuple(map(_entry, x["parameters"]))
    try:
        manifest = Manifest(
            x["world"], x["moments"], shards, parameters, position, x["optimizer"], x["extra"]
        )
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if checksum is not None and checksum != _checksum(fields):
        expected = f"{_checksum(fields)}, the checksum of the other fields"
        JsonNode(checksum, f"{where}.checksum").refuse(expected)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder. Raises CheckpointError, naming the file, if it is not valid."""
    path = folder / FILE
    return from_json(disk.read_small(path, LIMIT), str(path))


def shard_fields(shard: Shard) -> dict[str, Any]:
    """The JSON object of a shard."""
    tensors = [{**attrs.asdict(t), "checksums": shard.checksums[t.name]} for t in shard.tensors]
    return {
        "file": shard.file,
        "size": shard.size,
        "header": shard.header,
        "chunk": shard.chunk,
        "tensors": tensors,
    }


def position_fields(position: TrainingPosition) -> dict[str, Any]:
    """The JSON object of a position."""
    fields = attrs.asdict(position)
    pending = fields.pop("pending")
    if pending is None:
        return fields
    decision = {name: pending[name] for name in _DECISION}
    return {**fields, "pending": {**decision, **factor_fields(pending["factors"])}}


def factor_fields(factors: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of an optimizer's factors."""
    return {name: [*x] if isinstance(x, tuple) else x for name, x in factors.items()}


def _entry_fields(entry: ParameterEntry) -> dict[str, Any]:
    pieces = {kind: [attrs.astuple(x) for x in xs] for kind, xs in entry.pieces.items()}
    fields = {"name": entry.name, "shape": entry.shape, "trainable": entry.trainable, "pieces": pieces}
    own = entry.state_format
    return fields if own is None else {**fields, "moments": _FORMAT_NAMES.get(own, own)}


def read_shard(node: JsonNode) -> Shard:
    """The shard that `shard_fields` made. Raises CheckpointError, with the place, for anything else."""
    return _shard(node.read(_SHARD))


def _shard(x: dict[str, Any]) -> Shard:
    x["checksums"] = {t["name"]: t.pop("checksums") for t in x["tensors"]}
    x["tensors"] = tuple(TensorInfo(**t) for t in x["tensors"])
    return Shard(**x)


def _entry(x: dict[str, Any]) -> ParameterEntry:
    pieces = {kind: tuple(StateSlice(*piece) for piece in pieces) for kind, pieces in x["pieces"].items()}
    return ParameterEntry(x["name"], x["shape"], x["trainable"], pieces, x.get("moments"))


def read_position(node: JsonNode, state_format: str) -> TrainingPosition:
    """The position that `position_fields` made. Raises CheckpointError, with the place, for anything else."""
    x = node.read(_POSITION)
    try:
        x["loss_scale"] = LossScale(**x["loss_scale"])
    except ValueError as error:
        name, _, value = str(error).removeprefix("LossScale: ").partition(", expected")[0].partition(": got ")
        node.entries()["loss_scale"].refuse("the counters of a loss scale", f"{name} {value}")
    if "pending" in x:
        x["pending"] = _read_pending(node.entries()["pending"], state_format)
    return TrainingPosition(**x)


def _read_pending(node: JsonNode, state_format: str) -> StepDecision:
    names = node.entries().keys() - _DECISION
    if state_format in ADAM_FORMATS and names != _FACTORS.keys() and not any("." in name for name in names):
        # older versions did not write betas
        node.refuse(
            "lr and betas of the pending update: flush with the zfunc that saved it",
            ", ".join(sorted(names)) or "none",
        )
    kinds = {name: _FACTORS.get(factor_kind(name), _factor) for name in names}
    x = node.read({**_DECISION, **kinds})
    return StepDecision(**{name: x.pop(name) for name in _DECISION}, factors=x)


def _factor(value: Any) -> Any:
    return strict_json.of_kind(value, [float] if isinstance(value, list) else float)


def _checksum(fields: Mapping[str, Any]) -> int:
    """The CRC-32 of the other fields as they are written."""
    return zlib.crc32(strict_json.render(fields))
