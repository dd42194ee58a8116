"""The memory of regions: flat tensors, slots that buckets take in turn, buckets' state on the disk, spill files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from zfunc.checkpoint.durable_files import check_folders
from zfunc.checkpoint.swap_file import (
    Stripe,
    StripedBuffer,
    lay_stripes,
    num_checksums,
    read_striped,
    write_striped,
)
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.extents import BLOCK, Extent, whole_blocks
from zfunc.core.graph import Region, Tier
from zfunc.core.layout import Bucket, round_up
from zfunc.core.optimizer_state import FROZEN, HIGH_HALF, MASTER, PARAMS
from zfunc.core.spec import ALLOCATION, StepSpec
from zfunc.engine.trace.tensor_memory import byte_range, storage_of
from zfunc.errors import CheckpointError, DiskError
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


@define(eq=False)
class Flat:
    """The flat memory of one bucket, or of a slot for one bucket at a time, and `views` of it by name.

    For parameters, the views are the parameters in their shapes, by full name; a rank's slice of a bucket has
    none, as it may have parts of parameters. For optimizer state read from the disk, the views are the
    state's buffers.
    """

    flat: Tensor
    views: dict[str, Tensor] = field(factory=dict[str, Tensor])
    _held: dict[int, "Flat"] = field(factory=dict[int, "Flat"], repr=False)  # by bucket, what it was

    @classmethod
    def of(cls, flat: Tensor, bucket: Bucket) -> "Flat":
        """A Flat over the tensor `flat`, which has the parameters of `bucket`, or a rank's slice of them."""
        start, spans = bucket.start, bucket.spans if flat.numel() == bucket.numel else ()
        return cls(flat, {x.name: flat[x.start - start : x.stop - start].view(x.shape) for x in spans})

    def hold(self, bucket: Bucket) -> Tensor:
        """Make the views of this memory those of the parameters of `bucket`; returns the part of the memory
        that they take."""
        if bucket.index not in self._held:
            self._held[bucket.index] = Flat.of(self.flat[: bucket.numel], bucket)
        held = self._held[bucket.index]
        self.views = held.views
        return held.flat


def flat_of(held: Flat | Tensor) -> Tensor:
    """The flat tensor of `held`, which is a `Flat` or that tensor itself."""
    return held.flat if isinstance(held, Flat) else held


@frozen(eq=False)
class OnHost:
    """Wraps a residual that lies in host memory although its segment runs on a device, such as the seed of
    fused attention's dropout: copies between tiers leave it where it is."""

    value: Tensor


@define(eq=False)
class Squares:
    """Memory for the sums of squares of one bucket's gradient: rows of fp64 numbers that add up exactly, one
    row for the bucket or for each of its parameters. If a device writes fp32 norms of parts instead, `rows`
    has, for each norm, the row to which its square will be added."""

    flat: Tensor  # fp64
    rows: Sequence[int] | None = None

    @property
    def norms(self) -> Tensor:
        """View of the memory as fp32 norms of parts of the gradient, one for each entry of `rows`."""
        return self.flat.view(torch.float32)[: len(self.rows or ())]


@define(eq=False)
class ActivationSlot:
    """Flat memory for one pytree of tensors at a time: input and residuals that a backward needs.

    `parts` are slots in the rest of this memory, from whole disk blocks on, for tensors with a place of their
    own on the disk, by segment and leaf.
    """

    flat: Tensor  # uint8
    tree: Any = None
    used: int = 0  # bytes that have been put here
    parts: dict[tuple[int, ...], "ActivationSlot"] = field(factory=dict[Any, Any])

    @property
    def nbytes(self) -> int:
        """The size of the activation slot in bytes."""
        return self.flat.numel()

    def hold(self, other: "ActivationSlot") -> None:
        """Take over the pytree of slot `other`, whose bytes have been copied into this slot's memory."""
        further = self.flat.storage_offset() - other.flat.storage_offset()

        def here(t: Tensor) -> Tensor:
            offset = t.storage_offset() + further // t.itemsize
            return self.flat.view(t.dtype).as_strided(t.shape, t.stride(), offset)

        self.tree = tree_map_only(Tensor, here, other.tree)

    def put(self, tree: Any, instead: Mapping[int, Any] | None = None) -> list[Any]:
        """Copy the tensors of `tree` into this slot without waiting for a device; tensors that share memory
        share it here, too. Returns the leaves of `tree`.

        `instead` replaces leaves of `tree` by number before the copy; None leaves one out.
        """
        given, structure = _flatten_apart(tree)
        leaves = [*given]
        for n, value in (instead or {}).items():
            leaves[n] = value
        self.used, self.parts = 0, {}

        def next_part(nbytes: int) -> Tensor:
            start, self.used = self.used, self.used + round_up(nbytes, ALLOCATION)
            return self.flat[start : start + nbytes]

        self.tree = tree_unflatten(_copy_leaves(leaves, next_part, self.flat.device), structure)
        return given

    def add_part(self, at: tuple[int, ...]) -> "ActivationSlot":
        """A slot named `at` in `parts`, behind the pytree and the part before, which has been used."""
        start = sum(whole_blocks(x.used) for x in (self, *self.parts.values()))
        return self.parts.setdefault(at, ActivationSlot(self.flat[start:]))

    def copied(self) -> "ActivationSlot":
        """A new slot with a copy of this slot's pytree, in newly allocated memory."""
        other = ActivationSlot(self.flat[: self.used].clone())
        other.hold(self)
        return other


def _flatten_apart(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves and the structure of a pytree; its tensors on the host are `OnHost` if others are on a device."""
    leaves, structure = tree_flatten(tree)
    if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in leaves):
        leaves = [OnHost(x) if isinstance(x, Tensor) and x.device.type == "cpu" else x for x in leaves]
    return leaves, structure


def copy_tree(tree: Any, memory: Callable[[int], Tensor], device: torch.device) -> Any:
    """Copy the tensors of a pytree, without waiting for a device: tensors that share memory together, each group
    into `memory(nbytes)`, a uint8 tensor [nbytes] on `device`. On a device, a leaf `OnHost` becomes its tensor."""
    leaves, structure = _flatten_apart(tree)
    return tree_unflatten(_copy_leaves(leaves, memory, device), structure)


def _copy_leaves(leaves: list[Any], memory: Callable[[int], Tensor], device: torch.device) -> list[Any]:
    """The `leaves` of a pytree with copies of their tensors, made as `copy_tree` does."""
    copies = dict[int, Tensor]()
    for sharing in _close_together(t for t in leaves if isinstance(t, Tensor)):
        coarsest = max(t.itemsize for t in sharing)
        first = min(byte_range(t)[0] for t in sharing) // coarsest * coarsest
        last = max(byte_range(t)[1] for t in sharing)
        finest = min(sharing, key=lambda t: t.itemsize)
        numel, offset = (last - first) // finest.itemsize, first // finest.itemsize
        source = finest.as_strided((numel,), (1,), offset).view(torch.uint8)
        copy = memory(last - first).copy_(source, non_blocking=True)
        for t in sharing:
            begin, end = (edge - first for edge in byte_range(t))
            typed = copy[begin:end].view(t.dtype)
            copies[id(t)] = typed.as_strided(t.shape, t.stride(), typed.storage_offset())
    leaves = [copies.get(id(x), x) for x in leaves]
    if device.type != "cpu":
        leaves = [x.value if isinstance(x, OnHost) else x for x in leaves]
    return leaves


def _close_together(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors to be copied as one: those that overlap in memory, or lie in one unit of
    allocation.

    Copying a group takes no more memory than copying its tensors one by one, nor than the range of storage
    that it spans.
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
    """One bucket's state in a swap space (files on disk): its extent, and each buffer's dtype by name."""

    swap: SwapSpace = field(repr=False)
    b: int
    extent: Extent
    dtypes: Mapping[str, torch.dtype]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The bucket's state buffers by name, as views of `flat`, uint8 memory for the bucket's whole extent."""
        return {
            x.name: flat[x.start : x.start + x.nbytes].view(self.dtypes[x.name]) for x in self.extent.parts
        }

    def read(self, flat: Tensor, names: Sequence[str]) -> None:
        """Read the consecutive state buffers `names` from the disk to their positions in `flat` (`views`)."""
        self.swap.read(self.b, names, self._places(flat, names))

    def write(self, flat: Tensor, names: Sequence[str]) -> None:
        """Write the consecutive state buffers `names` to the disk from their positions in `flat`
        (`views`)."""
        self.swap.write(self.b, names, self._places(flat, names))

    def read_weights(self, page: Tensor | None = None) -> Tensor:
        """Read the bucket's parameters, of several ranks this one's slice, from the disk to the start of
        `page`, or into new host memory; returns a view."""
        return self.read_part(next(x for x in (PARAMS, FROZEN, HIGH_HALF) if x in self.all), page)

    def read_part(self, name: str, page: Tensor | None = None) -> Tensor:
        """Read the bucket's state buffer `name` from the disk to the start of `page`, or into new host memory."""
        (part,) = (x for x in self.extent.parts if x.name == name)
        size = part.stop - part.start
        page = alloc_host(size, torch.uint8) if page is None else page
        self.swap.read(self.b, [part.name], [as_bytes(page[:size])])
        return page[: part.nbytes].view(self.dtypes[part.name])

    @property
    def moved(self) -> list[str]:
        """The names of the bucket's state buffers that every update reads from the disk and writes back."""
        return [x.name for x in self.extent.parts[: self.extent.moved]]

    @property
    def is_written(self) -> bool:
        """Whether the bucket's state has been written to the disk at least once."""
        return self.swap.is_written(self.b)

    @property
    def in_memory(self) -> list[str]:
        """The names of the bucket's state buffers that stay in memory; only a commit writes these to the disk."""
        return self.all[self.extent.moved :]

    @property
    def all(self) -> list[str]:
        """The names of all of the bucket's state buffers that the disk has room for."""
        return [x.name for x in self.extent.parts]

    def _places(self, flat: Tensor, names: Sequence[str]) -> list[memoryview]:
        return [as_bytes(flat[x.start : x.stop]) for x in self.extent.parts if x.name in names]


def states_on_disk(spec: StepSpec, swap: SwapSpace) -> dict[int, StateOnDisk]:
    """The state of each bucket that the swap space `swap` has, as a `StateOnDisk` by bucket index."""

    def dtypes(b: int) -> dict[str, torch.dtype]:
        kinds = spec.places[b].buffers
        own = {**dict.fromkeys((PARAMS, FROZEN), TORCH_DTYPES[spec.places[b].dtype]), MASTER: torch.float32}
        return own | {x.name: TORCH_DTYPES[x.dtype] for x in kinds}

    return {b: StateOnDisk(swap, b, extent, dtypes(b)) for b, extent in spec.swapped.items()}


@define(eq=False)
class SpilledBytes:
    """Disk space for one region, such as a waiting gradient, divided among unnamed files, which vanish when
    their process ends."""

    files: Sequence[DirectFile] = field(repr=False)
    stripes: Sequence[Stripe]
    nbytes: int
    name: str
    checksums: list[int] | None = field(default=None, init=False)  # of what was written
    held: Any = None  # of activations: the slot that they were written from, as it was then

    def write(self, page: Tensor) -> None:
        """Write the region's bytes from the start of `page` to the disk, and remember their checksums."""
        self.checksums, new = None, [0] * num_checksums(self.stripes)
        write_striped(self.files, [self._buffer(page, new)])
        self.checksums = new

    def read(self, page: Tensor) -> None:
        """Read the region's bytes from the disk to the start of `page`, if any were written. Raises DiskError
        if a checksum differs."""
        if self.checksums is None:
            return
        try:
            read_striped(self.files, [self._buffer(page, self.checksums)])
        except CheckpointError as error:
            raise DiskError(str(error)) from error

    def _buffer(self, page: Tensor, checksums: list[int]) -> StripedBuffer:
        return StripedBuffer(self.name, as_bytes(page)[: self.nbytes], self.stripes, checksums)


def spill_files(regions: Iterable[Region], folders: Sequence[str]) -> dict[Region, SpilledBytes]:
    """Reserve disk space for each of `regions`, in equal parts in all `folders`.

    Raises DiskError where a disk is full, and CheckpointError for a folder that is missing or in memory.
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
    """Allocate zeroed memory for `regions`; those with the same buffer name, tier and device are views of one
    allocation.

    Regions of one buffer may differ in dtype. Regions on the disk get space in unnamed files in `folders`.
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
    """One zeroed uint8 allocation of `nbytes` bytes in the memory of region `r`: device, pinned or host memory."""
    # Updated by the host kernel.
    on_host = r.tier != "device" or (r.role == "state" and not on_accelerator(device))
    if not on_host:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pinned_for = device if r.tier == "pinned" and on_accelerator(device) else None
    return alloc_host(nbytes, torch.uint8, pinned_for=pinned_for)
