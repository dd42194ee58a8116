"""The size, tier, lifetime and role of every region of a step. `zfunc.core.ops` says which operation uses which."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

from attrs import define, evolve, field, frozen

from zfunc.core.dtypes import Dtype
from zfunc.core.extents import whole_blocks
from zfunc.core.graph import EVERY, Lifetime, Region, Role, Tier, of_stage
from zfunc.core.layout import round_up
from zfunc.core.optimizer_state import EMA, HIGH_HALF, MASTER, StateBuffer
from zfunc.core.pipeline import B, F, W
from zfunc.core.slots import ALIKE, Ring
from zfunc.core.spec import ALLOCATION, PassedOn, SegmentCost, StepSpec

BF16, FP32, FP64 = 2, 4, 8  # bytes
SUM_PARTS = 21  # doubles that an exact sum of squares consists of
# One is copied while a pass uses the other. Rows in tiles have one slot: they take far longer than their copies.
ACTIVATION_SLOTS = 2
USED_WHOLLY = ("weight_slot", "sum_slot")  # rings on a device all of whose slots a step uses

Index = tuple[int, ...]


@frozen
class Row:
    """The fields that all regions of one buffer name have in common: each a value, or a function of
    (StepSpec, region index). A region belongs to the device or rank for which operations are being made,
    unless `of` returns the number of another."""

    nbytes: int | Callable[[StepSpec, Index], int]
    tier: Tier | Callable[[StepSpec, Index], Tier] = "device"
    lifetime: Lifetime | Callable[[StepSpec, Index], Lifetime] = "operation"
    dtype: Dtype | Callable[[StepSpec, Index], Dtype] | None = None
    role: Role | None = None
    of: Callable[[StepSpec, Index], int] | None = None


def _for(value: Any, spec: StepSpec, index: Index) -> Any:
    return value(spec, index) if callable(value) else value


@frozen
class Flow:
    """What passes from segment to segment in passes of kind `way`: of forward, number `s` is the input of segment
    `s`; of backward, the gradient of that input. The pass that takes number `s` is through segment `s - back`.

    A region `own` has what no other number has, a region `common` what several numbers in a row have (`passed`),
    which has the size `made` where a pass makes it.
    """

    way: str
    own: str
    common: str
    back: int
    later: Callable[[int, int], int]  # of two numbers, that to which passes come later
    size: Callable[[SegmentCost], int]
    passed: Callable[[SegmentCost], tuple[PassedOn, ...]]
    made: Callable[[PassedOn], int]

    def taker(self, spec: StepSpec, i: Index) -> int:
        """The device of the pass of micro-batch `i[0]` that takes number `i[1]`."""
        return spec.mesh.device_of(self.way, i[0], i[1] - self.back)

    def maker(self, spec: StepSpec, i: Index) -> int:
        """The device of the pass of micro-batch `i[0]` that makes number `i[1]`."""
        return self.taker(spec, (i[0], self.before(i[1])))

    def before(self, number: int) -> int:
        """The number of the input, or gradient, taken by the pass whose result is `number` of this flow."""
        return number + 1 if self.back else number - 1

    def first_there(self, spec: StepSpec, m: int, number: int) -> int:
        """The first of the numbers in a row up to `number` that passes of micro-batch `m` take on one device."""
        return spec.mesh.run_of(self.way, m, number - self.back) + self.back

    def nbytes(self, spec: StepSpec, i: Index) -> int:
        """Bytes of number `i[-1]`."""
        return self.size(spec.costs[i[-1]])

    def own_bytes(self, spec: StepSpec, i: Index) -> int:
        """Bytes of number `i[-1]` without memory that other numbers have, too."""
        return self.nbytes(spec, i) - sum(x.nbytes for x in self.passed(spec.costs[i[-1]]))

    def made_bytes(self, spec: StepSpec, i: Index) -> int:
        """Bytes of number `i[-1]` that the pass before makes: not those that it passes on."""
        new = (x for x in self.passed(spec.costs[i[-1]]) if x.origin.first == i[-1])
        return self.own_bytes(spec, i) + sum(map(self.made, new))

    def common_bytes(self, spec: StepSpec, i: Index) -> int:
        """Bytes of the memory that numbers `i[1]` to `i[2]` have in common, on the device of the pass of
        micro-batch `i[0]` that takes number `i[1]`: it was made there, or came from another device."""
        m, begin, end = i
        came = self.first_there(spec, m, begin) == begin
        passed = [x for x in self.passed(spec.costs[begin]) if x.origin.last == end]
        return sum(x.nbytes if came else self.made(x) for x in passed if came or x.origin.first == begin)

    def rows(self) -> dict[str, Row]:
        """The fields, by buffer, of the regions of what passes."""
        return {
            self.own: Row(self.own_bytes),
            self.common: Row(self.common_bytes, of=self.taker),  # from, to
            # on another device, which makes it, until it is copied
            f"sent_{self.own}": Row(self.made_bytes, of=self.maker),
            # on its way to another rank, which has it
            f"{self.own}_wire": Row(self.nbytes, "pinned", of=self.taker),
        }


FLOWS = {
    F: Flow(
        *(F, "act", "passed", 0, max),
        size=lambda x: x.input_bytes,
        passed=lambda x: x.passed_on,
        made=lambda x: x.nbytes,
    ),
    B: Flow(
        *(B, "grad_act", "passed_grad", 1, min),
        size=lambda x: x.gradient_bytes,
        passed=lambda x: x.passed_back,
        made=lambda x: x.most,
    ),
}
"""What passes from segment to segment, by the letter of the passes that make it."""


def _buffer_bytes(spec: StepSpec, i: Index) -> int:
    return spec.buffer_bytes[i[-1]]


def _home_of(spec: StepSpec, i: Index) -> int:
    return spec.places[i[-1]].home


def _forward_of(spec: StepSpec, i: Index) -> int:
    return spec.mesh.device_of(F, 0, i[-1])


def _square_bytes(spec: StepSpec, i: Index) -> int:
    """Bytes for the sums of squares of a bucket's gradient: an exact sum of 21 doubles, with `norms` one for
    each parameter; at least 4 bytes a parameter, as a device may write fp32 norms instead."""
    parameters, row = len(spec.layout.buckets[i[-1]].spans), SUM_PARTS * FP64
    return row * (parameters if spec.settings.norms else max(1, -(-FP32 * parameters // row)))


def left_bytes(spec: StepSpec, s: int, without: Collection[int] = ()) -> int:
    """Bytes of the activations (input, residuals) that backward of segment `s` needs, when they are offloaded
    after forward and copied back; of the input not the leaves `without`, which have a `SharedStash`."""
    cost = spec.costs[s]
    return max(cost.stash_bytes, cost.input_bytes) - sum(x.nbytes for x in cost.shared if x.leaf in without)


def _own_bytes(spec: StepSpec, i: Index) -> int:
    """Bytes of a segment's offloaded activations for one micro-batch, without the tensors that are offloaded
    once for several segments."""
    return left_bytes(spec, i[-1], spec.shared_stashes[i[-1]])


def _shared_bytes(spec: StepSpec, i: Index) -> int:
    """Bytes of a tensor that is offloaded once for several segments."""
    return spec.shared_stashes[i[1]][i[2]].nbytes


def _recomputed_bytes(spec: StepSpec, i: Index) -> int:
    """Device bytes that a separate recomputation of a segment keeps for its backward: residuals, and
    offloaded activations, copied back."""
    came_back = 0 if spec.activations[i[-1]] == "device" else spec.costs[i[-1]].stash_bytes
    return spec.costs[i[-1]].recomputed_bytes + came_back


def _extent_bytes(spec: StepSpec, i: Index) -> int:
    extent = spec.extents[i[-1]]
    records = spec.swap_records if i[-1] in spec.first_on_disk else 0  # which is in every plan
    return extent.generations * extent.nbytes + records


def _delayed(spec: StepSpec, i: Index) -> Lifetime:
    """The lifetime of the region in which a bucket's gradient waits for its update: "state" if the next step
    makes the update, "program" if this step does."""
    return "state" if spec.deferred and spec.places[i[-1]].state != "device" else "program"


def _waiting(tier: Tier | Callable[[StepSpec, Index], Tier]) -> Row:
    """The fields (a Row) that regions have in common in which a bucket's gradient waits in `tier` for its
    update."""
    return Row(
        lambda spec, i: spec.places[i[-1]].waiting_bytes,
        *(tier, _delayed),
        lambda spec, i: spec.places[i[-1]].waiting_dtype,
        *("grad_shard", _home_of),
    )


def _slot(tier: Tier, dtype: Dtype | None, role: Role | None = None) -> Row:
    """The common fields (Row) of staging slots in `tier`, of `dtype`, by default that of `precision`."""
    return Row(0, tier, "program", dtype or (lambda spec, _: spec.settings.precision), role)


# Parameters where they live: all, or a rank's slice.
_PARAMS = Row(
    lambda spec, i: spec.places[i[-1]].weight_bytes,
    lambda spec, i: "device" if spec.places[i[-1]].params == "device" else "pinned",
    "state",
    lambda spec, i: spec.places[i[-1]].dtype,
    *("params", _home_of),
)
REGIONS: dict[str, Row] = {
    # of a micro-batch
    "batch": Row(lambda spec, _: spec.costs[0].input_bytes + spec.target_bytes, "host", "value"),
    "targets": Row(lambda spec, _: spec.target_bytes),
    "loss": Row(ALLOCATION, role="loss"),
    "aux": Row(lambda spec, _: round_up(4 * len(spec.aux), ALLOCATION), role="aux"),  # auxiliary outputs
    "aux_rows": Row(lambda spec, _: sum(round_up(x.nbytes, ALLOCATION) for x in spec.aux_rows)),  # of rows
    # of a micro-batch and a segment
    **{buffer: row for flow in FLOWS.values() for buffer, row in flow.rows().items()},
    "residuals": Row(lambda spec, i: spec.costs[i[-1]].residual_bytes),
    "recomputed": Row(_recomputed_bytes),  # they, made ahead of backward
    # kept by one half of backward for the other
    "pending": Row(lambda spec, i: spec.costs[i[-1]].pending_bytes),
    "grads": Row(lambda spec, i: spec.grad_bytes[i[-1]]),  # as backward returns them, before they are packed
    # of a micro-batch in its group, and a segment: what backward needs of forward, off the device
    "host_act": Row(_own_bytes, "pinned", "program", "uint8", "act"),
    "disk_act": Row(lambda spec, i: whole_blocks(_own_bytes(spec, i)), "disk", "program", "uint8", "act"),
    # and a leaf of its input, which several segments need
    "host_shared": Row(_shared_bytes, "pinned", "program", "uint8", "act"),
    "disk_shared": Row(
        lambda spec, i: whole_blocks(_shared_bytes(spec, i)), "disk", "program", "uint8", "act"
    ),
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
    # its state, or frozen parameters
    "extent": Row(_extent_bytes, "disk", "state", "uint8", "state", _home_of),
    "sent": Row(0, "host"),  # and of a delivery: it orders a collective before the decision
    "params": _PARAMS,
    "frozen": _PARAMS,
    "host_grad": _waiting("pinned"),
    # of several deliveries
    "grad_sum": _waiting(lambda spec, i: "host" if spec.places[i[-1]].update == "host" else "pinned"),
    "device_grad": _waiting("device"),
    "device_sum": _waiting("device"),
    "spilled": Row(  # a gradient that waits on the disk
        lambda spec, i: whole_blocks(spec.places[i[-1]].delivered_bytes),
        *("disk", _delayed, "uint8", None, _home_of),
    ),
    # slots, which `Ring` numbers; an item that passes decides their room, and of some the dtype
    "weight_slot": _slot("device", None, "params"),  # of a segment that uses them
    "weight_page": _slot("pinned", "uint8"),  # read from the disk, all or this rank's slice
    "sum_slot": _slot("device", "fp32", "grad_shard"),  # over the micro-batches
    "state_slot": _slot("pinned", "uint8", "paged"),  # while it is updated
    "update_slot": _slot("device", "uint8", "paged"),  # while it is updated there
    "grad_page": _slot("pinned", None, "grad_shard"),  # on its way to the disk, or back
    "grad_slot": _slot("device", None, "grad"),
    "host_slot": _slot("pinned", None, "grad_shard"),  # as it arrives on the host
    "param_slot": _slot("pinned", None, "copy"),  # new ones, before their copy to the device
    "direction_slot": _slot("device", "bf16"),  # from the slices of all ranks
    "direction_shard": _slot("device", "bf16", "grad_shard"),
    "host_direction": _slot("pinned", "bf16", "grad_shard"),  # on its way to the device, or back
    "act_slot": _slot("device", "uint8", "act"),  # what backward needs, back on the device
    "act_page": _slot("pinned", "uint8", "act"),  # on its way to the disk, or back
    "act_hop": _slot("pinned", "uint8", "act"),
    "grad_act_hop": _slot("pinned", "uint8", "act"),
    "act_room": Row(0),  # has no memory, and only counts
    # of the step
    "constants": Row(lambda spec, _: spec.constant_bytes, lifetime="value"),  # of the model
    "norm": Row(FP64, "host", "value"),
    "norms": Row(
        lambda spec, _: FP64 * sum(len(x.spans) for x in spec.layout.buckets) * spec.settings.norms,
        "host",
        "value",
    ),
    "mean_loss": Row(FP64, "host", "value", role="loss"),  # over all ranks
    "mean_aux": Row(lambda spec, _: FP64 * len(spec.aux), "host", "value", role="aux"),
    "all_rows": Row(  # the auxiliary outputs of rows, of all micro-batches and ranks
        lambda spec, _: spec.world * spec.settings.micro_batches * sum(x.nbytes for x in spec.aux_rows),
        "host",
        "value",
    ),
    "decision": Row(FP64, "host", "value"),  # whether it is skipped, and what scales its gradient
    "position": Row(0, "host", "value"),  # where the training is after the update that a commit names
    "committed": Row(0, "disk", "value"),  # what names the step whose state is on the disk
    "checkpoint": Row(0, "disk", "value"),  # the one being written
    "written_buffers": Row(lambda spec, _: sum(spec.buffer_bytes), "disk", "value"),  # by rank 0
    "published": Row(0, "disk", "value"),  # the checkpoint's path, or why it failed
}
"""The regions of every step, slots among them, by buffer; those of the optimizer state follow from its format."""

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
        tier, lifetime = _for(row.tier, spec, index), _for(row.lifetime, spec, index)
        if row.of is not None:
            number = row.of(spec, index)
        elif lifetime == "value" and tier != "device":
            number = EVERY
        else:
            number = self.device if device is None else device
        nbytes, dtype = _for(row.nbytes, spec, index), _for(row.dtype, spec, index)
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
        number = self._number(_for(REGIONS[buffer].tier, self.spec, ()), device)
        return self._made(buffer, REGIONS[buffer], (number,) if number else (), device)

    def gradient(self, b: int) -> Region:
        """The flat gradient of bucket `b` on the device: in a slot, or in stage 1 in a buffer of its own."""
        return self._whole_sum(b) if self.spec.settings.stage == 1 else self.slot_of("grad_slot", b)

    @_once
    def _whole_sum(self, b: int) -> Region:
        place = self.spec.places[b]
        row = Row(place.numel * place.element_bytes, "device", "program", place.dtype, "grad", _home_of)
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
            x.name, Row(x.nbytes(place.shard_numel), tier, "state", x.dtype, role, _home_of), (b,)
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
        return self._made("written", Row(nbytes, "disk", "value", of=_home_of), (b,))


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
