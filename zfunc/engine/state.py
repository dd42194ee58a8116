"""The training state, which a step consumes and returns, and the allocation of its memory.

There is one copy of the buffers, and one State that may use them. `train_step` takes a State and returns the next;
the one it took is donated, and using it again raises DonatedStateError.
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
    """The flat parameters of a bucket on the device, and its parameters by full name, as views in their shapes."""

    flat: Tensor  # [bucket.numel], 16- or 32-bit, device
    views: dict[str, Tensor]


@define(eq=False)
class Buffers:
    """The memory of a State: a tensor for each region, or a `Flat` for parameters.

    Only the State of this `generation` may use it. `deferred` is the decision of an update that is still to be made
    of all but the `updated` buckets (see `zfunc.engine.flush`).
    """

    memory: dict[Region, Any] = field(repr=False)
    generation: int = 0
    lost: str = ""  # why no State can use it, or ""
    compared: bool = False  # whether the weights have been compared with the other ranks'
    deferred: StepDecision | None = None
    updated: frozenset[int] = frozenset()

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
        """The shadows, and the states that a step may swap with them."""
        shadows = self._by_role.get("shadow", ())
        return (*shadows, *(r for b in sorted({r.index[0] for r in shadows}) for r in self._state[b]))

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """All parameters on the device by full name, in their shapes."""
        return {name: x for r in self._by_role["params"] for name, x in self.memory[r].views.items()}

    def params(self) -> list[Tensor]:
        """The flat parameters on the device: of each bucket, and the frozen ones."""
        return [self.memory[r].flat for r in self._by_role["params"]]

    def state(self, b: int) -> dict[str, Tensor]:
        """The optimizer state of a bucket, by the names in `zfunc.core.optimizer_state`."""
        return {r.buffer: self.memory[r] for r in self._state[b]}

    def waiting(self) -> dict[int, Tensor]:
        """The buffers of pending gradients by bucket; empty unless updates are delayed or deferred."""
        return {r.index[0]: self.memory[r] for r in self._by_role.get("grad_shard", ())}

    def settle(self, mem: Mapping[Region, Any]) -> None:
        """Record which shadows a step has swapped in."""
        self.memory.update((r, mem[r]) for r in self._swaps)


@frozen(eq=False)
class State:
    """Everything that training continues from: buffers, counters, loss scale, seed, data position.

    `step` counts updates, `batches` calls of train_step (skipped steps too), `sequences` the rows of all batches so
    far: the data position. All randomness derives from `seed`. With delayed updates the last gradient is pending in
    the buffers, with its decision in `pending`; `step` counts its update already.
    """

    buffers: Buffers = field(repr=False)
    program: int = field(repr=False)  # identity of its program
    generation: int
    step: int = 0
    batches: int = 0
    sequences: int = 0
    loss_scale: LossScale = field(factory=LossScale)
    seed: int = 0
    pending: StepDecision | None = None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a State belongs to a program of this process and cannot be copied or pickled: take "
            "zfunc.params(program, state), and pass it to zfunc.init(program, params=...) there"
        )

    def check(self, program: int, action: str) -> None:
        """Raise ValueError or DonatedStateError if `program` may not use this State for `action`."""
        if self.program != program:
            raise ValueError(
                f"{action}: got a state made by another program, expected one from zfunc.init with this "
                "program, because programs lay out their buffers differently: pass zfunc.params of the other to "
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


def refuse_global_modes(action: str, device: torch.device) -> None:
    """Raise RuntimeError under autocast or anomaly detection: a mode of this thread, which other lanes do not have
    and which a trace would keep."""
    for kind in dict.fromkeys(("cpu", device.type)):
        if torch.is_autocast_enabled(kind):
            raise RuntimeError(
                f"{action}: got autocast for {kind!r}, expected it off: pass precision= to zfunc.compile, which "
                "holds for every operation of the step"
            )
    if torch.is_anomaly_enabled():
        raise RuntimeError(
            f"{action}: got anomaly detection, expected it off: pass debug=True to train_step, which names the "
            "operation of an error"
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
    """Zeroed tensors, one allocation for each buffer and tier; `dtype` is that of parameters on the device."""
    groups: dict[tuple[str, Tier], list[Region]] = {}
    for r in regions:
        groups.setdefault((r.buffer, r.tier), []).append(r)
    memory: dict[Region, Tensor] = {}
    for group in groups.values():
        first, *_ = group = sorted(group, key=lambda r: r.index)
        element = dtype if first.dtype in (None, "compute") else TORCH_DTYPES[first.dtype]
        ends = [0, *accumulate(r.nbytes // element.itemsize for r in group)]
        flat = _allocate_flat(first, ends, element, device)
        memory |= {r: flat[start:stop] for r, (start, stop) in zip(group, pairwise(ends), strict=True)}
    return memory


def _allocate_flat(r: Region, ends: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One allocation for regions like `r`, at these offsets."""
    on_host = r.tier != "device" or (
        r.role == "state" and not on_accelerator(device)
    )  # updated by the host kernel
    if not on_host:
        return torch.zeros(ends[-1], dtype=dtype, device=device)
    pinned_for = device if r.tier == "pinned" and on_accelerator(device) else None
    return alloc_host(ends[-1], dtype, pinned_for=pinned_for, sweeps=[*pairwise(ends)])
