"""The size, tier, lifetime and role of every region of a step. `zfunc.core.ops` says which operation uses which."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from attrs import evolve, field, frozen

from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Lifetime, Region, RegionDtype, Role, Tier
from zfunc.core.optimizer_state import EMA, HIGH_HALF, StateBuffer, measuring_room
from zfunc.core.slots import Slot, StagingSlots
from zfunc.core.spec import ALLOCATION, StepSpec

BF16, FP32, FP64 = 2, 4, 8  # bytes
SUM_PARTS = 21  # doubles that an exact sum of squares consists of
ACTIVATION_SLOTS = 2  # one is copied while a pass uses the other
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
    """The regions of one spec."""

    spec: StepSpec
    made: defaultdict[Any, dict[Any, Any]] = field(
        factory=lambda: defaultdict[Any, dict[Any, Any]](dict), init=False, eq=False, repr=False
    )  # by method

    @_once
    def _params(self, b: int) -> Region:
        """The parameters of a bucket where they live: on the device or in pinned memory, all or a slice."""
        spec = self.spec
        buffer = "params" if b < len(spec.layout.buckets) else "frozen"
        tier: Tier = "pinned" if spec.off_device(b) else "device"
        return Region(
            buffer, (b,), spec.kept_numel(b) * spec.element_bytes, tier, "state", "compute", "params"
        )

    @_once
    def _home(self, b: int) -> Region:
        """Where memory has the parameters of a bucket, trainable or frozen, for the device."""
        return self._high_half(b) if self.spec.keeps_high_half(b) else self._params(b)

    @_once
    def _constants(self) -> tuple[Region, ...]:
        nbytes = self.spec.constant_bytes
        return (Region("constants", (), nbytes, lifetime="value"),) if nbytes else ()

    @_once
    def _module_buffers(self, s: int) -> Region:
        """The buffers of segment `s` that forward changes, as the step before left them."""
        return self._buffers_of("module_buffers", s, "state")

    @_once
    def _next_module_buffers(self, s: int) -> Region:
        """Those buffers, as the micro-batches of this step leave them."""
        return self._buffers_of("next_module_buffers", s, "program")

    def _buffers_of(self, buffer: str, s: int, lifetime: Lifetime) -> Region:
        nbytes = self.spec.buffer_bytes[s]
        return Region(buffer, (s,), nbytes, "device", lifetime, "uint8", "module_buffers")

    @_once
    def _weight_slot(self, slot: Slot) -> Region:
        nbytes = slot.numel * self.spec.element_bytes
        return Region("weight_slot", slot.key, nbytes, "device", "program", "compute", "params")

    @_once
    def _weight_page(self, slot: Slot) -> Region:
        """Parameters that have been read from the disk, or this rank's slice of them."""
        nbytes = whole_blocks(slot.numel * self.spec.element_bytes)
        return Region("weight_page", slot.key, nbytes, "pinned", "program", "uint8")

    @_once
    def _state_slot(self, slot: Slot) -> Region:
        """The state of a bucket while it is updated."""
        return Region("state_slot", slot.key, slot.numel, "pinned", "program", "uint8", "paged")

    @_once
    def _extent(self, b: int) -> Region:
        """This rank's state of a bucket on the disk, before a commit and after it, or its frozen parameters."""
        extent = self.spec.extent(b)
        nbytes = extent.generations * extent.nbytes
        if b == self.spec.first_on_disk:  # it is in every plan
            nbytes += self.spec.swap_records
        return Region("extent", (b,), nbytes, "disk", "state", "uint8", "state")

    @_once
    def _committed(self) -> Region:
        """What names the step whose state is on the disk."""
        return Region("committed", (), 0, "disk", "value")

    @_once
    def _grad_page(self, slot: Slot) -> Region:
        """A gradient on its way to the disk, or back."""
        dtype: RegionDtype = "fp32" if self.spec.sums_on_device else "compute"
        return Region("grad_page", slot.key, slot.numel, "pinned", "program", dtype, "grad_shard")

    @_once
    def _spilled(self, b: int) -> Region:
        """A gradient that waits on the disk for its update."""
        lifetime = "state" if self.spec.deferred else "program"
        return Region("spilled", (b,), self.spec.spilled_bytes(b), "disk", lifetime, "uint8")

    @_once
    def _input(self, m: int, s: int) -> Region:
        return Region("act", (m, s), self.spec.costs[s].input_bytes)

    @_once
    def _targets(self, m: int) -> Region:
        return Region("targets", (m,), self.spec.target_bytes)

    @_once
    def _loss(self, m: int) -> Region:
        return Region("loss", (m,), ALLOCATION, role="loss")

    @_once
    def _aux(self, m: int) -> tuple[Region, ...]:
        """The auxiliary outputs of a micro-batch, if there are any."""
        return (Region("aux", (m,), self.spec.aux_bytes, role="aux"),) if self.spec.aux else ()

    @_once
    def _host_activation(self, m: int, s: int) -> Region:
        """What backward of a segment needs, while it waits on the host."""
        return Region(
            "host_act",
            (m % self.spec.group_size, s),
            self._stashed_bytes(s),
            "pinned",
            "program",
            "uint8",
            "act",
        )

    @_once
    def _activation_page(self, k: int) -> Region:
        """What backward of a segment needs, on its way to the disk or back."""
        on_disk = (s for s in range(self.spec.num_segments) if self.spec.stashed_on_disk(s))
        nbytes = whole_blocks(max(map(self._stashed_bytes, on_disk)))
        return Region("act_page", (k,), nbytes, "pinned", "program", "uint8", "act")

    @_once
    def _disk_activation(self, m: int, s: int) -> Region:
        """What backward of a segment needs, while it waits on the disk."""
        nbytes = whole_blocks(self._stashed_bytes(s))
        index = m % self.spec.group_size, s
        return Region("disk_act", index, nbytes, "disk", "program", "uint8", "act")

    @_once
    def _activation_room(self, k: int) -> Region:
        """Empty; it keeps forward from running ahead of the copies to the host."""
        return Region("act_room", (k % ACTIVATION_SLOTS,))

    @_once
    def _activation_slot(self, k: int) -> Region:
        """What backward of a segment needs, back on the device."""
        largest = self._most_stashed()
        return self._staging("act_slot", k % ACTIVATION_SLOTS, largest, "device", role="act", dtype="uint8")

    @_once
    def _most_stashed(self) -> int:
        return max(self._stashed_bytes(s) for s in range(self.spec.num_segments) if self.spec.stashed(s))

    def _stashed_bytes(self, s: int) -> int:
        cost = self.spec.costs[s]
        return max(cost.stash_bytes, cost.input_bytes)

    @_once
    def _residuals(self, m: int, s: int) -> tuple[Region, ...]:
        kept = not self.spec.recompute[s] or s in self.spec.stateful
        if not kept or s < self.spec.layout.first_trainable:
            return ()
        return (Region("residuals", (m, s), self.spec.costs[s].residual_bytes),)

    @_once
    def _kept_output(self, m: int, s: int) -> tuple[Region, ...]:
        """The output of a segment, if it is one of its residuals too."""
        kept = self._residuals(m, s) and s < self.spec.num_segments - 1 and self.spec.costs[s].keeps_output
        return (self._input(m, s + 1),) if kept else ()

    @_once
    def _cotangent(self, m: int, s: int) -> Region:
        return Region("grad_act", (m, s), self.spec.costs[s].input_bytes)

    @_once
    def _grads(self, m: int, s: int) -> Region:
        """The gradients that backward of one segment returns, before they are packed."""
        return Region("grads", (m, s), self.spec.grad_bytes(s))

    @_once
    def gradient_slots(self) -> StagingSlots:
        """Those on the device, for gradients of whole buckets."""
        return self._slots_for(range(len(self.spec.layout.buckets)), self.spec.grad_slots)

    @_once
    def landing_slots(self) -> StagingSlots:
        """Those in pinned memory where gradients arrive."""
        return self._slots_for(self.spec.offloaded, self.spec.host_slots)

    def _slots_for(self, buckets: Collection[int], depth: int) -> StagingSlots:
        """Slots for these buckets, which pass in the order in which backward completes them."""
        layout = self.spec.layout
        segments = reversed(range(layout.first_trainable, self.spec.num_segments))
        parts = ((s, part) for s in segments for part in layout.contributions(s))
        order = [b for s, (b, _, group) in parts if s == group[-1] and b in buckets]
        return StagingSlots({b: layout.buckets[b].numel for b in buckets}, order, depth)

    @_once
    def direction_slots(self) -> StagingSlots:
        """Those on the device and in pinned memory for the directions of whole matrices.

        Recipes update buckets in different orders. In this one, those of a class are all in a row.
        """
        sizes = {b: self.spec.layout.buckets[b].numel for b in self.spec.matrix_buckets}
        return StagingSlots(sizes, sorted(sizes, key=lambda b: sizes[b]), self.spec.updates_ahead)

    @_once
    def _copy_slots(self) -> StagingSlots:
        """Those in pinned memory for new parameters on their way to the device."""
        spec, layout = self.spec, self.spec.layout
        sent = [b for b in spec.offloaded if not spec.off_device(b)]
        return StagingSlots({b: layout.buckets[b].numel for b in sent}, sent, spec.host_slots)

    @_once
    def _grad_slot(self, k: int) -> Region:
        """The flat gradient of a bucket on the device: slot `k`, or in stage 1 the buffer of bucket `k`."""
        numel = self.spec.layout.buckets[k].numel if self.spec.stage == 1 else self.gradient_slots().numels[k]
        return self._staging("grad_slot", k, numel * self.spec.element_bytes, "device", role="grad")

    @_once
    def _sum_slot(self, slot: Slot) -> Region:
        """This rank's slice of the sum of a bucket's gradients over the micro-batches, on the device."""
        nbytes = slot.numel // self.spec.world * FP32
        return Region("sum_slot", slot.key, nbytes, "device", "program", "fp32", "grad_shard")

    @_once
    def _host_slot(self, k: int) -> Region:
        """This rank's slice of a gradient where it arrives on the host."""
        summed, numel = self.spec.sums_on_device, self.landing_slots().numels[k] // self.spec.world
        nbytes = numel * (FP32 if summed else self.spec.element_bytes)
        dtype: RegionDtype = "fp32" if summed else "compute"
        return self._staging("host_slot", k, nbytes, "pinned", role="grad_shard", dtype=dtype)

    @_once
    def _direction_slot(self, k: int) -> Region:
        """The direction of a bucket of whole matrices, on the device."""
        nbytes = self.direction_slots().numels[k] * BF16
        role = "grad_shard" if self.spec.world == 1 else None
        return Region("direction_slot", (k,), nbytes, "device", "program", "bf16", role)

    @_once
    def _direction_shard(self, k: int) -> Region:
        """This rank's slice of a direction, on the device."""
        if self.spec.world == 1:
            return self._direction_slot(k)
        nbytes = self.direction_slots().numels[k] // self.spec.world * BF16
        return self._staging("direction_shard", k, nbytes, "device", role="grad_shard", dtype="bf16")

    @_once
    def _host_direction(self, k: int) -> Region:
        """This rank's slice of a direction, on its way to the device or back."""
        nbytes = self.direction_slots().numels[k] // self.spec.world * BF16
        return self._staging("host_direction", k, nbytes, "pinned", role="grad_shard", dtype="bf16")

    @_once
    def _measures(self, buffer: str, i: int, k: int, on_device: bool) -> Region:
        """In slot `k`, which buckets have in turn: what a rank "measured" in round `i`, or all "joined"."""
        nbytes = max(work.measured[i] for work in self.spec.update_work if work.measured)
        return self._of_measures(buffer, (i, k), nbytes, on_device)

    @_once
    def _measuring(self, k: int, on_device: bool) -> Region:
        """What this rank keeps from one round to the next."""
        largest = max(self._shard_bytes(b, 1) for b, x in enumerate(self.spec.update_work) if x.measured)
        return self._of_measures("measuring", (k,), measuring_room(0, largest).stop * FP64, on_device)

    def _of_measures(self, buffer: str, index: tuple[int, ...], nbytes: int, on_device: bool) -> Region:
        buffer, tier = (f"device_{buffer}", "device") if on_device else (buffer, "host")
        return Region(buffer, index, nbytes, tier, "program", "fp64", "measures")

    @_once
    def _param_slot(self, b: int) -> Region:
        """The new parameters of a bucket, before their copy to the device."""
        slots = self._copy_slots()
        k = slots.of(b)
        nbytes = slots.numels[k] // self.spec.world * self.spec.element_bytes
        return self._staging("param_slot", k, nbytes, "pinned", role="copy")

    def _staging(
        self, buffer: str, k: int, nbytes: int, tier: Tier, *, role: Role, dtype: RegionDtype = "compute"
    ) -> Region:
        return Region(buffer, (k,), nbytes, tier, "program", dtype, role)

    def _shard_bytes(self, b: int, element_bytes: int) -> int:
        return self.spec.layout.weights(b).numel // self.spec.world * element_bytes

    @_once
    def _waiting(self, b: int) -> Region:
        """The gradient of a bucket that waits for its update; fp32 if it is a sum of deliveries."""
        added = self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1
        nbytes, dtype = self._waiting_bytes(b), "fp32" if added else "compute"
        if b in self.spec.resident:
            buffer = "device_sum" if added else "device_grad"
            return self._staging(buffer, b, nbytes, "device", role="grad_shard", dtype=dtype)
        buffer, tier = ("grad_sum", "host") if added else ("host_grad", "pinned")
        # It waits for the next step, or in this one.
        lifetime = "state" if self.spec.deferred else "program"
        return Region(buffer, (b,), nbytes, tier, lifetime, dtype, "grad_shard")

    def _waiting_bytes(self, b: int) -> int:
        added = self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1
        return self._shard_bytes(b, FP32 if added else self.spec.element_bytes)

    def _sum(self, b: int, d: int) -> Region:
        """The sum over micro-batches of a bucket's delivery `d`; that of the first one becomes the whole gradient.

        So the sums of a tied bucket's segments are added in one order, whichever order the micro-batches come in.
        """
        total = self._waiting(b)
        if d == 0 or not self.spec.sums_apart(b):
            return total
        return evolve(total, buffer="tied_sum", index=(b, d), lifetime="program")

    def state(self) -> Iterator[Region]:
        """The regions of a State, which are those of lifetime "state" in any recipe's operations."""
        layout = self.spec.layout
        yield from map(self._module_buffers, self.spec.stateful)
        for bucket in layout.frozen_buckets:
            if not self.spec.on_disk(bucket.index):
                yield self._params(bucket.index)
            if self.spec.swaps:
                yield self._extent(bucket.index)
        for b in range(len(layout.buckets)):
            if not self.spec.keeps_high_half(b) and not self.spec.on_disk(b):
                yield self._params(b)
            yield from self._state(b)
            if self.spec.swaps:
                yield self._extent(b)
            if self.spec.ema:
                yield self._ema(b)
            if self.spec.deferred and b not in self.spec.resident:
                yield self._spilled(b) if self.spec.spilled(b) else self._waiting(b)

    @_once
    def _state(self, b: int) -> tuple[Region, ...]:
        """The optimizer state of a bucket in memory; pinned where the device gets it as it is."""
        kinds = self.spec.state_buffers(b)
        if b in self.spec.paged:
            kinds = [x for x in kinds if x.name == HIGH_HALF and self.spec.keeps_high_half(b)]
        return tuple(self._kept(b, x) for x in kinds)

    @_once
    def _ema(self, b: int) -> Region:
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

    def _copy(self, b: int) -> Region:
        """The new parameters of a bucket in the device's dtype, unless they are paged with the state."""
        return self._high_half(b) if self.spec.sends_high_half(b) else self._param_slot(b)

    def _high_half(self, b: int) -> Region:
        return next(r for r in self._state(b) if r.buffer == HIGH_HALF)

    @_once
    def _squares(self, b: int) -> Region:
        return self._staging("squares", b, self._square_bytes(b), "device", role="squares", dtype="fp64")

    @_once
    def _host_squares(self, b: int) -> Region:
        return self._staging("host_squares", b, self._square_bytes(b), "pinned", role="squares", dtype="fp64")

    def _square_bytes(self, b: int) -> int:
        """Bytes of the exact sums of a bucket's squares: one sum, or one for each parameter."""
        rows = len(self.spec.layout.buckets[b].spans) if self.spec.norms else 1
        return rows * SUM_PARTS * FP64

    def _norm(self) -> Region:
        return Region("norm", (), FP64, "host", "value")

    def _norms(self) -> tuple[Region, ...]:
        """The norms of all parameters' gradients, if they are asked for."""
        nbytes = FP64 * sum(len(x.spans) for x in self.spec.layout.buckets)
        return (Region("norms", (), nbytes, "host", "value"),) if self.spec.norms else ()

    def _mean_loss(self) -> Region:
        return Region("mean_loss", (), FP64, "host", "value", role="loss")

    def _mean_aux(self) -> tuple[Region, ...]:
        nbytes = FP64 * len(self.spec.aux)
        return (Region("mean_aux", (), nbytes, "host", "value", role="aux"),) if self.spec.aux else ()

    @_once
    def _decision(self) -> Region:
        return Region("decision", (), FP64, "host", "value")

    @_once
    def _position(self) -> Region:
        """Where the training is after the update that a commit names."""
        return Region("position", (), 0, "host", "value")

    @_once
    def _sent(self, m: int, b: int, d: int) -> Region:
        """Empty; it orders a collective before the decision."""
        return Region("sent", (m, b, d), tier="host")

    def _checkpoint(self) -> Region:
        """The checkpoint being written."""
        return Region("checkpoint", (), 0, "disk", "value")

    def _saved(self, b: int) -> tuple[Region, ...]:
        """What a checkpoint contains of a bucket in memory: state and averages; of a frozen one its parameters."""
        if b >= len(self.spec.layout.buckets):
            return () if self.spec.on_disk(b) else (self._params(b),)
        return (*self._state(b), *((self._ema(b),) if self.spec.ema else ()))

    def _written(self, b: int) -> Region:
        slice_ = self._shard_bytes(b, self.spec.element_bytes)
        nbytes = sum(slice_ if r.role == "params" else r.nbytes for r in self._saved(b))
        paged = self.spec.extent(b).moved_bytes if b in self.spec.paged or self.spec.on_disk(b) else 0
        return Region("written", (b,), nbytes + paged, "disk", "value")

    @_once
    def _written_buffers(self) -> Region:
        """What a checkpoint has of modules' buffers; rank 0 writes them."""
        return Region("written_buffers", (), sum(self.spec.buffer_bytes), "disk", "value")

    def _published(self) -> Region:
        """The result of a save: the checkpoint's path, or why it failed."""
        return Region("published", (), 0, "disk", "value")
