"""What a recipe knows of a training step: the layout, the costs of the segments, and the settings."""

from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

from attrs import evolve, field, frozen, validators

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
    """An attrs converter of an iterable, with a value for each segment, to a tuple."""
    of_type(name, given, Iterable, EACH)
    return tuple(given)


@frozen
class RowsOutput:
    """An auxiliary output of the last segment that has the rows of the micro-batch as its first dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch has it
    nbytes: int


@frozen
class PassCost:
    """The cost of a pass through a segment, in fields as those of its operation (`zfunc.core.graph.Op`).

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
        """This cost with `nbytes` less of workspace, because separate regions account for these bytes."""
        return evolve(self, workspace=max(0, self.workspace - nbytes))


@frozen
class SharedInput:
    """A tensor of a segment's input that inputs of other segments have, too, as a mask that all of them pass on.

    `leaf` is its number among the leaves of the input, `tensor` its number among all tensors of all inputs, and
    `nbytes` what a stash of the input without it saves.
    """

    leaf: int
    tensor: int
    nbytes: int


@frozen
class SegmentCost:
    """The costs of one segment for one micro-batch, by the verbs of its passes, and sizes in bytes.

    The cost of `backward` includes recomputation, unless a pass `recompute` precedes it, which leaves
    `recomputed_bytes`; `backward_input` and `backward_weight` are the halves of a split backward, between which
    `pending_bytes` are kept. `residual_bytes` are kept after forward beside the output, 0 if backward recomputes;
    `stash_bytes` is what backward needs of forward: input, residuals, and an output among these (`keeps_output`).
    `key_bytes` is the host memory that a pass needs for keys and values of a row in tiles. `shared` are tensors of
    the input that other segments' inputs have, too.
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
    shared: tuple[SharedInput, ...] = ()

    @property
    def passes(self) -> dict[str, PassCost]:
        """The segment's cost of each kind of pass, by the letter of the kind, such as "F"."""
        return {way: getattr(self, kind.verb) for way, kind in PASSES.items()}


@frozen
class StepSpec:
    """Everything a recipe needs to know about a training step, without tensors. Sizes are in bytes.

    - `settings`: those of `zfunc.compile`, none of them "auto". `costs` are of their micro-batches.
    - `world`: the number of ranks; each updates its slice of every bucket.
    - `constant_bytes`: device memory of the model beside its parameters.
    - `buffer_bytes[s]`: device memory of what forward of segment `s` changes, as running statistics.
    - `aux`: the names of the scalars that the last segment returns beside the loss; `aux_rows` are its outputs of
      rows.
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
    - `peers`: several devices of one process read each other's memory.
    - `stage`: the pipeline stage of this rank, whose State has its part; None has all of it.
    - `like`: a checked spec, whose mesh and places this one has, too, if all that these depend on is the same
      object.

    Raises TypeError for `costs` that are no list, ValueError for a value out of range, an unknown format of the
    state or an unknown bucket.
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
        """The spec `like` if what places depend on are this spec's objects, so mesh and places agree; else None."""
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
        """For each segment, where its activations wait for backward; the last segment's stay on the device."""
        shares, count = self.settings.activations_on, self.num_segments
        moving = range(self.layout.first_trainable, count - 1)
        return tuple(word_of(shares, s, count) if s in moving else "device" for s in range(count))  # pyright: ignore

    @cached_property
    def stashed_before(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """For each segment, the leaves of its input that need no stash of their own on the host, because an earlier
        segment's stash has them: {leaf: (that segment, leaf of its input)}. Ranks share no stash."""
        first: dict[Any, tuple[int, int]] = {}  # the stash of each shared tensor, on each rank
        found: list[dict[int, tuple[int, int]]] = []
        for s, cost in enumerate(self.costs):
            there = cost.shared if self.activations[s] == "host" else ()
            count = self.settings.micro_batches if there and self.mesh.over_ranks else 0
            rank = tuple(self.mesh.device_of(F, m, s) for m in range(count))
            own = {x.leaf: first.setdefault((x.tensor, rank), (s, x.leaf)) for x in there}
            found.append({leaf: at for leaf, at in own.items() if at[0] != s})
        return tuple(found)

    @property
    def barrier(self) -> bool:
        """Whether no parameter is updated before the norm of the step's whole gradient is known."""
        return self.settings.waits_for_norm

    @cached_property
    def recompute(self) -> tuple[bool, ...]:
        """For each segment, whether its backward recomputes its forward."""
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
        """The share of the optimizer state that is not on the device, 0 to 1."""
        return sum(self.layout.buckets[b].numel for b in self.offloaded) / self.layout.numel

    @property
    def swaps(self) -> bool:
        """Whether optimizer state or frozen parameters of the model are kept on the disk."""
        return bool(self.first_on_disk)

    @property
    def uses_disk(self) -> bool:
        """Whether the step has optimizer state, parameters or activations in files on the disk."""
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
        """Index of the first bucket with state or parameters on the disk, if any; with pp, each stage's first."""
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
        """For each segment, the bytes on the device of the gradients of its weights, as separate tensors."""
        layout = self.layout

        def of(s: int, names: frozenset[str]) -> int:
            spans = ((b, x) for b in layout.buckets_of(s) for x in layout.buckets[b].spans if x.name in names)
            return sum(
                round_up((x.stop - x.start) * self.places[b].element_bytes, ALLOCATION) for b, x in spans
            )

        return tuple(of(s, frozenset(names)) for s, names in enumerate(layout.segments))


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
    in_memory = {x.name for x in place.in_memory}
    return Extent.of([x for x in parts if x[0] not in in_memory], [x for x in parts if x[0] in in_memory])
