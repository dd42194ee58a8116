"""A swap space as a checkpoint: the slices of every parameter's state in the files of all ranks, at one commit.

What reads a checkpoint reads it: to resume in another world or layout, to export weights. Its bytes are compared
with the checksums of the commit, so a training that goes on in it meanwhile is found, not mistaken for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from attrs import evolve, frozen

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import (
    Checkpoint,
    Manifest,
    Slice,
    Snapshot,
    StateSlice,
    TrainingPosition,
    stored_kinds,
)
from zfunc.checkpoint.safetensors_file import BYTES, Shard, TensorInfo
from zfunc.checkpoint.strict_json import Count, JsonNode, Text, known, to_plain
from zfunc.checkpoint.swap_file import (
    CommitRecord,
    Stripes,
    SwapHeader,
    block_checksum,
    read_space,
    swap_file_name,
)
from zfunc.checkpoint.swap_space import in_use, swap_files
from zfunc.core.display import counted
from zfunc.core.dtypes import DTYPES, PRECISIONS, Dtype
from zfunc.core.extents import SUMMED
from zfunc.core.layout import Bucket, Layout, Span
from zfunc.core.optimizer_state import MASTER, STATE_FORMATS

_Edges: TypeAlias = tuple[tuple[Count, Count], ...]
_Spans: TypeAlias = tuple[tuple[Text, tuple[Count, ...], Count, Count], ...]  # name, shape, start, stop
_Format: TypeAlias = Annotated[str, known(lambda: {x: x for x in STATE_FORMATS})]


@frozen
class SwapIdentity:
    """What is stored in a swap space (files of training state on disk): the buckets and their parameters;
    frozen ones are in `precision`.

    `state_formats` has the state format of each bucket, if they differ; `in_fp32` the indices of buckets
    whose parameters are fp32 in any precision; `in_bytes` those of encoded weights, in uint8; `pp` the number
    of pipeline stages, if above 1.
    """

    state_format: _Format
    precision: Annotated[Dtype, known(lambda: {x: x for x in PRECISIONS})]
    buckets: _Edges
    frozen_buckets: _Edges
    trained: _Spans
    frozen: _Spans
    state_formats: tuple[_Format, ...] | None = None
    in_fp32: tuple[Count, ...] | None = None
    pp: Count | None = None
    in_bytes: tuple[Count, ...] | None = None

    def layout(self) -> Layout:
        """The Layout of the stored parameters, as far as slices of their state need it: buckets and spans."""
        formats = self.state_formats or (self.state_format,) * len(self.buckets)
        if len(formats) != len(self.buckets):
            disk.reject("swap space", "formats of other buckets than it has", "one for each")
        formats += (self.state_format,) * len(self.frozen_buckets)
        own: list[Bucket] = []
        for edges, fields in ((self.buckets, self.trained), (self.frozen_buckets, self.frozen)):
            spans = [Span(*x) for x in fields]
            for start, stop in edges:
                inside = tuple(s for s in spans if start <= s.start < stop)
                n, fp32 = len(own), len(own) in (self.in_fp32 or ())
                own.append(Bucket(n, start, stop, inside, (), state_format=formats[n], in_fp32=fp32))
        return Layout((), tuple(own[: len(self.buckets)]), tuple(own[len(self.buckets) :]))


@frozen
class CommitMetadata:
    """What a commit to a swap space stores beside tensors: position, optimizer settings, user's `extra`."""

    position: TrainingPosition
    optimizer: Mapping[str, Any]
    extra: Mapping[str, Any]


def swap_identity(layout: Layout, precision: Dtype, pp: int = 1) -> dict[str, Any]:
    """The `SwapIdentity` of a layout in JSON's own types."""
    formats = tuple(x.state_format for x in layout.buckets)
    edges = [tuple((x.start, x.stop) for x in of) for of in (layout.buckets, layout.frozen_buckets)]
    spans = [tuple((x.name, x.shape, x.start, x.stop) for x in of) for of in (layout.spans, layout.frozen)]
    several = formats if len(set(formats)) > 1 else None
    fp32 = tuple(x.index for x in layout.all_buckets if x.in_fp32) or None
    encoded = tuple(x.index for x in layout.all_buckets if x.is_bytes) or None
    stages = pp if pp > 1 else None
    return to_plain(
        SwapIdentity(
            *(layout.state_format, precision, edges[0], edges[1], spans[0], spans[1]),
            *(several, fp32, stages, encoded),
        )
    )


def has_swap_files(folder: Path) -> bool:
    """Whether a folder has a file of a swap space."""
    return folder.is_dir() and bool(swap_files(folder))


def open_swap_checkpoint(folder: Path) -> Checkpoint:
    """Open the newest commit that all ranks of a swap space (files of training state on disk) have, as a
    checkpoint; `folder` is any of its folders.

    Raises CheckpointError, naming the file, if a file is missing, damaged, in use or of another run, or
    nothing was committed.
    """
    some = swap_files(folder)[0]
    header, _ = read_space(some)
    headers, records, paths = list[SwapHeader](), list[Mapping[int, CommitRecord]](), list[Path]()
    for rank in range(header.world):  # one after the other: a damaged header may say that there are 2^60
        first = _there(evolve(header, rank=rank), 0, folder, header.folder)
        if disk.is_locked(first):
            raise in_use(first)
        own, commits = read_space(first)
        if (own.run, own.identity) != (header.run, header.identity):
            got = f"the swap space of another run than {some}"
            disk.reject(first, got, "that of one", "name another folder")
        headers.append(own)
        records.append(commits)
        others = range(1, len(own.folders))
        paths += [first, *(_there(own, n, folder, header.folder) for n in others)]
    number = max((n for n in records[0] if all(n in x for x in records)), default=0)
    commits = [x[number] for x in records] if number else []
    if not commits or any(x.metadata != commits[0].metadata for x in commits):
        got = "different commits of one number" if commits else "no commit that all ranks have"
        disk.reject(folder, got, "one", "resume from a checkpoint instead")
    return Checkpoint(folder, _manifest(headers, commits, str(paths[0])), {x.name: x for x in paths})


def _there(header: SwapHeader, n: int, folder: Path, number: int) -> Path:
    """The path of a rank's swap file number `n`: in `folder`, which is folder number `number`, if that is
    `n`; else in the header's folder `n`. Raises CheckpointError if the file is missing."""
    path = folder / header.paths[n].name if n == number else header.paths[n]
    if not path.exists():
        do = "if another host has it, copy it here, or resume on those hosts with the same ranks and folders"
        disk.reject(path, "none", "the files of all ranks", f"mount its drive; {do}")
    return path


def _manifest(headers: Sequence[SwapHeader], commits: Sequence[CommitRecord], where: str) -> Manifest:
    identity: SwapIdentity = JsonNode(headers[0].identity, f"{where}.identity").read(SwapIdentity)
    said: CommitMetadata = JsonNode(commits[0].metadata, f"{where}.metadata").read(CommitMetadata)
    layout = identity.layout()
    firsts = [*accumulate((len(x.folders) for x in headers), initial=0)]  # shards, by rank
    buckets = [x.index for x in layout.frozen_buckets]
    in_fp32 = {b for b in buckets if any(MASTER in _parts(x, b) for x in headers)}  # beside rounded ones
    frozen: dict[int, Dtype] = dict.fromkeys(buckets, identity.precision)
    frozen |= dict.fromkeys((b for b in buckets if b in in_fp32 or layout.all_buckets[b].in_fp32), "fp32")
    frozen |= dict.fromkeys((b for b in identity.in_bytes or () if b in frozen), "uint8")
    if len(headers) % (pp := identity.pp or 1):
        disk.reject(where, f"{pp} stages of {counted(len(headers), 'rank')}", "a number that divides them")
    homes = {b: x.rank * pp // x.world for x in headers for b in x.extents} if pp > 1 else {}
    kinds = stored_kinds(layout, frozen)
    snapshot = Snapshot(layout, kinds, said.position, said.optimizer, homes=homes, pp=pp)

    def places(rank: int, x: Slice) -> Iterator[StateSlice]:
        """Yield where slice `x` of `rank` is stored: one part for each swap file that has a part of it."""
        item, part = BYTES[x.stored.dtype], MASTER if x.bucket in in_fp32 else x.kind
        on = x.start - x.at  # from the buffer's elements to the parameter's
        for stripe in _parts(headers[rank], x.bucket).get(part, ()):
            begin, end = stripe.start // item, stripe.stop // item
            start, stop = max(x.at, begin), min(x.at + x.stop - x.start, end)
            if start < stop:
                shard, tensor = firsts[rank] + stripe.file, _tensor(x.bucket, part)
                yield StateSlice(start + on, stop + on, shard, tensor, start - begin)

    dtypes: dict[int, dict[str, Dtype]] = {
        b: {MASTER if b in in_fp32 else x.name: x.dtype for x in own} for b, own in snapshot.kinds.items()
    }
    shards = [x for own in zip(headers, commits, strict=True) for x in _shards(*own, dtypes)]
    return snapshot.manifest(len(headers), shards, said.extra, places)


def _parts(header: SwapHeader, b: int) -> Stripes:
    """The stripes (ranges in swap files) of each buffer of bucket `b`, by name; those of its first copy, as
    all copies are divided alike."""
    return header.stripes.get(b, ({},))[0]


def _shards(
    header: SwapHeader, commit: CommitRecord, dtypes: Mapping[int, Mapping[str, Dtype]]
) -> Iterator[Shard]:
    """Yield a Shard for each of a rank's swap files, whose tensors are the stripes of buffers in the copies
    that `commit` made valid. `dtypes[bucket][kind]` is a buffer's dtype."""
    tensors: list[list[TensorInfo]] = [[] for _ in header.folders]
    places: list[dict[str, int]] = [{} for _ in header.folders]
    for b, g in zip(header.extents, commit.generations, strict=True):
        for kind, own in dtypes.get(b, {}).items():
            for x in header.stripes[b][g].get(kind, ()):
                dtype, name = DTYPES[own], _tensor(b, kind)
                numel, sums = (x.stop - x.start) // dtype.nbytes, tuple(commit.checksums[x.first : x.last])
                tensors[x.file].append(TensorInfo(name, dtype.safetensors, (numel,), sums))
                places[x.file][name] = x.place
    for n, size in enumerate(header.sizes):
        file = swap_file_name(header.rank, header.world, n)
        yield Shard(file, size, 0, SUMMED, tuple(tensors[n]), places[n], block_checksum)


def _tensor(b: int, kind: str) -> str:
    return f"{b}/{kind}"
