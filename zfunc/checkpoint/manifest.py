"""What a checkpoint is: which file holds which elements of which parameter, and where training stood.

A Manifest is complete: the pieces of every parameter's state tile it, and they tile the tensors of the shards.
Offsets are logical, within a flattened parameter: they do not depend on buckets, world size or padding. The slices
of all ranks tile the state of every parameter too, because a layout's pieces do: saving and loading take them from
here.

As strict JSON, in a file of the checkpoint's folder, it reads back equal to the one written; anything else is
refused with its place in the file. Fields are there by their names, of the kinds that their annotations say.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from attrs import evolve, field, fields, frozen

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.durable_files import reject
from zfunc.checkpoint.safetensors_file import (
    BYTES,
    HEADER_LIMIT,
    LENGTH,
    Shape,
    Shard,
    TensorInfo,
    num_chunks,
)
from zfunc.checkpoint.strict_json import Count, JsonNode, Refusal, Text, Within, decoded, known
from zfunc.core.dtypes import DTYPES, PRECISIONS, Dtype
from zfunc.core.layout import Layout, Parameter, Span
from zfunc.core.optimizer_state import EMA, FROZEN, STATE_FORMATS, StateBuffer
from zfunc.errors import CheckpointError, did_you_mean
from zfunc.optim.loss_scale import LossScale

FILE = "manifest.json"
VERSION = 1
LIMIT = 64 << 20  # bytes of a manifest: 10,000 parameters on 64 ranks, of 10 TB
BUFFER = "buffer"  # the only kind of state of a module's buffer that forward changes: its values
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FROZEN = tuple(
    DTYPES[x].safetensors for x in (*PRECISIONS, "uint8")
)  # of weights, or the bytes of encoded ones


# State formats with another name in the file, and what has their own name there.
_FORMAT_NAMES = {"8bit": "8bit-2"}
_FORMER = {"8bit": "the first 8-bit moments, whose codes were others"}
Format = Annotated[str, known(lambda: {_written(name): name for name in STATE_FORMATS}, _FORMER)]


def _written(state_format: str) -> str:
    """The name of `state_format` in a manifest's file: "8bit-2" for "8bit", the same name for any other."""
    return _FORMAT_NAMES.get(state_format, state_format)


def _loss_scale(value: Any) -> LossScale:
    """Decode a LossScale from the JSON `value`; unlike in Python, no field may be left out."""
    given = decoded(value, dict)
    for name in (x.name for x in fields(LossScale) if x.name not in given):
        raise Refusal("none", f"a field named {name!r}")
    return decoded(given, LossScale)


class StateSlice(NamedTuple):
    """Where a part of a parameter's state is stored: elements `start` to `stop` of one kind, such as
    "exp_avg", from element `offset` of `tensor` in shard file number `shard`."""

    start: int
    stop: int
    shard: int
    tensor: str
    offset: int


def _state_slice(value: Any) -> StateSlice:
    return StateSlice(*decoded(value, tuple[Count, Count, Count, Text, Count]))


@frozen
class ParameterEntry:
    """What a manifest has of one parameter or module buffer: name, shape, and, by kind of state such as
    "exp_avg", the slices that store it, in ascending order.

    `state_format` is None if it is the manifest's.
    """

    name: Text
    shape: Shape
    trainable: bool
    pieces: Mapping[str, tuple[Annotated[StateSlice, _state_slice], ...]]
    state_format: Format | None = field(default=None, alias="moments")

    @property
    def numel(self) -> int:
        """The number of elements of the parameter; 1 for a scalar."""
        return math.prod(self.shape)


@frozen
class TrainingPosition:
    """What an exact resume needs beside a State's tensors: counters, random seed, loss scale."""

    step: Count
    batches: Count
    sequences: Count
    seed: int
    loss_scale: Annotated[LossScale, _loss_scale]


@frozen
class Manifest:
    """The description of a checkpoint, stored beside its shards. `world` is the number of ranks that wrote
    it; any number of ranks may read it.

    `state_format` is the optimizer state's format for parameters whose entry names none. `optimizer` (its
    settings) and `extra` (the user's data) are dicts of JSON's own types. Raises CheckpointError if the
    fields contradict each other.
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
                    reject(f"{shard.file}, {t.name!r}", flaw, f"each of {t.numel} to be one parameter's")

    @cached_property
    def by_name(self) -> dict[str, ParameterEntry]:
        """The manifest's entries of parameters, by full name."""
        return {x.name: x for x in self.parameters}

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The full names of the module buffers in the checkpoint, which forward changes."""
        return frozenset(x.name for x in self.parameters if BUFFER in x.pieces)

    def tensor(self, piece: StateSlice) -> TensorInfo:
        """The tensor of a shard that has `piece`, a slice of a parameter's state."""
        return self.shards[piece.shard].by_name[piece.tensor]

    def format_of(self, entry: ParameterEntry) -> str:
        """The format of a parameter's optimizer state."""
        return entry.state_format or self.state_format

    def kinds(self, entry: ParameterEntry) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The kinds of state, such as "exp_avg", that a checkpoint has of a parameter: by name, (number of
        elements, the safetensors dtypes allowed)."""
        if BUFFER in entry.pieces:
            return {BUFFER: (entry.numel, tuple(BYTES))}
        kinds: dict[str, tuple[int, tuple[str, ...]]] = {FROZEN: (entry.numel, _FROZEN)}
        if entry.trainable:
            buffers = STATE_FORMATS[self.format_of(entry)]
            kinds = {x.name: (x.numel(entry.numel), (DTYPES[x.dtype].safetensors,)) for x in buffers}
        if EMA.name in entry.pieces:
            kinds[EMA.name] = entry.numel, (DTYPES[EMA.dtype].safetensors,)
        return kinds


@frozen
class Checkpoint:
    """A complete checkpoint: its folder and its manifest. The tensors are checked only when they are read.

    `elsewhere` has the paths of files that are in other folders, by file name.
    """

    path: Path
    manifest: Manifest
    elsewhere: Mapping[str, Path] = field(factory=dict[str, Path])

    def file(self, n: int) -> Path:
        """The path of shard file number `n` of the checkpoint."""
        name = self.manifest.shards[n].file
        return self.elsewhere.get(name, self.path / name)


def check_model(manifest: Manifest, parameters: Iterable[Parameter], *, strict: bool = True) -> None:
    """Raise CheckpointError, naming the first differences, unless the checkpoint has exactly these
    parameters, in any order.

    Tied parameters may be repeated. Unless `strict`, a parameter may be trained in the model and frozen in
    the checkpoint, or the reverse.
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
                "meant, in Python zfunc.load(..., strict=False))"
            )
    for name in unknown:
        now = " now (if its module is in eval mode, in Python zfunc.load(..., strict=False))"
        flaws.append(f"it has {name!r}, which the model does not have{now * (name in manifest.buffers)}")
    if flaws:
        more = f", and {len(flaws) - 3} more" if len(flaws) > 3 else ""
        raise CheckpointError(
            f"got a checkpoint of another model: {'; '.join(flaws[:3])}{more}. Load it with the model that saved "
            "it: in zfunc train, pass `hf` and `lora`, or `num_layers` and the other sizes, of that run"
        )


def _check_shard(shard: Shard) -> None:
    if not _FILE_NAME.fullmatch(shard.file) or shard.file == FILE:
        expected = "letters, digits and ._- only, in the folder"
        reject("shards", f"the file name {shard.file!r:.300}", expected)
    _check_unique(f"{shard.file}: tensor", [t.name for t in shard.tensors])
    if shard.header_size <= 0 and shard.places is None:
        reject(shard.file, "tensors larger than the file", f"them to fit in {shard.size} bytes")
    if shard.header_size > (limit := LENGTH + HEADER_LIMIT) and shard.places is None:
        reject(shard.file, f"a header of {shard.header_size} bytes", f"at most {limit}")
    for t in shard.tensors:
        if len(t.checksums) != (count := num_chunks(t.nbytes, shard.chunk)):
            reject(f"{shard.file}, {t.name!r}", "another number of checksums", f"{count}")


def _check_pieces(
    manifest: Manifest, entry: ParameterEntry, used: dict[tuple[int, str], list[tuple[int, int]]]
) -> None:
    """Raise CheckpointError unless the slices of `entry` cover every kind of its state once, in one dtype.
    Adds to `used`, by (shard, tensor name), the ranges of elements that they take."""
    kinds = manifest.kinds(entry)
    if set(entry.pieces) != set(kinds):
        reject(repr(entry.name), f"the state {', '.join(entry.pieces) or 'nothing'}", ", ".join(kinds))
    for kind, (numel, dtypes) in kinds.items():
        where = f"{entry.name!r}, {kind}"
        if flaw := _flaw([(x.start, x.stop) for x in entry.pieces[kind]], numel):
            reject(where, flaw, f"pieces that tile its {numel}")
        stored: set[str] = set()
        for piece in entry.pieces[kind]:
            tensors = manifest.shards[piece.shard].by_name if 0 <= piece.shard < len(manifest.shards) else {}
            if (tensor := tensors.get(piece.tensor)) is None:
                reject(where, f"tensor {piece.tensor!r} of shard {piece.shard}", "one of that shard's")
            if tensor.dtype not in dtypes:
                reject(where, f"elements of {tensor.dtype} in {piece.tensor!r}", " or ".join(dtypes))
            stored.add(tensor.dtype)
            ends = (piece.offset, piece.offset + piece.stop - piece.start)
            used.setdefault((piece.shard, piece.tensor), []).append(ends)
        if len(stored) > 1:
            reject(where, f"elements of {' and '.join(sorted(stored))}", "one type")


def _flaw(ranges: list[tuple[int, int]], numel: int, *, gaps: bool = False) -> str:
    """Words for what is wrong with `ranges`, which should cover 0 to `numel` without overlap (and, unless
    `gaps`, without gaps); "" if nothing is."""
    end = 0
    for start, stop in ranges:
        if start >= stop:
            return f"an empty range, {start} to {stop}"
        if start < end or (start > end and not gaps):
            return f"no elements {end} to {start}" if start > end else f"elements {start} to {end} twice"
        end = stop
    return "" if end == numel or (gaps and end < numel) else f"{end} elements"


def _check_unique(what: str, names: list[str]) -> None:
    for name in (x for x, n in Counter(names).items() if n > 1):
        reject(f"{what} {name!r}", "it twice", "it once")


def check_plain(value: object, where: str) -> None:
    """Raise CheckpointError, which begins with `where`, unless `value` is a dict of JSON's own types."""
    reason, back = "", cast("dict[str, Any]", value if isinstance(value, dict) else {"": value})
    try:
        back = strict_json.parse_json(strict_json.render(back), where).value
    except (ValueError, TypeError, RecursionError) as error:
        back, reason = None, f": {error}"
    if back != value:
        do = "write tensors into a file of your own, tuples as lists, and keys as text"
        reject(where, f"{value!r:.80}{reason:.200}", "a dict of JSON's own types that reads back equal", do)


def to_json(manifest: Manifest) -> bytes:
    """The text of a manifest. Raises CheckpointError if it is larger than 64 MiB."""
    named: dict[str, Any] = {"version": VERSION, **strict_json.to_plain(manifest)}
    for x in (named, *named["parameters"]):
        if "moments" in x:
            x["moments"] = _written(x["moments"])
    raw = strict_json.render({**named, "checksum": _checksum(named)})
    if len(raw) > LIMIT:
        reject(FILE, f"{len(raw)} bytes", f"at most {LIMIT}", "save with fewer ranks")
    return raw


def from_json(raw: bytes, where: str = FILE) -> Manifest:
    """Parse the JSON text of a manifest. Raises CheckpointError, which begins with `where`, for any other text."""
    named = JsonNode(strict_json.parse_json(raw, where).read(dict), where)
    checksum = named.value.pop("checksum", None)
    position = named.value.get("position")
    if isinstance(position, dict) and "pending" in position:
        named.refuse(
            "none: call zfunc.flush and zfunc.save with the zfunc that saved it",
            "a gradient that is still to be applied, of the delayed updates of earlier versions",
            ".position.pending",
        )
    manifest: Manifest = named.of_version(VERSION).read(Manifest)
    if checksum != (expected := _checksum(named.value)):
        JsonNode(checksum, f"{where}.checksum").refuse(f"{expected}, the checksum of the other fields")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a checkpoint's folder. Raises CheckpointError, naming the file, if it is not valid."""
    path = folder / FILE
    return from_json(disk.read_small(path, LIMIT), str(path))


def _checksum(named: Mapping[str, Any]) -> int:
    """The CRC-32 of a manifest's JSON with the fields `named`, the checksum itself left out."""
    return zlib.crc32(strict_json.render(named))


# --- what a rank writes of a layout ---------------------------------------------------------------------------


@frozen
class Slice:
    """Elements `start` to `stop` of one kind of a parameter's state, such as "exp_avg", that one rank holds
    in memory and writes to a checkpoint.

    In memory the slice begins at element `at` of the rank's buffer of this kind for the bucket. In the rank's
    shard file it is the tensor `stored`, in the parameter's shape if the slice is the whole parameter.
    """

    parameter: str
    bucket: int
    kind: str
    start: int
    stop: int
    at: int
    stored: TensorInfo


Kinds = Mapping[int, Sequence[StateBuffer]]  # what is kept of the parameters of each bucket


def stored_kinds(
    layout: Layout, frozen: Mapping[int, Dtype], *, ema: bool = False, averaged: Collection[int] = ()
) -> dict[int, list[StateBuffer]]:
    """The kinds of state, such as "exp_avg", that a checkpoint stores of each bucket, by index. `frozen` has
    the dtype of each frozen bucket's values. `ema` adds the moving average to trained buckets; `averaged` are
    the frozen buckets that have one."""
    averages = [EMA] if ema else []
    kinds = {x.index: [*STATE_FORMATS[x.state_format], *averages] for x in layout.buckets}
    return kinds | {
        b: [StateBuffer(FROZEN, dtype), *([EMA] if b in averaged else ())] for b, dtype in frozen.items()
    }


def slices_of(layout: Layout, kinds: Kinds, rank: int, world: int) -> Iterator[Slice]:
    """Yield what rank `rank` of `world` stores of every parameter in the buckets of `kinds`, which has the
    kinds of state to store, by bucket index."""
    for bucket in layout.all_buckets:
        for span in bucket.spans if bucket.index in kinds else ():
            piece = layout.piece(span, rank, world)
            if piece.start < piece.stop:
                for kind in kinds[bucket.index]:
                    yield _slice(span, bucket.index, kind, piece.start, piece.stop, piece.at)


def _slice(span: Span, bucket: int, buffer: StateBuffer, start: int, stop: int, at: int) -> Slice:
    first, last = buffer.numel(start), buffer.numel(stop)
    complete = buffer.shared == 1 and (start, stop) == (0, span.stop - span.start)
    shape = span.shape if complete else (last - first,)
    stored = TensorInfo(f"{span.name}/{buffer.name}", DTYPES[buffer.dtype].safetensors, shape)
    return Slice(span.name, bucket, buffer.name, first, last, buffer.numel(at), stored)


def _in_own_shard(rank: int, x: Slice) -> Iterator[StateSlice]:
    yield StateSlice(x.start, x.stop, rank, x.stored.name, 0)


@frozen
class Snapshot:
    """What a checkpoint's manifest says of a State that is about to be saved, without tensor data:
    parameters, kinds of state, position, settings."""

    layout: Layout
    kinds: Kinds
    position: TrainingPosition
    optimizer: Mapping[str, Any]
    buffers: Sequence[TensorInfo] = ()  # of modules, by full name
    # Of pipelines over ranks: the stage of each bucket, then of each of these buffers.
    homes: Mapping[int, int] = field(factory=dict[int, int])
    pp: int = 1

    def slices(self, rank: int, world: int) -> list[Slice]:
        """What rank `rank` of `world` writes to its shard file: its slices of parameters, trained or frozen;
        on the first rank of each pipeline stage also module buffers."""
        world //= self.pp
        stage, own = divmod(rank, world)
        kinds = {b: kind for b, kind in self.kinds.items() if self.homes.get(b, stage) == stage}
        slices = [*slices_of(self.layout, kinds, own, world)]
        for number, x in enumerate(self.buffers if own == 0 else (), len(self.kinds)):
            if x.numel and self.homes.get(number, stage) == stage:
                stored = evolve(x, name=f"{x.name}/{BUFFER}")
                slices.append(Slice(x.name, number, BUFFER, 0, x.numel, 0, stored))
        return slices

    def manifest(
        self,
        world: int,
        shards: Sequence[Shard],
        extra: Mapping[str, Any],
        places: Callable[[int, Slice], Iterable[StateSlice]] = _in_own_shard,
    ) -> Manifest:
        """The manifest of a checkpoint in the files `shards` of `world` ranks, with the caller's `extra`.
        `places(rank, slice)` yields where a rank's slice is stored, by default whole in its own shard."""
        pieces: dict[str, dict[str, tuple[StateSlice, ...]]] = {}  # by name and kind
        for rank in range(world):
            for x in self.slices(rank, world):
                by_kind = pieces.setdefault(x.parameter, {})
                by_kind[x.kind] = (*by_kind.get(x.kind, ()), *places(rank, x))
        common, entries = self.layout.state_format, list[ParameterEntry]()
        for bucket in self.layout.all_buckets:
            trainable = bucket.index < len(self.layout.buckets)
            own = bucket.state_format if trainable and bucket.state_format != common else None
            for span in bucket.spans:  # an empty parameter has no pieces
                by_kind = {
                    x.name: pieces.get(span.name, {}).get(x.name, ()) for x in self.kinds[bucket.index]
                }
                entries.append(ParameterEntry(span.name, span.shape, trainable, by_kind, own))
        for x in self.buffers:
            entries.append(ParameterEntry(x.name, x.shape, False, {BUFFER: (), **pieces.get(x.name, {})}))
        return Manifest(world, common, tuple(shards), tuple(entries), self.position, self.optimizer, extra)
