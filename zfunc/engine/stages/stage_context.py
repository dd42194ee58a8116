"""The arguments of a stage function: an operation, the memory of its regions, the constants of the step."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Region
from zfunc.core.spec import StepSpec
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentVJP
from zfunc.optim.base import Optimizer
from zfunc.runtime.collectives import RankGroup

Memory = MutableMapping[Region, Any]


@frozen(eq=False)
class CompiledSegment:
    """A segment as operations of a step call it: forward, backward and their variants, and the full names of
    its parameters by short name."""

    name: str
    function: Callable[..., Any]  # its own, with checked outputs
    evaluate: Callable[..., Any]  # the same without dropout
    passes: SegmentVJP
    plain: SegmentVJP  # the same without torch.compile, to trace costs
    options: PassOptions
    trained: dict[str, str]  # short name -> full name
    fixed: dict[str, str]
    buffers: dict[str, Tensor]  # on the meta device, of those that forward changes


@frozen(eq=False)
class StepContext:
    """What is constant during one step, passed to every function that runs an operation: program, ranks,
    counters. `loss_scale` is the factor of the loss and gradients on the device."""

    spec: StepSpec
    calls: tuple[CompiledSegment, ...]
    constants: Mapping[tuple[int, int], dict[str, Tensor]]  # by device and segment, then by short name
    optimizer: Optimizer
    number: int  # of the update with this step's gradient, from 1
    factors: Mapping[str, Any]  # of the optimizer, for that update
    loss_scale: float
    dtype: torch.dtype  # of floating-point inputs on the device
    devices: tuple[torch.device, ...]
    randomness: Callable[[int, int], AbstractContextManager[None]]  # (micro-batch, segment) -> seeded
    ranks: RankGroup
    shards: Sequence[slice]  # this rank's elements of each bucket, relative to the start of the bucket
    updated: frozenset[int] = frozenset()  # buckets whose deferred update a step made that then failed
    averaged: frozenset[int] = frozenset()  # those whose moving average it updated
    patience: float = 600.0  # seconds to wait for the device
    # Logs a warning, where this step compares its first loss with those of its halves; None where it does not.
    warn: Callable[[str], None] | None = None
    # Of the State: updates over buffers that were checked, by verb and index.
    prepared: dict[Any, Any] = field(factory=dict[Any, Any])

    def decision(
        self, *, skip: bool = False, factor: float = 1.0, loss: float = 0.0, aux: Sequence[float] = ()
    ) -> StepDecision:
        """The `StepDecision` of this step: to `skip` its update, or to update with the gradient times
        `factor`; `loss` and `aux` are for the metrics."""
        named = dict(zip(self.spec.aux, aux, strict=True)) if aux else {}
        scale = factor / self.loss_scale
        return StepDecision(skip, scale, self.number, self.factors, loss, named, self.spec.unused)


Stage = Callable[[Op, Memory, StepContext], None]


def named_like_verbs(*stages: Stage) -> dict[str, Stage]:
    """Functions that run operations, by verb: a function's verb is its name without an underscore at the end."""
    return {stage.__name__.rstrip("_"): stage for stage in stages}  # pyright: ignore


def gaps(start: int, stop: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges (start, stop) between `start` and `stop` that the ascending ranges `covered` do not cover.

    >>> gaps(0, 9, [(0, 2), (2, 4), (6, 7)])
    [(4, 6), (7, 9)]
    """
    edges = [start, *chain.from_iterable(covered), stop]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
