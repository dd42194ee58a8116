"""The donated training state: what a step consumes and returns.

The invariant: there is one copy of the buffers and one State that may use them. `train_step` takes a State and
returns the next; the one it took is donated, and using it again raises, with what to do instead.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Region, Role, Tier
from zfunc.core.regions import Regions
from zfunc.core.spec import StepSpec
from zfunc.errors import DonatedStateError
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.torch_dtypes import TORCH_DTYPES


@frozen(eq=False)
class Flat:
    """A bucket's piece of a flat buffer and, by full name, the parameters in it as views with their shapes."""

    flat: Tensor  # [bucket.numel], 16- or 32-bit, device
    views: dict[str, Tensor]


@define(eq=False)
class Buffers:
    """The memory behind a State: a tensor for each of its regions, or for parameters a `Flat`.

    `generation` is that of the one State that may use it.
    """

    memory: dict[Region, Any] = field(repr=False)
    generation: int = 0
    lost: str = ""  # why no State can use it any more
    compared: bool = False  # with those of the other ranks

    @cached_property
    def _by_role(self) -> dict[Role | None, list[Region]]:
        by_role: dict[Role | None, list[Region]] = {}
        for r in self.memory:
            by_role.setdefault(r.role, []).append(r)
        return by_role

    @cached_property
    def _state(self) -> dict[int, list[Region]]:
        by_bucket: dict[int, list[Region]] = {}
        for r in self._by_role.get("state", ()):
            by_bucket.setdefault(r.index[0], []).append(r)
        return by_bucket

    @cached_property
    def _swaps(self) -> tuple[Region, ...]:
        """The regions of buckets that have a shadow: a step may swap the two."""
        shadows = self._by_role.get("shadow", ())
        return (*shadows, *(r for b in sorted({r.index[0] for r in shadows}) for r in self._state[b]))

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """Every parameter on the device by full name, in its own shape."""
        return {name: x for r in self._by_role["params"] for name, x in self.memory[r].views.items()}

    def params(self) -> list[Tensor]:
        """The flat parameters on the device, a bucket at a time, then those that are not trained."""
        return [self.memory[r].flat for r in self._by_role["params"]]

    def state(self, b: int) -> dict[str, Tensor]:
        """The optimizer's state of a bucket, by the names of `zfunc.core.optimizer_state`."""
        return {r.buffer: self.memory[r] for r in self._state[b]}

    def waiting(self) -> dict[int, Tensor]:
        """Where gradients wait for the next step, by bucket; empty unless updates are delayed."""
        return {r.index[0]: self.memory[r] for r in self._by_role.get("grad_shard", ())}

    def settle(self, mem: Mapping[Region, Any]) -> None:
        """Take over which shadows a step has swapped in."""
        self.memory.update((r, mem[r]) for r in self._swaps)


@frozen(eq=False)
class State:
    """Everything training needs to go on: buffers, counters, loss scale, seed, data position.

    `step` counts updates made, `batches` calls of train_step (skipped steps too), `sequences` the rows of all
    batches so far: the data position. `seed` is the key all randomness derives from. With delayed updates the last
    gradient waits in the buffers, and `pending` is its decision; the update it goes into counts as made.
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


def refuse_inference_mode(action: str) -> None:
    """Raise RuntimeError in inference mode: tensors allocated there cannot be written outside of it."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{action}: got inference mode, expected it off: training writes into what is made here. Call it "
            "outside of torch.inference_mode()"
        )


def allocate(spec: StepSpec, dtype: torch.dtype, device: torch.device) -> Buffers:
    """Zeroed buffers for one State."""
    memory: dict[Region, Any] = {**allocate_regions(Regions(spec).state(), dtype, device)}
    for r, flat in memory.items():
        if r.role == "params":
            start, spans = 0, spec.layout.frozen
            if r.index:
                bucket = spec.layout.buckets[r.index[0]]
                start, spans = bucket.start, bucket.spans
            memory[r] = Flat(
                flat, {x.name: flat[x.start - start : x.stop - start].view(x.shape) for x in spans}
            )
    return Buffers(memory)


def allocate_regions(
    regions: Iterable[Region], dtype: torch.dtype, device: torch.device
) -> dict[Region, Tensor]:
    """Zeroed tensors, one allocation for all regions of a buffer on one tier; `dtype` is that of parameters."""
    together: dict[tuple[str, Tier], list[Region]] = {}
    for r in regions:
        together.setdefault((r.buffer, r.tier), []).append(r)
    memory: dict[Region, Tensor] = {}
    for of_buffer in together.values():
        first, *_ = of_buffer = sorted(of_buffer, key=lambda r: r.index)
        kind = dtype if first.dtype in (None, "compute") else TORCH_DTYPES[first.dtype]
        ends = [0, *accumulate(r.nbytes // kind.itemsize for r in of_buffer)]
        flat = _flat(first, ends, kind, device)
        memory |= {r: flat[start:stop] for r, (start, stop) in zip(of_buffer, pairwise(ends), strict=True)}
    return memory


def _flat(r: Region, ends: list[int], kind: torch.dtype, device: torch.device) -> Tensor:
    """The memory of all regions like this one, which end there."""
    swept = r.role == "state" and device.type == "cpu"  # by the host's kernel, wherever it is
    if r.tier == "device" and not swept:
        return torch.zeros(ends[-1], dtype=kind, device=device)
    pinned_for = device if r.tier == "pinned" and on_accelerator(device) else None
    return alloc_host(ends[-1], kind, pinned_for=pinned_for, sweeps=[*pairwise(ends)])
