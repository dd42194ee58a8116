"""The training state, which a step consumes and returns.

There is one copy of the buffers, and one State that may use them. `train_step` takes a State and returns the next;
the one it took is donated, and using it again raises DonatedStateError. `copy.deepcopy` makes buffers of their own.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from zfunc.checkpoint.manifest import TrainingPosition
from zfunc.checkpoint.swap_space import SwapSpace
from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Region, Role
from zfunc.core.layout import Layout
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER
from zfunc.core.regions import Regions
from zfunc.core.spec import StepSpec
from zfunc.engine.state.memory import Flat, StateOnDisk, allocate_regions, flat_of, states_on_disk
from zfunc.errors import AbandonedCalls, DonatedStateError, LaneTimeout, NonFiniteError, OutOfMemory, refuse
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.accelerator import on_accelerator, room_for_tensors
from zfunc.runtime.host_memory import alloc_host, available_host_bytes


@define(eq=False)
class Ownership:
    """Which State may use a set of buffers: the one of this `generation`, or none if they are `lost`, which
    has the reason. A step passes buffers on to the next State.

    `deferred` is the decision of an update that is still to be made, except for the buckets in `updated`, and
    for the moving averages of the buckets in `averaged`.
    """

    generation: int = 0
    lost: str = ""
    deferred: StepDecision | None = None
    updated: frozenset[int] = frozenset()
    averaged: frozenset[int] = frozenset()

    def check(self, generation: int, step: int, action: str) -> None:
        """Raise DonatedStateError, for the call `action`, unless the State of `generation`, at `step`
        updates, owns the buffers."""
        if self.lost:
            raise DonatedStateError(f"{action}: this state is gone: {self.lost}")
        if generation != self.generation:
            raise DonatedStateError(
                f"{action}: got a state that an earlier train_step or replace consumed (step {step}), expected the "
                "one it returned: write `state, metrics = zfunc.train_step(program, state, batch)`, or "
                "`state = zfunc.replace(program, state, params)`"
            )

    def settle(self, name: str, decision: StepDecision, norm: float, *, defers: bool) -> None:
        """Record the `decision` of the step called `name`, which has ended; with `defers`, its update is
        still to be made.

        Raises NonFiniteError for a gradient `norm` that is not finite if the updates did not wait for it.
        """
        if not math.isfinite(norm) and not decision.skip:
            self.lost = f"{name} had a gradient norm of {norm}, seen only after the updates"
            raise NonFiniteError(
                f"{name}: got a gradient norm of {norm} with a loss of {decision.loss}, expected finite numbers; "
                "without clipping the updates do not wait for the norm, so this state is gone. Go on from an "
                "earlier copy of the parameters, with clip_norm: then such a step is refused unharmed"
            )
        if defers and not decision.skip:
            self.deferred = decision

    def take_back(self) -> None:
        """Return the buffers to the State from before the last step, which has changed nothing in them."""
        self.generation -= 1

    @contextmanager
    def running(
        self, name: str, ops: Sequence[Op], *, defers: bool, donated: bool, way_on: str
    ) -> Iterator[dict[int, bool]]:
        """A context in which operations `ops` run on a State's buffers, which are `donated` to the next
        State, or changed in place.

        With `defers`, the operations before the decision make the deferred updates of the step before.

        Yields a dict that the caller fills: by index, the operations that have started, and whether they have
        ended. After a failure the old State owns the buffers again, unless an update of this step has begun,
        or a deferred one has begun and not ended; deferred updates not begun are made later. Errors quote
        `name` and `way_on`.
        """
        started: dict[int, bool] = {}
        self.generation += donated
        self.lost = f"{name} did not finish" if donated else ""
        try:
            yield started
            # An interrupt here comes after deferred updates, which must not be made again.
            self.lost, self.deferred, self.updated, self.averaged = "", None, frozenset(), frozenset()
        except (LaneTimeout, AbandonedCalls) as error:
            self.lost = f"{name} was given up while a lane was still busy ({error})"
            raise
        except BaseException as error:
            if update := self._unfinished(ops, started, defers=defers):
                why = f"({type(error).__name__}: {error}). {way_on}"
                self.lost = f"{name} failed after {update} had begun to update it {why}"
            else:
                self.generation -= donated
                self.lost = ""
            raise

    def _unfinished(self, ops: Sequence[Op], started: Mapping[int, bool], *, defers: bool) -> str:
        """The name of the first update that has begun and makes the State unusable after a failure; "" if
        there is none. Also records the deferred updates that have ended.

        A deferred update has ended once its optimizer state or average is written: copies to devices are
        repeated.
        """
        decide = next((i for i, op in enumerate(ops) if op.writes == (Region("decision"),)), len(ops))
        late = decide if defers else 0  # operations before are of the deferred updates
        unfinished = [i for i in started if i >= late and any(r.trained for r in ops[i].writes)]
        by_bucket: dict[tuple[str, int], list[int]] = {}  # an update, and what writes its result to the disk
        for i in range(late if self.deferred is not None else 0):
            for role in {r.role for r in ops[i].writes} & {"state", "ema"}:
                by_bucket.setdefault((role, ops[i].index[0]), []).append(i)
        begun = {key: own for key, own in by_bucket.items() if any(i in started for i in own)}
        ended = {key for key, own in begun.items() if all(started.get(i) for i in own)}
        self.updated |= {b for role, b in ended if role == "state"}
        self.averaged |= {b for role, b in ended if role == "ema"}
        unfinished += [i for key in begun.keys() - ended for i in begun[key] if i in started]
        return ops[min(unfinished)].name if unfinished else ""


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
        """Drop the references to the memory of `regions`, which were copied off the device, to free it."""
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
