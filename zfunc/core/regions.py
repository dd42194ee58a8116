"""The size, tier, lifetime and role of every region of a step. `zfunc.core.ops` says which operation uses which."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

from attrs import define, evolve, field, frozen

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.extents import whole_blocks
from zfunc.core.graph import EVERY, Lifetime, Region, Role, Tier
from zfunc.core.layout import round_up
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER, StateBuffer
from zfunc.core.pipeline import B, F
from zfunc.core.slots import Ring
from zfunc.core.spec import ALLOCATION, GRADIENT, PARAMS, StepSpec

BF16, FP32, FP64 = 2, 4, 8  # bytes
SUM_PARTS = 21  # doubles that an exact sum of squares consists of
# One is copied while a pass uses the other. Rows in tiles have one slot: they take far longer than their copies.
ACTIVATION_SLOTS = 2


@frozen
class Row:
    """The common fields of a buffer's regions. Their bytes follow from the spec and the last index. They are on the
    device or rank whose operations are made, unless `of` finds it from the spec and the index."""

    nbytes: Callable[[StepSpec, int], int]
    tier: Tier = "device"
    lifetime: Lifetime = "operation"
    dtype: Dtype | None = None
    role: Role | None = None
    of: Callable[[StepSpec, tuple[int, ...]], int] | None = None


def _none(_spec: StepSpec, _i: int) -> int:
    return 0


def _number(_spec: StepSpec, _i: int) -> int:
    return FP64


def _input_bytes(spec: StepSpec, s: int) -> int:
    return spec.costs[s].input_bytes


def _buffer_bytes(spec: StepSpec, s: int) -> int:
    return spec.buffer_bytes[s]


def _home_of(spec: StepSpec, index: tuple[int, ...]) -> int:
    return spec.places[index[-1]].home


def _forward_of(spec: StepSpec, index: tuple[int, ...]) -> int:
    return spec.device_of(F, 0, index[-1])


def _square_bytes(spec: StepSpec, b: int) -> int:
    """Bytes of the exact sums of a bucket's squares: one sum, or one for each parameter; with room for what
    a device has instead, a norm of each parameter."""
    parameters, row = len(spec.layout.buckets[b].spans), SUM_PARTS * FP64
    return row * (parameters if spec.settings.norms else max(1, -(-FP32 * parameters // row)))


def _stashed_bytes(spec: StepSpec, s: int) -> int:
    """Bytes that wait for backward of segment `s` off the device."""
    return max(spec.costs[s].stash_bytes, spec.costs[s].input_bytes)


def _recomputed_bytes(spec: StepSpec, s: int) -> int:
    """Bytes that a recomputation keeps for backward: residuals, and what has come back to a slot for both."""
    came_back = 0 if spec.activations[s] == "device" else spec.costs[s].stash_bytes
    return spec.costs[s].recomputed_bytes + came_back


def _extent_bytes(spec: StepSpec, b: int) -> int:
    extent = spec.extents[b]
    records = spec.swap_records if b in spec.first_on_disk else 0  # which is in every plan
    return extent.generations * extent.nbytes + records


REGIONS: dict[str, Row] = {
    # of a micro-batch
    "batch": Row(lambda spec, _: spec.costs[0].input_bytes + spec.target_bytes, "host", "value"),
    "targets": Row(lambda spec, _: spec.target_bytes),
    "loss": Row(lambda _, __: ALLOCATION, role="loss"),
    "aux": Row(lambda spec, _: round_up(4 * len(spec.aux), ALLOCATION), role="aux"),  # auxiliary outputs
    # of a micro-batch and a segment
    "act": Row(_input_bytes),  # its input, which the segment before it made
    "grad_act": Row(_input_bytes),  # the gradient of that
    "sent_act": Row(_input_bytes),  # they, made on another device
    "sent_grad_act": Row(_input_bytes),
    # they, on their way to another rank, which has them
    "act_wire": Row(_input_bytes, "pinned", of=lambda spec, i: spec.device_of(F, *i)),
    "grad_act_wire": Row(_input_bytes, "pinned", of=lambda spec, i: spec.device_of(B, i[0], i[1] - 1)),
    "residuals": Row(lambda spec, s: spec.costs[s].residual_bytes),
    "recomputed": Row(_recomputed_bytes),  # they, made ahead of backward
    "pending": Row(lambda spec, s: spec.costs[s].pending_bytes),  # kept by one half of backward for the other
    "grads": Row(lambda spec, s: spec.grad_bytes[s]),  # as backward returns them, before they are packed
    # of a micro-batch in its group, and a segment: what backward needs of forward, off the device
    "host_act": Row(_stashed_bytes, "pinned", "program", "uint8", "act"),
    "disk_act": Row(lambda spec, s: whole_blocks(_stashed_bytes(spec, s)), "disk", "program", "uint8", "act"),
    # of the pass that runs: keys and values of a row in tiles, and the sums of their gradients
    "host_keys": Row(
        lambda spec, _: max(x.key_bytes for x in spec.costs), "pinned", "program", "uint8", "act"
    ),
    # of a segment: the buffers that forward changes, as the step before left them, and as this one does
    "module_buffers": Row(_buffer_bytes, "device", "state", "uint8", "module_buffers", _forward_of),
    "next_module_buffers": Row(_buffer_bytes, "device", "program", "uint8", "module_buffers", _forward_of),
    # of a bucket
    "squares": Row(_square_bytes, "device", "program", "fp64", "squares"),  # sums of those of its gradient
    "host_squares": Row(_square_bytes, "pinned", "program", "fp64", "squares"),
    "extent": Row(
        _extent_bytes, "disk", "state", "uint8", "state", _home_of
    ),  # its state, or frozen parameters
    "sent": Row(_none, "host"),  # and of a delivery: it orders a collective before the decision
    # of the step
    "constants": Row(lambda spec, _: spec.constant_bytes, lifetime="value"),  # of the model
    "norm": Row(_number, "host", "value"),
    "norms": Row(
        lambda spec, _: FP64 * sum(len(x.spans) for x in spec.layout.buckets) * spec.settings.norms,
        "host",
        "value",
    ),
    "mean_loss": Row(_number, "host", "value", role="loss"),  # over all ranks
    "mean_aux": Row(lambda spec, _: FP64 * len(spec.aux), "host", "value", role="aux"),
    "decision": Row(_number, "host", "value"),  # whether it is skipped, and what scales its gradient
    "position": Row(_none, "host", "value"),  # where the training is after the update that a commit names
    "committed": Row(_none, "disk", "value"),  # what names the step whose state is on the disk
    "checkpoint": Row(_none, "disk", "value"),  # the one being written
    "written_buffers": Row(lambda spec, _: sum(spec.buffer_bytes), "disk", "value"),  # by rank 0
    "published": Row(_none, "disk", "value"),  # the checkpoint's path, or why it failed
}
"""The buffers whose place is the same in every step; the others are methods of `Regions`."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _once(make: Method) -> Method:
    """The method, which makes the regions of equal arguments once: operations share them, which is faster."""

    @wraps(make)
    def made(self: "Regions", *args: Any) -> Any:
        known = self.made[make]
        if args not in known:
            known[args] = make(self, *args)
        return known[args]

    return cast("Method", made)


@define
class Regions:
    """The regions of one spec, and, as a step goes on, the slot that each item has in the rings of staging.

    `device` is the one whose operations are made now: what is on a device, and has no home there, is on that.
    """

    spec: StepSpec
    device: int = field(default=0, init=False)
    made: defaultdict[Any, dict[Any, Any]] = field(
        factory=lambda: defaultdict[Any, dict[Any, Any]](dict), init=False, eq=False, repr=False
    )  # by method

    def __call__(self, buffer: str, *index: int) -> Region:
        """The region of a row of `REGIONS`."""
        return self._row(buffer, index)

    def some(self, buffer: str, *index: int) -> tuple[Region, ...]:
        """The region of a row, unless there is nothing in it."""
        return (r,) if (r := self._row(buffer, index)).nbytes else ()

    @_once
    def _row(self, buffer: str, index: tuple[int, ...]) -> Region:
        row = REGIONS[buffer]
        nbytes = row.nbytes(self.spec, index[-1] if index else 0)
        if row.of is not None:
            number = row.of(self.spec, index)
        else:
            number = EVERY if row.lifetime == "value" and row.tier != "device" else self.device
        own = row.tier, row.lifetime, row.dtype, row.role
        return Region(buffer, index, nbytes, *own, **self.whose(row.tier, number))

    def whose(self, tier: Tier, number: int) -> dict[str, Any]:
        """Whose a region is: of this device, or, where each is another rank's, of this rank, on any tier."""
        if self.spec.over_ranks:
            return {"rank": number}
        return {"device": number} if tier == "device" else {}

    @property
    def constants(self) -> tuple[Region, ...]:
        """The model's constants on the device, unless there are none."""
        return self.some("constants", *([self.device] if self.device else []))

    def received(self, buffer: str, way: str, m: int, s: int) -> Region:
        """The input of segment `s` ("act"), or its gradient ("grad_act"), as a pass of this device makes it, which
        the next of the same `way` reads: another device gets it sent."""
        if self.spec.device_of(way, m, s if way == F else s - 1) != self.device:
            buffer = f"sent_{buffer}"
        return self(buffer, m, s)

    @_once
    def params(self, b: int) -> Region:
        """The parameters of a bucket where they live: on the device or in pinned memory, all or a slice."""
        spec = self.spec
        buffer = "params" if b < len(spec.layout.buckets) else "frozen"
        tier: Tier = "pinned" if spec.places[b].params != "device" else "device"
        own = tier, "state", spec.places[b].dtype, "params"
        return Region(
            buffer, (b,), spec.places[b].weight_bytes, *own, **self.whose(tier, spec.places[b].home)
        )

    @_once
    def home(self, b: int) -> Region:
        """The parameters of a bucket, trainable or frozen, in host memory, as the device gets them."""
        return self.high_half(b) if self.spec.places[b].keeps_high_half else self.params(b)

    @_once
    def spilled(self, b: int) -> Region:
        """A gradient that waits on the disk for its update."""
        lifetime = "state" if self.spec.deferred else "program"
        nbytes = whole_blocks(self.spec.places[b].delivered_bytes)
        home = self.whose("disk", self.spec.places[b].home)
        return Region("spilled", (b,), nbytes, "disk", lifetime, "uint8", **home)

    def residuals(self, m: int, s: int) -> tuple[Region, ...]:
        """The residuals that forward of a segment keeps beside its output, unless backward recomputes them."""
        kept = not self.spec.recompute[s] or s in self.spec.stateful
        return (self("residuals", m, s),) if kept and s >= self.spec.layout.first_trainable else ()

    @property
    def rings(self) -> dict[str, Ring]:
        """The rings of slots, by buffer: the device's own, and those of all devices; each has the items that pass
        through it."""
        return self._rings_of(self.device)

    @_once
    def _rings_of(self, device: int) -> dict[str, Ring]:
        rings = {ring.region.buffer: ring for ring in _rings(self, device)}
        return {k: x if x.region.index or not device else self._rings_of(0)[k] for k, x in rings.items()}

    def slot(self, buffer: str, item: int) -> Region:
        """The slot of a ring that has a bucket or what a segment left."""
        return self.rings[buffer].slot(item)

    def give(self, buffer: str, item: int) -> Region:
        """The slot of a ring that it has from now on."""
        return self.rings[buffer].give(item)

    def gradient(self, b: int) -> Region:
        """The flat gradient of a bucket on the device: in a slot, or in stage 1 in a buffer of its own."""
        return self._whole_sum(b) if self.spec.settings.stage == 1 else self.slot("grad_slot", b)

    @_once
    def _whole_sum(self, b: int) -> Region:
        nbytes = self.spec.layout.buckets[b].numel * self.spec.places[b].element_bytes
        home = self.whose("device", self.spec.places[b].home)
        return Region(
            "grad_slot", (b,), nbytes, "device", "program", self.spec.places[b].dtype, "grad", **home
        )

    def delivered(self, b: int) -> Region:
        """This rank's slice of a gradient on the device, on its way to the host; in the slot of a whole bucket."""
        return self.slot("sum_slot", b) if self.spec.places[b].summed else self.gradient(b)

    def room(self, s: int) -> tuple[Region, ...]:
        """Empty; it keeps forward from running ahead of the copies of what a segment leaves to the host."""
        return (self.slot("act_room", s),) if s in self.rings["act_room"] else ()

    def keys(self, s: int) -> tuple[Region, ...]:
        """Where the passes of a segment have the keys of a row, if on the host: memory for each device."""
        own = [self.device] if self.device else []
        return (self("host_keys", *own),) if self.spec.costs[s].key_bytes else ()

    def left_by_forward(self, m: int, s: int) -> tuple[Region, ...]:
        """What forward of a segment leaves on the device for backward: its input, residuals, maybe its output."""
        kept = self.residuals(m, s)
        output = kept and s < self.spec.num_segments - 1 and self.spec.costs[s].keeps_output
        made = (self.received("act", F, m, s + 1),) if output else ()
        return (self("act", m, s), *kept, *made, *self.room(s))

    def sum(self, b: int, d: int) -> Region:
        """The sum over micro-batches of a bucket's delivery `d`; that of the first one becomes the whole gradient.

        So the sums of a tied bucket's segments are added in one order, whichever order the micro-batches come in.
        """
        total = self.gradient_to_apply(b)
        if d == 0 or not self.spec.places[b].apart:
            return total
        return evolve(total, buffer="tied_sum", index=(b, d), lifetime="program")

    def gradient_to_apply(self, b: int) -> Region:
        """The gradient of a bucket that waits for its update, in memory; in a page if it waits on the disk."""
        return self.slot("grad_page", b) if self.spec.places[b].gradient == "disk" else self.waiting(b)

    def shard_bytes(self, b: int, element_bytes: int | None = None) -> int:
        """Bytes of this rank's slice of a bucket, with elements as its parameters' on the device, or of so many."""
        return self.spec.places[b].shard_numel * (element_bytes or self.spec.places[b].element_bytes)

    @_once
    def waiting(self, b: int) -> Region:
        """The gradient of a bucket that waits for its update; fp32 if it is a sum of deliveries."""
        added = self.spec.places[b].added
        dtype = "fp32" if added else self.spec.places[b].dtype
        nbytes = self.shard_bytes(b, DTYPES[dtype].nbytes)
        tier: Tier = "host" if added and self.spec.places[b].update != "device" else "pinned"
        buffer = "grad_sum" if added else "host_grad"
        if self.spec.places[b].gradient == "device":
            tier, buffer = "device", "device_sum" if added else "device_grad"
        # It waits for the next step, or in this one.
        lifetime = "state" if self.spec.deferred and self.spec.places[b].state != "device" else "program"
        home = self.whose(tier, self.spec.places[b].home)
        return Region(buffer, (b,), nbytes, tier, lifetime, dtype, "grad_shard", **home)

    def staged_bytes(self, b: int) -> dict[str, int]:
        """Bytes of what the slot on the device has of bucket `b` while it is updated there: its state, parameters
        that live elsewhere and are no part of the state, and a gradient that waited elsewhere."""
        spec, numel = self.spec, self.spec.places[b].shard_numel
        parts = {x.name: x.nbytes(numel) for x in spec.places[b].buffers}
        if spec.places[b].params != "device" and not spec.places[b].sends_high_half:
            parts[PARAMS] = spec.places[b].weight_bytes
        if spec.places[b].gradient != "device":
            parts[GRADIENT] = self.waiting(b).nbytes
        return parts

    def state(self) -> Iterator[Region]:
        """The regions of a State, which are those of lifetime "state" in any recipe's operations; of a rank with a
        pipeline stage those of that."""
        if (stage := self.spec.stage) is None:
            yield from self._state()
        else:
            yield from (evolve(r, rank=0) for r in self._state() if r.rank == stage)

    def _state(self) -> Iterator[Region]:
        layout = self.spec.layout
        yield from (self("module_buffers", s) for s in self.spec.stateful)
        for bucket in layout.frozen_buckets:
            if self.spec.places[bucket.index].params != "disk":
                yield self.params(bucket.index)
            if self.spec.swaps:
                yield self("extent", bucket.index)
            elif bucket.index in self.spec.frozen_masters:
                nbytes = self.shard_bytes(bucket.index, FP32)
                home = self.whose("host", self.spec.places[bucket.index].home)
                yield Region(MASTER, (bucket.index,), nbytes, "host", "state", "fp32", "state", **home)
            if bucket.index in self.spec.frozen_averages:
                yield self.ema(bucket.index)
        for b in range(len(layout.buckets)):
            if not self.spec.places[b].keeps_high_half and self.spec.places[b].params != "disk":
                yield self.params(b)
            yield from self.bucket_state(b)
            if self.spec.swaps:
                yield self("extent", b)
            if self.spec.settings.ema is not None:
                yield self.ema(b)
            if self.spec.deferred and self.spec.places[b].state != "device":
                yield self.spilled(b) if self.spec.places[b].gradient == "disk" else self.waiting(b)

    def on_device(self) -> dict[Region, bool]:
        """The regions of a State on the device; True for parameters that can be made again of their master."""
        spec, there = self.spec, (r for r in self.state() if r.tier == "device")
        kept = {x.index for x in spec.places if x.trainable} | spec.frozen_masters
        made = {b for b in kept if spec.world == 1 or spec.places[b].sharded}
        return {r: r.role == "params" and r.index[0] in made for r in there}

    @_once
    def bucket_state(self, b: int) -> tuple[Region, ...]:
        """The optimizer state of a bucket in memory; pinned where the device gets it as it is."""
        kinds = self.spec.places[b].buffers
        if self.spec.places[b].state == "disk":
            kinds = [x for x in kinds if x.name == HIGH_HALF and self.spec.places[b].keeps_high_half]
        numel, sent = (
            self.spec.places[b].shard_numel,
            HIGH_HALF if self.spec.places[b].sends_high_half else "",
        )
        staged = self.spec.places[b].staged
        tiers: dict[str, Tier] = {x.name: "pinned" if staged or x.name == sent else "host" for x in kinds}
        if self.spec.places[b].state == "device":
            tiers = dict.fromkeys(tiers, "device")

        def region(x: StateBuffer) -> Region:
            home = self.whose(tiers[x.name], self.spec.places[b].home)
            return Region(x.name, (b,), x.nbytes(numel), tiers[x.name], "state", x.dtype, "state", **home)

        return tuple(map(region, kinds))

    @_once
    def ema(self, b: int) -> Region:
        """The moving average of the weights of a bucket, where its state is."""
        nbytes, there = EMA.nbytes(self.spec.places[b].shard_numel), self.spec.places[b].state == "device"
        where: Tier = "device" if there else "host"
        home = self.whose(where, self.spec.places[b].home)
        return Region(EMA.name, (b,), nbytes, where, "state", EMA.dtype, "ema", **home)

    def high_half(self, b: int) -> Region:
        """The half of a split master that the device gets as it is."""
        return next(r for r in self.bucket_state(b) if r.buffer == HIGH_HALF)

    def paged(self, b: int) -> tuple[Region, ...]:
        """The slot that has the state of a bucket that lives on the disk; of a frozen one the page."""
        if self.spec.places[b].state == "disk":
            return (self.slot("state_slot", b),)
        frozen_there = b >= len(self.spec.layout.buckets) and self.spec.places[b].params == "disk"
        return (self.slot("weight_page", b),) if frozen_there else ()

    def saved(self, b: int) -> tuple[Region, ...]:
        """The regions of a bucket in memory that are saved: state and averages, or frozen parameters."""
        if b >= len(self.spec.layout.buckets):
            return () if self.spec.places[b].params == "disk" else (self.params(b),)
        return (*self.bucket_state(b), *((self.ema(b),) if self.spec.settings.ema is not None else ()))

    def written(self, b: int) -> Region:
        """The bytes of a checkpoint for a bucket, as a region that its write makes."""
        slice_ = self.shard_bytes(b)
        nbytes = sum(slice_ if r.role == "params" else r.nbytes for r in self.saved(b))
        paged = (
            self.spec.extents[b].moved_bytes
            if self.spec.places[b].state == "disk" or self.spec.places[b].params == "disk"
            else 0
        )
        home = self.whose("disk", self.spec.places[b].home)
        return Region("written", (b,), nbytes + paged, "disk", "value", **home)


def _rings(at: Regions, device: int) -> Iterator[Ring]:
    """The rings of slots: the region that each slot is, the bytes of each item that passes through, and how many of
    them in a row have slots of their own. Those on a device have the items of its passes."""
    spec, layout, settings = at.spec, at.spec.layout, at.spec.settings

    def slots(buffer: str, tier: Tier, dtype: Dtype | None, role: Role | None = None) -> Region:
        own = at.whose(tier, device)
        lifetime = "operation" if dtype is None else "program"
        index = tuple(n for n in own.values() if n)
        return Region(buffer, index, 0, tier, lifetime, dtype, role, **own)

    def here(segments: Iterable[int], *ways: str) -> list[int]:
        there = spec.segments_on(device, *ways)
        return [s for s in segments if s in there]

    def shards(element_bytes: int | None, buckets: Iterable[int]) -> dict[int, int]:
        return {b: at.shard_bytes(b, element_bytes) for b in buckets}

    # A slot of parameters, or of gradients in their dtype, serves buckets of one.
    dtypes: dict[int, Dtype] = {b.index: spec.places[b.index].dtype for b in layout.all_buckets}
    delivered: dict[int, Dtype] = {x.index: x.delivered_dtype for x in spec.places}
    usual = spec.settings.precision

    # Parameters, sums and states stay in their slots until another item needs one.
    together = [layout.weights_of(s) for s in range(spec.num_segments)]
    used = [layout.weights_of(s) for s in here(range(spec.num_segments), F, B)]
    weights = {
        b.index: b.numel * spec.places[b.index].element_bytes
        for b in layout.all_buckets
        if spec.places[b.index].streamed
    }
    weights_here = {b: nbytes for b, nbytes in weights.items() if any(b in own for own in used)}
    weight_slots = slots("weight_slot", "device", usual, "params")  # of a segment that uses them
    yield Ring.reused(weight_slots, weights_here, used, settings.weight_slots, dtypes)
    paged = weights_here if spec.over_ranks else weights
    pages = {b: whole_blocks(spec.places[b].weight_bytes) for b in paged if spec.places[b].params == "disk"}
    weight_pages = slots("weight_page", "pinned", "uint8")  # read from the disk, all or this rank's slice
    yield Ring.reused(weight_pages, pages, together, settings.weight_slots)
    offloaded = [b for b in spec.offloaded if not spec.over_ranks or spec.places[b].home == device]
    leaving = [b for b in offloaded if spec.places[b].gradient != "device"]  # gradients
    pulled = [s for s in here(range(spec.num_segments), B) if s >= layout.first_trainable]
    added = [layout.buckets_of(s) for s in pulled]
    sums = shards(FP32, (b for b in leaving if spec.places[b].summed and any(b in own for own in added)))
    sum_slots = slots("sum_slot", "device", "fp32", "grad_shard")  # over the micro-batches
    yield Ring.reused(sum_slots, sums, added, max(settings.grad_slots, spec.open_sums(device)))
    states = {b: spec.extents[b].nbytes for b in (offloaded if spec.swaps else ())}
    state_slots = slots("state_slot", "pinned", "uint8", "paged")  # while it is updated
    yield Ring.reused(state_slots, states, [[b] for b in states], settings.state_slots)
    updated_here = [b for b in range(len(layout.buckets)) if spec.places[b].home == device]
    staged = {
        b: sum(map(whole_blocks, at.staged_bytes(b).values())) for b in updated_here if spec.places[b].staged
    }
    update_slots = slots("update_slot", "device", "uint8", "paged")  # while it is updated there
    yield Ring.reused(update_slots, staged, [[b] for b in staged], settings.update_slots)
    spilled = {b: at.spilled(b).nbytes for b in offloaded if spec.places[b].gradient == "disk"}
    grad_pages = slots("grad_page", "pinned", usual, "grad_shard")  # on its way to the disk, or back
    yield Ring.reused(grad_pages, spilled, [[b] for b in spilled], settings.host_slots, delivered)

    # Gradients pass in the order in which backward completes the buckets.
    backward = reversed(range(layout.first_trainable, spec.num_segments))
    parts = [(s, part) for s in backward for part in layout.contributions(s)]
    completed = [b for s, (b, _, group) in parts if s == group[-1]]
    packed = {b for s, (b, _, _) in parts if s in pulled}
    whole = {
        b.index: b.numel * spec.places[b.index].element_bytes
        for b in layout.buckets
        if settings.stage != 1 and b.index in packed
    }
    grad_slots = slots("grad_slot", "device", usual, "grad")
    yield Ring.passing(grad_slots, whole, completed, settings.grad_slots, dtypes)
    landing = {b: spec.places[b].delivered_bytes for b in leaving if spec.places[b].lands}
    host_slots = slots("host_slot", "pinned", usual, "grad_shard")  # as it arrives on the host
    homes = {b: spec.places[b].home for b in landing}  # a device does not wait for what another sends
    yield Ring.passing(host_slots, landing, completed, settings.host_slots, delivered, homes)
    sent = shards(
        None, (b for b in offloaded if not spec.places[b].staged and spec.places[b].params == "device")
    )
    param_slots = slots("param_slot", "pinned", usual, "copy")  # new ones, before their copy to the device
    yield Ring.passing(param_slots, sent, [*sent], settings.host_slots, dtypes)

    # Recipes update buckets in different orders. In this one, those of a class are all in a row.
    matrices = {b: layout.buckets[b].numel * BF16 for b in spec.matrix_buckets}
    slices, updated = shards(BF16, matrices), sorted(matrices, key=lambda b: matrices[b])
    for directions, sizes in (
        (slots("direction_slot", "device", "bf16"), matrices),  # from the slices of all ranks
        (slots("direction_shard", "device", "bf16", "grad_shard"), slices),
        (
            slots("host_direction", "pinned", "bf16", "grad_shard"),
            slices,
        ),  # on its way to the device, or back
    ):
        there = {b: n for b, n in sizes.items() if directions.tier != "device" or b in updated_here}
        yield Ring.passing(directions, there, updated, spec.updates_ahead)

    # What a segment left passes once for each micro-batch of a group.
    segments = [s for s in range(spec.num_segments) if spec.activations[s] != "device"]
    stashed = {s: _stashed_bytes(spec, s) for s in segments}
    ahead = ACTIVATION_SLOTS if settings.tiles == 1 else 1
    order = [s for s in segments for _ in range(min(settings.in_flight, settings.host_slots + ahead))]
    act_slots = slots("act_slot", "device", "uint8", "act")  # what backward needs, back on the device
    yield Ring.passing(act_slots, {s: stashed[s] for s in here(segments, B)}, order, ahead)
    rooms = dict.fromkeys(here(segments, F), 1)
    yield Ring.passing(slots("act_room", "device", None), rooms, order, ahead)
    off_device = here(segments, F, B) if spec.over_ranks else segments
    on_disk = {s: whole_blocks(stashed[s]) for s in off_device if spec.activations[s] == "disk"}
    act_pages = slots("act_page", "pinned", "uint8", "act")  # on its way to the disk, or back
    yield Ring.passing(act_pages, on_disk, order, settings.host_slots)

    # What a pass makes that another device reads: each way into a segment has a slot of its own.
    for buffer, way in (("act_hop", F), ("grad_act_hop", B)):
        sent = {
            s: round_up(spec.costs[s].input_bytes, ALLOCATION)
            for s in ([] if spec.over_ranks else spec.hops(way))
        }
        yield Ring.reused(slots(buffer, "pinned", "uint8", "act"), sent, [[*sent]], 1)
