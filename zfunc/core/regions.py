"""The size, tier, lifetime and role of every region of a step. `zfunc.core.ops` says which operation uses which."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from attrs import evolve, field, frozen

from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Lifetime, Region, RegionDtype, Role, Tier
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER, StateBuffer, measuring_room
from zfunc.core.slots import Ring, Slot
from zfunc.core.spec import ALLOCATION, StepSpec

BF16, FP32, FP64 = 2, 4, 8  # bytes
SUM_PARTS = 21  # doubles that an exact sum of squares consists of
ACTIVATION_SLOTS = 2  # one is copied while a pass uses the other
STAGING: dict[str, tuple[Tier, RegionDtype | None, Role | None]] = {
    "weight_slot": ("device", "compute", "params"),  # of a segment that uses them
    "weight_page": ("pinned", "uint8", None),  # read from the disk, all or this rank's slice
    "grad_slot": ("device", "compute", "grad"),
    "sum_slot": ("device", "fp32", "grad_shard"),  # over the micro-batches
    "host_slot": ("pinned", None, "grad_shard"),  # as it arrives on the host
    "grad_page": ("pinned", None, "grad_shard"),  # on its way to the disk, or back
    "state_slot": ("pinned", "uint8", "paged"),  # while it is updated
    "param_slot": ("pinned", "compute", "copy"),  # new ones, before their copy to the device
    "direction_slot": ("device", "bf16", None),  # from the slices of all ranks
    "direction_shard": ("device", "bf16", "grad_shard"),
    "host_direction": ("pinned", "bf16", "grad_shard"),  # on its way to the device, or back
    "act_slot": ("device", "uint8", "act"),  # what backward needs, back on the device
    "act_page": ("pinned", "uint8", "act"),  # on its way to the disk, or back
}
"""Tier, dtype and role of the slots of each ring; a dtype of None is that of delivered gradients."""

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def _once(
    make: Callable[Concatenate["Regions", Arguments], Made],
) -> Callable[Concatenate["Regions", Arguments], Made]:
    """The method, which makes the regions of equal arguments once: operations share them, which is faster."""

    @wraps(make)
    def made(self: "Regions", *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        known, key = self.made[make], (args, *kwargs.values()) if kwargs else args
        try:
            return known[key]
        except KeyError:
            return known.setdefault(key, make(self, *args, **kwargs))

    return made


@frozen
class Regions:
    """The regions of one spec, and, as a step goes on, the slot that each item has in the rings of staging."""

    spec: StepSpec
    made: defaultdict[Any, dict[Any, Any]] = field(
        factory=lambda: defaultdict[Any, dict[Any, Any]](dict), init=False, eq=False, repr=False
    )  # by method

    @_once
    def params(self, b: int) -> Region:
        """The parameters of a bucket where they live: on the device or in pinned memory, all or a slice."""
        spec = self.spec
        buffer = "params" if b < len(spec.layout.buckets) else "frozen"
        tier: Tier = "pinned" if spec.off_device(b) else "device"
        return Region(buffer, (b,), self.weight_bytes(b), tier, "state", "compute", "params")

    @_once
    def home(self, b: int) -> Region:
        """Where memory has the parameters of a bucket, trainable or frozen, for the device."""
        return self.high_half(b) if self.spec.keeps_high_half(b) else self.params(b)

    @_once
    def constants(self) -> tuple[Region, ...]:
        """The model's constants on the device, if there are any."""
        nbytes = self.spec.constant_bytes
        return (Region("constants", (), nbytes, lifetime="value"),) if nbytes else ()

    @_once
    def module_buffers(self, s: int) -> Region:
        """The buffers of segment `s` that forward changes, as the step before left them."""
        return self._buffers_of("module_buffers", s, "state")

    @_once
    def next_module_buffers(self, s: int) -> Region:
        """Those buffers, as the micro-batches of this step leave them."""
        return self._buffers_of("next_module_buffers", s, "program")

    def _buffers_of(self, buffer: str, s: int, lifetime: Lifetime) -> Region:
        nbytes = self.spec.buffer_bytes[s]
        return Region(buffer, (s,), nbytes, "device", lifetime, "uint8", "module_buffers")

    @_once
    def extent(self, b: int) -> Region:
        """This rank's state of a bucket on the disk, before a commit and after it, or its frozen parameters."""
        extent = self.spec.extent(b)
        nbytes = extent.generations * extent.nbytes
        if b == self.spec.first_on_disk:  # it is in every plan
            nbytes += self.spec.swap_records
        return Region("extent", (b,), nbytes, "disk", "state", "uint8", "state")

    @_once
    def committed(self) -> Region:
        """What names the step whose state is on the disk."""
        return Region("committed", (), 0, "disk", "value")

    @_once
    def spilled(self, b: int) -> Region:
        """A gradient that waits on the disk for its update."""
        lifetime = "state" if self.spec.deferred else "program"
        return Region("spilled", (b,), self.spec.spilled_bytes(b), "disk", lifetime, "uint8")

    @_once
    def input(self, m: int, s: int) -> Region:
        """The input of segment `s`, which is the output of the one before."""
        return Region("act", (m, s), self.spec.costs[s].input_bytes)

    @_once
    def targets(self, m: int) -> Region:
        """The targets of a micro-batch."""
        return Region("targets", (m,), self.spec.target_bytes)

    @_once
    def loss(self, m: int) -> Region:
        """The loss of a micro-batch."""
        return Region("loss", (m,), ALLOCATION, role="loss")

    @_once
    def aux(self, m: int) -> tuple[Region, ...]:
        """The auxiliary outputs of a micro-batch, if there are any."""
        return (Region("aux", (m,), self.spec.aux_bytes, role="aux"),) if self.spec.aux else ()

    @_once
    def host_activation(self, m: int, s: int) -> Region:
        """What backward of a segment needs, while it waits on the host."""
        return Region(
            "host_act",
            (m % self.spec.group_size, s),
            self.stashed_bytes(s),
            "pinned",
            "program",
            "uint8",
            "act",
        )

    @_once
    def disk_activation(self, m: int, s: int) -> Region:
        """What backward of a segment needs, while it waits on the disk."""
        nbytes = whole_blocks(self.stashed_bytes(s))
        index = m % self.spec.group_size, s
        return Region("disk_act", index, nbytes, "disk", "program", "uint8", "act")

    def stashed_bytes(self, s: int) -> int:
        """Bytes that wait for backward of segment `s` off the device."""
        cost = self.spec.costs[s]
        return max(cost.stash_bytes, cost.input_bytes)

    @_once
    def residuals(self, m: int, s: int) -> tuple[Region, ...]:
        """What forward of a segment keeps beside its output, if backward does not recompute it."""
        kept = not self.spec.recompute[s] or s in self.spec.stateful
        if not kept or s < self.spec.layout.first_trainable:
            return ()
        return (Region("residuals", (m, s), self.spec.costs[s].residual_bytes),)

    @_once
    def cotangent(self, m: int, s: int) -> Region:
        """The gradient of the input of segment `s`."""
        return Region("grad_act", (m, s), self.spec.costs[s].input_bytes)

    @_once
    def grads(self, m: int, s: int) -> Region:
        """The gradients that backward of one segment returns, before they are packed."""
        return Region("grads", (m, s), self.spec.grad_bytes(s))

    def measures(self, buffer: str, i: int, b: int) -> Region:
        """What a rank has "measured" of a bucket in round `i`, or all have "joined"."""
        nbytes = max(work.measured[i] for work in self.spec.update_work if work.measured)
        return self._of_measures(buffer, (i, self._measured(b)), nbytes, b in self.spec.resident)

    def measuring(self, b: int) -> Region:
        """What this rank keeps of a bucket from one round to the next."""
        largest = max(self.shard_bytes(b, 1) for b, x in enumerate(self.spec.update_work) if x.measured)
        nbytes = measuring_room(0, largest).stop * FP64
        return self._of_measures("measuring", (self._measured(b),), nbytes, b in self.spec.resident)

    def _measured(self, b: int) -> int:
        return self.rings["measured"].slot(b).number

    @_once
    def _of_measures(self, buffer: str, index: tuple[int, ...], nbytes: int, on_device: bool) -> Region:
        buffer, tier = (f"device_{buffer}", "device") if on_device else (buffer, "host")
        return Region(buffer, index, nbytes, tier, "program", "fp64", "measures")

    @cached_property
    def rings(self) -> dict[str, Ring]:
        """The rings of slots at the beginning of a step, by buffer; a ring has the items that pass through it."""
        return {ring.buffer: ring for ring in _rings(self)}

    def slot(self, buffer: str, item: int) -> Region:
        """The slot of a ring that has a bucket or what a segment left."""
        return self._slot(buffer, self.rings[buffer].slot(item))

    def give(self, buffer: str, item: int) -> Region:
        """The slot of a ring that it has from now on."""
        return self._slot(buffer, self.rings[buffer].give(item))

    @_once
    def _slot(self, buffer: str, slot: Slot) -> Region:
        tier, dtype, role = STAGING[buffer]
        if dtype is None:
            dtype = "fp32" if self.spec.sums_on_device else "compute"
        return Region(buffer, (slot.number,), slot.nbytes, tier, "program", dtype, role)

    def gradient(self, b: int) -> Region:
        """The flat gradient of a bucket on the device: in a slot, or in stage 1 in a buffer of its own."""
        return self._own_gradient(b) if self.spec.stage == 1 else self.slot("grad_slot", b)

    @_once
    def _own_gradient(self, b: int) -> Region:
        nbytes = self.spec.layout.buckets[b].numel * self.spec.element_bytes
        return Region("grad_slot", (b,), nbytes, "device", "program", "compute", "grad")

    def delivered(self, b: int) -> Region:
        """This rank's slice of a gradient on the device, on its way to the host; in the slot of a whole bucket."""
        return self.slot("sum_slot", b) if self.spec.sums_on_device else self.gradient(b)

    def room(self, s: int) -> tuple[Region, ...]:
        """Empty; it keeps forward from running ahead of the copies of what a segment leaves to the host."""
        ring = self.rings["act_room"]
        return (Region("act_room", (ring.slot(s).number,)),) if s in ring else ()

    def left_by_forward(self, m: int, s: int) -> tuple[Region, ...]:
        """What forward of a segment leaves for backward: input and residuals, of which its output may be one."""
        kept = self.residuals(m, s)
        output = kept and s < self.spec.num_segments - 1 and self.spec.costs[s].keeps_output
        return (self.input(m, s), *kept, *((self.input(m, s + 1),) if output else ()))

    def sum(self, b: int, d: int) -> Region:
        """The sum over micro-batches of a bucket's delivery `d`; that of the first one becomes the whole gradient.

        So the sums of a tied bucket's segments are added in one order, whichever order the micro-batches come in.
        """
        total = self.gradient_to_apply(b)
        if d == 0 or not self.spec.sums_apart(b):
            return total
        return evolve(total, buffer="tied_sum", index=(b, d), lifetime="program")

    def gradient_to_apply(self, b: int) -> Region:
        """The gradient of a bucket that waits for its update, in memory; in a page if it waits on the disk."""
        return self.slot("grad_page", b) if self.spec.spilled(b) else self.waiting(b)

    @property
    def delivered_bytes(self) -> int:
        """Bytes of an element of a gradient that leaves the device."""
        return FP32 if self.spec.sums_on_device else self.spec.element_bytes

    def weight_bytes(self, b: int) -> int:
        """Bytes of the parameters of a bucket, or of the slice of them that a rank keeps."""
        return self.spec.kept_numel(b) * self.spec.element_bytes

    def shard_bytes(self, b: int, element_bytes: int) -> int:
        """Bytes of this rank's slice of a bucket."""
        return self.spec.layout.weights(b).numel // self.spec.world * element_bytes

    @_once
    def waiting(self, b: int) -> Region:
        """The gradient of a bucket that waits for its update; fp32 if it is a sum of deliveries."""
        added = self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1
        nbytes, dtype = self.waiting_bytes(b), "fp32" if added else "compute"
        if b in self.spec.resident:
            buffer = "device_sum" if added else "device_grad"
            return Region(buffer, (b,), nbytes, "device", "program", dtype, "grad_shard")
        buffer, tier = ("grad_sum", "host") if added else ("host_grad", "pinned")
        # It waits for the next step, or in this one.
        lifetime = "state" if self.spec.deferred else "program"
        return Region(buffer, (b,), nbytes, tier, lifetime, dtype, "grad_shard")

    def waiting_bytes(self, b: int) -> int:
        """Bytes of the gradient of a bucket that waits for its update."""
        added = self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1
        return self.shard_bytes(b, FP32 if added else self.spec.element_bytes)

    def state(self) -> Iterator[Region]:
        """The regions of a State, which are those of lifetime "state" in any recipe's operations."""
        layout = self.spec.layout
        yield from map(self.module_buffers, self.spec.stateful)
        for bucket in layout.frozen_buckets:
            if not self.spec.on_disk(bucket.index):
                yield self.params(bucket.index)
            if self.spec.swaps:
                yield self.extent(bucket.index)
            elif bucket.index in self.spec.frozen_masters:
                nbytes = self.shard_bytes(bucket.index, FP32)
                yield Region(MASTER, (bucket.index,), nbytes, "host", "state", "fp32", "state")
        for b in range(len(layout.buckets)):
            if not self.spec.keeps_high_half(b) and not self.spec.on_disk(b):
                yield self.params(b)
            yield from self.bucket_state(b)
            if self.spec.swaps:
                yield self.extent(b)
            if self.spec.ema:
                yield self.ema(b)
            if self.spec.deferred and b not in self.spec.resident:
                yield self.spilled(b) if self.spec.spilled(b) else self.waiting(b)

    @_once
    def bucket_state(self, b: int) -> tuple[Region, ...]:
        """The optimizer state of a bucket in memory; pinned where the device gets it as it is."""
        kinds = self.spec.state_buffers(b)
        if b in self.spec.paged:
            kinds = [x for x in kinds if x.name == HIGH_HALF and self.spec.keeps_high_half(b)]
        return tuple(self._kept(b, x) for x in kinds)

    @_once
    def ema(self, b: int) -> Region:
        """The moving average of the weights of a bucket, where its state is."""
        nbytes = EMA.nbytes(self.spec.layout.buckets[b].numel // self.spec.world)
        where: Tier = "device" if b in self.spec.resident else "host"
        return Region(EMA.name, (b,), nbytes, where, "state", EMA.dtype, "ema")

    def _kept(self, b: int, kind: StateBuffer) -> Region:
        """One buffer of a bucket's optimizer state."""
        tier: Tier = "pinned" if self.spec.send_high_half and kind.name == HIGH_HALF else "host"
        nbytes = kind.nbytes(self.spec.layout.buckets[b].numel // self.spec.world)
        where = "device" if b in self.spec.resident else tier
        return Region(kind.name, (b,), nbytes, where, "state", kind.dtype, "state")

    def high_half(self, b: int) -> Region:
        """The half of a split master that the device gets as it is."""
        return next(r for r in self.bucket_state(b) if r.buffer == HIGH_HALF)

    def paged(self, b: int) -> tuple[Region, ...]:
        """The slot that has the state of a bucket that lives on the disk; of a frozen one the page."""
        if b in self.spec.paged:
            return (self.slot("state_slot", b),)
        frozen_there = b >= len(self.spec.layout.buckets) and self.spec.on_disk(b)
        return (self.slot("weight_page", b),) if frozen_there else ()

    @_once
    def squares(self, b: int) -> Region:
        """The sums of the squares of a bucket's gradient, on the device."""
        return Region("squares", (b,), self._square_bytes(b), "device", "program", "fp64", "squares")

    @_once
    def host_squares(self, b: int) -> Region:
        """Those sums on the host, for the norm."""
        return Region("host_squares", (b,), self._square_bytes(b), "pinned", "program", "fp64", "squares")

    def _square_bytes(self, b: int) -> int:
        """Bytes of the exact sums of a bucket's squares: one sum, or one for each parameter."""
        rows = len(self.spec.layout.buckets[b].spans) if self.spec.norms else 1
        return rows * SUM_PARTS * FP64

    def norm(self) -> Region:
        """The norm of the whole gradient."""
        return Region("norm", (), FP64, "host", "value")

    def norms(self) -> tuple[Region, ...]:
        """The norms of all parameters' gradients, if they are asked for."""
        nbytes = FP64 * sum(len(x.spans) for x in self.spec.layout.buckets)
        return (Region("norms", (), nbytes, "host", "value"),) if self.spec.norms else ()

    def mean_loss(self) -> Region:
        """The mean loss over all ranks."""
        return Region("mean_loss", (), FP64, "host", "value", role="loss")

    def mean_aux(self) -> tuple[Region, ...]:
        """The means of the auxiliary outputs over all ranks, if there are any."""
        nbytes = FP64 * len(self.spec.aux)
        return (Region("mean_aux", (), nbytes, "host", "value", role="aux"),) if self.spec.aux else ()

    @_once
    def decision(self) -> Region:
        """Whether the step is skipped, and by what factor its gradient is scaled."""
        return Region("decision", (), FP64, "host", "value")

    @_once
    def position(self) -> Region:
        """Where the training is after the update that a commit names."""
        return Region("position", (), 0, "host", "value")

    @_once
    def sent(self, m: int, b: int, d: int) -> Region:
        """Empty; it orders a collective before the decision."""
        return Region("sent", (m, b, d), tier="host")

    def checkpoint(self) -> Region:
        """The checkpoint being written."""
        return Region("checkpoint", (), 0, "disk", "value")

    def saved(self, b: int) -> tuple[Region, ...]:
        """What a checkpoint contains of a bucket in memory: state and averages; of a frozen one its parameters."""
        if b >= len(self.spec.layout.buckets):
            return () if self.spec.on_disk(b) else (self.params(b),)
        return (*self.bucket_state(b), *((self.ema(b),) if self.spec.ema else ()))

    def written(self, b: int) -> Region:
        """What a checkpoint contains of a bucket."""
        slice_ = self.shard_bytes(b, self.spec.element_bytes)
        nbytes = sum(slice_ if r.role == "params" else r.nbytes for r in self.saved(b))
        paged = self.spec.extent(b).moved_bytes if b in self.spec.paged or self.spec.on_disk(b) else 0
        return Region("written", (b,), nbytes + paged, "disk", "value")

    @_once
    def written_buffers(self) -> Region:
        """What a checkpoint has of modules' buffers; rank 0 writes them."""
        return Region("written_buffers", (), sum(self.spec.buffer_bytes), "disk", "value")

    def published(self) -> Region:
        """The result of a save: the checkpoint's path, or why it failed."""
        return Region("published", (), 0, "disk", "value")


def _rings(at: Regions) -> Iterator[Ring]:
    """A ring for each row of `STAGING`, and two that only count: room for activations, and what is measured."""
    spec, layout = at.spec, at.spec.layout
    segments = range(spec.num_segments)
    # Parameters, sums and states stay in their slots until another item needs one.
    weights = {b.index: b.numel for b in (*layout.buckets, *layout.frozen_buckets) if spec.streamed(b.index)}
    used = [[b for b in layout.weights_of(s) if b in weights] for s in segments]
    yield Ring.reused(
        "weight_slot", {b: n * spec.element_bytes for b, n in weights.items()}, used, spec.weight_slots
    )
    pages = {b: whole_blocks(at.weight_bytes(b)) for b in weights if spec.on_disk(b)}
    read = [[b for b in own if b in pages] for own in used]
    yield Ring.reused("weight_page", pages, read, spec.weight_slots)
    sums = {b: at.shard_bytes(b, FP32) for b in spec.offloaded if spec.sums_on_device}
    added = [[b for b in layout.buckets_of(s) if b in sums] for s in segments]
    yield Ring.reused("sum_slot", sums, added, spec.grad_slots)
    states = {b: spec.extent(b).nbytes for b in (spec.offloaded if spec.swaps else ())}
    yield Ring.reused("state_slot", states, [[b] for b in states], spec.state_slots)
    spilled = {b: spec.spilled_bytes(b) for b in spec.offloaded if spec.spilled(b)}
    yield Ring.reused("grad_page", spilled, [[b] for b in spilled], spec.host_slots)

    # Gradients pass in the order in which backward completes the buckets.
    backward = reversed(range(layout.first_trainable, spec.num_segments))
    parts = [(s, part) for s in backward for part in layout.contributions(s)]
    completed = [b for s, (b, _, group) in parts if s == group[-1]]
    whole = {b.index: b.numel * spec.element_bytes for b in layout.buckets if spec.stage != 1}
    yield Ring.passing("grad_slot", whole, completed, spec.grad_slots)
    landing = {b: at.shard_bytes(b, at.delivered_bytes) for b in spec.offloaded if spec.lands(b)}
    yield Ring.passing("host_slot", landing, [b for b in completed if b in landing], spec.host_slots)
    sent = {b: at.shard_bytes(b, spec.element_bytes) for b in spec.offloaded if not spec.off_device(b)}
    yield Ring.passing("param_slot", sent, [*sent], spec.host_slots)

    # Recipes update buckets in different orders. In this one, those of a class are all in a row.
    whole = {b: layout.buckets[b].numel * BF16 for b in spec.matrix_buckets}
    slices = {b: nbytes // spec.world for b, nbytes in whole.items()}
    updated = sorted(whole, key=lambda b: whole[b])
    for buffer, sizes in (("direction_slot", whole), ("direction_shard", slices), ("host_direction", slices)):
        yield Ring.passing(buffer, sizes, updated, spec.updates_ahead)
    measured = {b.index: 1 for b in layout.buckets if spec.rounds(b.index)}
    yield Ring.passing("measured", measured, [*measured], spec.updates_ahead)

    # What a segment left passes once for each micro-batch of a group.
    stashed = {s: at.stashed_bytes(s) for s in segments if spec.stashed(s)}
    order = [s for s in stashed for _ in range(min(spec.group_size, spec.host_slots + ACTIVATION_SLOTS))]
    yield Ring.passing("act_slot", stashed, order, ACTIVATION_SLOTS)
    yield Ring.passing("act_room", dict.fromkeys(stashed, 1), order, ACTIVATION_SLOTS)
    on_disk = {s: whole_blocks(nbytes) for s, nbytes in stashed.items() if spec.stashed_on_disk(s)}
    yield Ring.passing("act_page", on_disk, [s for s in order if s in on_disk], spec.host_slots)
