"""What a recipe knows of a training step: the layout, the costs of the segments, and the settings."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from attrs import Factory, evolve, field, frozen, validators

from zfunc.core.display import brief
from zfunc.core.extents import BLOCK, SUMMED, Extent, record_bytes, whole_blocks
from zfunc.core.layout import Layout, round_up
from zfunc.core.mesh import DeviceMesh
from zfunc.core.optimizer_state import FROZEN, MASTER, PARAMS, STATE_FORMATS
from zfunc.core.pipeline import PASSES, F, Order, Pass, passes_in
from zfunc.core.places import BucketPlaces, Where, make_places
from zfunc.core.settings import StepSettings
from zfunc.core.shares import word_of
from zfunc.errors import refuse
from zfunc.values import of_type

ALLOCATION = 512  # bytes; CUDA's caching allocator rounds every tensor up to a multiple
HOP = 10_000  # FLOPs of a device while a byte comes from another, about
# Fields that decide which device makes a pass, and where data is.
PLACING = "layout", "settings", "world", "resident", "paged", "order", "stage", "peers", "buffer_bytes"
EACH = "one for each segment of the layout: pass (x,) * len(layout.segments) for equal ones"


def _each(name: str, given: Any) -> tuple[Any, ...]:
    """An attrs converter of an iterable, one value for each segment, to a tuple; `name` is for errors."""
    of_type(name, given, Iterable, EACH)
    return tuple(given)


@frozen
class RowsOutput:
    """The description of an auxiliary output of the last segment that has one entry per row of the
    micro-batch: its name, shape, dtype and bytes for one micro-batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch has it
    nbytes: int


@frozen
class PassCost:
    """The cost of one pass (such as forward) of a micro-batch through a segment: FLOPs, kernel launches and
    bytes.

    `nbytes` are read and written by its kernels, `workspace` is the most it allocates beside inputs and
    outputs, `copied_bytes` go between host and device. The fields are those of `zfunc.core.graph.Op`.
    """

    flops: int = 0
    nbytes: int = 0
    workspace: int = 0
    launches: int = 0
    attention_flops: int = 0
    copied_bytes: int = 0

    def beside(self, nbytes: int) -> "PassCost":
        """This cost with `nbytes` less workspace (at least 0), which regions of the plan account for."""
        return evolve(self, workspace=max(0, self.workspace - nbytes))


@frozen
class Origin:
    """Where a tensor, or its memory, comes from: leaf `leaf` of the input of segment `first`, from where segments
    pass it on unchanged to the inputs up to that of `last`. So backward passes on gradients, to lower numbers."""

    first: int
    leaf: int
    last: int


@frozen
class SharedInput:
    """A tensor in the input of one segment that the inputs of other segments contain as well, such as a mask
    that is passed on.

    `leaf` is its number among the leaves of this input; an offloaded copy of the input is at least `nbytes` bytes
    smaller without it, and a copy of it alone has at most `most` bytes. They differ where kinds of micro-batches
    do.
    """

    leaf: int
    origin: Origin
    nbytes: int
    most: int = field(default=Factory(lambda self: self.nbytes, takes_self=True))


@frozen
class SharedStash:
    """The one offloaded copy of a tensor that inputs of several segments contain: of leaf `leaf` in the input
    of segment `first`, which offloads it; it takes at most `nbytes` bytes and is in `place`, "host" or
    "disk"."""

    first: int
    leaf: int
    nbytes: int
    place: Where


@frozen
class PassedOn:
    """Device memory in the input of a segment, or in its gradient, that inputs of segments before or after it have
    as well, or their gradients: `nbytes` bytes, or, where it is made, `most`, if a part of that is passed on."""

    origin: Origin
    nbytes: int
    most: int = field(default=Factory(lambda self: self.nbytes, takes_self=True))


@frozen
class SegmentCost:
    """The costs of one segment for one micro-batch: a `PassCost` for each kind of pass, and sizes in bytes.

    `backward` includes recomputation, unless a pass `recompute` comes before it, which leaves
    `recomputed_bytes`. `backward_input` and `backward_weight` are the two halves of a split backward;
    `pending_bytes` are kept between them. `residual_bytes` are kept after forward, beside the output; 0 if
    backward recomputes. `stash_bytes`: all that backward needs of forward (input, residuals, and the output
    if `keeps_output`), when it is offloaded. `key_bytes`: host memory for keys and values of attention over
    rows in tiles. `gradient_bytes`: of the gradient of the input, by default `input_bytes`. `shared`:
    tensors of the input that other segments' inputs contain, too; `passed_on`: their memory on the device;
    `passed_back`: memory of the gradient that gradients of other segments' inputs have, too.
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
    gradient_bytes: int = field(default=Factory(lambda self: self.input_bytes, takes_self=True))
    shared: tuple[SharedInput, ...] = ()
    passed_on: tuple[PassedOn, ...] = ()
    passed_back: tuple[PassedOn, ...] = ()

    @property
    def passes(self) -> dict[str, PassCost]:
        """The segment's cost of each kind of pass, by the letter of the kind, such as "F"."""
        return {way: getattr(self, kind.verb) for way, kind in PASSES.items()}


@frozen
class StepSpec:
    """Everything a recipe needs to know about a training step, without tensors. Sizes are in bytes.

    - `layout`: the parameters in buckets. `settings`: those of `zfunc.compile`, none of them "auto". `costs`:
      those of each segment for one micro-batch.
    - `world`: the number of data-parallel ranks; each updates its slice of every bucket.
    - `target_bytes`: the targets of a micro-batch. `constant_bytes`: device memory of the model's constants.
    - `buffer_bytes[s]`: device memory of the module buffers that forward of segment `s` changes.
    - `aux`: the names of the scalars that the last segment returns beside the loss; `aux_rows`: its outputs
      that have one entry per row.
    - `unused`: the names of the trained parameters on which the loss does not depend.
    - `save`: whether the step also writes a checkpoint of the state before it.
    - `resident`: the buckets whose optimizer state is on the device, and is updated there with
      `update_workspace` bytes of workspace.
    - `paged`: the buckets whose optimizer state is on the disk, and in a staging slot during an update.
    - `commit`: whether the step leaves the state on the disk as a checkpoint, with the part that is also in
      memory.
    - `frozen_masters`: the frozen buckets of which a loaded State also keeps fp32 weights; `frozen_averages`:
      those of which it keeps the moving average. No step reads either.
    - `order`: the order of passes on several devices; None for one device.
    - `peers`: whether the devices of this process read each other's memory.
    - `stage`: the pipeline stage of this rank, whose part of the State it has; None if it has all of it.
    - `like`: a spec already checked; its mesh and places are reused if all that they depend on is the same
      object.

    Raises TypeError for `costs` that are no list, ValueError for a value out of range, an unknown state
    format or an unknown bucket.
    """

    layout: Layout
    costs: tuple[SegmentCost, ...] = field(converter=partial(_each, "costs"))
    settings: StepSettings = field(factory=StepSettings)
    world: int = field(default=1, validator=validators.ge(1))
    target_bytes: int = 0
    aux: tuple[str, ...] = field(default=(), converter=tuple[str, ...])
    aux_rows: tuple[RowsOutput, ...] = field(default=(), converter=tuple[RowsOutput, ...])
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
    peers: bool = False
    like: "StepSpec | None" = field(default=None, eq=False, repr=False)

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
        if self.mesh.made_on and self._placed is None:
            stay = {s for s, place in enumerate(self.activations) if place == "device"}
            self.mesh.check_passes(stay, self.stateful)
            # Several devices may use what each of them fetches and the host updates.
            self.mesh.check_homes(lambda b: "device" not in (self.places[b].params, self.places[b].update))
            self.mesh.check_sums(self.passes)  # whose devices do not wait for each other

    @cached_property
    def _placed(self) -> "StepSpec | None":
        """The spec `like` if its layout, settings and other fields that decide where data is are the same
        objects as this spec's; else None."""
        return self.like if all(getattr(self.like, x, None) is getattr(self, x) for x in PLACING) else None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The devices of the step, and which passes (forwards, backwards and their parts) each of them makes."""
        if self._placed is not None:
            return self._placed.mesh
        return DeviceMesh(self.layout, self.settings, self.world, self.order, self.stage, self.peers)

    @cached_property
    def places(self) -> tuple[BucketPlaces, ...]:
        """Where the data of each bucket is, trainable or frozen, by its index."""
        if self._placed is not None:
            return self._placed.places
        return make_places(self.layout, self.settings, self.mesh, self.resident, self.paged)

    @cached_property
    def activations(self) -> tuple[Where, ...]:
        """For each segment, where its activations are between forward and backward: "device", "host" or
        "disk". The last segment's stay on the device."""
        shares, count = self.settings.activations_on, self.num_segments
        moving = range(self.layout.first_trainable, count - 1)
        return tuple(word_of(shares, s, count) if s in moving else "device" for s in range(count))  # pyright: ignore

    @cached_property
    def shared_stashes(self) -> tuple[dict[int, SharedStash], ...]:
        """For each segment, the leaves of its input that are offloaded once for several segments: {leaf: its
        `SharedStash`}.

        A tensor is on the host if any of these segments' activations are; else on the disk, if that saves whole
        blocks there. Ranks share nothing.
        """
        # The segments that have a tensor, on each rank.
        sharing = defaultdict[Any, list[tuple[int, SharedInput]]](list)
        for s, cost in enumerate(self.costs):
            there = cost.shared if self.activations[s] != "device" else ()
            count = self.settings.micro_batches if there and self.mesh.over_ranks else 0
            rank = tuple(self.mesh.device_of(F, m, s) for m in range(count))
            for x in there:
                sharing[x.origin, rank].append((s, x))
        found: list[dict[int, SharedStash]] = [{} for _ in self.costs]
        for own in sharing.values():
            (first, x), segments = own[0], {s for s, _ in own}
            place = "host" if any(self.activations[s] == "host" for s in segments) else "disk"
            stash = SharedStash(first, x.leaf, max(x.most for _, x in own), place)
            saved = len(segments) * (min(x.nbytes for _, x in own) // BLOCK * BLOCK)
            if len(segments) > 1 and (place == "host" or saved > whole_blocks(stash.nbytes)):
                for s, x in own:
                    found[s][x.leaf] = stash
        return tuple(found)

    @property
    def barrier(self) -> bool:
        """Whether no parameter is updated before the norm of the step's whole gradient is known."""
        return self.settings.waits_for_norm

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """For each segment, whether its backward recomputes its whole forward."""
        return tuple(mode == "all" for mode in self.settings.recompute_modes(self.num_segments))

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of all micro-batches through the segments, on all devices, in serial order."""
        work = [{way: cost.flops or PASSES[way].work for way, cost in x.passes.items()} for x in self.costs]
        hops = [x.input_bytes * HOP for x in self.costs]
        mesh = self.mesh
        return tuple(x for _, _, x in passes_in(mesh.listed, mesh.trained, work, hops, [*mesh.tied.values()]))

    @property
    def num_segments(self) -> int:
        """The number of segments of the model."""
        return len(self.costs)

    def is_last(self, s: int) -> bool:
        """Whether segment `s` is the last one, which makes the loss."""
        return s == len(self.costs) - 1

    @cached_property
    def stateful(self) -> tuple[int, ...]:
        """Numbers of the segments whose forward changes module buffers, such as running statistics."""
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
    def share_on_host(self) -> float:
        """The share of the optimizer state, 0 to 1 by parameter elements, that is not on the device."""
        return sum(self.layout.buckets[b].numel for b in self.offloaded) / self.layout.numel

    @cached_property
    def swaps(self) -> bool:
        """Whether optimizer state or frozen parameters of the model are kept on the disk."""
        return bool(self.first_on_disk)

    @property
    def uses_disk(self) -> bool:
        """Whether the step has optimizer state, parameters or activations in files on the disk."""
        return self.swaps or "disk" in self.activations

    @property
    def swapped(self) -> dict[int, Extent]:
        """The extents, by bucket index, of this rank's swap space (its files of training state on disk)."""
        buckets = (*self.offloaded, *(x.index for x in self.layout.frozen_buckets))
        return {b: self.extents[b] for b in buckets if self.places[b].owned}

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """For each bucket, the sizes of the buffers that this rank would store of it on disk: optimizer
        state, and the parameters if they live there alone; of a frozen bucket, the parameters."""
        return tuple(_extent(x, master=x.index in self.frozen_masters) for x in self.places)

    @cached_property
    def first_on_disk(self) -> frozenset[int]:
        """The index of the first bucket with optimizer state or parameters on the disk, as a set, empty if
        there is none; in a pipeline over ranks, the first of each stage."""
        there = [x for x in self.places if "disk" in (x.state, x.params)]
        return frozenset({x.home if self.mesh.over_ranks else 0: x.index for x in reversed(there)}.values())

    @cached_property
    def swap_records(self) -> int:
        """Upper bound in bytes of the header and the two records of a swap space in one folder."""
        spans = (*self.layout.spans, *self.layout.frozen)
        header = BLOCK + sum(6 * len(x.name) + 24 * len(x.shape) + 64 for x in spans)
        header += sum(160 + 64 * len(extent.parts) for extent in self.extents)
        checksums = sum(x.nbytes // SUMMED + 8 for extent in self.extents for x in extent.parts)
        return whole_blocks(header) + 2 * record_bytes(len(self.extents), checksums)

    @cached_property
    def deferred(self) -> bool:
        """Whether each update is made by the step after, so the State contains the last step's gradient."""
        return self.settings.defer and self.barrier

    @cached_property
    def grad_bytes(self) -> tuple[int, ...]:
        """For each segment, the device bytes of its weights' gradients, as backward returns them: as
        tensors."""
        layout = self.layout

        def of(s: int, names: frozenset[str]) -> int:
            spans = ((b, x) for b in layout.buckets_of(s) for x in layout.buckets[b].spans if x.name in names)
            return sum(
                round_up((x.stop - x.start) * self.places[b].element_bytes, ALLOCATION) for b, x in spans
            )

        return tuple(of(s, frozenset(names)) for s, names in enumerate(layout.segments))


def _extent(place: BucketPlaces, *, master: bool) -> Extent:
    """The disk extent of a rank's slice of a bucket; of a frozen bucket, with fp32 weights if `master`."""
    numel, params = place.shard_numel, place.shard_numel * place.element_bytes
    if not place.trainable:
        here = place.params == "disk"
        moved = [(MASTER, 4 * numel)] * master + [(FROZEN, params)] * here
        others = () if here else [(FROZEN, params)]
        return Extent.of(moved, others, generations=1)  # the first commit has all of them
    parts = [(x.name, x.nbytes(numel)) for x in place.buffers]
    if place.params == "disk" and not place.sends_high_half:
        parts.append((PARAMS, params))
    in_memory = {x.name for x in place.in_memory}
    return Extent.of([x for x in parts if x[0] not in in_memory], [x for x in parts if x[0] in in_memory])
