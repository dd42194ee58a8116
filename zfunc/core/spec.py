"""What a recipe knows of a training step: the layout, the costs of the segments, and the settings."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any

from attrs import evolve, field, frozen, validators

from zfunc.core.display import brief
from zfunc.core.extents import BLOCK, SUMMED, Extent, record_bytes, whole_blocks
from zfunc.core.layout import Layout, round_up
from zfunc.core.optimizer_state import HIGH_HALF, MASTER, STATE_FORMATS
from zfunc.core.pipeline import PASSES, B, F, I, InGroups, Order, Pass, R, W, passes_in, passes_listed
from zfunc.core.places import BucketPlaces, Where, make_places
from zfunc.core.settings import StepSettings
from zfunc.core.shares import word_of
from zfunc.errors import PlanError, refuse
from zfunc.values import of_type

ALLOCATION = 512  # bytes; CUDA's caching allocator rounds every tensor up to a multiple
HOP = 10_000  # FLOPs of a device while a byte comes from another, about
PARAMS = "params"  # parameters in the dtype of the device, where the disk has them
GRADIENT = "gradient"  # of a bucket, in a slot with the state that it updates
FROZEN = "frozen"  # the only kind of state of a frozen parameter: its values
EACH = "one for each segment of the layout: pass (x,) * len(layout.segments) for equal ones"
Parts = frozenset[tuple[str, int]]


def _each(name: str, given: Any) -> tuple[Any, ...]:
    """An attrs converter of an iterable, with a value for each segment, to a tuple."""
    of_type(name, given, Iterable, EACH)
    return tuple(given)


@frozen
class PassCost:
    """The cost of a pass through a segment: the figures of its operation (`zfunc.core.graph.Op`).

    `nbytes` is what its kernels read and write, `workspace` the most that it allocates beside its inputs and
    outputs.
    """

    flops: int = 0
    nbytes: int = 0
    workspace: int = 0
    launches: int = 0
    attention_flops: int = 0
    copied_bytes: int = 0

    def beside(self, nbytes: int) -> "PassCost":
        """The cost of the pass with `nbytes` of its workspace counted as regions of their own."""
        return evolve(self, workspace=max(0, self.workspace - nbytes))


@frozen
class SegmentCost:
    """The costs of one segment for one micro-batch, by the verbs of its passes, and sizes in bytes.

    The cost of `backward` includes recomputation, unless a pass `recompute` precedes it, which leaves
    `recomputed_bytes`; `backward_input` and `backward_weight` are the halves of a split backward, between which
    `pending_bytes` are kept. `residual_bytes` are kept after forward beside the output, 0 if backward recomputes;
    `stash_bytes` is what backward needs of forward: input, residuals, and an output among these (`keeps_output`).
    `key_bytes` is the host memory of any pass for keys of a row.
    """

    forward: PassCost = PassCost()
    backward: PassCost = PassCost()
    backward_input: PassCost = PassCost()
    backward_weight: PassCost = PassCost()
    recompute: PassCost = PassCost()
    input_bytes: int = 0
    residual_bytes: int = 0
    stash_bytes: int = 0
    keeps_output: bool = False
    key_bytes: int = 0
    pending_bytes: int = 0
    recomputed_bytes: int = 0

    @property
    def passes(self) -> dict[str, PassCost]:
        """The segment's cost of each kind of pass, by its letter in `PASSES`."""
        return {way: getattr(self, kind.verb) for way, kind in PASSES.items()}


@frozen
class StepSpec:
    """Everything a recipe needs to know about a training step, without tensors. Sizes are in bytes.

    - `settings`: those of `zfunc.compile`, none of them "auto". `costs` are of their micro-batches.
    - `world`: the number of ranks; each updates its slice of every bucket.
    - `constant_bytes`: device memory of the model beside its parameters.
    - `buffer_bytes[s]`: device memory of what forward of segment `s` changes, as running statistics.
    - `aux`: the names of the auxiliary outputs that the last segment returns beside the loss.
    - `unused`: the names of the trained parameters that no path from the loss leads to.
    - `save`: the step also writes a checkpoint of the state before it.
    - `resident`: the buckets whose state is on the device and is updated there, with `update_workspace` bytes more.
    - `paged`: the buckets whose state is on the disk, and in a slot while it is updated.
    - `commit`: the step leaves the state on the disk as a checkpoint; otherwise what is also in memory is not
      written.
    - `frozen_masters`: the frozen buckets whose fp32 weights a State keeps, beside those that the device rounds;
      `frozen_averages`: those of which it keeps the moving average. Both are of a State that was loaded, and no
      step reads them.
    - `order`: the passes on several devices.
    - `stage`: the pipeline stage of this rank, whose State has its part; None has all of it.

    Raises TypeError for `costs` that are no list, ValueError for a value out of range, an unknown format of the
    state or an unknown bucket.
    """

    layout: Layout
    costs: tuple[SegmentCost, ...] = field(converter=partial(_each, "costs"))
    settings: StepSettings = field(factory=StepSettings)
    world: int = field(default=1, validator=validators.ge(1))
    target_bytes: int = 0
    aux: tuple[str, ...] = field(default=(), converter=tuple[str, ...])
    unused: tuple[str, ...] = field(default=(), converter=tuple[str, ...])
    constant_bytes: int = 0
    buffer_bytes: tuple[int, ...] = field(default=(), converter=tuple[int, ...])
    save: bool = False
    resident: frozenset[int] = field(default=frozenset[int](), converter=frozenset[int])
    paged: frozenset[int] = field(default=frozenset[int](), converter=frozenset[int])
    commit: bool = False
    update_workspace: int = 0
    frozen_masters: frozenset[int] = frozenset()
    frozen_averages: frozenset[int] = frozenset()
    order: Order | None = None
    stage: int | None = None

    def __repr__(self) -> str:
        return brief(self)

    def __attrs_post_init__(self) -> None:
        for unknown in {x.state_format for x in self.layout.buckets} - STATE_FORMATS.keys():
            known = ", ".join(STATE_FORMATS)
            expected = f"one of {known}, the rows of zfunc.core.optimizer_state.STATE_FORMATS"
            refuse("state_format", repr(unknown), expected, "add one there for an optimizer of your own")
        if len(self.costs) != (count := len(self.layout.segments)):
            expected, _, do = f"{count}, {EACH}".partition(": ")
            refuse("costs", str(len(self.costs)), expected, do)
        if automatic := self.settings.automatic:
            refuse(automatic[0], "'auto'", "what it stands for", "pass that")
        self.settings.check_shares(count)
        for name, given, known in (
            ("resident", self.resident, {*range(len(self.layout.buckets))}),
            ("paged", self.paged, {*self.offloaded}),
        ):
            if unknown := given - known:
                got, expected = f"buckets {sorted(unknown)}", f"some of {sorted(known)}"
                refuse(name, got, expected, "make it with zfunc.core.bucketing")
        if self.devices:
            self._check_places()

    @cached_property
    def places(self) -> tuple[BucketPlaces, ...]:
        """Where the data of each bucket is, trainable or frozen, by its index."""
        return make_places(
            self.layout,
            self.settings,
            world=self.world,
            resident=self.resident,
            paged=self.paged,
            homes={b: min(devices) for b, devices in self._homes.items()},
            stage=self.stage,
            sums=self._one_sum_at_a_time,
        )

    @cached_property
    def activations(self) -> tuple[Where, ...]:
        """For each segment, where its activations wait for backward; the last segment's stay on the device."""
        shares, count = self.settings.activations_on, self.num_segments
        moving = range(self.layout.first_trainable, count - 1)
        return tuple(word_of(shares, s, count) if s in moving else "device" for s in range(count))  # pyright: ignore

    @property
    def barrier(self) -> bool:
        """Whether no parameter is updated before the norm of the step's whole gradient is known."""
        return self.settings.waits_for_norm

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """For each segment, whether its backward recomputes its forward."""
        return tuple(mode == "all" for mode in self.settings.recompute_modes(self.num_segments))

    def loaded_before(self, m: int) -> Sequence[int]:
        """The micro-batches that are copied to the first device just before the first pass of micro-batch `m`: all
        of its group, or, with several devices, the one after `m`."""
        total, size = self.settings.micro_batches, self.settings.group_size
        if self.devices:
            return range(m + (m > 0), min(m + 2, total))
        return range(m, min(m + size, total)) if m % size == 0 else ()

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of all micro-batches through the segments, on all devices, in serial order."""
        work = [{way: cost.flops or PASSES[way].work for way, cost in x.passes.items()} for x in self.costs]
        hops = [x.input_bytes * HOP for x in self.costs]
        tied = [*self._tied.values()]
        return tuple(x for _, _, x in passes_in(self.listed, self._trained, work, hops, tied))

    @cached_property
    def listed(self) -> list[list[Pass]]:
        """The passes of each device, in the device's order."""
        order, settings = self.order or InGroups(self.settings.group_size), self.settings
        given = settings.stages, settings.micro_batches, self._trained, self.num_segments, self.repeated
        return passes_listed(order, *given)

    @cached_property
    def _trained(self) -> list[int]:
        return [s for s in range(self.num_segments) if self.layout.buckets_of(s)]

    @cached_property
    def _tied(self) -> dict[int, set[int]]:
        """For each tied bucket, the segments whose gradients are added up to the bucket's gradient."""
        buckets = (x for x in self.layout.buckets if len(x.deliveries) > 1)
        return {x.index: {*chain(*x.deliveries)} for x in buckets}

    @property
    def repeated(self) -> list[int]:
        """Segments whose forward may be recomputed ahead of backward; compiled, it would give other bits."""
        whole = self.settings.tiles == 1 and not self.settings.compile_segments
        return [s for s, repeats in enumerate(self.recompute) if repeats and whole]

    @cached_property
    def parts(self) -> Parts:
        """Pairs (W, s) if backward of segment `s` is split for some micro-batch, and (R, s) if the recomputation of
        segment `s` is a pass of its own."""
        return frozenset((way, s) for way, _, s in self.devices if way in (W, R))

    @cached_property
    def devices(self) -> dict[tuple[str, int, int], int]:
        """With several devices, the number of the device, or with pp of the stage, that makes each pass (B stands
        for I); empty for one device, whose passes may be millions."""
        lists = self.listed if self.settings.stages > 1 else ()
        return {(B if x.way == I else x.way, x.m, x.s): x.device for x in chain(*lists)}

    def device_of(self, way: str, m: int, s: int) -> int:
        """The number of the device that makes pass `way` of micro-batch `m`, segment `s` (B stands for I)."""
        return self.devices.get((way, m, s), 0)

    def segments_on(self, device: int, *ways: str) -> list[int]:
        """Ascending segments through which `device` makes passes of the kinds `ways`."""
        if not self.devices:
            return [*range(self.num_segments)]
        return sorted(set[int]().union(*(self._made_on.get((device, way), ()) for way in ways)))

    @cached_property
    def _made_on(self) -> dict[tuple[int, str], set[int]]:
        """For each device and kind of pass, the segments through which the device makes such passes."""
        made: dict[tuple[int, str], set[int]] = {}
        for (way, _, s), d in self.devices.items():
            made.setdefault((d, way), set()).add(s)
        return made

    def hops(self, way: str) -> list[int]:
        """Segments whose input (`way` F), or its gradient (B), goes from one device to another."""
        of = self.devices
        return sorted({s for (x, m, s), d in of.items() if x == way and s and of.get((x, m, s - 1), d) != d})

    @cached_property
    def _homes(self) -> dict[int, set[int]]:
        """For each bucket, the devices on which passes use its parameters."""
        homes: dict[int, set[int]] = {}
        for (_, _, s), d in self.devices.items():
            for b in self.layout.weights_of(s):
                homes.setdefault(b, set()).add(d)
        return homes

    @property
    def several_ranks(self) -> bool:
        """Whether several ranks train together, by data or as stages of a pipeline."""
        return self.world > 1 or self.over_ranks

    @property
    def over_ranks(self) -> bool:
        """Whether each device belongs to another rank, as with pp."""
        return self.settings.pp > 1

    def _check_places(self) -> None:
        """Raise PlanError if the order of several devices does not fit the places of data, or other settings."""
        if any(way == W for way, _ in self.parts) and (
            self.settings.tiles != 1 or self.settings.compile_segments
        ):
            name = "tiles" if self.settings.tiles != 1 else "compile_segments"
            raise PlanError(
                f"order: got a backward in two halves with {name}={getattr(self.settings, name)!r}, whose backward "
                f"is one: pass order='OneFOneB', or leave {name} out"
            )
        for x in chain(*self.listed):
            m, s, forward = x.m, x.s, self.device_of(F, x.m, x.s)
            if x.way in (W, R) and x.device != (other := self.device_of(B, m, s)):
                raise PlanError(
                    f"order: got {x} on device {x.device} and the rest of that backward on device {other}, "
                    f"expected one device, which has what is kept between them: list {x} for device {other}"
                )
            apart = x.way in (B, I) and x.device != forward
            if apart and (self.over_ranks or self.activations[s] == "device"):
                way_on = "in one process activations_on='host' for all but the last segment"
                raise PlanError(
                    f"order: got {x} on device {x.device} and its forward on device {forward}, which has its "
                    f"activations: expected one device, or {way_on}"
                )
            if self.device_of(F, m, s) != self.device_of(F, 0, s) and s in self.stateful:
                raise PlanError(
                    f"order: got segment {s}, whose forward changes buffers, on several devices, expected "
                    "one: pass an order that keeps a segment on a device, such as 'OneFOneB'"
                )
        for b, devices in self._homes.items():
            if len(devices) > 1 and (self.over_ranks or not self.places[b].fetched_anywhere):
                names = [span.name for span in self.layout.all_buckets[b].spans]
                way_on = "pass params_on='host', with update_on='host', or"
                if self.over_ranks:
                    one_process = f"pass devices={self.settings.pp}, params_on='host' in one process"
                    way_on = f"{one_process}, or untie them, or"
                raise PlanError(
                    f"order: got passes with the weights {', '.join(names[:3])} on the devices {sorted(devices)}, "
                    f"expected one: {way_on} an order that has those segments on one, "
                    "as DualPipeV the first and last"
                )

        _ = self.passes  # whose devices do not wait for each other
        for b in self._tied if self.settings.stage == 1 else ():
            self._check_sum(b)

    def _check_sum(self, b: int) -> None:
        """Raise PlanError if stage 1 would add a tied weight's gradients in another order than one device."""
        own = [x for x in self.passes if x.ended and x.way in (B, W) and x.s in self._tied[b]]
        for x, y in pairwise(own):
            if (x.m, -x.s) > (y.m, -y.s):
                names = [span.name for span in self.layout.buckets[b].spans[:3]]
                raise PlanError(
                    f"order: got {x} before {y} with stage=1 and the weights "
                    f"{', '.join(names)}, which it adds up in this order, "
                    "expected one micro-batch after the other through all of their segments: pass stage=2, or "
                    "another order"
                )

    @property
    def num_segments(self) -> int:
        """The number of segments of the model."""
        return len(self.costs)

    def is_last(self, s: int) -> bool:
        """Whether segment `s` is the last one, which makes the loss."""
        return s == len(self.costs) - 1

    @cached_property
    def stateful(self) -> tuple[int, ...]:
        """The segments whose forward changes module buffers, such as running statistics."""
        return tuple(s for s, nbytes in enumerate(self.buffer_bytes) if nbytes)

    @cached_property
    def slot_numel(self) -> int:
        """The number of elements of the largest trainable bucket."""
        return max(b.numel for b in self.layout.buckets)

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """Ascending indices of the buckets whose optimizer state is not on the device."""
        return tuple(b.index for b in self.layout.buckets if b.index not in self.resident)

    @property
    def swaps(self) -> bool:
        """Whether optimizer state or frozen parameters of the model are kept on the disk."""
        return bool(self.first_on_disk)

    @property
    def uses_disk(self) -> bool:
        """Whether a step reads and writes files."""
        return self.swaps or "disk" in self.activations

    @property
    def swapped(self) -> dict[int, Extent]:
        """The extents of this rank in its swap space, by bucket index."""
        buckets = (*self.offloaded, *(x.index for x in self.layout.frozen_buckets))
        return {b: self.extents[b] for b in buckets if self.places[b].owned}

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """For each bucket, the extent of this rank's state on the disk, with the parameters if the disk alone has
        them; of a frozen bucket, the extent of its parameters."""
        return tuple(_extent(x, master=x.index in self.frozen_masters) for x in self.places)

    @cached_property
    def first_on_disk(self) -> frozenset[int]:
        """The first bucket that a step reads from the disk, if any; with pp, the first of each stage."""
        there = [x for x in self.places if "disk" in (x.state, x.params)]
        return frozenset({x.home if self.over_ranks else 0: x.index for x in reversed(there)}.values())

    @cached_property
    def swap_records(self) -> int:
        """Upper bound in bytes of the header and the two records of a swap space in one folder."""
        spans = (*self.layout.spans, *self.layout.frozen)
        header = BLOCK + sum(6 * len(x.name) + 24 * len(x.shape) + 64 for x in spans)
        header += sum(160 + 64 * len(extent.parts) for extent in self.extents)
        checksums = sum(x.nbytes // SUMMED + 8 for extent in self.extents for x in extent.parts)
        return whole_blocks(header) + 2 * record_bytes(len(self.extents), checksums)

    @property
    def deferred(self) -> bool:
        """Whether updates are deferred to the next step, so that a State has the previous step's gradient."""
        return self.settings.defer and self.barrier

    @cached_property
    def matrix_buckets(self) -> tuple[int, ...]:
        """Ascending indices of the buckets whose updates need whole matrices."""
        return tuple(x.index for x in self.places if x.matrices)

    @cached_property
    def grad_bytes(self) -> tuple[int, ...]:
        """For each segment, bytes of its gradients on the device as separate tensors."""
        layout = self.layout

        def of(s: int, names: frozenset[str]) -> int:
            spans = ((b, x) for b in layout.buckets_of(s) for x in layout.buckets[b].spans if x.name in names)
            return sum(
                round_up((x.stop - x.start) * self.places[b].element_bytes, ALLOCATION) for b, x in spans
            )

        return tuple(of(s, frozenset(names)) for s, names in enumerate(layout.segments))

    @cached_property
    def _one_sum_at_a_time(self) -> bool:
        """Whether no device adds to two gradient sums of a bucket, and no two devices to one."""
        pulled: dict[int, set[int]] = {}
        for (way, _, s), d in self.devices.items():
            if way == B:
                pulled.setdefault(s, set()).add(d)
        if any(len(devices) > 1 for devices in pulled.values()):
            return False
        of = [[group[-1] for group in bucket.deliveries] for bucket in self.layout.buckets]
        return not pulled or all(len({min(pulled[s]) for s in own}) == len(own) for own in of)

    def open_sums(self, device: int) -> int:
        """The most segments at any time through which `device` has passed some micro-batches back, not all."""
        most, counts = 0, Counter[int]()
        for x in self.passes if self.devices else ():
            if x.way in (B, W) and x.device == device and x.ended:
                counts[x.s] += 1
                most = max(most, len(counts))
                if counts[x.s] == self.settings.micro_batches:
                    del counts[x.s]
        return most


def _extent(place: BucketPlaces, *, master: bool) -> Extent:
    """The disk extent of a rank's slice of a bucket; of a frozen bucket with its fp32 weights if `master`."""
    numel, params = place.shard_numel, place.shard_numel * place.element_bytes
    if not place.trainable:
        here = place.params == "disk"
        moved = [(MASTER, 4 * numel)] * master + [(FROZEN, params)] * here
        others = () if here else [(FROZEN, params)]
        return Extent.of(moved, others, generations=1)  # the first commit has all of them
    parts = [(x.name, x.nbytes(numel)) for x in place.buffers]
    if place.params == "disk" and not place.sends_high_half:
        parts.append((PARAMS, params))
    if place.state == "disk":
        in_memory = {HIGH_HALF} if place.keeps_high_half else set[str]()
    else:
        in_memory = {x for x, _ in parts}
    return Extent.of([x for x in parts if x[0] not in in_memory], [x for x in parts if x[0] in in_memory])
