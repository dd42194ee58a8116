"""The training state, which a step consumes and returns, and the allocation of its memory.

There is one copy of the buffers, and one State that may use them. `train_step` takes a State and returns the next;
the one it took is donated, and using it again raises DonatedStateError.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from zfunc.checkpoint.manifest import TrainingPosition
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.core.graph import Region, Role, Tier
from zfunc.core.layout import Bucket, round_up
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER
from zfunc.core.regions import Regions
from zfunc.core.spec import ALLOCATION, StepSpec
from zfunc.engine.compile.tensor_memory import byte_range, storage_of
from zfunc.engine.state.disk_memory import StateOnDisk, spill_files, states_on_disk
from zfunc.engine.state.ownership import Ownership
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


@frozen(eq=False)
class Flat:
    """The flat parameters of a bucket, and its parameters by full name, as views in their shapes.

    A rank's slice of a bucket has no views: a parameter may lie in several slices.
    """

    flat: Tensor  # [bucket.numel], or [bucket.numel / world], 16- or 32-bit
    views: dict[str, Tensor]

    @classmethod
    def of(cls, flat: Tensor, bucket: Bucket) -> "Flat":
        """The parameters of `bucket`, or a rank's slice of them."""
        start, spans = bucket.start, bucket.spans if flat.numel() == bucket.numel else ()
        return cls(flat, {x.name: flat[x.start - start : x.stop - start].view(x.shape) for x in spans})


@define(eq=False)
class WeightSlot:
    """Device memory that has the parameters of one bucket at a time."""

    flat: Tensor  # [of the largest bucket of its class], 16- or 32-bit, device
    views: dict[str, Tensor] = field(factory=dict[str, Tensor])
    _buckets: dict[int, Flat] = field(factory=dict[int, Flat], repr=False)

    def hold(self, bucket: Bucket) -> Tensor:
        """From now on its views are those of `bucket`, whose flat memory this returns."""
        if bucket.index not in self._buckets:
            flat = self.flat[: bucket.numel]
            self._buckets[bucket.index] = Flat.of(flat, bucket)
        held = self._buckets[bucket.index]
        self.views = held.views
        return held.flat


@define(eq=False)
class ActivationSlot:
    """Memory that has the tensors of one pytree at a time: what backward of a segment needs."""

    flat: Tensor  # uint8
    tree: Any = None

    @property
    def nbytes(self) -> int:
        """Room for so many bytes."""
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
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        ranges: dict[int, list[Tensor]] = {}
        for t in tensors:
            ranges.setdefault(storage_of(t), []).append(t)
        start, copies = 0, dict[int, Tensor]()
        for sharing in ranges.values():
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
        self.tree = tree_unflatten([copies.get(id(x), x) for x in leaves], structure)


@define(eq=False)
class Buffers:
    """The memory of a State: a tensor for each region, or a `Flat` for parameters.

    Only the State that is its `owner` may use it.
    """

    memory: dict[Region, Any] = field(repr=False)
    # Parameters where they live, by bucket.
    weights: dict[int, Flat] = field(factory=dict[int, Flat], repr=False)
    owner: Ownership = field(factory=Ownership)
    compared: bool = False  # whether the weights have been compared with the other ranks'
    on_disk: dict[int, StateOnDisk] = field(factory=dict[int, StateOnDisk], repr=False)
    masters: frozenset[int] = frozenset()  # frozen buckets whose fp32 values are kept too
    # What the disk has of one bucket's state, in memory between steps, and whether it was changed.
    _opened: tuple[StateOnDisk, Tensor] | None = None
    _changed: bool = False

    @cached_property
    def _in_memory(self) -> dict[tuple[Role | None, int], list[Region]]:
        """The regions in memory by role and bucket."""
        found: dict[tuple[Role | None, int], list[Region]] = {}
        for r in (r for r in self.memory if r.tier != "disk"):
            found.setdefault((r.role, r.index[0]), []).append(r)
        return found

    def params(self) -> list[Tensor]:
        """The flat parameters: of each bucket, and the frozen ones."""
        return [x.flat for x in self.weights.values()]

    def state(self, b: int, *, write: bool = False) -> dict[str, Tensor]:
        """The optimizer state of a bucket, by the names in `zfunc.core.optimizer_state`; of a frozen one, its
        parameters if they live on the disk.

        What the disk has of it is read; `close` writes it back if `write`. One bucket is in memory at a time.
        """
        state = self.state_in_memory(b)
        if b not in self.on_disk or not self.on_disk[b].moved:
            return state
        if self._opened is None or self._opened[0].b != b:
            self.close()
            self._opened = self.on_disk[b], self.on_disk[b].opened()
        self._changed |= write
        on_disk, flat = self._opened
        return state | {name: on_disk.views(flat)[name] for name in on_disk.moved}

    def state_in_memory(self, b: int) -> dict[str, Tensor]:
        """What memory has of a bucket's state, by name."""
        return {r.buffer: self.memory[r] for r in self._in_memory.get(("state", b), ())}

    def parameters(self, b: int) -> Flat:
        """The parameters of a bucket, trainable or frozen; read from the disk if they live there."""
        if b in self.weights:
            return self.weights[b]
        self.close()
        return Flat(self.on_disk[b].read_weights(), {})

    def frozen_master(self, b: int) -> Tensor | None:
        """This rank's slice of a frozen bucket as it was loaded, in fp32, if that is kept; read from the disk if it
        is there."""
        if b not in self.masters:
            return None
        return self.on_disk[b].read_part(MASTER) if b in self.on_disk else self.memory[Region(MASTER, (b,))]

    def ema(self, b: int) -> Tensor | None:
        """This rank's slice of the moving average of a bucket's weights, if there is one."""
        return self.memory.get(Region(EMA.name, (b,)))

    def close(self) -> None:
        """Write back the state that was read from the disk, if it was changed."""
        opened, changed = self._opened, self._changed
        self._opened, self._changed = None, False
        if opened is not None and changed:
            on_disk, flat = opened
            on_disk.write(flat, on_disk.moved)


@frozen(eq=False)
class State:
    """Everything that training continues from: buffers, counters, loss scale, seed, data position.

    `step` counts updates, `batches` calls of train_step (skipped steps too), `sequences` the rows of all batches so
    far: the data position. All randomness derives from `seed`.
    """

    buffers: Buffers = field(repr=False)
    program: int = field(repr=False)  # identity of its program
    generation: int
    step: int = 0
    batches: int = 0
    sequences: int = 0
    loss_scale: LossScale = field(factory=LossScale)
    seed: int = 0

    @property
    def position(self) -> TrainingPosition:
        """Its counters, which a checkpoint has beside the bytes."""
        return TrainingPosition(self.step, self.batches, self.sequences, self.seed, self.loss_scale)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a State belongs to a program of this process and cannot be copied or pickled: take "
            "zfunc.params(program, state), and pass it to zfunc.init(program, params=...) there"
        )


def refuse_inference_mode(action: str) -> None:
    """Raise RuntimeError in inference mode: tensors allocated there cannot be written outside of it."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{action}: got inference mode, expected it off: training writes into what is made here. Call it "
            "outside of torch.inference_mode()"
        )


def refuse_global_modes(action: str, device: torch.device) -> None:
    """Raise RuntimeError under autocast or anomaly detection: a mode of this thread, which other lanes do not have
    and which a trace would keep."""
    for kind in dict.fromkeys(("cpu", device.type)):
        if torch.is_autocast_enabled(kind):
            raise RuntimeError(
                f"{action}: got autocast for {kind!r}, expected it off: pass precision= to zfunc.compile, which "
                "holds for every operation of the step"
            )
    if torch.is_anomaly_enabled():
        raise RuntimeError(
            f"{action}: got anomaly detection, expected it off: pass debug=True to train_step, which names the "
            "operation of an error"
        )


def allocate(
    spec: StepSpec,
    dtype: torch.dtype,
    device: torch.device,
    swap: SwapSpace | None,
    folders: Sequence[str],
) -> Buffers:
    """Zeroed buffers for one State; what is on the disk is in `swap`, or in files of its own in `folders`."""
    layout, regions = spec.layout, [*Regions(spec).state()]
    memory = dict[Region, Any](allocate_regions((r for r in regions if r.tier != "disk"), dtype, device))
    on_disk = {} if swap is None else states_on_disk(spec, swap, dtype)
    memory |= {r: on_disk[r.index[0]] for r in regions if r.buffer == "extent"}
    memory |= spill_files((r for r in regions if r.buffer == "spilled"), folders)
    weights: dict[int, Flat] = {}
    for r, flat in memory.items():
        if r.role == "params":
            (b,) = r.index
            memory[r] = weights[b] = Flat.of(flat, layout.weights(b))
    for bucket in layout.buckets:
        if bucket.index not in weights and spec.params_at(bucket.index) != "disk":
            high = memory[Region(HIGH_HALF, (bucket.index,))]
            weights[bucket.index] = Flat.of(high, bucket)
    return Buffers(memory, weights, on_disk=on_disk, masters=spec.frozen_masters)


def allocate_regions(
    regions: Iterable[Region], dtype: torch.dtype, device: torch.device
) -> dict[Region, Tensor]:
    """Zeroed tensors, one allocation for each buffer and tier; `dtype` is that of parameters on the device."""
    groups: dict[tuple[str, Tier], list[Region]] = {}
    for r in regions:
        groups.setdefault((r.buffer, r.tier), []).append(r)
    memory: dict[Region, Tensor] = {}
    for group in groups.values():
        first, *_ = group = sorted(group, key=lambda r: r.index)
        element = dtype if first.dtype in (None, "compute") else TORCH_DTYPES[first.dtype]
        ends = [0, *accumulate(r.nbytes // element.itemsize for r in group)]
        flat = _allocate_flat(first, ends[-1], element, device)
        memory |= {r: flat[start:stop] for r, (start, stop) in zip(group, pairwise(ends), strict=True)}
    return memory


def _allocate_flat(r: Region, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One allocation for regions like `r`."""
    # Updated by the host kernel.
    on_host = r.tier != "device" or (r.role == "state" and not on_accelerator(device))
    if not on_host:
        return torch.zeros(numel, dtype=dtype, device=device)
    pinned_for = device if r.tier == "pinned" and on_accelerator(device) else None
    return alloc_host(numel, dtype, pinned_for=pinned_for)
