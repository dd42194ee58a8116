"""One constructor for each operation of the built-in recipes, with the regions it reads and writes.

A stage function (`zfunc.engine.stages`) may touch exactly these regions; dependencies, memory and plans are derived
from them.
"""

from attrs import frozen

from zfunc.core.graph import Op, Region
from zfunc.core.regions import FP64, Regions
from zfunc.core.spec import ALLOCATION


@frozen
class OpBuilder(Regions):
    """Constructs the operations of one spec. A method has the name of the verb; its arguments are the indices:
    micro-batch `m`, segment `s`, bucket `b`, delivery `d`."""

    def load(self, m: int) -> Op:
        """Copy micro-batch `m` to the device."""
        nbytes = self.spec.costs[0].input_bytes + self.spec.target_bytes
        batch = Region("batch", (m,), nbytes, "host", "value")
        return Op("load", (m,), "h2d", (batch,), (self._input(m, 0), self._targets(m)), nbytes=nbytes)

    def forward(self, m: int, s: int) -> Op:
        """Run segment `s`; the last one returns the loss. Residuals are kept unless backward recomputes them."""
        last = s == self.spec.num_segments - 1
        cost = self.spec.costs[s]
        return Op(
            "forward",
            (m, s),
            "compute",
            (*self._weights(s), self._input(m, s), *((self._targets(m),) if last else ())),
            (self._loss(m) if last else self._input(m, s + 1), *self._residuals(m, s)),
            flops=cost.flops,
            workspace=cost.forward_workspace,
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
            (*self._weights(s), self._input(m, s), *above, *self._residuals(m, s)),
            (*below, *grads),
            flops=cost.backward_flops,
            workspace=cost.backward_workspace + (ALLOCATION if last else 0),  # the cotangent of the loss
            launches=cost.backward_launches,
        )

    def pack(self, m: int, b: int, s: int, slot: int, *, first: bool) -> Op:
        """Copy the gradients of segment `s` for bucket `b` into a slot; the `first` one zeroes the gaps."""
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
        early = self._sends_before_decision(m)
        reads = (region,) if self.spec.barrier or early else (region, self._decision())
        writes = (region, self._sent(m, b, d)) if early else (region,)
        return Op("reduce_scatter", (m, b, d), "network", reads, writes, nbytes=nbytes)

    def square_sum(self, b: int, slot: int | None) -> Op:
        """Sum the squares of a complete bucket on the device: in its slot, or in its sum."""
        grad = self._waiting(b) if slot is None else self._grad_slot(slot)
        nbytes = self._shard_bytes(b, self.spec.element_bytes) if slot is not None else grad.nbytes
        return Op("square_sum", (b,), "compute", (grad,), (self._squares(b),), nbytes=nbytes)

    def to_host(self, m: int, b: int, d: int, slot: int, host_slot: int | None) -> Op:
        """Copy a bucket's gradient to pinned memory: into a slot, or to its own buffer to wait for the norm."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes)
        into = self._waiting(b) if host_slot is None else self._host_slot(host_slot)
        if self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1:
            return Op("to_host", (m, b, d), "d2h", (self._grad_slot(slot),), (into,), nbytes=nbytes)
        reads = (self._grad_slot(slot), self._squares(b))
        return Op("to_host", (m, b, d), "d2h", reads, (into, self._host_squares(b)), nbytes=nbytes)

    def accumulate(self, m: int, b: int, d: int, host_slot: int, *, first: bool) -> Op:
        """Add a delivered gradient to the bucket's fp32 sum, and sum its squares in the same pass."""
        total, slot = self._waiting(b), self._host_slot(host_slot)
        nbytes = self._shard_bytes(b, self.spec.element_bytes) + (1 if first else 2) * total.nbytes
        reads = (slot,) if first else (slot, total)
        return Op("accumulate", (m, b, d), "host", reads, (total, self._host_squares(b)), nbytes=nbytes)

    def hold(self, m: int, b: int, d: int, slot: int, *, first: bool) -> Op:
        """Copy a delivered gradient to its own buffer on the device, or add it to the fp32 sum there."""
        into, grad = self._waiting(b), self._grad_slot(slot)
        nbytes = self._shard_bytes(b, self.spec.element_bytes) + (1 if first else 2) * into.nbytes
        return Op("hold", (m, b, d), "compute", (grad,) if first else (grad, into), (into,), nbytes=nbytes)

    def squares_to_host(self, b: int) -> Op:
        """Copy the squares of a bucket that is updated on the device to the host, for the norm."""
        return Op("squares_to_host", (b,), "d2h", (self._squares(b),), (self._host_squares(b),), nbytes=FP64)

    def global_norm(self) -> Op:
        """The norm of the whole gradient, from the squares of all buckets in a fixed order."""
        squares = tuple(self._host_squares(b.index) for b in self.spec.layout.buckets)
        kind = "network" if self.spec.world > 1 else "host"
        return Op("global_norm", (), kind, squares, (self._norm(),), nbytes=FP64)

    def _losses(self) -> tuple[Region, ...]:
        return tuple(self._loss(m) for m in range(self.spec.micro_batches))

    def mean_loss(self) -> Op:
        """The mean loss over all ranks, on which all of them decide."""
        nbytes = FP64 * (self.spec.world - 1)
        return Op("mean_loss", (), "network", self._losses(), (self._mean_loss(),), nbytes=nbytes)

    def decide(self) -> Op:
        """Decide whether the step is skipped and by what factor gradients are scaled, before any update."""
        losses = (self._mean_loss(),) if self.spec.world > 1 else self._losses()
        norm = (self._norm(),) if self.spec.barrier else ()
        return Op("decide", (), "host", (*losses, *norm, *self._all_sent()), (self._decision(),))

    def _all_sent(self) -> tuple[Region, ...]:
        """The regions that order every collective of earlier micro-batches before the decision."""
        early = (m for m in range(self.spec.micro_batches) if self._sends_before_decision(m))
        parts = [(x.index, d) for x in self.spec.layout.buckets for d in range(len(x.deliveries))]
        return tuple(self._sent(m, b, d) for m in early for b, d in parts)

    def _sends_before_decision(self, m: int) -> bool:
        """Whether micro-batch `m` sends gradients before the decision, which reads no norm without a barrier."""
        spec = self.spec
        return spec.world > 1 and spec.stage == 2 and not spec.barrier and m < spec.micro_batches - 1

    def adam(self, b: int, host_slot: int | None) -> Op:
        """Update bucket `b` in one pass over memory: unscale, clip, Adam, and the copy for the device."""
        grad = self._waiting(b) if host_slot is None else self._host_slot(host_slot)
        state, copy = self._state(b), self._new_copy(b)
        return Op(
            "adam",
            (b,),
            "host",
            (self._decision(), grad, *state),
            (*state, *copy),
            nbytes=self._sweep_bytes(b),
        )

    def speculate(self, b: int) -> Op:
        """Update bucket `b` into its shadow before the decision, as if nothing were clipped or skipped."""
        reads, writes = (self._waiting(b), *self._state(b)), (*self._shadow(b), *self._new_copy(b))
        return Op("speculate", (b,), "host", reads, writes, nbytes=self._sweep_bytes(b))

    def confirm(self, b: int) -> Op:
        """Swap state and shadow of bucket `b`, which moves no bytes, or update it again with the right factor."""
        changed = (*self._state(b), *self._shadow(b), *self._new_copy(b))
        reads = (self._decision(), self._waiting(b), *changed)
        return Op("confirm", (b,), "host", reads, changed)

    def adam_on_device(self, b: int, slot: int | None) -> Op:
        """Update bucket `b`, whose state is on the device, and this rank's slice of its parameters."""
        grad = self._waiting(b) if slot is None else self._grad_slot(slot)
        changed = (*self._state(b), self._params(b))
        return Op(
            "adam_on_device",
            (b,),
            "compute",
            (self._decision(), grad, *changed),
            changed,
            nbytes=self._sweep_bytes(b),
            workspace=self.spec.update_workspace,
        )

    def _new_copy(self, b: int) -> tuple[Region, ...]:
        return () if self.spec.send_high_half else (self._param_slot(b),)

    def _sweep_bytes(self, b: int) -> int:
        """Bytes that an update moves: the state twice, the gradient, and the copy unless the state has it."""
        copied = 0 if self.spec.send_high_half else self._shard_bytes(b, self.spec.element_bytes)
        return 2 * sum(r.nbytes for r in self._state(b)) + self._waiting(b).nbytes + copied

    def to_device(self, b: int) -> Op:
        """Copy this rank's slice of the new parameters of bucket `b` to the device, unless the step is skipped."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes)
        reads = (self._decision(), self._copy(b), self._params(b))
        return Op("to_device", (b,), "h2d", reads, (self._params(b),), nbytes=nbytes)

    def all_gather(self, b: int) -> Op:
        """Gather the new slices of bucket `b` from all ranks."""
        nbytes = self._shard_bytes(b, self.spec.element_bytes) * (self.spec.world - 1)
        # After a late update it precedes the decision of this step, so no rank can leave one unfinished.
        reads = (self._params(b), *((self._decision(),) if self.spec.keeps_gradient else ()))
        return Op("all_gather", (b,), "network", reads, (self._params(b),), nbytes=nbytes)

    def write(self, b: int) -> Op:
        """Write this rank's slice of the state of bucket `b` to the checkpoint, before its next update."""
        into = self._written(b)
        return Op("write", (b,), "disk", (self._checkpoint(), *self._saved(b)), (into,), nbytes=into.nbytes)

    def write_frozen(self) -> Op:
        """Write the frozen parameters; every rank has them all, and rank 0 writes them."""
        into = self._written_frozen()
        return Op(
            "write_frozen", (), "disk", (self._checkpoint(), *self._frozen()), (into,), nbytes=into.nbytes
        )

    def publish(self, *, last: bool = False) -> Op:
        """Sync the checkpoint to disk and give it its name, after every rank has written its part.

        As the `last` operation of a step it waits for the decision, because a refused step leaves no checkpoint,
        and for the norm, because on the network lane it would delay all other collectives.
        """
        written = tuple(self._written(b.index) for b in self.spec.layout.buckets)
        frozen = (self._written_frozen(),) if self.spec.layout.frozen else ()
        kind = "network" if self.spec.world > 1 else "disk"
        after = (self._norm(), self._decision()) if last else ()
        return Op("publish", (), kind, (self._checkpoint(), *written, *frozen, *after), (self._published(),))
