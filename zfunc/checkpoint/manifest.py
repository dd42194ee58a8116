"""What a checkpoint is: which file holds which elements of which parameter, and where training stood.

A Manifest is complete: the pieces of every parameter's state tile it, and they tile the tensors of the shards.
Offsets are logical, within a flattened parameter: they do not depend on buckets, world size or padding.

As strict JSON, in a file of the checkpoint's folder, it reads back equal to the one written; anything else is
refused with its place in the file. Fields are there by their names, of the kinds that their annotations say.
"""

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from attrs import field, frozen

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.safetensors_file import (
    BYTES,
    CHUNK_LIMIT,
    HEADER_LIMIT,
    LENGTH,
    Shape,
    Shard,
    TensorInfo,
    num_chunks,
)
from zfunc.checkpoint.strict_json import COUNT, MAX_INT, TEXT, Count, JsonNode, Text, Within, known
from zfunc.core.decision import StepDecision
from zfunc.core.dtypes import DTYPES, PRECISIONS
from zfunc.core.layout import Parameter
from zfunc.core.optimizer_state import EMA, FORMER_FORMATS, STATE_FORMATS, owner_of, stored_buffers
from zfunc.core.spec import FROZEN
from zfunc.errors import USE_ANOTHER, CheckpointError, did_you_mean
from zfunc.optim.loss_scale import LossScale

FILE = "manifest.json"
VERSION = 1
LIMIT = 64 << 20  # bytes of a manifest: 10,000 parameters on 64 ranks, of 10 TB
PENDING = "pending"  # the kind of a gradient that is still to be applied
BUFFER = "buffer"  # the only kind of state of a module's buffer that forward changes: its values
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FLOATS = tuple(DTYPES[x].safetensors for x in PRECISIONS)


# State formats with another name in the file: "8bit" was the first format of 8-bit moments, and a zfunc that knows
# only that one has to refuse the current one.
_FORMAT_NAMES = {"8bit-1": "8bit", "8bit": "8bit-2"}
_FACTORS = {"lr": float, "betas": (float, float)}  # others are numbers, or lists of them
Format = Annotated[str, known(lambda: {_written(name): name for name in (*STATE_FORMATS, *FORMER_FORMATS)})]


def _written(state_format: str) -> str:
    """The name of a state format in the file."""
    return _FORMAT_NAMES.get(state_format, state_format)


def _loss_scale(value: Any) -> LossScale:
    """The kind of a loss scale: all of its fields, but for the one that older versions did not write."""
    kinds = {
        name if name == "consecutive?" else name[:-1]: x
        for name, x in strict_json.kinds_of(LossScale).items()
    }
    named = strict_json.of_kind(value, kinds)
    return strict_json.made(LossScale, named, "the counters of a loss scale")


def _decision(value: Any) -> StepDecision:
    """The kind of a decision whose update is still to be made: some of its fields, and beside them the factors."""
    own = {"skip": bool, "grad_scale": float, "number": Within(int, 1, MAX_INT)}
    factors = strict_json.of_kind(value, dict).keys() - own
    x = strict_json.of_kind(
        value, {**own, **{name: _FACTORS.get(factor_kind(name), _factor) for name in factors}}
    )
    return StepDecision(**{name: x.pop(name) for name in own}, factors=x)


def _factor(value: Any) -> Any:
    return strict_json.of_kind(value, [float] if isinstance(value, list) else float)


def factor_kind(name: str) -> str:
    """What a factor is: its name without the group it is of."""
    return name.rpartition(".")[2]


class StateSlice(NamedTuple):
    """Elements start to stop of one kind of a parameter's state are in a shard's tensor, from `offset` on."""

    start: int
    stop: int
    shard: int
    tensor: str
    offset: int


def _slice(value: Any) -> StateSlice:
    return StateSlice(*strict_json.of_kind(value, (COUNT, COUNT, COUNT, TEXT, COUNT)))


@frozen
class ParameterEntry:
    """A parameter in a checkpoint, or a module's buffer, and the pieces of its state by kind, ascending.

    `state_format` is None if it is the manifest's.
    """

    name: Text
    shape: Shape
    trainable: bool
    pieces: Mapping[str, tuple[Annotated[StateSlice, _slice], ...]]
    state_format: Format | None = field(default=None, alias="moments")

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@frozen
class TrainingPosition:
    """The counters of a State: with them and the buffers a resume is exact.

    `pending` is the decision of an update whose gradient is part of the checkpoint and still to be applied, as in
    those of delayed updates of earlier versions.
    """

    step: Count
    batches: Count
    sequences: Count
    seed: int
    loss_scale: Annotated[LossScale, _loss_scale]
    pending: Annotated[StepDecision, _decision] | None = None


@frozen
class Manifest:
    """The contents of a checkpoint. `world` is the number of ranks that wrote it; nothing else depends on it.

    `state_format` is that of every parameter that names no other. `optimizer` and `extra` are dicts of JSON's own
    types. Raises CheckpointError if the parts do not fit together.
    """

    world: Annotated[int, Within(int, 1, 1 << 20)]
    state_format: Format = field(alias="moments")
    shards: tuple[Shard, ...]
    parameters: tuple[ParameterEntry, ...]
    position: TrainingPosition
    optimizer: Mapping[str, Any]
    extra: Mapping[str, Any]

    def __attrs_post_init__(self) -> None:
        check_plain(self.optimizer, "optimizer")
        check_plain(self.extra, "extra")
        _check_position(self.position, self.pending, self.state_format)
        _check_unique("shard", [x.file for x in self.shards])
        _check_unique("parameter", [x.name for x in self.parameters])
        for shard in self.shards:
            _check_shard(shard)
        used: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for entry in self.parameters:
            _check_pieces(self, entry, used)
        for n, shard in enumerate(self.shards):
            for t in shard.tensors:
                ranges = sorted(used.get((n, t.name), ()))
                if flaw := _flaw(ranges, t.numel, gaps=shard.places is not None):
                    raise _bad(f"{shard.file}, {t.name!r}", flaw, f"each of {t.numel} to be one parameter's")

    @cached_property
    def by_name(self) -> dict[str, ParameterEntry]:
        """The parameters by name."""
        return {x.name: x for x in self.parameters}

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The names of modules' buffers that forward changes."""
        return frozenset(x.name for x in self.parameters if BUFFER in x.pieces)

    def tensor(self, piece: StateSlice) -> TensorInfo:
        """The tensor that a piece lies in."""
        return self.shards[piece.shard].by_name[piece.tensor]

    def format_of(self, entry: ParameterEntry) -> str:
        """The format of a parameter's optimizer state."""
        return entry.state_format or self.state_format

    def kinds(self, entry: ParameterEntry) -> dict[str, tuple[int, tuple[str, ...]]]:
        """By kind of a parameter's state, how many elements it has and which types they may be stored in."""
        if BUFFER in entry.pieces:
            return {BUFFER: (entry.numel, tuple(BYTES))}
        if not entry.trainable:
            return {FROZEN: (entry.numel, _FLOATS)}
        buffers = stored_buffers(self.format_of(entry))
        kinds: dict[str, tuple[int, tuple[str, ...]]] = {
            x.name: (x.numel(entry.numel), (DTYPES[x.dtype].safetensors,)) for x in buffers
        }
        if EMA.name in entry.pieces:
            kinds[EMA.name] = entry.numel, (DTYPES[EMA.dtype].safetensors,)
        if self.position.pending is not None and PENDING in entry.pieces:
            kinds[PENDING] = entry.numel, _FLOATS
        return kinds

    @property
    def averages(self) -> bool:
        """Whether it has moving averages of the weights."""
        return any(EMA.name in x.pieces for x in self.parameters)

    @property
    def pending(self) -> frozenset[str]:
        """The parameters with a gradient that is still to be applied."""
        return frozenset(x.name for x in self.parameters if PENDING in x.pieces)


@frozen
class Checkpoint:
    """A complete checkpoint: its folder and manifest. The data is checked when it is read.

    `elsewhere` has the paths of files that are not in the folder, by their names.
    """

    path: Path
    manifest: Manifest
    elsewhere: Mapping[str, Path] = field(factory=dict[str, Path])

    def file(self, n: int) -> Path:
        """The file of shard number `n`."""
        name = self.manifest.shards[n].file
        return self.elsewhere.get(name, self.path / name)


def check_model(manifest: Manifest, parameters: Iterable[Parameter], *, strict: bool = True) -> None:
    """Raise CheckpointError, naming the first differences, unless these are the checkpoint's parameters.

    They may be in any order, and tied ones may be repeated. Unless `strict`, others may be trained.
    """
    wanted = {p.name: p for p in parameters}
    entries = manifest.by_name
    flaws: list[str] = []
    unknown = [name for name in entries if name not in wanted]
    for name, p in wanted.items():
        if (entry := entries.get(name)) is None:
            hint = did_you_mean(name, unknown) if len(flaws) < 3 else ""  # slow, with thousands of them
            flaws.append(f"it has no {name!r}{hint}")
        elif entry.shape != p.shape:
            flaws.append(f"{name!r} has shape {list(entry.shape)} in it and {list(p.shape)} in the model")
        elif strict and entry.trainable != p.trainable:
            flaws.append(
                f"{name!r} is {'trained' if entry.trainable else 'frozen'} in it, not in the model (if that is "
                "meant, zfunc.load(..., strict=False))"
            )
    for name in unknown:
        now = " now (if its module is in eval mode, zfunc.load(..., strict=False))"
        flaws.append(f"it has {name!r}, which the model does not have{now * (name in manifest.buffers)}")
    if flaws:
        more = f", and {len(flaws) - 3} more" if len(flaws) > 3 else ""
        raise CheckpointError(
            f"got a checkpoint of another model: {'; '.join(flaws[:3])}{more}. Load it with the model that saved "
            "it: with zfunc train, pass num_layers, hidden_size and the other sizes of that run"
        )


def _check_position(position: TrainingPosition, pending: frozenset[str], state_format: str) -> None:
    """A pending decision is of the last update that was counted, and has a gradient."""
    if (decision := position.pending) is None:
        return
    names = decision.factors.keys()
    if not owner_of(state_format) and names != _FACTORS.keys() and not any("." in name for name in names):
        # older versions did not write betas
        got, expected = ", ".join(sorted(names)) or "none", "lr and betas of the pending update"
        raise _bad("position.pending", got, f"{expected}: flush with the zfunc that saved it")
    due = position.step + decision.skip
    if decision.number != due:
        raise _bad("position.pending", f"update {decision.number}", f"{due}, the last one decided")
    for name, value in decision.factors.items():
        kind = factor_kind(name)
        if kind == "lr" and not value >= 0:
            raise _bad("position.pending", f"a learning rate of {value}", "0 or above")
        if kind == "betas" and not all(0 <= beta < 1 for beta in value):
            raise _bad("position.pending", f"betas of {value}", "two numbers, 0 or above and below 1")
    if not pending:
        raise _bad("position.pending", "a decision without a gradient", "some parameter with a pending one")


def _check_shard(shard: Shard) -> None:
    if not _FILE_NAME.fullmatch(shard.file) or shard.file == FILE:
        raise _bad(
            "shards", f"the file name {shard.file!r:.300}", "letters, digits and ._- only, in the folder"
        )
    if not 0 < shard.chunk <= CHUNK_LIMIT:
        raise _bad(shard.file, f"chunks of {shard.chunk} bytes", f"1 to {CHUNK_LIMIT}")
    _check_unique(f"{shard.file}: tensor", [t.name for t in shard.tensors])
    if shard.places is None and shard.header_size <= 0:
        raise _bad(shard.file, "tensors larger than the file", f"them to fit in {shard.size} bytes")
    if shard.places is None and shard.header_size > (limit := LENGTH + HEADER_LIMIT):
        raise _bad(shard.file, f"a header of {shard.header_size} bytes", f"at most {limit}")
    for t in shard.tensors:
        if len(t.checksums) != (count := num_chunks(t.nbytes, shard.chunk)):
            raise _bad(f"{shard.file}, {t.name!r}", "another number of checksums", f"{count}")


def _check_pieces(
    manifest: Manifest, entry: ParameterEntry, used: dict[tuple[int, str], list[tuple[int, int]]]
) -> None:
    """The pieces of each kind tile it, in tensors of one type. Adds their ranges in the tensors to `used`."""
    kinds = manifest.kinds(entry)
    if set(entry.pieces) != set(kinds):
        raise _bad(repr(entry.name), f"the state {', '.join(entry.pieces) or 'nothing'}", ", ".join(kinds))
    for kind, (numel, dtypes) in kinds.items():
        where = f"{entry.name!r}, {kind}"
        if flaw := _flaw([(x.start, x.stop) for x in entry.pieces[kind]], numel):
            raise _bad(where, flaw, f"pieces that tile its {numel}")
        stored: set[str] = set()
        for piece in entry.pieces[kind]:
            tensors = manifest.shards[piece.shard].by_name if 0 <= piece.shard < len(manifest.shards) else {}
            if (tensor := tensors.get(piece.tensor)) is None:
                raise _bad(where, f"tensor {piece.tensor!r} of shard {piece.shard}", "one of that shard's")
            if tensor.dtype not in dtypes:
                raise _bad(where, f"elements of {tensor.dtype} in {piece.tensor!r}", " or ".join(dtypes))
            stored.add(tensor.dtype)
            ends = (piece.offset, piece.offset + piece.stop - piece.start)
            used.setdefault((piece.shard, piece.tensor), []).append(ends)
        if len(stored) > 1:
            raise _bad(where, f"elements of {' and '.join(sorted(stored))}", "one type")


def _flaw(ranges: list[tuple[int, int]], numel: int, *, gaps: bool = False) -> str:
    """What is wrong with ranges that should tile 0 to numel in this order, but for gaps; "" if nothing is."""
    end = 0
    for start, stop in ranges:
        if start >= stop:
            return f"an empty range, {start} to {stop}"
        if start < end or (start > end and not gaps):
            return f"no elements {end} to {start}" if start > end else f"elements {start} to {end} twice"
        end = stop
    return "" if end == numel or (gaps and end < numel) else f"{end} elements"


def _check_unique(what: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        duplicate = next(x for x in names if x in seen or seen.add(x))
        raise _bad(f"{what} {duplicate!r}", "it twice", "it once")


def check_plain(value: object, where: str) -> None:
    """Raise CheckpointError, with the value's name, unless it is a dict of JSON's own types."""
    try:
        same = strict_json.parse_json(strict_json.render(cast("dict[str, Any]", value)), where).value == value
    except (CheckpointError, ValueError, TypeError, RecursionError) as error:
        same, reason = False, f": {error}"
    else:
        reason = ""
    if not same or not isinstance(value, dict):
        raise _bad(where, f"{value!r:.80}{reason:.200}", "a dict of JSON's own types that reads back equal")


def _bad(where: str, got: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{where}: got {got}, expected {expected}: {USE_ANOTHER}")


def to_json(manifest: Manifest) -> bytes:
    """The text of a manifest. Raises CheckpointError if it is larger than LIMIT."""
    named: dict[str, Any] = {"version": VERSION, **strict_json.to_plain(manifest)}
    for x in (named, *named["parameters"]):
        if "moments" in x:
            x["moments"] = _written(x["moments"])
    raw = strict_json.render({**named, "checksum": _checksum(named)})
    if len(raw) > LIMIT:
        raise CheckpointError(
            f"{FILE}: got {len(raw)} bytes, expected at most {LIMIT}: save with fewer ranks"
        )
    return raw


def from_json(raw: bytes, where: str = FILE) -> Manifest:
    """Parse a manifest. Raises CheckpointError, which begins with `where`, for anything else."""
    root = strict_json.parse_json(raw, where)
    kinds = {**strict_json.kinds_of(Manifest), "checksum?": int}  # older versions did not write it
    x = root.of_version(VERSION).read(kinds)
    checksum, named = x.pop("checksum", None), {k: v for k, v in root.value.items() if k != "checksum"}
    try:
        manifest = Manifest(**x)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if checksum is not None and checksum != _checksum(named):
        expected = f"{_checksum(named)}, the checksum of the other fields"
        JsonNode(checksum, f"{where}.checksum").refuse(expected)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder. Raises CheckpointError, naming the file, if it is not valid."""
    path = folder / FILE
    return from_json(disk.read_small(path, LIMIT), str(path))


def _checksum(named: Mapping[str, Any]) -> int:
    """The CRC-32 of the other fields as they are written."""
    return zlib.crc32(strict_json.render(named))
