"""The donated training state: what a step consumes and returns.

The invariant: there is one copy of the buffers and one State that may use them. `train_step` takes a State and
returns the next; the one it took is donated, and using it again raises, with what to do instead.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region
from zfunc.core.layout import Layout, Span
from zfunc.core.optimizer_state import HIGH_HALF, STATE_FORMATS, StateBuffer
from zfunc.core.regions import SHADOW, Regions, StepSpec
from zfunc.errors import DonatedStateError
from zfunc.optim.compact import DTYPES
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.host_memory import alloc_host


@frozen(eq=False)
class Flat:
    """A bucket's piece of a flat buffer and, by full name, the parameters in it as views with their shapes."""

    flat: Tensor  # [bucket.numel], 16- or 32-bit, device
    views: dict[str, Tensor]


@frozen(eq=False)
class FlatState:
    """The optimizer's state of some buckets: for each name of `zfunc.core.optimizer_state` one flat buffer of all
    of them.

    `spans` says which of this rank's parameters those of a bucket are, counted in these buffers.
    """

    flats: dict[str, Tensor]
    spans: dict[int, tuple[int, int]]

    def of(self, b: int) -> dict[str, Tensor]:
        """The state of one bucket, as views."""
        start, stop = self.spans[b]
        return {name: flat[start // SHARED[name] : stop // SHARED[name]] for name, flat in self.flats.items()}


@define(eq=False)
class Buffers:
    """The memory behind a State. `generation` is that of the one State that may use it."""

    params: Tensor  # [layout.numel], compute precision, device
    frozen: Tensor  # [layout.frozen_numel], compute precision, device
    host: FlatState  # of the buckets that are updated on the host, this rank's slices
    device: FlatState  # of those that are updated on the device
    shadow: FlatState  # host: room for the next state of buckets whose update is speculated
    waiting: dict[
        Region, Tensor
    ]  # pinned or host: where gradients wait for the next step, if updates are delayed
    swapped: set[int] = field(factory=set[int])  # buckets whose state is in `shadow`
    generation: int = 0
    lost: str = ""  # why no State can use it any more
    compared: bool = False  # with those of the other ranks
    placed: dict[Region, Any] = field(
        factory=dict[Region, Any], repr=False
    )  # views, made once: see `regions`

    def kept(self, b: int) -> dict[str, Tensor]:
        """The optimizer's state of a bucket, wherever it is, by the names of `zfunc.core.optimizer_state`."""
        if b in self.device.spans:
            return self.device.of(b)
        return (self.shadow if b in self.swapped else self.host).of(b)

    def settle(self, mem: Mapping[Region, Any]) -> None:
        """Take over which shadows a step has swapped in; `mem` was made by `regions`."""
        for b in self.shadow.spans:
            name = next(iter(self.shadow.flats))
            in_shadow = mem[Region(name, (b,))] is self.placed[Region(SHADOW + name, (b,))]
            self.swapped = self.swapped | {b} if in_shadow else self.swapped - {b}


@frozen(eq=False)
class State:
    """Everything training needs to go on: buffers, counters, loss scale, seed, data position.

    `step` counts updates made, `batches` calls of train_step (skipped steps too), `sequences` the rows of all
    batches so far: the data position. `seed` is the key all randomness derives from. With delayed updates the last
    gradient waits in the buffers, and `pending` is its verdict; the update it goes into counts as made.
    """

    buffers: Buffers = field(repr=False)
    program: int = field(repr=False)  # identity of the program that made it
    generation: int
    step: int = 0
    batches: int = 0
    sequences: int = 0
    loss_scale: LossScale = field(factory=LossScale)
    seed: int = 0
    pending: StepDecision | None = None

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
                f"{action}: got a state that an earlier train_step or flush consumed (step {self.step}), expected "
                "the one it returned: write `state, metrics = zfunc.train_step(program, state, batch)`"
            )


def allocate(job: StepSpec, dtype: torch.dtype, device: torch.device) -> Buffers:
    """Zeroed buffers for one State."""
    sent = {HIGH_HALF} if job.send_high_half and device.type == "cuda" else set[str]()

    def flat(x: StateBuffer, spans: list[tuple[int, int]], where: torch.device | None) -> Tensor:
        numel, kind = x.numel(spans[-1][1] if spans else 0), DTYPES[x.dtype]
        if where is not None and where.type != "cpu":
            return torch.zeros(numel, dtype=kind, device=where)
        sweeps = [(x.numel(start), x.numel(stop)) for start, stop in spans]
        return alloc_host(numel, kind, pinned=x.name in sent and where is None, sweeps=sweeps)

    def flats(buckets: Iterable[int], where: torch.device | None = None) -> FlatState:
        spans = job.spans_of(buckets)
        return FlatState(
            {x.name: flat(x, [*spans.values()], where) for x in STATE_FORMATS[job.moments]}, spans
        )

    return Buffers(
        params=torch.zeros(job.layout.numel, dtype=dtype, device=device),
        frozen=torch.zeros(job.layout.frozen_numel, dtype=dtype, device=device),
        host=flats(job.offloaded),
        device=flats(sorted(job.resident), device),
        shadow=flats(sorted(job.shadowed)),
        waiting={r: staging_buffer(r, dtype, device) for r in waiting(job)},
    )


def waiting(job: StepSpec) -> tuple[Region, ...]:
    """Where gradients wait from step to step: nowhere unless updates are delayed."""
    return Regions(job).waiting() if job.delayed else ()


def staging_buffer(r: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed flat tensor for a region that says of what dtype it is; `dtype` is that of the parameters."""
    kind = {"compute": dtype, "fp32": torch.float32, "fp64": torch.float64}[r.dtype or "compute"]
    numel = r.nbytes // kind.itemsize
    if r.tier == "device":
        return torch.zeros(numel, dtype=kind, device=device)
    return alloc_host(numel, kind, pinned=r.tier == "pinned" and device.type == "cuda")


def view(flat: Tensor, span: Span) -> Tensor:
    """The parameter at `span` of `flat`, in its own shape."""
    return flat[span.start : span.stop].view(span.shape)


def regions(buffers: Buffers, layout: Layout) -> dict[Region, Any]:
    """Where the regions of a State are: views of its buffers, in a dict of the caller's own."""
    if not buffers.placed:
        buffers.placed.update(_placed(buffers, layout))
    mem = {**buffers.placed}
    for b in buffers.swapped:
        for name in buffers.shadow.flats:
            state, spare = Region(name, (b,)), Region(SHADOW + name, (b,))
            mem[state], mem[spare] = mem[spare], mem[state]
    return mem


def _placed(buffers: Buffers, layout: Layout) -> dict[Region, Any]:
    """All views of a State, with no shadow swapped in. One a parameter: they take milliseconds to make."""
    mem: dict[Region, Any] = {**buffers.waiting}
    for bucket in layout.buckets:
        index = (bucket.index,)
        views = {span.name: view(buffers.params, span) for span in bucket.spans}
        mem[Region("params", index)] = Flat(buffers.params[bucket.start : bucket.stop], views)
        state = buffers.device if bucket.index in buffers.device.spans else buffers.host
        for name, kept in state.of(bucket.index).items():
            mem[Region(name, index)] = kept
        if bucket.index in buffers.shadow.spans:
            for name, spare in buffers.shadow.of(bucket.index).items():
                mem[Region(SHADOW + name, index)] = spare
    frozen_views = {span.name: view(buffers.frozen, span) for span in layout.frozen}
    mem[Region("frozen")] = Flat(buffers.frozen, frozen_views)
    return mem


SHARED = {x.name: x.shared for kept in STATE_FORMATS.values() for x in kept}
