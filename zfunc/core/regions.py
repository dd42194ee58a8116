"""What a step touches: the regions of a spec, with their sizes and tiers, and the spec itself.

The invariant: this is the only place that knows how large a region is and where it lives. Which operation touches
which is in `zfunc.core.ops`.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal

from attrs import evolve, field, frozen, validators

from zfunc.core.graph import Graph, Op, Region, RegionDtype, Role, Tier
from zfunc.core.layout import Bucket, Layout, round_up
from zfunc.core.optimizer_state import HIGH_HALF, STATE_FORMATS, StateBuffer

FP32, FP64 = 4, 8  # bytes
ALLOCATION = 512  # bytes; what an allocator rounds a tensor of its own up to
SHADOW = "shadow_"  # begins the name of the buffer that a speculative update goes to


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
class StepSpec:
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

    The state of the buckets in `resident` is on the device and is updated there, with `update_workspace` bytes
    beside it. The first `shadows` of the others that backward completes are updated before the norm is known. With
    `delayed` the host applies a gradient one step late; `pending` says that one waits when the step begins. Sizes
    are in bytes.
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
    state_format: str = "fp32"  # a row of `STATE_FORMATS`
    send_high_half: bool = False
    save: bool = False
    resident: frozenset[int] = field(default=frozenset[int](), converter=frozenset[int])
    update_workspace: int = 0
    shadows: int = field(default=0, validator=validators.ge(0))
    delayed: bool = False
    pending: bool = False

    def __attrs_post_init__(self) -> None:
        if self.state_format not in STATE_FORMATS:
            known = ", ".join(STATE_FORMATS)
            raise ValueError(
                f"state_format: got {self.state_format!r}, expected one of {known}, the rows of "
                "zfunc.core.optimizer_state.STATE_FORMATS: add one there for an optimizer of your own"
            )

    @resident.validator  # pyright: ignore
    def _check_resident(self, _: object, resident: frozenset[int]) -> None:
        if strangers := resident - set(range(len(self.layout.buckets))):
            raise ValueError(
                f"resident: got buckets {sorted(strangers)}, expected some of the {len(self.layout.buckets)} there "
                "are: make it with zfunc.core.layout.resident_buckets"
            )

    @property
    def num_segments(self) -> int:
        """How many segments the model has."""
        return len(self.costs)

    @cached_property
    def slot_numel(self) -> int:
        """Elements of the largest bucket: the size of every staging slot."""
        return max(b.numel for b in self.layout.buckets)

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """The buckets whose state is on the host, ascending."""
        return tuple(b.index for b in self.layout.buckets if b.index not in self.resident)

    @cached_property
    def shadowed(self) -> frozenset[int]:
        """The buckets whose update does not wait for the norm: those that backward completes first."""
        return frozenset(self.offloaded[::-1][: self.shadows] if self.barrier else ())

    def spans_of(self, buckets: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Where each bucket's slice of one rank is if those of `buckets` lie one after the other, in parameters."""
        spans: dict[int, tuple[int, int]] = {}
        start = 0
        for b in buckets:
            stop = start + self.layout.buckets[b].numel // self.world
            spans[b], start = (start, stop), stop
        return spans

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
class Regions:
    """The regions of one spec."""

    spec: StepSpec

    def _params(self, b: int) -> Region:
        bucket = self.spec.layout.buckets[b]
        nbytes = bucket.numel * self.spec.element_bytes
        return Region("params", (b,), nbytes, lifetime="state", dtype="compute", role="params")

    def _weights(self, s: int) -> tuple[Region, ...]:
        """What segment `s` reads: its buckets, and its frozen parameters."""
        return tuple(self._params(b) for b in self.spec.layout.buckets_of(s)) + self._frozen()

    def _frozen(self) -> tuple[Region, ...]:
        layout = self.spec.layout
        nbytes = layout.frozen_numel * self.spec.element_bytes + self.spec.constant_bytes
        if not nbytes and not layout.frozen:
            return ()
        return (Region("frozen", (), nbytes, lifetime="state", dtype="compute", role="params"),)

    def _input(self, m: int, s: int) -> Region:
        return Region("act", (m, s), self.spec.costs[s].input_bytes)

    def _targets(self, m: int) -> Region:
        return Region("targets", (m,), self.spec.target_bytes)

    def _loss(self, m: int) -> Region:
        return Region("loss", (m,), ALLOCATION, role="loss")

    def _residuals(self, m: int, s: int) -> tuple[Region, ...]:
        if self.spec.recompute[s] or s < self.spec.layout.first_trainable:
            return ()
        return (Region("residuals", (m, s), self.spec.costs[s].residual_bytes),)

    def _cotangent(self, m: int, s: int) -> Region:
        return Region("grad_act", (m, s), self.spec.costs[s].input_bytes)

    def _grads(self, m: int, s: int) -> Region:
        """The gradients one backward returns, before they are packed: one segment's, no more."""
        return Region("grads", (m, s), self.spec.grad_bytes(s))

    def _grad_slot(self, k: int) -> Region:
        """Where a bucket's gradient waits on the device: one of a few slots, or in stage 1 its own."""
        if self.spec.stage == 1:
            nbytes = self.spec.layout.buckets[k].numel * self.spec.element_bytes
            return self._staging("grad_slot", k, nbytes, "device", role="grad")
        nbytes = self.spec.slot_numel * self.spec.element_bytes
        return self._staging("grad_slot", k % self.spec.grad_slots, nbytes, "device", role="grad")

    def _host_slot(self, k: int) -> Region:
        nbytes = self.spec.slot_numel // self.spec.world * self.spec.element_bytes
        return self._staging("host_slot", k % self.spec.host_slots, nbytes, "pinned", role="grad_shard")

    def _param_slot(self, b: int) -> Region:
        """Where the new parameters of a bucket wait for their copy to the device.

        One that waits long has a place of its own: for the decision, or for backward to be done with the old ones.
        """
        if self.spec.delayed or b in self.spec.shadowed:
            nbytes = self._shard_bytes(b, self.spec.element_bytes)
            return self._staging("param_copy", b, nbytes, "pinned", role="copy")
        nbytes = self.spec.slot_numel // self.spec.world * self.spec.element_bytes
        return self._staging("param_slot", b % self.spec.host_slots, nbytes, "pinned", role="copy")

    def _staging(
        self, buffer: str, k: int, nbytes: int, tier: Tier, *, role: Role, dtype: RegionDtype = "compute"
    ) -> Region:
        return Region(buffer, (k,), nbytes, tier, "program", dtype, role)

    def _shard_bytes(self, b: int, element_bytes: int) -> int:
        return self.spec.layout.buckets[b].numel // self.spec.world * element_bytes

    def _waiting(self, b: int) -> Region:
        """Where the whole gradient of a bucket waits for its update: fp32 where several are added up."""
        added = self.spec.num_deliveries(self.spec.layout.buckets[b]) > 1
        nbytes = self._shard_bytes(b, FP32 if added else self.spec.element_bytes)
        dtype = "fp32" if added else "compute"
        if b in self.spec.resident:
            buffer = "device_sum" if added else "device_grad"
            return self._staging(buffer, b, nbytes, "device", role="grad_shard", dtype=dtype)
        buffer, tier = ("grad_sum", "host") if added else ("host_grad", "pinned")
        lifetime = "state" if self.spec.delayed else "program"  # until the next step, or in this one
        return Region(buffer, (b,), nbytes, tier, lifetime, dtype, "grad_shard")

    def state(self) -> Iterator[Region]:
        """All memory of a State: what every recipe's operations have of it, and no more.

        What the model keeps beside its frozen parameters is not the State's.
        """
        layout = self.spec.layout
        for frozen_parameters in self._frozen():
            yield evolve(frozen_parameters, nbytes=layout.frozen_numel * self.spec.element_bytes)
        for b in range(len(layout.buckets)):
            yield self._params(b)
            yield from self._state(b)
            if b in self.spec.shadowed:
                yield from self._shadow(b)
            if self.spec.delayed and b not in self.spec.resident:
                yield self._waiting(b)

    def _state(self, b: int) -> tuple[Region, ...]:
        """What is kept of a bucket from step to step; what is sent to the device from where it lies is pinned."""
        return tuple(self._kept(b, x) for x in STATE_FORMATS[self.spec.state_format])

    def _shadow(self, b: int) -> tuple[Region, ...]:
        """Where the speculated update of a bucket goes."""
        return tuple(evolve(r, buffer=SHADOW + r.buffer, role="shadow") for r in self._state(b))

    def _kept(self, b: int, kind: StateBuffer) -> Region:
        tier: Tier = "pinned" if self.spec.send_high_half and kind.name == HIGH_HALF else "host"
        nbytes = kind.nbytes(self.spec.layout.buckets[b].numel // self.spec.world)
        where = "device" if b in self.spec.resident else tier
        return Region(kind.name, (b,), nbytes, where, "state", kind.dtype, "state")

    def _copy(self, b: int) -> Region:
        """The new parameters of a bucket as the device wants them."""
        if self.spec.send_high_half:
            return next(r for r in self._state(b) if r.buffer == HIGH_HALF)
        return self._param_slot(b)

    def _squares(self, b: int) -> Region:
        return self._staging("squares", b, FP64, "device", role="squares", dtype="fp64")

    def _host_squares(self, b: int) -> Region:
        return self._staging("host_squares", b, FP64, "pinned", role="squares", dtype="fp64")

    def _norm(self) -> Region:
        return Region("norm", (), FP64, "host", "value")

    def _mean_loss(self) -> Region:
        return Region("mean_loss", (), FP64, "host", "value", role="loss")

    def _decision(self) -> Region:
        return Region("decision", (), FP64, "host", "value")

    def _sent(self, m: int, b: int, d: int) -> Region:
        """Holds nothing: it orders a collective before the decision."""
        return Region("sent", (m, b, d), tier="host")

    def _checkpoint(self) -> Region:
        """The file being written, and what is known of it."""
        return Region("checkpoint", (), 0, "disk", "value")

    def _saved(self, b: int) -> tuple[Region, ...]:
        """What a checkpoint has of a bucket: its state, and the gradient that is still to be applied."""
        waits = self.spec.pending and b not in self.spec.resident
        return (*self._state(b), *((self._waiting(b),) if waits else ()))

    def _written(self, b: int) -> Region:
        return Region("written", (b,), sum(r.nbytes for r in self._saved(b)), "disk", "value")

    def _written_frozen(self) -> Region:
        nbytes = self.spec.layout.frozen_numel * self.spec.element_bytes
        return Region("written_frozen", (), nbytes, "disk", "value")

    def _published(self) -> Region:
        """The checkpoint under its name, or why there is none."""
        return Region("published", (), 0, "disk", "value")


def ops_before_decision(graph: Graph) -> Iterator[Op]:
    """The operations whose effect leaves the step although it may be refused: there must be none.

    What updates the state, or publishes it, has to be ordered behind what writes the decision, or to read the
    decision that the step began with: a delayed update was decided one step earlier. A collective has to be ordered
    behind the decision or before it: in between, a rank that refuses the step may leave others waiting. A graph
    without a decision refuses nothing.
    """
    decides = [i for i, op in enumerate(graph) if any(r.buffer == "decision" for r in op.writes)]
    if not decides:
        return
    (decide, *_), needs = decides, graph.predecessors
    behind, before = {decide}, {decide}
    for i in range(decide + 1, len(graph)):
        behind |= {i} if behind.intersection(needs[i]) else set()
    for i in range(decide, -1, -1):
        before |= {*needs[i]} if i in before else set()
    for i, op in enumerate(graph):
        applies_pending = i < decide and any(r.buffer == "decision" for r in op.reads)
        lasts = any(r.trained or r.buffer == "published" for r in op.writes) and not applies_pending
        sends = op.kind == "network" and i not in before
        if i not in behind and (lasts or sends):
            yield op
