"""The training state, which a step consumes and returns.

There is one copy of the buffers, and one State that may use them. `train_step` takes a State and returns the next;
the one it took is donated, and using it again raises DonatedStateError. `copy.deepcopy` makes buffers of their own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from zfunc.checkpoint.manifest import TrainingPosition
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.core.graph import Region, Role
from zfunc.core.layout import Layout
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER
from zfunc.core.regions import Regions
from zfunc.core.spec import StepSpec
from zfunc.engine.state.memory import Flat, StateOnDisk, allocate_regions, flat_of, states_on_disk
from zfunc.engine.state.ownership import Ownership
from zfunc.errors import OutOfMemory, refuse
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.accelerator import on_accelerator, room_for_tensors
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.memory_limits import available_host_bytes


@define(eq=False)
class Buffers:
    """The memory of a training State: for each region a tensor, or for parameters a `Flat`.

    Only the State that `owner` records may use this memory.
    """

    memory: dict[Region, Any] = field(repr=False)
    spec: StepSpec = field(repr=False)  # that the memory was allocated for
    devices: Sequence[torch.device]
    # Parameters where they live, by bucket.
    weights: dict[int, Flat] = field(factory=dict[int, Flat], repr=False)
    owner: Ownership = field(factory=Ownership)
    compared: bool = False  # whether the weights have been compared with the other ranks'
    on_disk: dict[int, StateOnDisk] = field(factory=dict[int, StateOnDisk], repr=False)
    swap: SwapSpace | None = None  # with that, or of a rank that has no bucket
    homes: Mapping[int, int] = field(
        factory=dict[int, int]
    )  # of pipelines over ranks: the stage of each bucket
    masters: frozenset[int] = frozenset()  # frozen buckets whose fp32 values are kept too
    averages: frozenset[int] = frozenset()  # frozen buckets whose moving average is kept, as it was at first
    averages_left: float = 1.0  # the share of their distance to the weights that updates since have left
    released: tuple[Region, ...] = ()  # what is not on the device now, or is not known to be there
    parked: dict[Region, Tensor] = field(factory=dict[Region, Tensor], repr=False)  # its copies on the host
    # What the disk has of one bucket's state, in memory between steps, and whether it was changed.
    _opened: tuple[StateOnDisk, Tensor] | None = None
    _changed: bool = False

    def place(self, memory: Mapping[Region, Any], layout: Layout) -> None:
        """Add `memory`, by region, to this State's; parameters can then be found by bucket as well."""
        self.memory |= memory
        for r, x in memory.items():
            if r.role == "params":
                x.hold(layout.all_buckets[r.index[0]])
                self.weights[r.index[0]] = x

    def drop(self, regions: Iterable[Region]) -> None:
        """Let go of the device memory of `regions`, which are in host memory or can be made from what is: the
        memory is free unless other tensors are views of it."""
        for r in regions:
            self.memory[r] = None
            if r.role == "params":
                self.weights.pop(r.index[0], None)

    @cached_property
    def _in_memory(self) -> dict[tuple[Role | None, int], list[Region]]:
        """The State's regions that are in memory, not on the disk, by role and bucket index."""
        found: dict[tuple[Role | None, int], list[Region]] = {}
        for r in (r for r in self.memory if r.tier != "disk"):
            found.setdefault((r.role, r.index[0]), []).append(r)
        return found

    def state(self, b: int, *, write: bool = False) -> dict[str, Tensor]:
        """The optimizer state of bucket `b`, by buffer name (see `zfunc.core.optimizer_state`); of a frozen
        bucket on the disk, its parameters.

        State on the disk is read into memory, for one bucket at a time; after `write`, `close` writes it
        back.
        """
        state = self.state_in_memory(b)
        if b not in self.on_disk or not self.on_disk[b].moved:
            return state
        if self._opened is None or self._opened[0].b != b:
            self.close()
            on_disk = self.on_disk[b]
            self._opened = on_disk, alloc_host(on_disk.extent.nbytes, torch.uint8)
            if on_disk.is_written:  # zeros otherwise
                on_disk.read(self._opened[1], on_disk.moved)
        self._changed |= write
        on_disk, flat = self._opened
        return state | {name: on_disk.views(flat)[name] for name in on_disk.moved}

    def state_in_memory(self, b: int) -> dict[str, Tensor]:
        """The buffers of a bucket's optimizer state that are in memory, not on the disk, by name."""
        return {r.buffer: self.memory[r] for r in self._in_memory.get(("state", b), ())}

    def parameters(self, b: int) -> Flat:
        """The parameters of bucket `b`, trainable or frozen; if they live on the disk, they are read."""
        if b in self.weights:
            return self.weights[b]
        self.close()
        return Flat(self.on_disk[b].read_weights(), {})

    def frozen_master(self, b: int) -> Tensor | None:
        """This rank's slice of the fp32 weights of frozen bucket `b`, which the parameters were rounded from:
        in memory, or read from the disk; None if they are not kept."""
        if b not in self.masters:
            return None
        return self.on_disk[b].read_part(MASTER) if b in self.on_disk else self.memory[Region(MASTER, (b,))]

    def ema(self, b: int) -> Tensor | None:
        """This rank's slice of the moving average of bucket `b`'s weights, None if there is none; of a frozen
        bucket as of the last `average_frozen`."""
        return self.memory.get(Region(EMA.name, (b,)))

    def close(self) -> None:
        """Write state on the disk that `state` has read back if it was to be changed; free its memory."""
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

    `copy.deepcopy(state)` is a second State of the same program, in as much memory again on the same tiers: the
    two train apart, each to the bit as it would alone. Each rank copies its own part. Raises OutOfMemory, before
    anything is allocated, where memory has no room, and ValueError for a State that is on the disk or released.
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
        """The State's counters, such as step and sequences, in the form that a checkpoint stores."""
        return TrainingPosition(self.step, self.batches, self.sequences, self.seed, self.loss_scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> "State":
        owner = self.buffers.owner
        owner.check(self.generation, self.step, "deepcopy")
        buffers = _copied(self.buffers)
        owner.check(self.generation, self.step, "deepcopy")  # no step of another thread has begun since
        return evolve(self, buffers=buffers)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a State belongs to a program of this process and cannot be pickled: copy.deepcopy(state) is a second "
            "one here; elsewhere pass zfunc.params(program, state) to zfunc.init(program, params=...)"
        )


def _copied(buffers: Buffers) -> Buffers:
    """A copy of a State's `buffers`: new memory on the same tiers, with the same bytes and deferred update."""
    if buffers.swap is not None or any(r.tier == "disk" for r in buffers.memory):
        do = "save it to another folder, and load that with a program that has its own `swap`"
        refuse("deepcopy", "a state of which the disk has a part", "one in memory", do)
    if buffers.released:
        raise ValueError(
            "deepcopy: got a released state, expected one on its device: take it back by a call that uses it, such "
            "as zfunc.params, before"
        )
    _check_room(buffers)
    accelerators = [x for x in buffers.devices if on_accelerator(x)]
    with torch.inference_mode(False):
        other = allocate(buffers.spec, buffers.devices, None, ())
        for device in accelerators:
            torch.accelerator.synchronize(device)  # the zeros are of another stream
        for r, source in buffers.memory.items():
            flat_of(other.memory[r]).copy_(flat_of(source))
        for device in accelerators:
            torch.accelerator.synchronize(device)
    other.owner, other.compared = evolve(buffers.owner), buffers.compared
    other.averages_left = buffers.averages_left
    return other


def _check_room(buffers: Buffers) -> None:
    """Raise OutOfMemory unless the memories that `buffers` are in have room for them once more."""
    needed: Counter[torch.device] = Counter()
    for x in map(flat_of, buffers.memory.values()):
        needed[x.device] += x.nbytes
    for device, nbytes in needed.items():
        apart = on_accelerator(device)
        free = room_for_tensors(device) if apart else available_host_bytes()
        if nbytes > free:
            raise OutOfMemory(
                f"deepcopy: needs {nbytes:,} bytes of {device if apart else 'host'} memory, {free:,} are free; "
                "nothing was allocated. Save the state, and load it where it is to go on"
            )


def allocate(
    spec: StepSpec,
    devices: Sequence[torch.device],
    swap: SwapSpace | None,
    folders: Sequence[str],
) -> Buffers:
    """Zeroed buffers for one State; on the disk they are in the swap space `swap` or spill files in `folders`."""
    layout, regions = spec.layout, [*Regions(spec).state()]
    memory = allocate_regions((r for r in regions if r.buffer != "extent"), devices, folders)
    on_disk = {} if swap is None else states_on_disk(spec, swap)
    memory |= {r: on_disk[r.index[0]] for r in regions if r.buffer == "extent"}
    homes = {} if spec.stage is None else {x.index: spec.places[x.index].home for x in layout.all_buckets}
    kept = spec.frozen_masters, spec.frozen_averages
    buffers = Buffers(
        {}, spec, devices, on_disk=on_disk, swap=swap, masters=kept[0], averages=kept[1], homes=homes
    )
    buffers.place(memory, layout)
    for bucket in (x for x in layout.buckets if spec.places[x.index].owned):
        if bucket.index not in buffers.weights and spec.places[bucket.index].params != "disk":
            high = memory[Region(HIGH_HALF, (bucket.index,))]
            buffers.weights[bucket.index] = Flat.of(high, bucket)
    return buffers
