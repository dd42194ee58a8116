"""The size, tier, lifetime and role of each region of a step. `zfunc.core.ops` says which operation uses which."""

from collections.abc import Callable, Collection
from typing import Any

from attrs import frozen

from zfunc.core.dtypes import Dtype
from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Lifetime, Role, Tier
from zfunc.core.layout import round_up
from zfunc.core.pipeline import B, F
from zfunc.core.spec import ALLOCATION, PassedOn, SegmentCost, StepSpec

BF16, FP32, FP64 = 2, 4, 8  # bytes
SUM_PARTS = 21  # doubles that an exact sum of squares consists of

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


def value_for(value: Any, spec: StepSpec, index: Index) -> Any:
    """The `value` of a field of a Row for the region with `index`: itself, or what it returns as a function."""
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


def home_of(spec: StepSpec, i: Index) -> int:
    """The number of the device, or pipeline stage, on which bucket `i[-1]` lives."""
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
    """The Row of a region in which the gradient of a bucket waits for the update of the bucket, in memory of
    `tier`."""
    return Row(
        lambda spec, i: spec.places[i[-1]].waiting_bytes,
        *(tier, _delayed),
        lambda spec, i: spec.places[i[-1]].waiting_dtype,
        *("grad_shard", home_of),
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
    *("params", home_of),
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
    "extent": Row(_extent_bytes, "disk", "state", "uint8", "state", home_of),
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
        *("disk", _delayed, "uint8", None, home_of),
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
