"""What lives on the disk: the state of every bucket, which a slot holds in turn; waiting gradients; activations."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

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
from zfunc.core.graph import Region
from zfunc.core.optimizer_state import HIGH_HALF, MASTER
from zfunc.core.spec import FROZEN, PARAMS, StepSpec
from zfunc.errors import CheckpointError, DiskError
from zfunc.runtime.direct_io import DirectFile
from zfunc.runtime.host_memory import alloc_host
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

    def opened(self) -> Tensor:
        """Memory for all parts, with those that every update moves; zeros where they were never written."""
        flat = alloc_host(self.extent.nbytes, torch.uint8)
        if self.is_written:
            self.read(flat, self.moved)
        return flat

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


def states_on_disk(spec: StepSpec, swap: SwapSpace, dtype: torch.dtype) -> dict[int, StateOnDisk]:
    """Where `swap` has the state of each bucket; `dtype` is that of parameters on the device."""

    def dtypes(b: int) -> dict[str, torch.dtype]:
        kinds = spec.state_buffers(b) if b < len(spec.layout.buckets) else ()
        own = {PARAMS: dtype, FROZEN: dtype, MASTER: torch.float32}
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
