"""A manifest as strict JSON, in a file of the checkpoint's folder.

A manifest reads back equal to the one written; anything else is refused with its place in the file. Names and types
are checked here, how the parts fit together by Manifest itself.
"""

import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

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
from zfunc.checkpoint.strict_json import MAX_INT, JsonNode
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import ADAM_FORMATS, FORMER_FORMATS, STATE_FORMATS
from zfunc.errors import CheckpointError
from zfunc.optim.loss_scale import LossScale

VERSION = 1
# State formats with another name in the file: "8bit" was the first format of 8-bit moments, and a zfunc that knows
# only that one has to refuse the current one.
_FORMAT_NAMES = {"8bit-1": "8bit", "8bit": "8bit-2"}
LIMIT = 64 << 20  # bytes of a manifest: 10,000 parameters on 64 ranks, of 10 TB
_MAX_CRC = 2**32 - 1
# The fields of a pending decision, beside the optimizer's factors.
_DECISION = (
    "skip",
    "grad_scale",
    "number",
)
_ADAM_FACTORS = ("lr", "betas")


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
    if (version := root.entries().get("version")) is None or version.integer() != VERSION:
        got = "no version" if version is None else f"version {version.value}"
        root.refuse(f"version {VERSION}, the one that this zfunc reads", got)
    fields = {name: node.value for name, node in root.entries().items() if name != "checksum"}
    checksum = root.entries().get("checksum")
    _, world, moments, position, optimizer, extra, shards, parameters = JsonNode(fields, where).fields(
        "version", "world", "moments", "position", "optimizer", "extra", "shards", "parameters"
    )
    state_format = _read_format(moments)
    parts = (
        world.integer(1, 1 << 20),
        state_format,
        tuple(read_shard(x) for x in shards.items()),
        tuple(_read_entry(x) for x in parameters.items()),
        read_position(position, state_format),
        _read_object(optimizer),
        _read_object(extra),
    )
    try:
        manifest = Manifest(*parts)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if checksum is not None and checksum.integer(high=_MAX_CRC) != _checksum(fields):
        checksum.refuse(f"{_checksum(fields)}, the checksum of the other fields")
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
    file, size, header, chunk, tensors = node.fields("file", "size", "header", "chunk", "tensors")
    entries = [x.fields("name", "dtype", "shape", "checksums") for x in tensors.items()]
    stored = tuple(
        TensorInfo(name.text(), dtype.choice(tuple(BYTES)), read_shape(shape))
        for name, dtype, shape, _ in entries
    )
    return Shard(
        file=file.text(high=200),
        size=size.integer(),
        header=header.integer(high=_MAX_CRC),
        chunk=chunk.integer(1, CHUNK_LIMIT),
        tensors=stored,
        checksums={t.name: entry[3].integers(_MAX_CRC) for t, entry in zip(stored, entries, strict=True)},
    )


def read_shape(node: JsonNode) -> tuple[int, ...]:
    """A shape whose number of bytes fits in 64 bits, at any precision, even if every 0 were 1."""
    dims = node.integers()
    if len(dims) > 64 or prod(max(d, 1) for d in dims) * 8 > MAX_INT:
        node.refuse("at most 64 dimensions and 2^60 elements")
    return dims


def _read_entry(node: JsonNode) -> ParameterEntry:
    own = [name for name in node.entries() if name == "moments"]
    name, shape, trainable, pieces, *moments = node.fields("name", "shape", "trainable", "pieces", *own)
    return ParameterEntry(
        name=name.text(),
        shape=read_shape(shape),
        trainable=trainable.boolean(),
        pieces={kind: tuple(_read_piece(x) for x in xs.items()) for kind, xs in pieces.entries().items()},
        state_format=_read_format(moments[0]) if moments else None,
    )


def _read_format(node: JsonNode) -> str:
    formats = {_FORMAT_NAMES.get(name, name): name for name in (*STATE_FORMATS, *FORMER_FORMATS)}
    return formats[node.choice(tuple(formats))]


def _read_piece(node: JsonNode) -> StateSlice:
    items = node.items()
    if len(items) != 5:
        node.refuse("start, stop, shard, tensor, offset", f"a list of {len(items)}")
    start, stop, shard, tensor, offset = items
    return StateSlice(start.integer(), stop.integer(), shard.integer(), tensor.text(), offset.integer())


def read_position(node: JsonNode, state_format: str) -> TrainingPosition:
    """The position that `position_fields` made. Raises CheckpointError, with the place, for anything else."""
    is_pending = "pending" in node.entries()
    names = [x.name for x in attrs.fields(TrainingPosition) if is_pending or x.name != "pending"]
    step, batches, sequences, seed, loss_scale, *pending = node.fields(*names)
    return TrainingPosition(
        step=step.integer(),
        batches=batches.integer(),
        sequences=sequences.integer(),
        seed=seed.integer(-MAX_INT),
        loss_scale=_read_loss_scale(loss_scale),
        pending=_read_pending(pending[0], state_format) if is_pending else None,
    )


def _read_pending(node: JsonNode, state_format: str) -> StepDecision:
    grouped = any("." in name for name in node.entries())
    is_adam = state_format in ADAM_FORMATS and not grouped
    if is_adam and "betas" not in node.entries():  # older versions did not write them
        node.refuse("the betas of the pending update: flush with the zfunc that saved it", "none")
    names = _ADAM_FACTORS if is_adam else tuple(name for name in node.entries() if name not in _DECISION)
    skip, grad_scale, number, *rest = node.fields(*_DECISION, *names)
    factors = {name: _read_factor(name, x) for name, x in zip(names, rest, strict=True)}
    return StepDecision(skip.boolean(), grad_scale.number(), number.integer(1), factors)


def _read_factor(name: str, node: JsonNode) -> float | tuple[float, ...]:
    """A number, or a list of them; a learning rate is one number, betas are two."""
    name = factor_kind(name)
    if name == "lr" or (name != "betas" and not isinstance(node.value, list)):
        return node.number()
    values = tuple(x.number() for x in node.items())
    if name == "betas" and len(values) != 2:
        node.refuse("two numbers", f"a list of {len(values)}")
    return values


def _read_loss_scale(node: JsonNode) -> LossScale:
    has_consecutive = "consecutive" in node.entries()  # older versions did not write it
    names = [x.name for x in attrs.fields(LossScale) if has_consecutive or x.name != "consecutive"]
    values = dict(zip(names, node.fields(*names), strict=True))
    consecutive = has_consecutive and values.pop("consecutive").boolean()
    numbers = {name: values.pop(name).number() for name in ("scale", "minimum")}
    counters = {name: x.integer(-1) for name, x in values.items()}
    try:
        return LossScale(**numbers, **counters, consecutive=consecutive)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        name, _, value = str(error).removeprefix("LossScale: ").partition(", expected")[0].partition(": got ")
        node.refuse("the counters of a loss scale", f"{name} {value}")


def _read_object(node: JsonNode) -> dict[str, Any]:
    node.entries()
    return cast("dict[str, Any]", node.value)


def _checksum(fields: Mapping[str, Any]) -> int:
    """The CRC-32 of the other fields as they are written."""
    return zlib.crc32(strict_json.render(fields))
