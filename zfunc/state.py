"""The donated training state: what a step consumes and returns.

The invariant: there is one copy of the buffers and one State that may use them. `train_step` takes a State and
returns the next; the one it took is donated, and using it again raises, with what to do instead.
"""

from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.emit import Job
from zfunc.errors import DonatedStateError
from zfunc.graph import Region
from zfunc.layout import Layout, Span
from zfunc.loss_scale import LossScale
from zfunc.moments import BUFFERS, HIGH_HALF, Buffer, SizedType
from zfunc.resources import host_buffer

DTYPES: dict[SizedType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int16": torch.int16,
    "uint8": torch.uint8,
}


@frozen(eq=False)
class Flat:
    """A bucket's piece of a flat buffer and, by full name, the parameters in it as views with their shapes."""

    flat: Tensor  # [bucket.numel], 16- or 32-bit, device
    views: dict[str, Tensor]


@define(eq=False)
class Buffers:
    """The memory behind a State. `generation` is that of the one State that may use it."""

    params: Tensor  # [layout.numel], compute precision, device
    frozen: Tensor  # [layout.frozen_numel], compute precision, device
    optimizer: dict[str, Tensor]  # by the names of zfunc.moments, host: this rank's slices of all buckets
    generation: int = 0
    lost: str = ""  # why no State can use it any more
    compared: bool = False  # with those of the other ranks


@frozen(eq=False)
class State:
    """Everything training needs to go on: buffers, counters, loss scale, seed, data position.

    `step` counts updates made, `batches` calls of train_step (skipped steps too), `sequences` the rows of all
    batches so far: the data position. `seed` is the key all randomness derives from.
    """

    buffers: Buffers = field(repr=False)
    program: int = field(repr=False)  # identity of the program that made it
    generation: int
    step: int = 0
    batches: int = 0
    sequences: int = 0
    loss_scale: LossScale = field(factory=LossScale)
    seed: int = 0

    def __reduce__(self) -> Any:
        raise TypeError(
            "a State is memory that belongs to a program of this process and is not copied or pickled: take "
            "zfunc.params(program, state), and zfunc.init(program, params=...) there"
        )

    def check(self, program: int, action: str) -> None:
        """Raise if this State may not be used by `program` for `action`."""
        if self.program != program:
            raise ValueError(
                f"{action}: got a state made by another program, expected one from zfunc.init with this "
                "program: programs lay out their buffers differently. Pass zfunc.params of the other as "
                "init(program, params=...)"
            )
        if self.buffers.lost:
            raise DonatedStateError(f"{action}: this state is gone: {self.buffers.lost}")
        if self.generation != self.buffers.generation:
            raise DonatedStateError(
                f"{action}: got a state that an earlier train_step consumed (step {self.step}), expected the "
                "one it returned: write `state, metrics = zfunc.train_step(program, state, batch)`"
            )


def allocate(job: Job, dtype: torch.dtype, device: torch.device) -> Buffers:
    """Zeroed buffers for one State."""
    layout = job.layout
    sent = {HIGH_HALF} if job.send_high_half and device.type == "cuda" else set[str]()

    def buffer(x: Buffer) -> Tensor:
        per = x.shared * job.world  # parameters an element of this rank's buffer stands for
        sweeps = [(b.start // per, b.stop // per) for b in layout.buckets]
        return host_buffer(layout.numel // per, DTYPES[x.dtype], pinned=x.name in sent, sweeps=sweeps)

    return Buffers(
        params=torch.zeros(layout.numel, dtype=dtype, device=device),
        frozen=torch.zeros(layout.frozen_numel, dtype=dtype, device=device),
        optimizer={x.name: buffer(x) for x in BUFFERS[job.moments]},
    )


def view(flat: Tensor, span: Span) -> Tensor:
    """The parameter at `span` of `flat`, in its own shape."""
    return flat[span.start : span.stop].view(span.shape)


def regions(buffers: Buffers, layout: Layout) -> dict[Region, Any]:
    """Where the regions of a State are: views of its buffers."""
    mem: dict[Region, Any] = {}
    for bucket in layout.buckets:
        index = (bucket.index,)
        views = {span.name: view(buffers.params, span) for span in bucket.spans}
        mem[Region("params", index)] = Flat(buffers.params[bucket.start : bucket.stop], views)
        for name, kept in buffers.optimizer.items():
            shared = layout.numel // kept.numel()  # by ranks, and by the elements of a block
            mem[Region(name, index)] = kept[bucket.start // shared : bucket.stop // shared]
    frozen_views = {span.name: view(buffers.frozen, span) for span in layout.frozen}
    mem[Region("frozen")] = Flat(buffers.frozen, frozen_views)
    return mem


TRAINED = frozenset({"params", *(x.name for kept in BUFFERS.values() for x in kept)})
"""The buffers a step updates: once an operation that writes one has begun, the State before it is gone."""
