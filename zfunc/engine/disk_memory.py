"""What lives on the disk: the state of every bucket, which a slot holds in turn, and gradients that wait."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.checkpoint.manifest import FROZEN
from zfunc.checkpoint.swap_file import block_checksum
from zfunc.checkpoint.swap_space import SwapSpace, check_folders
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.extents import Extent
from zfunc.core.graph import Region
from zfunc.core.spec import PARAMS, StepSpec
from zfunc.errors import DiskError
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


@define(eq=False)
class StateSlot:
    """Pinned memory that has the state of one bucket at a time."""

    flat: Tensor  # uint8 [of the largest extent of its class]
    state: dict[str, Tensor] = field(factory=dict[str, Tensor], repr=False)  # as the last extent has it


@frozen(eq=False)
class StateOnDisk:
    """Where the disk has one bucket's state: an extent, and the dtypes of its parts."""

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

    def read_part(self, page: Tensor, name: str) -> None:
        """Read one part into the beginning of `page`."""
        (part,) = (x for x in self.extent.parts if x.name == name)
        self.swap.read(self.b, [name], [as_bytes(page[: part.stop - part.start])])

    @property
    def moved(self) -> list[str]:
        """The parts that every update moves."""
        return [x.name for x in self.extent.parts[: self.extent.moved]]

    @property
    def is_written(self) -> bool:
        """Whether there is something to read."""
        return self.swap.is_written(self.b)

    @property
    def in_memory(self) -> list[str]:
        """The parts that memory has as well, and only a commit writes."""
        return self.all[self.extent.moved :]

    @property
    def all(self) -> list[str]:
        """Every part."""
        return [x.name for x in self.extent.parts]

    def _places(self, flat: Tensor, names: Sequence[str]) -> list[memoryview]:
        return [as_bytes(flat[x.start : x.stop]) for x in self.extent.parts if x.name in names]


def extents_of(spec: StepSpec) -> dict[int, Extent]:
    """The extents of a rank by bucket; those of frozen ones have its slice of the parameters."""
    frozen_parameters = {
        bucket.index: Extent.of([], [(FROZEN, bucket.numel // spec.world * spec.element_bytes)])
        for bucket in spec.layout.frozen_buckets
    }
    return {b: spec.extent(b) for b in spec.offloaded} | frozen_parameters


def states_on_disk(spec: StepSpec, swap: SwapSpace, dtype: torch.dtype) -> dict[int, StateOnDisk]:
    """Where `swap` has the state of each bucket; `dtype` is that of parameters on the device."""

    def dtypes(b: int) -> dict[str, torch.dtype]:
        kinds = spec.state_buffers(b) if b < len(spec.layout.buckets) else ()
        return {x.name: TORCH_DTYPES[x.dtype] for x in kinds} | {PARAMS: dtype, FROZEN: dtype}

    return {b: StateOnDisk(swap, b, extent, dtypes(b)) for b, extent in extents_of(spec).items()}


@define(eq=False)
class SpilledBytes:
    """A part of a file that nobody else sees, and that is gone when its process ends."""

    file: DirectFile = field(repr=False)
    start: int
    nbytes: int
    name: str
    checksum: int | None = field(default=None, init=False)  # of what was written
    held: Any = None  # of activations: the slot that they were written from, as it was then

    def write(self, page: Tensor) -> None:
        """Write the bytes of `page`, which has at least as many."""
        data = as_bytes(page)[: self.nbytes]
        self.checksum = None
        self.file.write([data], self.start, self.name)
        self.checksum = block_checksum(data)

    def read(self, page: Tensor) -> None:
        """Read them back into `page`, if a write has ended. Raises DiskError for others than were written."""
        if self.checksum is None:
            return
        data = as_bytes(page)[: self.nbytes]
        self.file.read([data], self.start, self.name)
        if block_checksum(data) != self.checksum:
            raise DiskError(
                f"{self.file.path}: {self.name}: got other bytes than were written, the checksum differs: check "
                "this disk, and load the last commit of the swap space"
            )


def spill_files(regions: Iterable[Region], folders: Sequence[str]) -> dict[Region, SpilledBytes]:
    """Room on the disk for these regions, dealt to the folders in turn.

    Raises DiskError where there is none, and CheckpointError for a folder that is missing or in memory.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    dealt: list[list[Region]] = [[] for _ in folders]
    for n, r in enumerate(sorted(regions, key=lambda r: r.index)):
        dealt[n % len(folders)].append(r)
    if dealt and dealt[0]:
        check_folders(paths)
    places: dict[Region, SpilledBytes] = {}
    for folder, own in zip(paths, dealt, strict=True):
        if own:
            path = folder / f".spilled-{os.getpid()}-{os.urandom(4).hex()}"
            file = DirectFile.create(path, sum(r.nbytes for r in own))
            with suppress(FileNotFoundError):
                path.unlink()
            start = 0
            for r in own:
                places[r] = SpilledBytes(file, start, r.nbytes, str(r))
                start += r.nbytes
    return places
