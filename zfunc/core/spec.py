"""What a recipe knows of a training step: its layout, the costs of its segments, and the settings resolved."""

from functools import cached_property
from typing import Literal

from attrs import field, frozen, validators

from zfunc.core.layout import Bucket, Layout, round_up
from zfunc.core.optimizer_state import STATE_FORMATS

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

    def grad_bytes(self, s: int) -> int:
        """Bytes of the gradients of segment `s`, as tensors of their own."""
        names = set(self.layout.segments[s])
        spans = (x for b in self.layout.buckets_of(s) for x in self.layout.buckets[b].spans)
        sizes = ((x.stop - x.start) * self.element_bytes for x in spans if x.name in names)
        return sum(round_up(size, ALLOCATION) for size in sizes)

    def num_deliveries(self, bucket: Bucket) -> int:
        """How many times a step sends a gradient of `bucket` to the host; more than one is accumulated there."""
        return 1 if self.stage == 1 else self.micro_batches * len(bucket.deliveries)
