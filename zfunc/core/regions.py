"""`Regions`: the regions of a step that operations read and write, and the staging slot that each item has."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

from attrs import define, evolve, field

from zfunc.core.dtypes import Dtype
from zfunc.core.extents import whole_blocks
from zfunc.core.graph import EVERY, Region, Tier, of_stage
from zfunc.core.layout import round_up
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER, StateBuffer
from zfunc.core.pipeline import B, F, W
from zfunc.core.region_table import BF16, FLOWS, FP32, REGIONS, Index, Row, home_of, left_bytes, value_for
from zfunc.core.slots import ALIKE, Ring
from zfunc.core.spec import ALLOCATION, StepSpec

# One is copied while a pass uses the other. Rows in tiles have one slot: they take far longer than their copies.
ACTIVATION_SLOTS = 2
USED_WHOLLY = ("weight_slot", "sum_slot")  # rings on a device all of whose slots a step uses

Method = TypeVar("Method", bound=Callable[..., Any])
T = TypeVar("T")


def _once(make: Method) -> Method:
    """A decorator of methods of `Regions` that caches results by arguments: operations share regions."""

    @wraps(make)
    def made(self: "Regions", *args: Any) -> Any:
        known = self.made[make]
        if (found := known.get(args)) is None:
            found = known[args] = make(self, *args)
        return found

    return cast("Method", made)


@define
class Regions:
    """Makes the regions (named memory) that operations of a step of `spec` read and write, and records, while
    a recipe yields operations, which staging slot has which data.

    `device` is the number of the device for which operations are being made: regions in device memory are on
    this one by default.
    """

    spec: StepSpec
    device: int = field(default=0, init=False)
    made: defaultdict[Any, dict[Any, Any]] = field(
        factory=lambda: defaultdict[Any, dict[Any, Any]](dict), init=False, eq=False, repr=False
    )  # by method
    # How often each operation was made, by verb and index.
    times: Counter[Any] = field(factory=Counter[Any], init=False, eq=False, repr=False)
    _rings: dict[int, dict[str, Ring]] = field(factory=dict[int, dict[str, Ring]], init=False, eq=False)

    @_once
    def __call__(self, buffer: str, *index: int) -> Region:
        """The region named `buffer` with `index`; the step's spec gives its size, tier and owner."""
        return self._made(buffer, REGIONS[buffer], index)

    def some(self, buffer: str, *index: int) -> tuple[Region, ...]:
        """The region named `buffer`, with `index`, in a tuple; () if it would have no bytes."""
        return (r,) if (r := self(buffer, *index)).nbytes else ()

    def _made(self, buffer: str, row: Row, index: Index, device: int | None = None) -> Region:
        """A region with the fields of `row` and `index`, on `device`, by default the regions' current
        device."""
        spec = self.spec
        tier, lifetime = value_for(row.tier, spec, index), value_for(row.lifetime, spec, index)
        if row.of is not None:
            number = row.of(spec, index)
        elif lifetime == "value" and tier != "device":
            number = EVERY
        else:
            number = self.device if device is None else device
        nbytes, dtype = value_for(row.nbytes, spec, index), value_for(row.dtype, spec, index)
        own = self._number(tier, number), spec.mesh.over_ranks
        return Region(buffer, index, nbytes, tier, lifetime, dtype, row.role, *own)

    def _number(self, tier: Tier, device: int) -> int:
        """The device number that a region in `tier` gets: `device` in device memory and in a pipeline over
        ranks, 0 in memory that devices share."""
        return device if tier == "device" or self.spec.mesh.over_ranks else 0

    def number(self, verb: str, *index: int) -> int:
        """Count one more operation with `verb` and `index`. Returns how many there were before, the first
        part of the name of an operation that a step repeats."""
        self.times[verb, index] += 1
        return self.times[verb, index] - 1

    @property
    def constants(self) -> tuple[Region, ...]:
        """The region of the model's constants (unchanging buffers) on this device, in a tuple; () if none."""
        return self.some("constants", *([self.device] if self.device else []))

    def between(self, way: str, m: int, s: int, *, sent: bool = False) -> tuple[Region, ...]:
        """The regions of segment `s`'s input (`way` F), or of the gradient of that (B), on the device of the pass
        that takes it: what no other input or gradient has, and what others have, too. `sent`: on the device of the
        pass that makes it, to be copied from there."""
        flow = FLOWS[way]
        number = flow.before(s) if sent else s  # which the pass there takes
        begin = flow.first_there(self.spec, m, number)
        origins = (x.origin for x in flow.passed(self.spec.costs[s]))
        there = (x for x in origins if flow.later(x.first, number) == number)
        spans = {(flow.later(x.first, begin), x.last) for x in there}
        own = self(f"sent_{flow.own}" if sent else flow.own, m, s)
        return (own, *(self(flow.common, m, *span) for span in sorted(spans)))

    def made_between(self, way: str, m: int, s: int) -> tuple[Region, ...]:
        """The regions of segment `s`'s input (`way` F), or of the gradient of that (B), as far as the pass that
        makes it writes them on its device: without those that this pass only passes on."""
        elsewhere = FLOWS[way].taker(self.spec, (m, s)) != self.device
        own, *common = self.between(way, m, s, sent=elsewhere)
        return (own, *(r for r in common if r.index[1] == s))

    def losses(self, m: int) -> tuple[Region, ...]:
        """The regions of micro-batch `m`'s loss and of the last segment's auxiliary outputs, if any."""
        return (self("loss", m), *self.some("aux", m), *self.some("aux_rows", m))

    def params(self, b: int) -> Region:
        """The region with the parameters of bucket `b` between passes, on the device or in pinned memory: all
        of them, or this rank's slice."""
        return self("params" if self.spec.places[b].trainable else "frozen", b)

    def residuals(self, m: int, s: int) -> tuple[Region, ...]:
        """The region of the residuals of forward of segment `s`, in a tuple; () if backward recomputes
        them."""
        kept = not self.spec.recompute[s] or s in self.spec.stateful
        return (self("residuals", m, s),) if kept and s >= self.spec.layout.first_trainable else ()

    def ring(self, buffer: str) -> Ring:
        """The set of staging slots named `buffer`: this device's own, or, in host memory, the one that
        devices share."""
        if (own := self._rings.get(self.device)) is None:
            own = self._rings[self.device] = self._rings_of(self.device)
        return own[buffer]

    def slot_of(self, buffer: str, item: int) -> Region:
        """The staging slot in the ring `buffer` with the data of `item`, a bucket or segment; PlanError if
        none."""
        return self.ring(buffer).slot(item)

    @_once
    def _rings_of(self, device: int) -> dict[str, Ring]:
        own = {ring.region.buffer: ring for ring in rings(self, device)}
        return {k: x if x.region.index or not device else self._rings_of(0)[k] for k, x in own.items()}

    def blank_slot(self, buffer: str, device: int) -> Region:
        """The region named `buffer` on `device`, without number and size, as a template of a ring's slots."""
        number = self._number(value_for(REGIONS[buffer].tier, self.spec, ()), device)
        return self._made(buffer, REGIONS[buffer], (number,) if number else (), device)

    def gradient(self, b: int) -> Region:
        """The flat gradient of bucket `b` on the device: in a slot, or in stage 1 in a buffer of its own."""
        return self._whole_sum(b) if self.spec.settings.stage == 1 else self.slot_of("grad_slot", b)

    @_once
    def _whole_sum(self, b: int) -> Region:
        place = self.spec.places[b]
        row = Row(place.numel * place.element_bytes, "device", "program", place.dtype, "grad", home_of)
        return self._made("grad_slot", row, (b,))

    def delivered(self, b: int) -> Region:
        """The device region from which this rank's slice of bucket `b`'s gradient is copied off the
        device."""
        return self.slot_of("sum_slot", b) if self.spec.places[b].summed else self.gradient(b)

    def buffers(self, s: int, *, new: bool) -> tuple[Region, ...]:
        """The region of the module buffers that forward of segment `s` changes: the State's values or, if
        `new`, the step's new ones; () if it changes none."""
        buffer = "next_module_buffers" if new else "module_buffers"
        return (self(buffer, s),) if s in self.spec.stateful else ()

    def act_room(self, s: int) -> tuple[Region, ...]:
        """A slot without memory that limits how many micro-batches' activations are on the device: forward of
        segment `s` waits for it until older ones are offloaded. () if they are not offloaded."""
        return (self.slot_of("act_room", s),) if s in self.ring("act_room") else ()

    def keys(self, s: int) -> tuple[Region, ...]:
        """The host region, in a tuple, for attention's keys and values in segment `s` of rows in tiles; else
        ()."""
        own = [self.device] if self.device else []
        return (self("host_keys", *own),) if self.spec.costs[s].key_bytes else ()

    def stash(self, m: int, s: int, tier: Tier, *, new: bool = False) -> tuple[Region, ...]:
        """The regions in `tier` with the offloaded activations for backward of segment `s`: its own, then the
        tensors that are offloaded once for several segments. `new`: only what segment `s` offloads. `m` numbers
        the micro-batch in its group."""
        own = self(f"{self.spec.activations[s]}_act", m, s)
        apart = dict.fromkeys(x for x in self.spec.shared_stashes[s].values() if not new or x.first == s)
        found = (own, *(self(f"{x.place}_shared", m, x.first, x.leaf) for x in apart))
        return tuple(r for r in found if r.tier == tier)

    def left_by_forward(self, m: int, s: int) -> tuple[Region, ...]:
        """The device regions that forward of segment `s` leaves for backward: its input, residuals, and its
        output if residuals share tensors with it."""
        kept = self.residuals(m, s)
        output = kept and s < self.spec.num_segments - 1 and self.spec.costs[s].keeps_output
        made = self.made_between(F, m, s + 1) if output else ()
        return (*self.between(F, m, s), *kept, *made, *self.act_room(s))

    def sum(self, b: int, d: int) -> Region:
        """The region of the sum, over micro-batches, of bucket `b`'s gradients from delivery `d` (tied
        parameters have one for each segment). That of delivery 0 becomes the gradient.

        With a sum for each delivery, the order of micro-batches does not change the order of the additions.
        """
        total = self.gradient_to_apply(b)
        if d == 0 or not self.spec.places[b].apart:
            return total
        return evolve(total, buffer="tied_sum", index=(b, d), lifetime="program")

    def gradient_to_apply(self, b: int) -> Region:
        """The region in memory with the gradient of bucket `b` that waits for its update; if it waits on the
        disk, the staging slot it is read into."""
        return self.waiting(b) if self.spec.places[b].gradient != "disk" else self.slot_of("grad_page", b)

    def applied(self, b: int) -> Region:
        """The region with the gradient that the update of bucket `b` reads: where it waits, or a slot it was
        copied to, which for a staged update is a part of the slot of the optimizer state."""
        place = self.spec.places[b]
        if place.staged and place.gradient != "device":
            return self.slot_of("update_slot", b)
        if place.waits:
            return self.gradient_to_apply(b)
        return self.gradient(b) if place.update == "device" else self.slot_of("host_slot", b)

    def waiting(self, b: int) -> Region:
        """The region in memory where bucket `b`'s gradient, or a sum of several, waits for its update."""
        place = self.spec.places[b]
        if place.gradient == "device":
            return self("device_sum" if place.added else "device_grad", b)
        return self("grad_sum" if place.added else "host_grad", b)

    def state(self) -> Iterator[Region]:
        """Yield the regions of a training State (lifetime "state"); with pp those of this rank's stage."""
        return of_stage(self._state(), self.spec.stage)

    def _state(self) -> Iterator[Region]:
        spec = self.spec
        yield from (self("module_buffers", s) for s in spec.stateful)
        for place in sorted(spec.places, key=lambda x: x.trainable):
            b = place.index
            if place.params != "disk" and not place.keeps_high_half:
                yield self.params(b)
            yield from self.bucket_state(b)
            if spec.swaps:
                yield self("extent", b)
            elif b in spec.frozen_masters:
                yield self.of_state(StateBuffer(MASTER, "fp32"), b)
            if b in spec.frozen_averages or (place.trainable and spec.settings.ema is not None):
                yield self.of_state(EMA, b)
            if spec.deferred and place.trainable and place.state != "device":
                yield self("spilled", b) if place.gradient == "disk" else self.waiting(b)

    def on_device(self) -> dict[Region, bool]:
        """The State's regions in device memory. The value is True for parameters that can be made again from
        master weights, else False."""
        spec, there = self.spec, (r for r in self.state() if r.tier == "device")
        kept = {x.index for x in spec.places if x.trainable} | spec.frozen_masters
        made = {b for b in kept if spec.world == 1 or spec.places[b].sharded}
        return {r: r.role == "params" and r.index[0] in made for r in there}

    @_once
    def bucket_state(self, b: int) -> tuple[Region, ...]:
        """The regions of bucket `b`'s optimizer state in memory; pinned if they are copied to the device."""
        place = self.spec.places[b]
        sent = HIGH_HALF if place.sends_high_half else ""
        return tuple(self.of_state(x, b, place.staged or x.name == sent) for x in place.in_memory)

    def updated_state(self, b: int, but: Collection[str] = ()) -> tuple[Region, ...]:
        """The regions of bucket `b`'s optimizer state that its update changes: where they are in memory, and
        the slot of the part that lives on the disk; or, if the state is copied to the device, the slot there.

        Buffers named in `but` are left out, because another operation of the update changes them.
        """
        if self.spec.places[b].staged:
            return (self.slot_of("update_slot", b),)
        return (*(r for r in self.bucket_state(b) if r.buffer not in but), *self.paged(b))

    def direction(self, b: int) -> Ring:
        """For Muon: the ring of slots for this rank's slices of update directions, where bucket `b` is
        updated: on the device or the host."""
        return self.ring("direction_shard" if self.spec.places[b].update == "device" else "host_direction")

    @_once
    def of_state(self, x: StateBuffer, b: int, copied: bool = False) -> Region:
        """The region of buffer `x`, of the optimizer state or the moving average, for this rank's slice of
        bucket `b`; in pinned memory if it is `copied` to the device."""
        place = self.spec.places[b]
        tier: Tier = "device" if place.state == "device" else "pinned" if copied else "host"
        role = "ema" if x == EMA else "state"
        return self._made(
            x.name, Row(x.nbytes(place.shard_numel), tier, "state", x.dtype, role, home_of), (b,)
        )

    def high_half(self, b: int) -> Region:
        """The region of the high half of bucket `b`'s master weights: the bf16 parameters for the device."""
        return next(r for r in self.bucket_state(b) if r.buffer == HIGH_HALF)

    def paged(self, b: int) -> tuple[Region, ...]:
        """The staging slot into which bucket `b`'s optimizer state, or a frozen bucket's parameters, are read
        from the disk; () if they do not live there."""
        place = self.spec.places[b]
        if place.state == "disk":
            return (self.slot_of("state_slot", b),)
        return (self.slot_of("weight_page", b),) if place.params == "disk" and not place.trainable else ()

    def saved(self, b: int) -> tuple[Region, ...]:
        """The regions in memory that a checkpoint stores of bucket `b`: optimizer state and moving average,
        or the parameters of a frozen bucket."""
        if not (place := self.spec.places[b]).trainable:
            return () if place.params == "disk" else (self.params(b),)
        average = (self.of_state(EMA, b),) if self.spec.settings.ema is not None else ()
        return (*self.bucket_state(b), *average)

    def written(self, b: int) -> Region:
        """A region on the disk for what a checkpoint stores of bucket `b`, with its size in bytes."""
        place = self.spec.places[b]
        nbytes = sum(place.shard_bytes if r.role == "params" else r.nbytes for r in self.saved(b))
        nbytes += self.spec.extents[b].moved_bytes if "disk" in (place.state, place.params) else 0
        return self._made("written", Row(nbytes, "disk", "value", of=home_of), (b,))


def _open_sums(spec: StepSpec, device: int) -> int:
    """The largest number of segments, at any one time, whose gradients `device` has added up for some
    micro-batches but not yet for all."""
    most, counts = 0, Counter[int]()
    for x in spec.passes if spec.mesh.made_on else ():
        if x.way in (B, W) and x.device == device and x.ended:
            counts[x.s] += 1
            most = max(most, len(counts))
            if counts[x.s] == spec.settings.micro_batches:
                del counts[x.s]
    return most


def rings(at: Regions, device: int) -> Iterator[Ring]:
    """Yield the rings of staging slots of `device`, first those of which a step uses every slot. A ring has
    slots for the bytes of its items (buckets or segments) and for as many as are in use at a time; a ring in
    device memory only has items of that device's passes."""
    spec, layout, settings = at.spec, at.spec.layout, at.spec.settings
    slots = settings.slots

    def reused(
        buffer: str,
        sizes: dict[int, int],
        groups: Iterable[Sequence[int]],
        depth: int,
        kinds: Mapping[int, Dtype] = ALIKE,
    ) -> Ring:
        return Ring.reused(at.blank_slot(buffer, device), sizes, groups, depth, kinds)

    def passing(buffer: str, sizes: dict[int, int], order: Sequence[int], depth: int, *kinds: Any) -> Ring:
        return Ring.passing(at.blank_slot(buffer, device), sizes, order, depth, *kinds)

    def here(segments: Iterable[int], *ways: str) -> list[int]:
        there = spec.mesh.segments_on(device, *ways)
        return [s for s in segments if s in there]

    def off_device(own: Iterable[T], of_all: Iterable[T]) -> Iterable[T]:
        """The items for a ring off the device: with pp `own`, those of this device; else `of_all` devices."""
        return own if spec.mesh.over_ranks else of_all

    # A slot of parameters, or of gradients in their dtype, serves buckets of one.
    places, segments = spec.places, range(spec.num_segments)
    dtypes: dict[int, Dtype] = {x.index: x.dtype for x in places}
    delivered: dict[int, Dtype] = {x.index: x.delivered_dtype for x in places}
    at_home = [x for x in places if x.trainable and x.home == device]
    offloaded = [x for x in off_device(at_home, places) if x.trainable and x.state != "device"]
    leaving = [x for x in offloaded if x.gradient != "device"]  # gradients
    used = [layout.weights_of(s) for s in here(segments, F, B)]
    pulled = [layout.buckets_of(s) for s in here(segments, B) if s >= layout.first_trainable]

    # Parameters, sums and states stay in their slots until another item needs one.
    streamed = [x for x in places if x.streamed]
    fetched, made = {*chain(*used)}, {*chain(*pulled)}
    own = [x for x in streamed if x.index in fetched]
    weights = {x.index: x.numel * x.element_bytes for x in own}
    yield reused("weight_slot", weights, used, slots, dtypes)
    added = (x for x in leaving if x.summed and x.index in made)
    sums = {x.index: x.shard_numel * FP32 for x in added}
    yield reused("sum_slot", sums, pulled, max(slots, _open_sums(spec, device)))
    on_disk = (x for x in off_device(own, streamed) if x.params == "disk")
    pages = {x.index: whole_blocks(x.weight_bytes) for x in on_disk}
    yield reused("weight_page", pages, [layout.weights_of(s) for s in segments], slots)
    states = {x.index: spec.extents[x.index].nbytes for x in (offloaded if spec.swaps else ())}
    yield reused("state_slot", states, [[b] for b in states], settings.state_slots)
    staged = [x.index for x in at_home if x.staged]
    updated = {b: sum(map(whole_blocks, places[b].staged_bytes.values())) for b in staged}
    yield reused("update_slot", updated, [[b] for b in updated], settings.state_slots)
    spilled = {x.index: whole_blocks(x.delivered_bytes) for x in leaving if x.gradient == "disk"}
    yield reused("grad_page", spilled, [[b] for b in spilled], slots, delivered)

    # Gradients pass in the order in which backward completes the buckets.
    backward = reversed(segments[layout.first_trainable :])
    parts = [(s, part) for s in backward for part in layout.contributions(s)]
    completed = [b for s, (b, _, group) in parts if s == group[-1]]
    packed = (places[b] for b in sorted(made) if settings.stage != 1)
    sizes = {x.index: x.numel * x.element_bytes for x in packed}
    yield passing("grad_slot", sizes, completed, slots, dtypes)
    # Off the device a gradient has a slot if it is applied or added at once.
    landing = {x.index: x.delivered_bytes for x in leaving if x.added or not x.waits}
    homes = {b: places[b].home for b in landing}  # a device does not wait for what another sends
    yield passing("host_slot", landing, completed, slots, delivered, homes)
    sent = {x.index: x.shard_bytes for x in offloaded if not x.staged and x.params == "device"}
    yield passing("param_slot", sent, [*sent], slots, dtypes)

    # Recipes update buckets in different orders. By size, those of a class are all in a row: of this device alone,
    # as all whose update has begun may be its own.
    matrices, ours = ([x for x in of if x.matrices] for of in (places, at_home))
    for buffer, those in (("direction_slot", ours), ("direction_shard", ours), ("host_direction", matrices)):
        sizes = {x.index: (x.numel if buffer == "direction_slot" else x.shard_numel) * BF16 for x in those}
        yield passing(buffer, sizes, [x.index for x in sorted(those, key=lambda x: x.numel)], slots)

    # What a segment left passes once for each micro-batch of a group.
    away = {s: left_bytes(spec, s) for s in segments if spec.activations[s] != "device"}
    ahead = ACTIVATION_SLOTS if settings.tiles == 1 else 1
    in_turn = [s for s in away for _ in range(min(settings.in_flight, slots + ahead))]
    yield passing("act_slot", {s: away[s] for s in here(away, B)}, in_turn, ahead)
    yield passing("act_room", dict.fromkeys(here(away, F), 1), in_turn, ahead)
    on_disk = (s for s in off_device(here(away, F, B), away) if spec.activations[s] == "disk")
    kept = {s: sum(r.nbytes for r in at.stash(0, s, "disk")) for s in on_disk}
    yield passing("act_page", kept, in_turn, slots)

    # What a pass makes that another device reads: each way into a segment has a slot of its own.
    for way, flow in FLOWS.items():
        into = off_device((), spec.mesh.hops(way))
        hops = {s: round_up(flow.size(spec.costs[s]), ALLOCATION) for s in into}
        yield reused(f"{flow.own}_hop", hops, [[*hops]], 1)
