"""One constructor for each operation of the built-in recipes, with the regions it reads and writes.

A stage function (`zfunc.engine.step.stages`) may touch exactly these regions; dependencies, memory and plans are
derived from them.
"""

from collections import Counter
from collections.abc import Collection
from typing import NoReturn

from attrs import define, field, frozen

from zfunc.core.extents import whole_blocks
from zfunc.core.graph import Op, Region
from zfunc.core.optimizer_state import moment_buffers, weight_buffers
from zfunc.core.regions import BF16, FP32, Regions
from zfunc.core.slots import SlotAllocator
from zfunc.core.spec import ALLOCATION, StepSpec
from zfunc.errors import PlanError, did_you_mean


@define(eq=False)
class Progress:
    """What later operations of a step depend on: which slot has what, and what the decision has to wait for."""

    weights: SlotAllocator  # of buckets
    sums: SlotAllocator  # of buckets
    states: SlotAllocator  # of buckets
    weight_pages: SlotAllocator  # of buckets
    grad_pages: SlotAllocator  # of buckets
    pages: Counter[int] = field(factory=Counter[int])  # reads of each bucket's parameters
    paged_in: set[int] = field(factory=set[int])  # buckets whose state has been read
    fetches: Counter[int] = field(factory=Counter[int])  # of each bucket
    open: int = 0  # the slot of the gradient that the segment below goes on with
    rooms: dict[tuple[int, int], int] = field(factory=dict[tuple[int, int], int])  # (m, s) -> number
    activations: dict[tuple[int, int], int] = field(factory=dict[tuple[int, int], int])  # (m, s) -> slot
    activation_pages: int = 0  # that have been given to activations on their way to the disk or back
    sent: list[Region] = field(factory=list[Region])  # by collectives before the decision
    decided: bool = False
    # Buckets updated in parts whose update has not ended, and the slot with the gradient of each, if one has it.
    begun: dict[int, int | None] = field(factory=dict[int, "int | None"])
    directions: dict[int, int] = field(factory=dict[int, int])  # the slot of each one's direction
    measured: dict[int, int] = field(factory=dict[int, int])  # the slot of what is measured of each

    @classmethod
    def of(cls, spec: StepSpec) -> "Progress":
        """The beginning of a step: no slot has anything."""
        layout, segments = spec.layout, range(spec.num_segments)
        weights = {
            b.index: b.numel for b in (*layout.buckets, *layout.frozen_buckets) if spec.streamed(b.index)
        }
        sums = {b: layout.buckets[b].numel for b in spec.offloaded if spec.sums_on_device}
        read = [[b for b in layout.weights_of(s) if b in weights] for s in segments]
        added = [[b for b in layout.buckets_of(s) if b in sums] for s in segments]
        states = {b: spec.extent(b).nbytes for b in (spec.offloaded if spec.swaps else ())}
        on_disk = {b: spec.kept_numel(b) for b in weights if spec.on_disk(b)}
        spilled = {b: spec.spilled_bytes(b) for b in spec.offloaded if spec.spilled(b)}
        return cls(
            SlotAllocator(weights, read, spec.weight_slots),
            SlotAllocator(sums, added, spec.grad_slots),
            SlotAllocator(states, [[b] for b in states], spec.state_slots),
            SlotAllocator(on_disk, [[b for b in x if b in on_disk] for x in read], spec.weight_slots),
            SlotAllocator(spilled, [[b] for b in spilled], spec.host_slots),
        )


@frozen
class OpBuilder(Regions):
    """Constructs the operations of one spec, in the order in which they are asked for. A method has the name of the
    verb; its arguments are the indices: micro-batch `m`, segment `s`, bucket `b`, delivery `d`."""

    progress: Progress = field(init=False, eq=False, repr=False)

    @progress.default  # pyright: ignore
    def _begin(self) -> Progress:
        return Progress.of(self.spec)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # a protocol of Python asks for it
            raise AttributeError(name)
        known = [verb for verb in vars(OpBuilder) if not verb.startswith("_") and verb != "progress"]
        raise PlanError(
            f"recipe: got the operation {name!r}, expected one that OpBuilder has{did_you_mean(name, known)}: "
            f"call {', '.join(known)}; or make one of your own, zfunc.core.graph.Op"
        )

    def load(self, m: int) -> Op:
        """Copy micro-batch `m` to the device."""
        nbytes = self.spec.costs[0].input_bytes + self.spec.target_bytes
        batch = Region("batch", (m,), nbytes, "host", "value")
        return Op("load", (m,), "h2d", (batch,), (self._input(m, 0), self._targets(m)), nbytes=nbytes)

    def fetch(self, b: int) -> Op:
        """Copy the parameters of bucket `b`, or this rank's slice of them, from the host to its slot."""
        home = (
            self._weight_page(self.progress.weight_pages.slot(b)) if self.spec.on_disk(b) else self._home(b)
        )
        return Op(
            "fetch",
            self._next_fetch(b),
            "h2d",
            (home,),
            (self._slot_of(b),),
            nbytes=self.spec.kept_numel(b) * self.spec.element_bytes,
        )

    def gather(self, b: int) -> Op:
        """Gather the parameters of bucket `b` from all ranks in its slot."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes) * (self.spec.world - 1)
        fetched = self.spec.off_device(b)
        slice_ = self._slot_of(b) if fetched else self._params(b)
        index = (self.progress.fetches[b] - 1, b) if fetched else self._next_fetch(b)
        return Op(
            "gather", index, "network", (slice_, *self._decision_made()), (self._slot_of(b),), nbytes=nbytes
        )

    def _next_fetch(self, b: int) -> tuple[int, int]:
        self.progress.fetches[b] += 1
        return self.progress.fetches[b] - 1, b

    def _slot_of(self, b: int) -> Region:
        return self._weight_slot(self.progress.weights.slot(b))

    def _weights(self, s: int) -> tuple[Region, ...]:
        """The parameters that segment `s` reads, bucket by bucket, and the model's constants."""
        spec, used = self.spec, self.spec.layout.weights_of(s)
        weights = (self._slot_of(b) if spec.streamed(b) else self._params(b) for b in used)
        return (*weights, *self._constants())

    def stash(self, m: int, s: int) -> Op:
        """Copy what backward of segment `s` needs to the host: its input, and the residuals."""
        into = self._next_page() if self.spec.stashed_on_disk(s) else self._host_activation(m, s)
        kept = (self._input(m, s), *self._residuals(m, s), *self._kept_output(m, s), *self._room(m, s))
        return Op("stash", (m, s), "d2h", kept, (into,), nbytes=self._stashed_bytes(s))

    def _next_page(self) -> Region:
        self.progress.activation_pages += 1
        return self._page()

    def _page(self) -> Region:
        """The page that the last `stash` or `unspill_act` has filled."""
        return self._activation_page((self.progress.activation_pages - 1) % self.spec.host_slots)

    def _room(self, m: int, s: int) -> tuple[Region, ...]:
        """Room for what a forward leaves on the device until it is stashed: the one after the next waits for it."""
        if not self.spec.stashed(s):
            return ()
        number = self.progress.rooms.setdefault((m, s), len(self.progress.rooms))
        return (self._activation_room(number),)

    def unstash(self, m: int, s: int) -> Op:
        """Copy what backward of segment `s` needs back to the device."""
        self.progress.activations[m, s] = len(self.progress.activations)
        stashed = self._page() if self.spec.stashed_on_disk(s) else self._host_activation(m, s)
        return Op(
            "unstash", (m, s), "h2d", (stashed,), self._for_backward(m, s), nbytes=self._stashed_bytes(s)
        )

    def _for_backward(self, m: int, s: int) -> tuple[Region, ...]:
        """What forward of segment `s` left for backward: its input and residuals, or the slot that has them."""
        if self.spec.stashed(s):
            return (self._activation_slot(self.progress.activations[m, s]),)
        return (self._input(m, s), *self._residuals(m, s), *self._kept_output(m, s))

    def forward(self, m: int, s: int) -> Op:
        """Run segment `s`; the last one returns the loss, and auxiliary outputs. Residuals are kept unless backward
        recomputes them.

        Buffers that it changes are those that the micro-batch before left; what it read of them is a residual.
        """
        last = s == self.spec.num_segments - 1
        cost, residuals = self.spec.costs[s], self._residuals(m, s)
        stateful = s in self.spec.stateful
        before = (self._next_module_buffers(s) if m else self._module_buffers(s),) if stateful else ()
        after = (self._next_module_buffers(s),) if stateful else ()
        read = self.spec.buffer_bytes[s] if stateful and not residuals else 0
        return Op(
            "forward",
            (m, s),
            "compute",
            (*self._weights(s), self._input(m, s), *((self._targets(m),) if last else ()), *before),
            (
                *((self._loss(m), *self._aux(m)) if last else (self._input(m, s + 1),)),
                *residuals,
                *self._room(m, s),
                *after,
            ),
            flops=cost.flops,
            nbytes=cost.moved_bytes,
            attention_flops=cost.attention_flops,
            workspace=read + cost.forward_workspace,
            launches=cost.forward_launches,
        )

    def backward(self, m: int, s: int) -> Op:
        """Backward of segment `s`. It reads the weights whether it recomputes or not: the pullback holds them."""
        last = s == self.spec.num_segments - 1
        cost, layout = self.spec.costs[s], self.spec.layout
        above = (self._targets(m),) if last else (self._cotangent(m, s + 1),)
        below = (self._cotangent(m, s),) if s > layout.first_trainable else ()
        grads = (self._grads(m, s),) if layout.buckets_of(s) else ()
        return Op(
            "backward",
            (m, s),
            "compute",
            (*self._weights(s), *self._for_backward(m, s), *above),
            (*below, *grads),
            flops=cost.backward_flops,
            nbytes=cost.backward_moved_bytes,
            attention_flops=cost.backward_attention_flops,
            workspace=cost.backward_workspace + (ALLOCATION if last else 0),  # the cotangent of the loss
            launches=cost.backward_launches,
        )

    def pack(self, m: int, b: int, s: int, slot: int, *, first: bool) -> Op:
        """Copy the gradients of segment `s` for bucket `b` into a slot; the `first` one zeroes what none fills."""
        into = self._grad_slot(slot)
        nbytes = 2 * self.spec.layout.buckets[b].numel * self.spec.element_bytes
        reads = (self._grads(m, s),) if first else (self._grads(m, s), into)
        return Op("pack", (m, b, s), "compute", reads, (into,), nbytes=nbytes)

    def add(self, m: int, b: int, s: int) -> Op:
        """Add the gradients of segment `s` for bucket `b` to the sum on the device (stage 1)."""
        into = self._grad_slot(b)
        nbytes = 3 * self.spec.layout.buckets[b].numel * self.spec.element_bytes
        return Op("add", (m, b, s), "compute", (self._grads(m, s), into), (into,), nbytes=nbytes)

    def reduce_scatter(self, m: int, b: int, d: int, slot: int) -> Op:
        """Sum bucket `b` over the ranks in place; each keeps its slice. Losses are divided by the world size."""
        region = self._grad_slot(slot)
        nbytes = self._shard_bytes(b, self.spec.element_bytes) * (self.spec.world - 1)
        # A rank that refuses the step must not leave others waiting: a collective is before the decision or after.
        reads = (region, *self._decision_made())
        writes = (region,)
        if not self.spec.barrier and not self.progress.decided:
            self.progress.sent.append(self._sent(m, b, d))
            writes = (region, self._sent(m, b, d))
        return Op("reduce_scatter", (m, b, d), "network", reads, writes, nbytes=nbytes)

    def _decision_made(self) -> tuple[Region, ...]:
        """The decision, for a collective that comes after it. With a barrier all but the last ones come before."""
        return (self._decision(),) if self.progress.decided and not self.spec.barrier else ()

    def square_sum(self, b: int, slot: int | None) -> Op:
        """Sum the squares of a complete bucket on the device: in its slot, or in its sum."""
        grad = self._waiting(b) if slot is None else self._grad_slot(slot)
        nbytes = self._shard_bytes(b, self.spec.element_bytes) if slot is not None else grad.nbytes
        return Op("square_sum", (b,), "compute", (grad,), (self._squares(b),), nbytes=nbytes)

    def to_host(self, m: int, b: int, d: int, slot: int, host_slot: int | None) -> Op:
        """Copy a bucket's gradient to pinned memory: into a slot, or to its own buffer to wait for the norm."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes)
        if self.spec.spilled(b):
            self.progress.grad_pages.take([b])
        into = self._waiting(b) if host_slot is None else self._host_slot(host_slot)
        if self.spec.sums_on_device:
            return Op(
                "to_host", (m, b, d), "d2h", (self._sum_of(b),), (into,), nbytes=self._shard_bytes(b, FP32)
            )
        if self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1:
            return Op("to_host", (m, b, d), "d2h", (self._grad_slot(slot),), (into,), nbytes=nbytes)
        reads = (self._grad_slot(slot), self._squares(b))
        return Op("to_host", (m, b, d), "d2h", reads, (into, self._host_squares(b)), nbytes=nbytes)

    def accumulate(self, m: int, b: int, d: int, host_slot: int, *, first: bool) -> Op:
        """Add a delivered gradient to its fp32 sum, and sum the squares of that in the same pass."""
        total, slot = self._sum(b, d), self._host_slot(host_slot)
        delivered = FP32 if self.spec.sums_on_device else self.spec.element_bytes
        nbytes = self._shard_bytes(b, delivered) + (1 if first else 2) * total.nbytes
        reads = (slot,) if first else (slot, total)
        return Op("accumulate", (m, b, d), "host", reads, (total, self._host_squares(b)), nbytes=nbytes)

    def hold(self, m: int, b: int, d: int, slot: int, *, first: bool) -> Op:
        """Copy a reduced gradient to its own buffer on the device, or add it to the fp32 sum there."""
        into, grad = self._sum(b, d) if b in self.spec.resident else self._sum_of(b), self._grad_slot(slot)
        moved = (
            into.nbytes if b in self.spec.resident else self._shard_bytes(b, FP32)
        )  # a slot has room for more
        nbytes = self._shard_bytes(b, self.spec.element_bytes) + (1 if first else 2) * moved
        return Op("hold", (m, b, d), "compute", (grad,) if first else (grad, into), (into,), nbytes=nbytes)

    def _sum_of(self, b: int) -> Region:
        return self._sum_slot(self.progress.sums.slot(b))

    def join_sums(self, b: int, d: int) -> Op:
        """Add the sum of delivery `d` of a tied bucket to that of the first, which becomes the whole gradient."""
        total, part = self._sum(b, 0), self._sum(b, d)
        if b in self.spec.resident:
            return Op("join_sums", (b, d), "compute", (total, part), (total,), nbytes=3 * total.nbytes)
        writes = total, self._host_squares(b)
        return Op("join_sums", (b, d), "host", (total, part), writes, nbytes=3 * total.nbytes)

    def squares_to_host(self, b: int) -> Op:
        """Copy the squares of a bucket that is updated on the device to the host, for the norm."""
        on_device, on_host = self._squares(b), self._host_squares(b)
        return Op("squares_to_host", (b,), "d2h", (on_device,), (on_host,), nbytes=on_device.nbytes)

    def global_norm(self) -> Op:
        """The norm of the whole gradient, from the squares of all buckets, and those of all parameters."""
        squares = tuple(self._host_squares(b.index) for b in self.spec.layout.buckets)
        kind = "network" if self.spec.world > 1 else "host"
        norms = self._norm(), *self._norms()
        return Op("global_norm", (), kind, squares, norms, nbytes=sum(r.nbytes for r in norms))

    def _losses(self) -> tuple[Region, ...]:
        return tuple(r for m in range(self.spec.micro_batches) for r in (self._loss(m), *self._aux(m)))

    def mean_loss(self) -> Op:
        """The mean loss over all ranks, on which all of them decide, and those of auxiliary outputs."""
        means = self._mean_loss(), *self._mean_aux()
        nbytes = sum(r.nbytes for r in means) * (self.spec.world - 1)
        return Op("mean_loss", (), "network", self._losses(), means, nbytes=nbytes)

    def decide(self) -> Op:
        """Decide whether the step is skipped and by what factor gradients are scaled, before any update."""
        losses = (self._mean_loss(), *self._mean_aux()) if self.spec.world > 1 else self._losses()
        norm = (self._norm(),) if self.spec.barrier else ()
        self.progress.decided = True
        return Op("decide", (), "host", (*losses, *norm, *self.progress.sent), (self._decision(),))

    def keep_buffers(self) -> Op:
        """Make the buffers that forward changed those of the State, unless the step is skipped; the same on all
        ranks."""
        stateful, several = self.spec.stateful, self.spec.world > 1
        kept = tuple(map(self._module_buffers, stateful))
        changed = tuple(map(self._next_module_buffers, stateful))
        nbytes = sum(r.nbytes for r in kept)
        return Op(
            "keep_buffers",
            (),
            "network" if several else "compute",
            (self._decision(), *changed, *kept),
            (*kept, *(changed if several else ())),
            nbytes=nbytes if several else 2 * nbytes,
            workspace=2 * nbytes if several else 0,  # a mean is in fp64
        )

    def write_buffers(self) -> Op:
        """Write the buffers that forward changes to the checkpoint."""
        reads = (self._checkpoint(), *map(self._module_buffers, self.spec.stateful))
        into = self._written_buffers()
        return Op("write_buffers", (), "write", reads, (into,), nbytes=into.nbytes)

    def adam(self, b: int, host_slot: int | None) -> Op:
        """Update bucket `b` in one pass over memory: unscale, clip, Adam, and the copy for the device.

        The weights of a bucket of whole matrices move along its orthogonal direction.
        """
        grad = self._gradient(b, host_slot)
        if self.spec.whole_matrices(b):
            grad = self._host_direction(self.progress.directions[b])
        state, copy = self._updated(b, self._moments(b)), self._new_copy(b)
        kept = copy if self.spec.off_device(b) else ()  # by a step that is skipped
        return Op(
            "adam",
            (b,),
            "host",
            (self._decision(), grad, *state, *kept, *self._joined_of(b)),
            (*state, *copy),
            nbytes=self._sweep_bytes(b),
        )

    def momentum(self, b: int, slot: int | None) -> Op:
        """Update the momentum of a bucket of whole matrices, and write this rank's slice of their direction, on the
        host or, as `momentum_on_device`, where the state is there."""
        on_device, state = b in self.spec.resident, self._updated(b, weight_buffers(self._format(b)))
        k = self.progress.directions[b] = self.direction_slots().next(b)
        return Op(
            "momentum_on_device" if on_device else "momentum",
            (b,),
            "compute" if on_device else "host",
            (self._decision(), self._gradient(b, slot), *state),
            (*state, self._direction_shard(k) if on_device else self._host_direction(k)),
            nbytes=2 * self._moment_bytes(b) + self._waiting_bytes(b) + self._shard_bytes(b, BF16),
            workspace=self.spec.update_workspace if on_device else 0,
        )

    momentum_on_device = momentum

    def _gradient(self, b: int, slot: int | None) -> Region:
        """The gradient that an update reads: in a slot, on the device or on the host, or where it waits."""
        if slot is None:
            return self._waiting(b)
        return self._grad_slot(slot) if b in self.spec.resident else self._host_slot(slot)

    def direction_to_device(self, b: int) -> Op:
        """Copy this rank's slice of a direction to the device."""
        k = self.progress.directions[b]
        reads, writes = (self._host_direction(k),), (self._direction_shard(k),)
        return Op("direction_to_device", (b,), "h2d", reads, writes, nbytes=self._shard_bytes(b, BF16))

    def gather_direction(self, b: int) -> Op:
        """Gather the slices of a direction from all ranks, which makes its matrices whole."""
        k = self.progress.directions[b]
        nbytes = self._shard_bytes(b, BF16) * (self.spec.world - 1)
        reads = (self._decision(), self._direction_shard(k))
        return Op("gather_direction", (b,), "network", reads, (self._direction_slot(k),), nbytes=nbytes)

    def orthogonalize(self, b: int) -> Op:
        """Make whole matrices orthogonal, as many as this rank's slice of the bucket has a part of."""
        k, work = self.progress.directions[b], self.spec.update_work[b]
        whole, own = self._direction_slot(k), self._direction_shard(k)
        return Op(
            "orthogonalize",
            (b,),
            "compute",
            (self._decision(), *dict.fromkeys((whole, own))),
            tuple(dict.fromkeys((whole, own))),
            flops=work.flops,
            workspace=work.workspace,
            launches=work.launches,
        )

    def direction_to_host(self, b: int) -> Op:
        """Copy this rank's slice of an orthogonal direction to the host."""
        k = self.progress.directions[b]
        reads, writes = (self._direction_shard(k),), (self._host_direction(k),)
        return Op("direction_to_host", (b,), "d2h", reads, writes, nbytes=self._shard_bytes(b, BF16))

    def adam_on_device(self, b: int, slot: int | None) -> Op:
        """Update bucket `b`, whose state is on the device, and this rank's slice of its parameters."""
        grad = self._gradient(b, slot)
        if self.spec.whole_matrices(b):
            grad = self._direction_shard(self.progress.directions[b])
        changed = (*self._updated(b, self._moments(b)), self._params(b))
        return Op(
            "adam_on_device",
            (b,),
            "compute",
            (self._decision(), grad, *changed, *self._joined_of(b)),
            changed,
            nbytes=self._sweep_bytes(b),
            workspace=self.spec.update_workspace,
        )

    def measure(self, i: int, b: int, slot: int | None) -> Op:
        """Measure this rank's part of the parameters of bucket `b` that lie in several slices, in round `i`, on the
        host or, as `measure_on_device`, where the state is there."""
        if i == 0:
            self.progress.measured[b] = len(self.progress.measured) % self.spec.updates_ahead
        k, on_device = self.progress.measured[b], b in self.spec.resident
        kept = (self._measuring(k, on_device),)
        joined = self._joined_of(b, i)
        return Op(
            "measure_on_device" if on_device else "measure",
            (i, b),
            "compute" if on_device else "host",
            (self._decision(), self._gradient(b, slot), *self._updated(b), *joined, *(kept if i else ())),
            (self._measures("measured", i, k, on_device), *kept),
            nbytes=self._bytes_to_measure(b) // len(self.spec.rounds(b)),
            workspace=self.spec.update_workspace if on_device else 0,
        )

    measure_on_device = measure

    def join_measures(self, i: int, b: int) -> Op:
        """Join what all ranks have measured in round `i`."""
        k, on_device = self.progress.measured[b], b in self.spec.resident
        nbytes = 2 * self.spec.update_work[b].measured[i] * (self.spec.world - 1) // self.spec.world
        own, joined = (self._measures(x, i, k, on_device) for x in ("measured", "joined"))
        return Op("join_measures", (i, b), "network", (self._decision(), own), (joined,), nbytes=nbytes)

    def _joined_of(self, b: int, rounds: int | None = None) -> tuple[Region, ...]:
        """What all ranks know of bucket `b` after so many rounds, or all."""
        ended, on_device = self.spec.rounds(b)[:rounds], b in self.spec.resident
        return tuple(self._measures("joined", i, self.progress.measured[b], on_device) for i in ended)

    def average(self, b: int) -> Op:
        """Move the average of the weights of bucket `b` towards the new ones."""
        names, average = weight_buffers(self._format(b)), self._ema(b)
        weights = tuple(r for r in self._state(b) if r.buffer in names)
        on_device = b in self.spec.resident
        return Op(
            "average",
            (b,),
            "compute" if on_device else "host",
            (self._decision(), *weights, average),
            (average,),
            nbytes=2 * average.nbytes + sum(r.nbytes for r in weights),
            workspace=self.spec.update_workspace if on_device else 0,
        )

    def _new_copy(self, b: int) -> tuple[Region, ...]:
        """What an update writes beside the state: the parameters for the device, unless the state has them."""
        if self.spec.sends_high_half(b) or self.spec.on_disk(b):
            return ()
        return (self._params(b) if self.spec.off_device(b) else self._param_slot(b),)

    def _updated(self, b: int, but: Collection[str] = ()) -> tuple[Region, ...]:
        """The state of a bucket that an update changes: in memory, and in the slot it was paged into.

        Without the buffers that another operation of the update changes.
        """
        return (*(r for r in self._state(b) if r.buffer not in but), *self._paged(b))

    def _moments(self, b: int) -> tuple[str, ...]:
        """The buffers that `momentum` changes."""
        return tuple(x.name for x in moment_buffers(self._format(b))) if self.spec.whole_matrices(b) else ()

    def _format(self, b: int) -> str:
        return self.spec.layout.buckets[b].state_format

    def _paged(self, b: int) -> tuple[Region, ...]:
        """The slot that has the state of a bucket that lives on the disk; of a frozen one the page."""
        if b in self.spec.paged:
            return (self._state_slot(self.progress.states.slot(b)),)
        frozen_there = b >= len(self.spec.layout.buckets) and self.spec.on_disk(b)
        return (self._weight_page(self.progress.weight_pages.slot(b)),) if frozen_there else ()

    def _waiting(self, b: int) -> Region:
        if self.spec.spilled(b):
            return self._grad_page(self.progress.grad_pages.slot(b))
        return super()._waiting(b)

    def _sweep_bytes(self, b: int) -> int:
        """Bytes that an update moves: the state twice, the gradient, and the copy unless the state has it.

        One of whole parameters has measured them, or `measure` has. One of whole matrices moves the weights alone,
        and the direction: `momentum` has moved the rest.
        """
        numel = self.spec.layout.buckets[b].numel // self.spec.world
        kinds = self.spec.state_buffers(b)
        state = sum(x.nbytes(numel) for x in kinds)
        copied = 0 if self.spec.sends_high_half(b) else self._shard_bytes(b, self.spec.element_bytes)
        if self.spec.whole_matrices(b):
            return 2 * (state - self._moment_bytes(b)) + self._shard_bytes(b, BF16) + copied
        measured = 0 if self.spec.rounds(b) else self._bytes_to_measure(b)
        return measured + 2 * state + self._waiting_bytes(b) + copied

    def _bytes_to_measure(self, b: int) -> int:
        """Bytes that are read to measure whole parameters: the gradient three times, and the weights."""
        numel = self.spec.layout.buckets[b].numel // self.spec.world
        kinds = self.spec.state_buffers(b)
        if not any(x.whole for x in kinds):
            return 0
        return 3 * self._waiting_bytes(b) + sum(x.nbytes(numel) for x in kinds if not x.whole)

    def _moment_bytes(self, b: int) -> int:
        numel = self.spec.layout.buckets[b].numel // self.spec.world
        return sum(x.nbytes(numel) for x in moment_buffers(self._format(b)))

    def to_device(self, b: int) -> Op:
        """Copy this rank's slice of the new parameters of bucket `b` to the device, unless the step is skipped."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes)
        paged = b in self.spec.paged and self.spec.sends_high_half(b)
        copy = self._state_slot(self.progress.states.slot(b)) if paged else self._copy(b)
        reads = (self._decision(), copy, self._params(b))
        return Op("to_device", (b,), "h2d", reads, (self._params(b),), nbytes=nbytes)

    def all_gather(self, b: int) -> Op:
        """Gather the new slices of bucket `b` from all ranks."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes) * (self.spec.world - 1)
        # After a late update it precedes the decision of this step, so no rank can leave one unfinished.
        reads = (self._params(b), *((self._decision(),) if self.spec.deferred else ()))
        return Op("all_gather", (b,), "network", reads, (self._params(b),), nbytes=nbytes)

    def write(self, b: int) -> Op:
        """Write this rank's slice of the state of bucket `b` to the checkpoint, before its next update; of a frozen
        bucket its parameters."""
        into = self._written(b)
        reads = (self._checkpoint(), *self._saved(b), *self._paged(b))
        return Op("write", (b,), "write", reads, (into,), nbytes=into.nbytes)

    def publish(self, *, last: bool = False) -> Op:
        """Sync the checkpoint to disk and give it its name, after every rank has written its part.

        As the `last` operation of a step it waits for the decision, because a refused step leaves no checkpoint,
        and for the norm, because on the network lane it would delay all other collectives.
        """
        layout = self.spec.layout
        written = tuple(self._written(b.index) for b in (*layout.buckets, *layout.frozen_buckets))
        kind = "network" if self.spec.world > 1 else "write"
        after = (self._norm(), self._decision()) if last else ()
        buffers = (self._written_buffers(),) if self.spec.stateful else ()
        reads = (self._checkpoint(), *written, *buffers, *after)
        return Op("publish", (), kind, reads, (self._published(),))

    def page_in(self, b: int) -> Op:
        """Read the state of bucket `b` into a slot: what memory does not have of it."""
        again = (1,) if b in self.progress.paged_in else ()  # for a checkpoint, and for the update
        self.progress.paged_in.add(b)
        self.progress.states.take([b])
        into = self._state_slot(self.progress.states.slot(b))
        return Op(
            "page_in",
            (b, *again),
            "read",
            (self._extent(b),),
            (into,),
            nbytes=self.spec.extent(b).moved_bytes,
        )

    def page_out(self, b: int) -> Op:
        """Write the state of bucket `b` to the disk after its update; for a commit also what memory has of it."""
        extent, commit = self.spec.extent(b), self.spec.commit
        if b not in self.spec.paged:
            self.progress.states.take([b])
        slot = self._state_slot(self.progress.states.slot(b))
        state = self._state(b) if commit else ()
        return Op(
            "page_out",
            (b,),
            "write",
            (self._decision(), *state, *((slot,) if b in self.spec.paged else ())),
            (self._extent(b), *((slot,) if state else ())),
            nbytes=extent.nbytes if commit else extent.moved_bytes,
        )

    def commit(self) -> Op:
        """Wait until the state is on the disk, and name its step there: until then the last commit's is valid.

        A gradient that was not finite, seen after the updates, leaves no commit.
        """
        layout = self.spec.layout
        extents = tuple(self._extent(b.index) for b in (*layout.buckets, *layout.frozen_buckets))
        kind = "network" if self.spec.world > 1 else "write"
        norm = () if self.spec.deferred else (self._norm(),)
        reads = (self._position(), self._decision(), *norm, *extents)
        return Op("commit", (), kind, reads, (self._committed(),))

    def page_in_weights(self, b: int) -> Op:
        """Read the parameters of bucket `b`, or this rank's slice of them, from the disk to pinned memory."""
        into = self._weight_page(self.progress.weight_pages.slot(b))
        self.progress.pages[b] += 1
        index = (self.progress.pages[b] - 1, b)
        # The page may have room for more.
        nbytes = whole_blocks(self._shard_bytes(b, self.spec.element_bytes))
        return Op("page_in_weights", index, "read", (self._extent(b),), (into,), nbytes=nbytes)

    def spill(self, b: int) -> Op:
        """Write the gradient of bucket `b` to the disk, where it waits for its update."""
        page = self._waiting(b)
        return Op("spill", (b,), "write", (page,), (self._spilled(b),), nbytes=self.spec.spilled_bytes(b))

    def unspill(self, b: int) -> Op:
        """Read the gradient of bucket `b` back."""
        self.progress.grad_pages.take([b])
        page = self._waiting(b)
        return Op("unspill", (b,), "read", (self._spilled(b),), (page,), nbytes=self.spec.spilled_bytes(b))

    def spill_act(self, m: int, s: int) -> Op:
        """Write to the disk what `stash` has copied to the host."""
        page, into = self._page(), self._disk_activation(m, s)
        return Op("spill_act", (m, s), "write", (page,), (into,), nbytes=into.nbytes)

    def unspill_act(self, m: int, s: int) -> Op:
        """Read back what `spill_act` has written."""
        spilled, page = self._disk_activation(m, s), self._next_page()
        return Op("unspill_act", (m, s), "read", (spilled,), (page,), nbytes=spilled.nbytes)
