"""Where the data of a bucket is in a step: answered once, from the settings, for all that plan or run it.

Recipes, operations, regions, engine and planner read the fields of `StepSpec.places[b]`.
"""

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, Literal

from attrs import frozen

from zfunc.core.dtypes import DTYPES, Dtype
from zfunc.core.layout import ELEMENTWISE, Bucket, Layout, UpdateWork
from zfunc.core.mesh import DeviceMesh
from zfunc.core.optimizer_state import (
    GRADIENT,
    HIGH_HALF,
    PARAMS,
    STATE_FORMATS,
    StateBuffer,
    moment_buffers,
    updates_matrices,
    weight_buffers,
)
from zfunc.core.settings import StepSettings
from zfunc.core.shares import word_of

Where = Literal["device", "host", "disk"]


@frozen
class BucketPlaces:
    """Where the data of one bucket is, and how its gradient reaches the update. A place is "device", "host"
    or "disk".

    - `numel`: elements of the bucket; `shard_numel`: those of a rank's slice; `dtype`: that of parameters and
      gradients on the device, "uint8" for the bytes of encoded weights.
    - `home`: the number of the device, or of the pipeline stage, that keeps the bucket's data; `owned`:
      whether this rank's State has a part of the bucket.
    - `params`: the place of the parameters between passes; `sharded`: each rank keeps only its slice of them.

    Of a trainable bucket; None, False, 0 or empty for a frozen one:

    - `state`: the place of the optimizer state; `buffers`: all its buffers; `moments`: those that are not
      weights; `weights`: the names of those that the fp32 weights are read from.
    - `update`: the place where the optimizer runs; `matrices`: whether it needs whole matrices, on the
      device; `work`: its cost beside an element-wise pass, on the rank where it is highest.
    - `gradient`: the place where the gradient waits for the update.
    - `deliveries`: the number of reduced gradients that a step makes; `added`: several are added up in fp32;
      `summed`: those of all micro-batches are added up on the device, and the sum leaves it once, in
      `delivered_dtype`; `apart`: each segment that shares the bucket has a sum of its own, and these are
      added last.
    - `waits`: the update waits for the norm of the whole gradient, or for further deliveries.
    """

    index: int
    numel: int
    shard_numel: int
    dtype: Dtype
    home: int
    owned: bool
    params: Where
    sharded: bool
    state: Where | None = None
    buffers: tuple[StateBuffer, ...] = ()
    weights: tuple[str, ...] = ()
    moments: tuple[StateBuffer, ...] = ()
    update: Where | None = None
    matrices: bool = False
    work: UpdateWork = ELEMENTWISE
    gradient: Where | None = None
    deliveries: int = 0
    added: bool = False
    summed: bool = False
    delivered_dtype: Dtype = "fp32"
    apart: bool = False
    waits: bool = False

    @property
    def trainable(self) -> bool:
        """Whether steps update the parameters of the bucket."""
        return self.state is not None

    @property
    def streamed(self) -> bool:
        """Whether the bucket's parameters are whole on the device only while a segment uses them."""
        return self.sharded or self.params != "device"

    @property
    def staged(self) -> bool:
        """Whether the bucket's optimizer state lives off the device and is copied there for each update."""
        return self.update == "device" and self.state != "device"

    @cached_property
    def by_parameter(self) -> bool:
        """Whether the bucket's optimizer is called once for each parameter, because an update needs
        statistics of the whole parameter."""
        return self.matrices or any(x.whole for x in self.buffers)

    @property
    def sends_high_half(self) -> bool:
        """Whether the device's copy of the bucket's parameters is the high half of the master weights."""
        return self.dtype == "bf16" and any(x.name == HIGH_HALF for x in self.buffers)

    @property
    def keeps_high_half(self) -> bool:
        """Whether the host keeps no separate copy of the bucket's 16-bit parameters: they are the high half
        of the fp32 master weights there."""
        return self.params == "host" and self.sends_high_half

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the bucket's parameters, and of their gradient, on the device."""
        return DTYPES[self.dtype].nbytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's slice of the bucket's parameters, in their dtype on the device."""
        return self.shard_numel * self.element_bytes

    @property
    def in_memory(self) -> tuple[StateBuffer, ...]:
        """The buffers of the bucket's optimizer state that stay in memory, not on disk, between steps."""
        if self.state != "disk":
            return self.buffers
        return tuple(x for x in self.buffers if x.name == HIGH_HALF and self.keeps_high_half)

    def bytes_of(self, buffers: Iterable[StateBuffer]) -> int:
        """Bytes of `buffers` of the optimizer state for a rank's slice of the bucket."""
        return sum(x.nbytes(self.shard_numel) for x in buffers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the bucket's parameters, or of a rank's slice if `sharded`, in their dtype on the device."""
        return self.shard_bytes if self.sharded else self.numel * self.element_bytes

    @property
    def delivered_bytes(self) -> int:
        """Bytes of a rank's slice of the bucket's gradient, in the dtype in which it leaves the device."""
        return self.shard_numel * DTYPES[self.delivered_dtype].nbytes

    @property
    def waiting_dtype(self) -> Dtype:
        """The dtype in which the bucket's gradient, or the sum of several, waits in memory for the update."""
        return "fp32" if self.added else self.dtype

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a rank's slice of the bucket's gradient that waits in memory for the update."""
        return self.shard_numel * DTYPES[self.waiting_dtype].nbytes

    @property
    def staged_bytes(self) -> dict[str, int]:
        """Bytes of each part of the slot on the device for the bucket's update: state buffers by name; parameters,
        if they live elsewhere and are no part of the state; the gradient, if it waited elsewhere."""
        parts = {x.name: x.nbytes(self.shard_numel) for x in self.buffers}
        if self.params != "device" and not self.sends_high_half:
            parts[PARAMS] = self.weight_bytes
        if self.gradient != "device":
            parts[GRADIENT] = self.waiting_bytes
        return parts

    @property
    def update_bytes(self) -> int:
        """Bytes that an update of the bucket reads and writes: the state both ways, the gradient, and the new
        parameters for the device unless they are part of the state.

        An optimizer of whole parameters reads the gradient and weights once more. An optimizer of whole
        matrices counts the weights and the direction alone, as its momentum operation moved the rest.
        """
        state, copied = self.bytes_of(self.buffers), 0 if self.sends_high_half else self.shard_bytes
        if self.matrices:
            weights, direction = state - self.bytes_of(self.moments), self.shard_numel * DTYPES["bf16"].nbytes
            return 2 * weights + direction + copied
        rest = [x for x in self.buffers if not x.whole]
        # To measure whole parameters: the weights, and thrice the gradient.
        measured = 3 * self.waiting_bytes + self.bytes_of(rest) if len(rest) < len(self.buffers) else 0
        return measured + 2 * state + self.waiting_bytes + copied


def make_places(
    layout: Layout,
    settings: StepSettings,
    mesh: DeviceMesh,
    resident: Collection[int],
    paged: Collection[int],
) -> tuple[BucketPlaces, ...]:
    """The places of every bucket of `layout`, with the optimizer state of the buckets `resident` on the device, of
    those in `paged` on the disk, and of all others on the host."""
    world = mesh.world
    sums = settings.sums_on_device and mesh.one_sum_at_a_time

    def places(bucket: Bucket) -> BucketPlaces:
        b, trainable = bucket.index, bucket.index < len(layout.buckets)
        stays = settings.params_on == "device" or b in resident or bucket.persistent
        on_disk = settings.params_on == "disk" and (b in paged or not trainable)
        return BucketPlaces(
            b,
            bucket.numel,
            bucket.numel // world,
            (dtype := settings.dtype_of(bucket)),
            home=(home := min(mesh.homes.get(b, (0,)))),
            owned=mesh.stage in (None, home),
            params="device" if stays else "disk" if on_disk else "host",
            sharded=settings.stage == 3 and world > 1 and not bucket.persistent,
            **(trained(bucket, dtype) if trainable else {}),
        )

    def trained(bucket: Bucket, dtype: Dtype) -> dict[str, Any]:
        b, barrier = bucket.index, settings.waits_for_norm
        state = "device" if b in resident else "disk" if b in paged else "host"
        update = word_of(settings.update_on, b, len(layout.buckets))
        update = "device" if "device" in (state, update) else "host"
        ties = len(bucket.deliveries)
        deliveries = 1 if settings.stage == 1 else settings.micro_batches * ties
        added = deliveries > 1
        waits = barrier or added
        # Where the gradient waits. One that the host adds up waits in its memory.
        on_device = state == "device" or settings.grads_on == "device" or not waits
        once = deliveries == 1 or (sums and ties == 1)
        if update == "device" and on_device:
            gradient = "device"
        else:
            gradient = "disk" if settings.grads_on == "disk" and barrier and once else "host"
        summed = sums and gradient != "device"
        return {
            "state": state,
            "buffers": STATE_FORMATS[bucket.state_format],
            "weights": weight_buffers(bucket.state_format),
            "moments": moment_buffers(bucket.state_format),
            "update": update,
            "matrices": updates_matrices(bucket.state_format),
            "work": bucket.work(world),
            "gradient": gradient,
            "deliveries": deliveries,
            "added": added,
            "summed": summed,
            "delivered_dtype": "fp32" if summed else dtype,
            "apart": deliveries > settings.micro_batches > 1 and not summed,
            "waits": waits,
        }

    return tuple(map(places, layout.all_buckets))
