"""Reads slices of a checkpoint's state into buffers, whatever files they lie in.

The reads of a slice fill it, every element once, and every byte passes its checksum.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.manifest import Checkpoint, Manifest
from zfunc.checkpoint.safetensors_file import BYTES, ShardReader, cut_elements, open_shard
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.optimizer_state import EMA, FROZEN, weight_buffers
from zfunc.optim.formats import master_weights
from zfunc.runtime.blocking_calls import in_parallel
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

_DTYPES: dict[str, Dtype] = {x.safetensors: name for name, x in DTYPES.items()}
MAX_OPEN = 4  # files: a slice seldom lies in more, and each keeps a chunk in memory


@frozen
class WantedSlice:
    """Elements `start` to `stop`, to be read from a checkpoint, of one kind (such as "exp_avg") of a
    parameter's flattened state."""

    kind: str
    parameter: str
    start: int
    stop: int


@define(eq=False)
class CheckpointReader:
    """A checkpoint open for reading: its shards are opened as they are needed, at most 4 at a time."""

    checkpoint: Checkpoint
    _open: dict[int, ShardReader] = field(factory=dict[int, ShardReader])

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint."""
        return self.checkpoint.manifest

    def dtype(self, parameter: str, kind: str) -> Dtype:
        """The dtype of `parameter`'s stored state of `kind`, such as "exp_avg"; "fp32" if it is empty."""
        pieces = self.manifest.by_name[parameter].pieces[kind]
        return _DTYPES[self.manifest.tensor(pieces[0]).dtype] if pieces else "fp32"

    def read(self, targets: Sequence[tuple[WantedSlice, Any]]) -> None:
        """Read each wanted slice into its buffer: writable, contiguous, of the slice's size and stored type.

        Raises CheckpointError, with file, tensor and offset, for bytes that are not what was written.
        """
        reads = [read for wanted, buffer in targets for read in self._reads(wanted, disk.bytes_of(buffer))]
        by_shard: dict[int, list[tuple[Any, ...]]] = {}
        for shard, _, *call in sorted(reads, key=lambda x: x[:2]):
            by_shard.setdefault(shard, []).append((*call,))
        for n, calls in by_shard.items():
            in_parallel(self._shard(n).read_into, calls)

    def tensors(self, wanted: Iterable[WantedSlice]) -> dict[str, Tensor]:
        """Read `wanted`, slices of different kinds of state, into new host tensors; returns them by kind."""
        typed = ((x, TORCH_DTYPES[self.dtype(x.parameter, x.kind)]) for x in wanted)
        values = {x: torch.empty(x.stop - x.start, dtype=dtype, device="cpu") for x, dtype in typed}
        self.read([(x, as_bytes(own)) for x, own in values.items()])
        return {x.kind: own for x, own in values.items()}

    def weights(self, name: str, start: int, stop: int, *, ema: bool = False) -> Tensor:
        """Elements `start` to `stop` of a parameter's fp32 weights, exact; with `ema` of their moving average."""
        entry = self.manifest.by_name[name]
        kinds = weight_buffers(self.manifest.format_of(entry)) if entry.trainable else (FROZEN,)
        if ema and (entry.trainable or EMA.name in entry.pieces):
            kinds = (EMA.name,)
        values = self.tensors(WantedSlice(x, name, start, stop) for x in kinds)
        only, *others = values.values()
        return master_weights(values, 0, stop - start) if others else only.float()

    def _reads(
        self, wanted: WantedSlice, data: memoryview
    ) -> Iterator[tuple[int, int, str, int, int, memoryview]]:
        """Yield the reads of `wanted` into `data`, divided where a file's checksum chunks meet, as work for
        several threads.

        Of each: shard number, first byte in the file, then the arguments of `ShardReader.read_into`.
        """
        pieces = self.manifest.by_name[wanted.parameter].pieces[wanted.kind]
        numel = pieces[-1].stop if pieces else 0
        if not 0 <= wanted.start <= wanted.stop <= numel:
            raise ValueError(f"got {wanted}, expected a slice of {numel} elements")
        first = bisect_right(pieces, wanted.start, key=lambda x: x.start) - 1
        for x in pieces[max(first, 0) :]:
            if x.start >= wanted.stop:
                break
            shard, item = self.manifest.shards[x.shard], BYTES[self.manifest.tensor(x).dtype]
            on = x.offset - x.start  # from the parameter's elements to the tensor's
            ends = max(x.start, wanted.start) + on, min(x.stop, wanted.stop) + on
            for start, stop in cut_elements(*ends, item, shard.chunk):
                into = data[(start - on - wanted.start) * item : (stop - on - wanted.start) * item]
                yield x.shard, shard.begins[x.tensor] + start * item, x.tensor, start, stop, into

    def _shard(self, n: int) -> ShardReader:
        if n not in self._open:
            while len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[n] = open_shard(self.checkpoint.file(n), self.manifest.shards[n])
        return self._open[n]
