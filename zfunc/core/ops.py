"""One constructor for each operation of the built-in recipes, with the regions it reads and writes.

Passes through segments are rows of `zfunc.core.pipeline.PASSES`, and operations that only copy those of
`zfunc.core.moves`: they are made like the others. A stage function (`zfunc.engine.stages`) may touch exactly these
regions; dependencies, memory and plans are derived from them.
"""

from collections.abc import Callable, Iterable
from functools import partial

from attrs import define, evolve, field

from zfunc.core.graph import Op, Region
from zfunc.core.moves import MOVES, move
from zfunc.core.optimizer_state import EMA
from zfunc.core.passes import make_pass
from zfunc.core.pipeline import WAYS, F
from zfunc.core.region_table import BF16, FP32
from zfunc.core.regions import Regions
from zfunc.core.spec import StepSpec
from zfunc.errors import PlanError, did_you_mean, refuse


@define(eq=False)
class OpBuilder:
    """Makes the operations of a step of `spec`, in the order in which a recipe calls its methods. A method is
    named like the operation's verb; its arguments are micro-batch `m`, segment `s`, bucket `b`, and delivery
    `d`: the number of a partial gradient of a bucket, of which tied parameters have one for each segment.

    The builder remembers what later operations of the step depend on: which staging slot has which data
    (`at`), what the decision waits for, and updates that have begun.
    """

    spec: StepSpec
    at: Regions = field(init=False)
    _sent: list[Region] = field(init=False, factory=list[Region])  # by collectives before the decision
    _decided: bool = field(init=False, default=False)
    # Buckets updated in parts whose update has not ended, the oldest first.
    begun: list[int] = field(init=False, factory=list[int])

    @at.default  # pyright: ignore
    def _regions(self) -> Regions:
        return Regions(self.spec)

    def __getattr__(self, name: str) -> Callable[..., Op]:
        """The function that makes the operation `name`, the verb of a pass (such as "forward") or of a copy.
        Raises PlanError for any other name."""
        if name in WAYS:
            return partial(make_pass, self.at, WAYS[name])
        if name in MOVES:
            make = partial(move, self.at, name)
            return (lambda *index: self._in_order(make(*index))) if self.spec.mesh.over_ranks else make
        if name.startswith("_"):  # a protocol of Python asks for it
            raise AttributeError(name)
        verbs = [*VERBS, *MOVES]
        got = f"the operation {name!r}"
        do = f"call {', '.join(verbs)}; or make one of your own, zfunc.core.graph.Op"
        refuse("recipe", got, f"one that OpBuilder has{did_you_mean(name, verbs)}", do, PlanError)

    # --- forward and backward -------------------------------------------------------------------------------

    def load(self, m: int, s: int = 0) -> Op:
        """Copy a micro-batch from the host to the device of segment `s`: the inputs for the first segment,
        the targets for the last, in one operation if both segments are on one device."""
        device, last = self.spec.mesh.device_of(F, m, 0), self.spec.num_segments - 1
        inputs = self.at.between(F, m, 0) if s == 0 else ()
        targets = (
            (self.at("targets", m),) if s == last or self.spec.mesh.device_of(F, m, last) == device else ()
        )
        made = (*inputs, *targets)
        nbytes = sum(r.nbytes for r in made)
        return Op("load", (m, s) if s else (m,), "h2d", (self.at("batch", m),), made, nbytes=nbytes)

    def gather(self, b: int) -> Op:
        """All-gather the parameters of bucket `b` from the ranks into the bucket's slot on the device."""
        place = self.spec.places[b]
        slot, fetched = self.at.slot_of("weight_slot", b), place.params != "device"
        reads = (slot if fetched else self.at.params(b),)
        nbytes = place.shard_bytes * (self.spec.world - 1)
        number = self.at.number("gather", b)
        return self._in_order(Op("gather", (number, b), "network", reads, (slot,), nbytes=nbytes))

    def keep_buffers(self) -> Op:
        """Copy the module buffers that forward changed on this device (such as running statistics) to the
        State, those of rank 0 on all ranks; in a skipped step the State keeps its own."""
        here, several = self.spec.mesh.segments_on(self.at.device, F), self.spec.world > 1
        stateful = [s for s in self.spec.stateful if s in here]
        kept = tuple(self.at("module_buffers", s) for s in stateful)
        changed = tuple(self.at("next_module_buffers", s) for s in stateful)
        nbytes = sum(r.nbytes for r in kept)
        return Op(
            "keep_buffers",
            (self.at.device,) if self.at.device else (),
            "network" if several else "compute",
            (self.at("decision"), *changed, *kept),
            (*kept, *(changed if several else ())),
            nbytes=nbytes if several else 2 * nbytes,
        )

    # --- gradients ------------------------------------------------------------------------------------------

    def pack(self, m: int, b: int, s: int, *, first: bool) -> Op:
        """Copy the gradients of segment `s` for micro-batch `m` into the flat gradient of bucket `b` on the
        device. The `first` copy also zeroes the elements that no gradient fills."""
        if first and self.spec.settings.stage != 1:
            self.at.ring("grad_slot").give(b)
        grads, into = self.at("grads", m, s), self.at.gradient(b)
        nbytes = 2 * self.spec.places[b].numel * self.spec.places[b].element_bytes
        return Op("pack", (m, b, s), "compute", (grads,) if first else (grads, into), (into,), nbytes=nbytes)

    def add(self, m: int, b: int, s: int) -> Op:
        """Add the gradients of segment `s` for bucket `b` to the bucket's sum on the device (stage 1)."""
        into = self.at.gradient(b)
        nbytes = 3 * self.spec.places[b].numel * self.spec.places[b].element_bytes
        return Op("add", (m, b, s), "compute", (self.at("grads", m, s), into), (into,), nbytes=nbytes)

    def reduce_scatter(self, m: int, b: int, d: int) -> Op:
        """Sum a gradient of bucket `b` over the ranks; each keeps its slice of the sum. `d` numbers the
        gradients of one micro-batch: tied parameters have one for each segment."""
        region = self.at.gradient(b)
        nbytes = self.spec.places[b].shard_bytes * (self.spec.world - 1)
        return self._in_order(Op("reduce_scatter", (m, b, d), "network", (region,), (region,), nbytes=nbytes))

    def _in_order(self, op: Op) -> Op:
        """`op` with a dependency added, if it is a collective: before the step's decision, or after it.
        Without this, a rank that refuses the step could leave others waiting in a collective."""
        if op.kind != "network" or self.spec.barrier:
            return op
        if self._decided:
            return evolve(op, reads=(*op.reads, self.at("decision")))
        if op.verb not in ("reduce_scatter", "recv_grad_act"):  # every loss comes after those of forward
            return op
        self._sent.append(self.at("sent", *op.index))
        return evolve(op, writes=(*op.writes, self._sent[-1]))

    def square_sum(self, b: int, *, waits: bool) -> Op:
        """Sum the squares of this rank's slice of bucket `b`'s gradient on the device: the gradient in its
        slot, or, if the update `waits` for more gradients or the norm, in the buffer where it waits."""
        place, grad = self.spec.places[b], self.at.waiting(b) if waits else self.at.gradient(b)
        nbytes = place.waiting_bytes if waits else place.shard_bytes
        return Op("square_sum", (b,), "compute", (grad,), (self.at("squares", b),), nbytes=nbytes)

    def accumulate(self, m: int, b: int, d: int, *, first: bool) -> Op:
        """Add this rank's slice of a gradient of bucket `b`, copied to the host, to the fp32 sum there, which
        the `first` overwrites; also compute the sum's squared norm. `d` numbers the gradients of one
        micro-batch: tied parameters have one for each segment."""
        total, slot = self.at.sum(b, d), self.at.slot_of("host_slot", b)
        nbytes = self.spec.places[b].delivered_bytes + (1 if first else 2) * total.nbytes
        reads = (slot,) if first else (slot, total)
        return Op("accumulate", (m, b, d), "host", reads, (total, self.at("host_squares", b)), nbytes=nbytes)

    def hold(self, m: int, b: int, d: int, *, first: bool) -> Op:
        """Copy this rank's slice of a gradient of bucket `b`, if it is the `first`, to a buffer on the
        device; else add it to that buffer. `d` numbers the gradients of one micro-batch: tied parameters have
        one for each segment."""
        place = self.spec.places[b]
        grad, stays = self.at.gradient(b), place.gradient == "device"
        into = self.at.sum(b, d) if stays else self.at.delivered(b)
        moved = into.nbytes if stays else place.shard_numel * FP32  # a slot has room for more
        nbytes = place.shard_bytes + (1 if first else 2) * moved
        return Op("hold", (m, b, d), "compute", (grad,) if first else (grad, into), (into,), nbytes=nbytes)

    def join_sums(self, b: int, d: int) -> Op:
        """For a bucket of tied parameters, add the gradient sum of delivery `d` (one segment's) to that of
        delivery 0, which so becomes the bucket's gradient."""
        total, part = self.at.sum(b, 0), self.at.sum(b, d)
        if self.spec.places[b].gradient == "device":
            return Op("join_sums", (b, d), "compute", (total, part), (total,), nbytes=3 * total.nbytes)
        writes = total, self.at("host_squares", b)
        return Op("join_sums", (b, d), "host", (total, part), writes, nbytes=3 * total.nbytes)

    # --- the decision ---------------------------------------------------------------------------------------

    def global_norm(self) -> Op:
        """Compute the norm of the whole gradient of the step, from the sums of squares of all buckets; with
        the setting `norms`, also the norm of each parameter's gradient."""
        squares = tuple(self.at("host_squares", b.index) for b in self.spec.layout.buckets)
        kind = "network" if self.spec.mesh.several_ranks else "host"
        norms = self.at("norm"), *self.at.some("norms")
        return Op("global_norm", (), kind, squares, norms, nbytes=sum(r.nbytes for r in norms))

    def _losses(self) -> tuple[Region, ...]:
        return tuple(r for m in range(self.spec.settings.micro_batches) for r in self.at.losses(m))

    def mean_loss(self) -> Op:
        """Average the loss and the scalar auxiliary outputs over all ranks, so that all decide alike, and
        gather the auxiliary outputs that have one entry per row of the batch."""
        means = self.at("mean_loss"), *self.at.some("mean_aux")
        nbytes, rows = sum(r.nbytes for r in means) * (self.spec.world - 1), self.at.some("all_rows")
        nbytes += sum(r.nbytes // self.spec.world * (self.spec.world - 1) for r in rows)
        return Op("mean_loss", (), "network", self._losses(), (*means, *rows), nbytes=nbytes)

    def decide(self) -> Op:
        """Decide whether the step is skipped and by what factor gradients are scaled, before any update."""
        several = self.spec.mesh.several_ranks
        losses = (self.at("mean_loss"), *self.at.some("mean_aux")) if several else self._losses()
        norm = (self.at("norm"),) if self.spec.barrier else ()
        self._decided = True
        made = self.at("decision"), *(() if several else self.at.some("all_rows"))
        return Op("decide", (), "host", (*losses, *norm, *self._sent), made)

    # --- the update -----------------------------------------------------------------------------------------

    def _on_state(
        self,
        verb: str,
        index: tuple[int, ...],
        reads: Iterable[Region],
        writes: Iterable[Region],
        nbytes: int,
    ) -> Op:
        """An operation that reads and writes a bucket's optimizer state after the step's decision. It runs
        where the first of `writes` is: on the host, or on the device, as `{verb}_on_device` if that exists.
        """
        writes = tuple(writes)
        on_device, there = writes[0].tier == "device", f"{verb}_on_device"
        return Op(
            there if on_device and there in VERBS else verb,
            index,
            "compute" if on_device else "host",
            (self.at("decision"), *dict.fromkeys(reads)),  # a gradient may be in the slot of the state
            writes,
            nbytes=nbytes,
            workspace=self.spec.update_workspace if on_device else 0,
        )

    def momentum(self, b: int) -> Op:
        """For Muon: update the momentum of bucket `b`, and write this rank's slice of the update direction.
        Runs on the host, or, if the optimizer state is on the device, there as `momentum_on_device`."""
        place = self.spec.places[b]
        state = self.at.updated_state(b, place.weights)
        grad, direction = self.at.applied(b), self.at.direction(b).give(b)
        nbytes = 2 * place.bytes_of(place.moments) + place.waiting_bytes + place.shard_numel * BF16
        return self._on_state("momentum", (b,), (grad, *state), (*state, direction), nbytes)

    momentum_on_device = momentum

    def gather_direction(self, b: int) -> Op:
        """For Muon: all-gather bucket `b`'s update direction, so that each rank has whole matrices."""
        nbytes = self.spec.places[b].shard_numel * BF16 * (self.spec.world - 1)
        reads = (self.at("decision"), self.at.slot_of("direction_shard", b))
        whole = self.at.ring("direction_slot").give(b)
        return Op("gather_direction", (b,), "network", reads, (whole,), nbytes=nbytes)

    def orthogonalize(self, b: int) -> Op:
        """For Muon: orthogonalize, by Newton-Schulz, the update directions of those matrices of bucket `b` of
        which this rank's slice has a part."""
        work, own = self.spec.places[b].work, self.at.slot_of("direction_shard", b)
        whole = (self.at.slot_of("direction_slot", b),) if self.spec.world > 1 else ()
        return Op(
            "orthogonalize",
            (b,),
            "compute",
            (self.at("decision"), *whole, own),
            (*whole, own),
            flops=work.flops,
            workspace=work.workspace,
            launches=work.launches,
        )

    def update(self, b: int) -> Op:
        """Apply the optimizer to this rank's slice of bucket `b` in one pass over memory: unscale and clip
        the gradient, update the state, write the new parameters for the device. If the state is on the
        device, it runs there as `update_on_device`.

        With Muon the gradient is replaced by the orthogonalized direction.
        """
        place = self.spec.places[b]
        at, on_device = self.at, place.update == "device"
        grad = at.direction(b).slot(b) if place.matrices else at.applied(b)
        moments = place.moments if place.matrices else ()  # which `momentum` changes
        state = at.updated_state(b, [x.name for x in moments])
        # What is written beside the state: the parameters for the device, unless the state has them.
        if on_device:
            copy = (at.params(b),) if place.params == "device" else ()
        elif place.sends_high_half or place.params == "disk":
            copy = ()
        else:
            copy = (at.params(b) if place.params != "device" else at.ring("param_slot").give(b),)
        kept = copy if on_device or place.params != "device" else ()  # by a step that is skipped
        reads = grad, *state, *kept
        return self._on_state("update", (b,), reads, (*state, *copy), place.update_bytes)

    update_on_device = update

    def average(self, b: int) -> Op:
        """Move the moving average of the weights of bucket `b` towards the new weights."""
        names, average = self.spec.places[b].weights, self.at.of_state(EMA, b)
        weights = tuple(r for r in self.at.bucket_state(b) if r.buffer in names)
        nbytes = 2 * average.nbytes + sum(r.nbytes for r in weights)
        return self._on_state("average", (b,), (*weights, average), (average,), nbytes)

    def all_gather(self, b: int) -> Op:
        """All-gather the updated slices of the parameters of bucket `b` from all ranks."""
        nbytes = self.spec.places[b].shard_bytes * (self.spec.world - 1)
        # After a late update it precedes the decision of this step, so no rank can leave one unfinished.
        params, late = self.at.params(b), (self.at("decision"),) if self.spec.deferred else ()
        return Op("all_gather", (b,), "network", (params, *late), (params,), nbytes=nbytes)

    # --- checkpoints, and the state on the disk -----------------------------------------------------------------

    def write(self, b: int) -> Op:
        """Write this rank's slice of the state of bucket `b`, or of a frozen bucket's parameters, to the
        checkpoint, before the next update."""
        into = self.at.written(b)
        reads = (self.at("checkpoint"), *self.at.saved(b), *self.at.paged(b))
        return Op("write", (b,), "write", reads, (into,), nbytes=into.nbytes)

    def write_buffers(self) -> Op:
        """Write the module buffers that forward changes to the checkpoint."""
        reads = (self.at("checkpoint"), *(self.at("module_buffers", s) for s in self.spec.stateful))
        into = self.at("written_buffers")
        return Op("write_buffers", (), "write", reads, (into,), nbytes=into.nbytes)

    def publish(self, *, last: bool = False) -> Op:
        """Complete the checkpoint after every rank has written its part: wait until the files are on the
        disk, then rename the checkpoint to its final name.

        As the `last` operation of a step it waits for the decision, because a refused step leaves no
        checkpoint, and for the norm, because on the network lane it would delay all other collectives.
        """
        layout = self.spec.layout
        written = tuple(self.at.written(b.index) for b in layout.all_buckets)
        kind = "network" if self.spec.mesh.several_ranks else "write"
        after = (self.at("norm"), self.at("decision")) if last else ()
        buffers = (self.at("written_buffers"),) if self.spec.stateful else ()
        reads = (self.at("checkpoint"), *written, *buffers, *after)
        return Op("publish", (), kind, reads, (self.at("published"),))

    def copy_state(self, b: int) -> Op:
        """Copy bucket `b`'s optimizer state in memory to the staging slot that a commit writes to disk."""
        extent, paged = self.spec.extents[b], self.spec.places[b].state == "disk"
        slot = self.at.slot_of("state_slot", b) if paged else self.at.ring("state_slot").give(b)
        reads = (self.at("extent", b), *self.at.bucket_state(b), *((slot,) if paged else ()))
        nbytes = 2 * (extent.nbytes - extent.moved_bytes)
        return Op("copy_state", (b,), "host", reads, (slot,), nbytes=nbytes)

    def commit(self) -> Op:
        """Wait until the optimizer state of all buckets is on the disk, then record the step as committed.
        Until then the previous commit is the valid one.

        No commit is made if the gradient turns out not to be finite after the updates.
        """
        layout = self.spec.layout
        extents = tuple(self.at("extent", b.index) for b in layout.all_buckets)
        kind = "network" if self.spec.mesh.several_ranks else "write"
        norm = () if self.spec.deferred else (self.at("norm"),)
        reads = (self.at("position"), self.at("decision"), *norm, *extents)
        return Op("commit", (), kind, reads, (self.at("committed"),))


_METHODS = [name for name, value in vars(OpBuilder).items() if callable(value) and name[0] != "_"]
VERBS = (*WAYS, *_METHODS)
"""The verbs of the operations of `OpBuilder` that do more than copy."""
