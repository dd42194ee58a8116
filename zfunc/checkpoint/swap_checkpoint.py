"""A swap space as a checkpoint: the slices of every parameter's state in the files of all ranks, at one commit.

What reads a checkpoint reads it: to resume in another world or layout, to export weights. Its bytes are compared
with the checksums of the commit, so a training that goes on in it meanwhile is found, not mistaken for it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import Checkpoint, Manifest, StateSlice, TrainingPosition
from zfunc.checkpoint.safetensors_file import Shard, TensorInfo
from zfunc.checkpoint.snapshot import Pieces, Slice, entries_of, slices_of, stored_kinds
from zfunc.checkpoint.strict_json import COUNT, TEXT, JsonNode, known
from zfunc.checkpoint.swap_file import (
    SWAP_FILE,
    CommitRecord,
    Stripes,
    SwapHeader,
    read_header,
    read_records,
    swap_file_name,
)
from zfunc.checkpoint.swap_stripes import Stripe, block_checksum
from zfunc.core.dtypes import DTYPES, PRECISIONS, Dtype
from zfunc.core.extents import SUMMED
from zfunc.core.layout import Bucket, Layout, Span
from zfunc.core.optimizer_state import MASTER, STATE_FORMATS
from zfunc.errors import CheckpointError

_EDGES, _SPANS, _FORMAT = [(COUNT, COUNT)], [(TEXT, [COUNT], COUNT, COUNT)], known(lambda: [*STATE_FORMATS])
_METADATA = {"position": TrainingPosition, "optimizer": dict, "extra": dict}
_IDENTITY = {
    **{"state_format": _FORMAT, "state_formats?": [_FORMAT], "precision": known(PRECISIONS)},
    **{"buckets": _EDGES, "frozen_buckets": _EDGES, "trained": _SPANS, "frozen": _SPANS},
}


def swap_identity(layout: Layout, precision: Dtype) -> dict[str, Any]:
    """What the bytes in a swap space mean, in JSON's own types; frozen parameters are stored in `precision`."""

    def fields(span: Span) -> list[Any]:
        return [span.name, [*span.shape], span.start, span.stop]

    formats = [x.state_format for x in layout.buckets]
    return {
        "state_format": layout.state_format,
        **({"state_formats": formats} if len(set(formats)) > 1 else {}),  # of each bucket
        "precision": precision,
        "buckets": [[x.start, x.stop] for x in layout.buckets],
        "frozen_buckets": [[x.start, x.stop] for x in layout.frozen_buckets],
        "trained": [fields(x) for x in layout.spans],
        "frozen": [fields(x) for x in layout.frozen],
    }


def has_swap_files(folder: Path) -> bool:
    """Whether a folder has a file of a swap space."""
    return folder.is_dir() and any(SWAP_FILE.fullmatch(x) for x in os.listdir(folder))


def has_commit(folder: Path) -> bool:
    """Whether a swap space whose first folder this is has a commit of any rank."""
    paths = [folder / x for x in os.listdir(folder) if SWAP_FILE.fullmatch(x)] if folder.is_dir() else []
    headers = ((path, _header(path)) for path in paths)
    return any(header.folder == 0 and max(_records(path, header)) > 0 for path, header in headers)


def open_swap_checkpoint(folder: Path) -> Checkpoint:
    """The newest commit that all ranks of the swap space in `folder`, one of its folders, have.

    Raises CheckpointError, naming the file, if one is missing, damaged, in use or of another run, or if nothing was
    committed.
    """
    some = next(x for x in sorted(os.listdir(folder)) if SWAP_FILE.fullmatch(x))
    header = _header(folder / some)
    first_folder = folder if header.folder == 0 else Path(header.folders[0])
    firsts = [_there(first_folder / swap_file_name(rank, header.world, 0)) for rank in range(header.world)]
    headers = [_header(path) for path in firsts]
    paths = [
        [
            _there((folder if n == header.folder else Path(x)) / swap_file_name(own.rank, own.world, n))
            for n, x in enumerate(own.folders)
        ]
        for own in headers
    ]
    for own, path in zip(headers, firsts, strict=True):
        if (own.run, own.identity) != (header.run, header.identity):
            raise CheckpointError(
                f"{path}: got the swap space of another run than {folder / some}, expected that of one: name "
                "another folder"
            )
        if disk.is_locked(path):
            raise disk.in_use(path)
    records = [_records(path, own) for path, own in zip(firsts, headers, strict=True)]
    number = max((n for n in records[0] if all(n in x for x in records)), default=0)
    commits = [x[number] for x in records] if number else []
    if not commits or any(x.metadata != commits[0].metadata for x in commits):
        got = "different commits of one number" if commits else "no commit that all ranks have"
        raise CheckpointError(f"{folder}: got {got}, expected one: resume from a checkpoint instead")
    manifest = _manifest(headers, commits, str(firsts[0]))
    return Checkpoint(folder, manifest, {path.name: path for own in paths for path in own})


def _there(path: Path) -> Path:
    """The path of a file that exists: each host has those of its own ranks. Before the next one is looked for, as a
    damaged header may say that there are 2^60."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: got none, expected the files of all ranks: mount its drive; if another host has it, "
            "copy it here, or resume on those hosts with the same ranks and folders"
        )
    return path


def _manifest(headers: Sequence[SwapHeader], commits: Sequence[CommitRecord], where: str) -> Manifest:
    identity = JsonNode(headers[0].identity, f"{where}.identity").read(_IDENTITY)
    metadata = JsonNode(commits[0].metadata, f"{where}.metadata").read(_METADATA)
    layout = _layout(identity)

    def parts(header: SwapHeader, b: int) -> Stripes:
        return header.stripes.get(b, ({},))[0]  # generations are cut alike

    # Frozen parameters that were rounded are there in fp32 too.
    in_fp32 = {x.index for x in layout.frozen_buckets if MASTER in parts(headers[0], x.index)}
    kept_in: Dtype = identity["precision"]
    frozen: dict[int, Dtype] = {
        x.index: "fp32" if x.index in in_fp32 else kept_in for x in layout.frozen_buckets
    }
    kinds = stored_kinds(layout, frozen)
    dtypes: dict[int, dict[str, Dtype]] = {
        b: {MASTER if b in in_fp32 else x.name: x.dtype for x in own} for b, own in kinds.items()
    }
    shards = list[Shard]()
    pieces: Pieces = {}
    for rank, (header, commit) in enumerate(zip(headers, commits, strict=True)):
        for x in slices_of(layout, kinds, rank, header.world):
            by_kind = pieces.setdefault(x.parameter, {})
            part = MASTER if x.bucket in in_fp32 else x.kind
            stripes, item = parts(header, x.bucket).get(part, ()), DTYPES[dtypes[x.bucket][part]].nbytes
            cut = _cut_at_stripes(evolve(x, kind=part), stripes, item, len(shards))
            by_kind[x.kind] = (*by_kind.get(x.kind, ()), *cut)
        shards += _shards(header, commit, dtypes)
    return Manifest(
        world=len(headers),
        moments=identity["state_format"],
        shards=tuple(shards),
        parameters=tuple(entries_of(layout, kinds, pieces)),
        **metadata,
    )


def _cut_at_stripes(x: Slice, stripes: Sequence[Stripe], item: int, first: int) -> Iterator[StateSlice]:
    """The parts of a slice in the stripes of its buffer, of `item` bytes an element; shard `first` has file 0."""
    for stripe in stripes:
        begin, end = stripe.start // item, stripe.stop // item
        start, stop = max(x.at, begin), min(x.at + x.stop - x.start, end)
        if start < stop:
            further = x.start - x.at
            yield StateSlice(
                start + further, stop + further, first + stripe.file, _tensor(x.bucket, x.kind), start - begin
            )


def _shards(
    header: SwapHeader, commit: CommitRecord, dtypes: Mapping[int, Mapping[str, Dtype]]
) -> Iterator[Shard]:
    """The committed generations of the extents in each of a rank's files; a tensor for each buffer's stripe."""
    tensors: list[list[TensorInfo]] = [[] for _ in header.folders]
    places: list[dict[str, int]] = [{} for _ in header.folders]
    sums = header.checksums_of(commit)
    for b, g in zip(header.extents, commit.generations, strict=True):
        own = dtypes.get(b, {})
        for kind, stripes in header.stripes[b][g].items():
            if kind in own:
                dtype, name = DTYPES[own[kind]], _tensor(b, kind)
                for x in stripes:
                    numel = (x.stop - x.start) // dtype.nbytes
                    own_sums = tuple(sums[b][kind][x.first : x.last])
                    tensors[x.file].append(TensorInfo(name, dtype.safetensors, (numel,), own_sums))
                    places[x.file][name] = x.place
    for n, size in enumerate(header.sizes):
        file = swap_file_name(header.rank, header.world, n)
        yield Shard(file, size, 0, SUMMED, tuple(tensors[n]), places[n], block_checksum)


def _tensor(b: int, kind: str) -> str:
    return f"{b}/{kind}"


def _layout(identity: Mapping[str, Any]) -> Layout:
    """The layout that `swap_identity` was given, as far as slices need it."""
    common, buckets, frozen = (identity[x] for x in ("state_format", "buckets", "frozen_buckets"))
    formats = [*identity.get("state_formats", [common] * len(buckets)), *[common] * len(frozen)]
    if len(formats) != len(buckets) + len(frozen):
        raise CheckpointError("swap space: got formats of other buckets than it has, expected one for each")
    own: list[Bucket] = []
    for edges, fields in ((buckets, identity["trained"]), (frozen, identity["frozen"])):
        spans = [Span(*x) for x in fields]
        for start, stop in edges:
            inside = tuple(s for s in spans if start <= s.start < stop)
            own.append(Bucket(len(own), start, stop, inside, (), state_format=formats[len(own)]))
    return Layout((), tuple(own[: len(buckets)]), tuple(own[len(buckets) :]))


def _header(path: Path) -> SwapHeader:
    with disk.opened(path) as (read, _):
        return read_header(read, str(path))


def _records(path: Path, header: SwapHeader) -> dict[int, CommitRecord]:
    with disk.opened(path) as (read, _):
        return read_records(read, header, str(path))
