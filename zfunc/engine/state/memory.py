"""The memory of regions: tensors, what slots have in turn, the state of every bucket on the disk, spilled bytes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from zfunc.checkpoint.swap_file import (
    Stripe,
    StripedBuffer,
    lay_stripes,
    num_checksums,
    read_striped,
    write_striped,
)
from zfunc.checkpoint.swap_space import SwapSpace, check_folders
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.extents import BLOCK, Extent
from zfunc.core.graph import Region, Tier
from zfunc.core.layout import Bucket, round_up
from zfunc.core.optimizer_state import HIGH_HALF, MASTER
from zfunc.core.spec import ALLOCATION, FROZEN, PARAMS, StepSpec
from zfunc.engine.trace.tensor_memory import byte_range, storage_of
from zfunc.errors import CheckpointError, DiskError
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


@define(eq=False)
class Flat:
    """Flat memory of one bucket, or of one at a time in a slot, and its tensors by name.

    Of parameters these are views in their shapes, by full name, if it has all of the bucket: in a rank's slice a
    parameter may have a part. Of a state that was paged in they are its parts.
    """

    flat: Tensor
    views: dict[str, Tensor] = field(factory=dict[str, Tensor])
    _held: dict[int, "Flat"] = field(factory=dict[int, "Flat"], repr=False)  # by bucket, what it was

    @classmethod
    def of(cls, flat: Tensor, bucket: Bucket) -> "Flat":
        """A Flat for the parameters of `bucket`, or for a rank's slice of them."""
        start, spans = bucket.start, bucket.spans if flat.numel() == bucket.numel else ()
        return cls(flat, {x.name: flat[x.start - start : x.stop - start].view(x.shape) for x in spans})

    def hold(self, bucket: Bucket) -> Tensor:
        """Let this slot have the parameters of `bucket` from now on; returns the memory that they take."""
        if bucket.index not in self._held:
            self._held[bucket.index] = Flat.of(self.flat[: bucket.numel], bucket)
        held = self._held[bucket.index]
        self.views = held.views
        return held.flat


@frozen(eq=False)
class OnHost:
    """A residual that a device's kernel keeps on the host, as fused attention does the seed of its dropout, and
    reads there: it does not move."""

    value: Tensor


@define(eq=False)
class Squares:
    """Sums of the squares of one bucket's gradient: SUM_PARTS numbers in fp64 for each row, a bucket's or a
    parameter's. Or, with `rows`, norms in fp32 that begin `flat`, and the row of each, which the host squares."""

    flat: Tensor  # fp64
    rows: Sequence[int] | None = None

    @property
    def norms(self) -> Tensor:
        """The fp32 norms on the device, one for each of `rows`."""
        return self.flat.view(torch.float32)[: len(self.rows or ())]


@define(eq=False)
class ActivationSlot:
    """Memory that has the tensors of one pytree at a time: what backward of a segment needs."""

    flat: Tensor  # uint8
    tree: Any = None
    used: int = 0  # bytes that have been put here

    @property
    def nbytes(self) -> int:
        """The bytes of the slot."""
        return self.flat.numel()

    def hold(self, other: "ActivationSlot") -> None:
        """From now on it has the tensors that `other` had, whose bytes have come here."""
        further = self.flat.storage_offset() - other.flat.storage_offset()

        def here(t: Tensor) -> Tensor:
            offset = t.storage_offset() + further // t.itemsize
            return self.flat.view(t.dtype).as_strided(t.shape, t.stride(), offset)

        self.tree = tree_map_only(Tensor, here, other.tree)

    def put(self, tree: Any) -> None:
        """Copy the tensors of `tree` here; on an accelerator without waiting. Those that share memory still do."""
        leaves, structure = tree_flatten(tree)
        on_host = self.flat.device.type == "cpu"
        if on_host and any(isinstance(x, Tensor) and x.device.type != "cpu" for x in leaves):
            leaves = [OnHost(x) if isinstance(x, Tensor) and x.device.type == "cpu" else x for x in leaves]
        start, copies = 0, dict[int, Tensor]()
        for sharing in _close_together(t for t in leaves if isinstance(t, Tensor)):
            coarsest = max(t.itemsize for t in sharing)
            first = min(byte_range(t)[0] for t in sharing) // coarsest * coarsest
            last = max(byte_range(t)[1] for t in sharing)
            finest = min(sharing, key=lambda t: t.itemsize)
            numel, offset = (last - first) // finest.itemsize, first // finest.itemsize
            source = finest.as_strided((numel,), (1,), offset).view(torch.uint8)
            copy = self.flat[start : start + last - first].copy_(source, non_blocking=True)
            for t in sharing:
                begin, end = (edge - first for edge in byte_range(t))
                typed = copy[begin:end].view(t.dtype)
                copies[id(t)] = typed.as_strided(t.shape, t.stride(), typed.storage_offset())
            start += round_up(last - first, ALLOCATION)
        leaves = [copies.get(id(x), x) for x in leaves]
        if not on_host:
            leaves = [x.value if isinstance(x, OnHost) else x for x in leaves]
        self.tree, self.used = tree_unflatten(leaves, structure), start

    def copied(self) -> "ActivationSlot":
        """A copy of the pytree in this slot, in memory of its own."""
        other = ActivationSlot(self.flat[: self.used].clone())
        other.hold(self)
        return other


def _close_together(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in groups that are copied as one: those that overlap in memory, or lie in one unit of allocation.

    So a group takes no more room than its tensors alone, nor than the part of a storage that it is in.
    """
    group, storage, start, end = list[Tensor](), 0, 0, 0
    for t in sorted(tensors, key=lambda t: (storage_of(t), byte_range(t))):
        (first, last), of = byte_range(t), storage_of(t)
        if group and (of != storage or first >= end):
            yield group
            group = []
        if not group:
            storage, start, end = of, first, first
        group.append(t)
        end = max(end, start + round_up(last - start, ALLOCATION))
    if group:
        yield group


@frozen(eq=False)
class StateOnDisk:
    """One bucket's state on the disk: an extent, and the dtypes of its parts."""

    swap: SwapSpace = field(repr=False)
    b: int
    extent: Extent
    dtypes: Mapping[str, torch.dtype]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts by name, as views of the memory for a whole extent."""
        return {
            x.name: flat[x.start : x.start + x.nbytes].view(self.dtypes[x.name]) for x in self.extent.parts
        }

    def read(self, flat: Tensor, names: Sequence[str]) -> None:
        """Read parts that follow one another into their places in `flat`."""
        self.swap.read(self.b, names, self._places(flat, names))

    def write(self, flat: Tensor, names: Sequence[str]) -> None:
        """Write parts that follow one another from their places in `flat`."""
        self.swap.write(self.b, names, self._places(flat, names))

    def read_weights(self, page: Tensor | None = None) -> Tensor:
        """Read the parameters, or this rank's slice of them, into the beginning of `page`, or into new memory."""
        return self.read_part(next(x for x in (PARAMS, FROZEN, HIGH_HALF) if x in self.all), page)

    def read_part(self, name: str, page: Tensor | None = None) -> Tensor:
        """Read one part into the beginning of `page`, or into new memory."""
        (part,) = (x for x in self.extent.parts if x.name == name)
        size = part.stop - part.start
        page = alloc_host(size, torch.uint8) if page is None else page
        self.swap.read(self.b, [part.name], [as_bytes(page[:size])])
        return page[: part.nbytes].view(self.dtypes[part.name])

    @property
    def moved(self) -> list[str]:
        """The names of the parts that every update reads and writes."""
        return [x.name for x in self.extent.parts[: self.extent.moved]]

    @property
    def is_written(self) -> bool:
        """Whether the disk has values of the bucket's state yet."""
        return self.swap.is_written(self.b)

    @property
    def in_memory(self) -> list[str]:
        """The names of the parts that memory has as well, and only a commit writes."""
        return self.all[self.extent.moved :]

    @property
    def all(self) -> list[str]:
        """The names of all parts of the bucket's state on the disk."""
        return [x.name for x in self.extent.parts]

    def _places(self, flat: Tensor, names: Sequence[str]) -> list[memoryview]:
        return [as_bytes(flat[x.start : x.stop]) for x in self.extent.parts if x.name in names]


def states_on_disk(spec: StepSpec, swap: SwapSpace) -> dict[int, StateOnDisk]:
    """The state of each bucket in `swap`."""

    def dtypes(b: int) -> dict[str, torch.dtype]:
        kinds = spec.places[b].buffers
        own = {**dict.fromkeys((PARAMS, FROZEN), TORCH_DTYPES[spec.places[b].dtype]), MASTER: torch.float32}
        return own | {x.name: TORCH_DTYPES[x.dtype] for x in kinds}

    return {b: StateOnDisk(swap, b, extent, dtypes(b)) for b, extent in spec.swapped.items()}


@define(eq=False)
class SpilledBytes:
    """A part of files that nobody else sees, and that are gone when their process ends."""

    files: Sequence[DirectFile] = field(repr=False)
    stripes: Sequence[Stripe]
    nbytes: int
    name: str
    checksums: list[int] | None = field(default=None, init=False)  # of what was written
    held: Any = None  # of activations: the slot that they were written from, as it was then

    def write(self, page: Tensor) -> None:
        """Write the bytes of `page`, which has at least as many."""
        self.checksums, new = None, [0] * num_checksums(self.stripes)
        write_striped(self.files, [self._buffer(page, new)])
        self.checksums = new

    def read(self, page: Tensor) -> None:
        """Read them back into `page`, if a write has ended. Raises DiskError for others than were written."""
        if self.checksums is None:
            return
        try:
            read_striped(self.files, [self._buffer(page, self.checksums)])
        except CheckpointError as error:
            raise DiskError(str(error)) from error

    def _buffer(self, page: Tensor, checksums: list[int]) -> StripedBuffer:
        return StripedBuffer(self.name, as_bytes(page)[: self.nbytes], self.stripes, checksums)


def spill_files(regions: Iterable[Region], folders: Sequence[str]) -> dict[Region, SpilledBytes]:
    """Room on the disk for these regions, each in equal parts on all folders.

    Raises DiskError where there is none, and CheckpointError for a folder that is missing or in memory.
    """
    if not (regions := sorted(regions, key=lambda r: r.index)):
        return {}
    paths, ends = [Path(folder).expanduser() for folder in folders], [0] * len(folders)
    check_folders(paths)
    stripes = [lay_stripes(r.nbytes, [1] * len(paths), ends) for r in regions]
    files = [DirectFile.unnamed(path, max(end, BLOCK)) for path, end in zip(paths, ends, strict=True)]
    return {r: SpilledBytes(files, x, r.nbytes, str(r)) for r, x in zip(regions, stripes, strict=True)}


# --- allocation ----------------------------------------------------------------------------------------------

HOLDERS = {"params": Flat, "paged": Flat, "act": ActivationSlot, "squares": Squares}  # or the tensor itself


def allocate_regions(
    regions: Iterable[Region], devices: Sequence[torch.device], folders: Sequence[str]
) -> dict[Region, Any]:
    """Zeroed memory, one allocation for each buffer and tier, or device, whose regions may be of different dtypes.

    What is on the disk has room in files of its own in `folders`.
    """
    groups: dict[tuple[str, Tier], list[Region]] = {}
    for r in regions:
        groups.setdefault((r.buffer, r.place), []).append(r)
    memory: dict[Region, Any] = spill_files(
        [r for (_, tier), group in groups.items() if tier == "disk" for r in group], folders
    )
    for group in (group for (_, tier), group in groups.items() if tier != "disk"):
        first, *_ = group = sorted(group, key=lambda r: r.index)
        ends = [0, *accumulate(r.nbytes for r in group)]
        flat = _allocate_flat(first, ends[-1], devices[first.device])
        holder = HOLDERS.get(first.role or "", lambda part: part)
        for r, (start, stop) in zip(group, pairwise(ends), strict=True):
            memory[r] = holder(flat[start:stop].view(TORCH_DTYPES[r.dtype or "uint8"]))
    return memory


def _allocate_flat(r: Region, nbytes: int, device: torch.device) -> Tensor:
    """One zeroed allocation of `nbytes` for regions of the place of `r`, as uint8."""
    # Updated by the host kernel.
    on_host = r.tier != "device" or (r.role == "state" and not on_accelerator(device))
    if not on_host:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pinned_for = device if r.tier == "pinned" and on_accelerator(device) else None
    return alloc_host(nbytes, torch.uint8, pinned_for=pinned_for)
