"""The vocabulary of the recipes: one short function for each operation, saying what it reads and writes.

The invariant: this is the only place that knows an operation's regions, their sizes and tiers. A stage
function (`zfunc.stages`) is handed exactly these; every interpreter derives the rest from them.
"""

from functools import cached_property
from typing import Literal

from attrs import field, frozen, validators

from zfunc.graph import Op, Region
from zfunc.layout import Bucket, Layout, round_up
from zfunc.moments import BUFFERS, HIGH_HALF, Moments

FP32, FP64 = 4, 8  # bytes
ALLOCATION = 512  # bytes; what an allocator rounds a tensor of its own up to


@frozen
class SegmentCost:
    """What one segment costs for one micro-batch: FLOPs and bytes.

    `flops` is the forward's, `backward_flops` the backward's, recomputing included; `input_bytes` what it is
    handed; `residual_bytes` what its forward keeps for its backward (0 where that recomputes from the input);
    the workspaces are the peaks of what each pass allocates beyond its inputs and declared outputs.
    """

    flops: int = 0
    input_bytes: int = 0
    residual_bytes: int = 0
    forward_workspace: int = 0
    backward_workspace: int = 0
    backward_flops: int = 0


@frozen
class Job:
    """Everything a recipe needs to know about a training step, and nothing about tensors.

    `element_bytes` is the size of a parameter and of a gradient on the device. With `barrier` no parameter is
    updated before the norm of the whole gradient is known (clipping, fp16). `grad_slots` and `host_slots`
    are the staging buffers on the device and in pinned memory, each the size of the largest bucket.
    `recompute[s]` says whether segment `s` recomputes its forward in backward. `constant_bytes` is the size
    of what the model keeps on the device beside its parameters. Of `world` ranks each keeps and updates its slice
    of every bucket; `stage` is ZeRO's: with 2 every micro-batch's gradient is reduced at once, with 1 the device
    adds them up in full and the sum is reduced. With `send_high_half` the device gets the high
    half of the split master as it is, and there is no other copy. With `save` the step also writes a checkpoint of
    the state it began with.
    """

    layout: Layout
    costs: tuple[SegmentCost, ...] = field(converter=tuple)
    recompute: tuple[bool, ...] = field(converter=tuple)
    element_bytes: Literal[2, 4] = field(default=2, validator=validators.in_((2, 4)))
    micro_batches: int = field(default=1, validator=validators.ge(1))
    barrier: bool = False
    grad_slots: int = field(default=2, validator=validators.ge(1))
    host_slots: int = field(default=2, validator=validators.ge(1))
    world: int = field(default=1, validator=validators.ge(1))
    stage: Literal[1, 2] = field(default=2, validator=validators.in_((1, 2)))
    target_bytes: int = 0
    constant_bytes: int = 0
    moments: Moments = field(default="fp32", validator=validators.in_(BUFFERS))
    send_high_half: bool = False
    save: bool = False

    @property
    def num_segments(self) -> int:
        """How many segments the model has."""
        return len(self.costs)

    @cached_property
    def slot_numel(self) -> int:
        """Elements of the largest bucket: the size of every staging slot."""
        return max(b.numel for b in self.layout.buckets)

    def grad_bytes(self, s: int) -> int:
        """Bytes of the gradients of segment `s`, as tensors of their own."""
        names = set(self.layout.segments[s])
        spans = (x for b in self.layout.buckets_of(s) for x in self.layout.buckets[b].spans)
        sizes = ((x.stop - x.start) * self.element_bytes for x in spans if x.name in names)
        return sum(round_up(size, ALLOCATION) for size in sizes)

    def num_deliveries(self, bucket: Bucket) -> int:
        """How many times a step sends a gradient of `bucket` to the host; more than one is accumulated there."""
        return 1 if self.stage == 1 else self.micro_batches * len(bucket.deliveries)


@frozen
class Emit:
    """Makes the operations of one job. Method names are the verbs; arguments are their indices."""

    job: Job

    # --- regions -----------------------------------------------------------------------------------------

    def _params(self, b: int) -> Region:
        bucket = self.job.layout.buckets[b]
        return Region("params", (b,), bucket.numel * self.job.element_bytes, "device", kept=True)

    def _weights(self, s: int) -> tuple[Region, ...]:
        """What segment `s` reads: its buckets, and its frozen parameters."""
        return tuple(self._params(b) for b in self.job.layout.buckets_of(s)) + self._frozen()

    def _frozen(self) -> tuple[Region, ...]:
        layout = self.job.layout
        nbytes = layout.frozen_numel * self.job.element_bytes + self.job.constant_bytes
        return (Region("frozen", (), nbytes, kept=True),) if nbytes or layout.frozen else ()

    def _input(self, m: int, s: int) -> Region:
        return Region("act", (m, s), self.job.costs[s].input_bytes)

    def _targets(self, m: int) -> Region:
        return Region("targets", (m,), self.job.target_bytes)

    def _loss(self, m: int) -> Region:
        return Region("loss", (m,), ALLOCATION)

    def _residuals(self, m: int, s: int) -> tuple[Region, ...]:
        if self.job.recompute[s] or s < self.job.layout.first_trainable:
            return ()
        return (Region("residuals", (m, s), self.job.costs[s].residual_bytes),)

    def _cotangent(self, m: int, s: int) -> Region:
        return Region("grad_act", (m, s), self.job.costs[s].input_bytes)

    def _grads(self, m: int, s: int) -> Region:
        """The gradients one backward returns, before they are packed: one segment's, no more."""
        return Region("grads", (m, s), self.job.grad_bytes(s))

    def _grad_slot(self, k: int) -> Region:
        """Where a bucket's gradient waits on the device: one of a few slots, or in stage 1 its own."""
        if self.job.stage == 1:
            nbytes = self.job.layout.buckets[k].numel * self.job.element_bytes
            return Region("grad_slot", (k,), nbytes, kept=True, dtype="compute")
        nbytes = self.job.slot_numel * self.job.element_bytes
        return Region("grad_slot", (k % self.job.grad_slots,), nbytes, kept=True, dtype="compute")

    def _host_slot(self, k: int) -> Region:
        nbytes = self.job.slot_numel // self.job.world * self.job.element_bytes
        return Region("host_slot", (k % self.job.host_slots,), nbytes, "pinned", kept=True, dtype="compute")

    def _param_slot(self, b: int) -> Region:
        nbytes = self.job.slot_numel // self.job.world * self.job.element_bytes
        return Region("param_slot", (b % self.job.host_slots,), nbytes, "pinned", kept=True, dtype="compute")

    def _shard_bytes(self, b: int, element_bytes: int) -> int:
        return self.job.layout.buckets[b].numel // self.job.world * element_bytes

    def _host_grad(self, b: int) -> Region:
        """Where the whole gradient of a bucket waits on the host: fp32 where several are added up."""
        if self.job.num_deliveries(self.job.layout.buckets[b]) > 1:
            return Region("grad_sum", (b,), self._shard_bytes(b, FP32), "host", kept=True, dtype="fp32")
        nbytes = self._shard_bytes(b, self.job.element_bytes)
        return Region("host_grad", (b,), nbytes, "pinned", kept=True, dtype="compute")

    def _state(self, b: int) -> tuple[Region, ...]:
        """What the host keeps of a bucket; what is sent to the device from where it lies is pinned."""
        numel = self.job.layout.buckets[b].numel // self.job.world
        return tuple(
            Region(
                x.name,
                (b,),
                x.nbytes(numel),
                "pinned" if self.job.send_high_half and x.name == HIGH_HALF else "host",
                kept=True,
            )
            for x in BUFFERS[self.job.moments]
        )

    def _copy(self, b: int) -> Region:
        """The new parameters of a bucket as the device wants them."""
        if self.job.send_high_half:
            return next(r for r in self._state(b) if r.buffer == HIGH_HALF)
        return self._param_slot(b)

    def _squares(self, b: int) -> Region:
        return Region("squares", (b,), FP64, "device", kept=True, dtype="fp64")

    def _host_squares(self, b: int) -> Region:
        return Region("host_squares", (b,), FP64, "pinned", kept=True, dtype="fp64")

    def _norm(self) -> Region:
        return Region("norm", (), FP64, "host", kept=True)

    def _mean_loss(self) -> Region:
        return Region("mean_loss", (), FP64, "host", kept=True)

    def _verdict(self) -> Region:
        return Region("verdict", (), FP64, "host", kept=True)

    def _checkpoint(self) -> Region:
        """The file being written, and what is known of it."""
        return Region("checkpoint", (), tier="disk", kept=True)

    def _written(self, b: int) -> Region:
        return Region("written", (b,), sum(r.nbytes for r in self._state(b)), "disk", kept=True)

    def _written_frozen(self) -> Region:
        nbytes = self.job.layout.frozen_numel * self.job.element_bytes
        return Region("written_frozen", (), nbytes, "disk", kept=True)

    # --- operations --------------------------------------------------------------------------------------

    def load(self, m: int) -> Op:
        """Bring micro-batch `m` to the device."""
        nbytes = self.job.costs[0].input_bytes + self.job.target_bytes
        batch = Region("batch", (m,), nbytes, "host", kept=True)
        return Op("load", (m,), "h2d", (batch,), (self._input(m, 0), self._targets(m)), nbytes=nbytes)

    def forward(self, m: int, s: int) -> Op:
        """Run segment `s`; the last one returns the loss. What backward needs is kept or recomputed."""
        last = s == self.job.num_segments - 1
        cost = self.job.costs[s]
        return Op(
            "forward",
            (m, s),
            "compute",
            (*self._weights(s), self._input(m, s), *((self._targets(m),) if last else ())),
            (self._loss(m) if last else self._input(m, s + 1), *self._residuals(m, s)),
            flops=cost.flops,
            workspace=cost.forward_workspace,
        )

    def backward(self, m: int, s: int) -> Op:
        """The pullback of segment `s`. It holds the weights, so it reads them, recomputing or not."""
        last = s == self.job.num_segments - 1
        cost, layout = self.job.costs[s], self.job.layout
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
        )

    def pack(self, m: int, b: int, s: int, slot: int, *, first: bool) -> Op:
        """Copy what segment `s` has of bucket `b` into a slot; the first to come clears the rest."""
        into = self._grad_slot(slot)
        nbytes = 2 * self.job.layout.buckets[b].numel * self.job.element_bytes
        reads = (self._grads(m, s),) if first else (self._grads(m, s), into)
        return Op("pack", (m, b, s), "compute", reads, (into,), nbytes=nbytes)

    def add(self, m: int, b: int, s: int) -> Op:
        """Add what segment `s` has of bucket `b` to the sum on the device (stage 1)."""
        into = self._grad_slot(b)
        nbytes = 3 * self.job.layout.buckets[b].numel * self.job.element_bytes
        return Op("add", (m, b, s), "compute", (self._grads(m, s), into), (into,), nbytes=nbytes)

    def reduce_scatter(self, m: int, b: int, d: int, slot: int) -> Op:
        """Sum bucket `b` over the ranks; each keeps its slice, in place. Losses are divided by their number."""
        region = self._grad_slot(slot)
        nbytes = self._shard_bytes(b, self.job.element_bytes) * (self.job.world - 1)
        last = m == self.job.micro_batches - 1
        # Before the verdict on the loss nothing is sent: a rank that refuses it must not leave others waiting.
        reads = (region,) if self.job.barrier or not last else (region, self._verdict())
        return Op("reduce_scatter", (m, b, d), "network", reads, (region,), nbytes=nbytes)

    def square_sum(self, b: int, slot: int) -> Op:
        """Sum the squares of a complete bucket while it is on the device: the host needs no sweep for it."""
        nbytes = self._shard_bytes(b, self.job.element_bytes)
        return Op("square_sum", (b,), "compute", (self._grad_slot(slot),), (self._squares(b),), nbytes=nbytes)

    def to_host(self, m: int, b: int, d: int, slot: int, host_slot: int | None) -> Op:
        """Copy a bucket's gradient to pinned memory: into a slot, or where it waits for the norm."""
        nbytes = self._shard_bytes(b, self.job.element_bytes)
        into = self._host_grad(b) if host_slot is None else self._host_slot(host_slot)
        if self.job.num_deliveries(self.job.layout.buckets[b]) > 1:
            return Op("to_host", (m, b, d), "d2h", (self._grad_slot(slot),), (into,), nbytes=nbytes)
        reads = (self._grad_slot(slot), self._squares(b))
        return Op("to_host", (m, b, d), "d2h", reads, (into, self._host_squares(b)), nbytes=nbytes)

    def accumulate(self, m: int, b: int, d: int, host_slot: int, *, first: bool) -> Op:
        """Add a delivered gradient to the bucket's fp32 sum, and square the new sum in the same sweep."""
        total, slot = self._host_grad(b), self._host_slot(host_slot)
        nbytes = slot.nbytes + (1 if first else 2) * total.nbytes
        reads = (slot,) if first else (slot, total)
        return Op("accumulate", (m, b, d), "host", reads, (total, self._host_squares(b)), nbytes=nbytes)

    def global_norm(self) -> Op:
        """The norm of the whole gradient, from the squares of every bucket, in a fixed order."""
        squares = tuple(self._host_squares(b.index) for b in self.job.layout.buckets)
        kind = "network" if self.job.world > 1 else "host"
        return Op("global_norm", (), kind, squares, (self._norm(),), nbytes=FP64)

    def _losses(self) -> tuple[Region, ...]:
        return tuple(self._loss(m) for m in range(self.job.micro_batches))

    def mean_loss(self) -> Op:
        """The mean loss over all ranks, so that they decide alike."""
        nbytes = FP64 * (self.job.world - 1)
        return Op("mean_loss", (), "network", self._losses(), (self._mean_loss(),), nbytes=nbytes)

    def decide(self) -> Op:
        """Whether this step counts and by what factor gradients are scaled, before anything is updated."""
        losses = (self._mean_loss(),) if self.job.world > 1 else self._losses()
        norm = (self._norm(),) if self.job.barrier else ()
        return Op("decide", (), "host", (*losses, *norm), (self._verdict(),))

    def adam(self, b: int, host_slot: int | None) -> Op:
        """Update bucket `b` in one sweep: unscale, clip, Adam, and the copy for the device."""
        grad = self._host_grad(b) if host_slot is None else self._host_slot(host_slot)
        state = self._state(b)
        copy = () if self.job.send_high_half else (self._param_slot(b),)
        nbytes = 2 * sum(r.nbytes for r in state) + self._host_grad(b).nbytes
        nbytes += len(copy) * self._shard_bytes(b, self.job.element_bytes)
        return Op("adam", (b,), "host", (self._verdict(), grad, *state), (*state, *copy), nbytes=nbytes)

    def to_device(self, b: int) -> Op:
        """Copy the new parameters of bucket `b` (this rank's slice) to the device, if the step counts."""
        nbytes = self._shard_bytes(b, self.job.element_bytes)
        reads = (self._verdict(), self._copy(b), self._params(b))
        return Op("to_device", (b,), "h2d", reads, (self._params(b),), nbytes=nbytes)

    def all_gather(self, b: int) -> Op:
        """Exchange the new slices of bucket `b` between the ranks."""
        nbytes = self._shard_bytes(b, self.job.element_bytes) * (self.job.world - 1)
        return Op("all_gather", (b,), "network", (self._params(b),), (self._params(b),), nbytes=nbytes)

    def write(self, b: int) -> Op:
        """Write this rank's slice of the state of bucket `b` to the checkpoint, before it is updated again."""
        into = self._written(b)
        return Op("write", (b,), "disk", (self._checkpoint(), *self._state(b)), (into,), nbytes=into.nbytes)

    def write_frozen(self) -> Op:
        """Write the parameters that are not trained, which every rank has: one of them does."""
        into = self._written_frozen()
        return Op(
            "write_frozen", (), "disk", (self._checkpoint(), *self._frozen()), (into,), nbytes=into.nbytes
        )

    def publish(self, *, last: bool = False) -> Op:
        """When every rank has written everything: on to the disk, and give the checkpoint its name.

        The `last` one of a step waits for its norm too: on the network lane it would hold up all others.
        """
        written = tuple(self._written(b.index) for b in self.job.layout.buckets)
        frozen = (self._written_frozen(),) if self.job.layout.frozen else ()
        kind = "network" if self.job.world > 1 else "disk"
        published = Region("published", (), tier="disk", kept=True)
        after = (self._norm(),) if last else ()
        return Op("publish", (), kind, (self._checkpoint(), *written, *frozen, *after), (published,))
