"""What a stage function is, and what it is handed: an operation, the memory it declares, the constants of its step.

The invariant: nothing here changes in a step but what is in `Memory`.
"""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.graph import Op, Region
from zfunc.core.layout import Layout
from zfunc.engine.vjp import SegmentVJP
from zfunc.optim.base import Optimizer
from zfunc.runtime.collectives import RankGroup

Memory = MutableMapping[Region, Any]


@frozen(eq=False)
class CompiledSegment:
    """What the stages know of one segment: how to run it, and its parameters' full names by short name."""

    passes: SegmentVJP
    plain: SegmentVJP  # the same, never through torch.compile: what costs are traced with
    trained: dict[str, str]  # short name -> full name
    fixed: dict[str, str]
    constants: dict[str, Tensor]


@frozen(eq=False)
class StepContext:
    """The constants of one step: nothing a stage could change.

    `number` is that of the update this step's gradient goes into, from 1, with the optimizer's `factors` of it.
    Gradients on the device are of the loss times `loss_scale`. With `skip_overflow`, as in fp16, a gradient that is
    not finite skips the step instead of raising. `dtype` is the precision on the `device`. `randomness(m, s)` is a
    context in which what segment `s` draws for micro-batch `m` is seeded. `applies_pending`: the gradient of the
    step before is applied in this one.
    """

    layout: Layout
    calls: tuple[CompiledSegment, ...]
    optimizer: Optimizer
    number: int  # of the update that this step's gradient goes into, from 1
    factors: Mapping[str, Any]  # the optimizer's, of that update
    loss_scale: float
    clip_norm: float | None
    skip_overflow: bool  # fp16: a non-finite gradient skips the step instead of raising
    micro_batches: int
    dtype: torch.dtype
    device: torch.device
    randomness: Callable[[int, int], AbstractContextManager[None]]  # (micro-batch, segment) -> seeded
    ranks: RankGroup
    applies_pending: bool  # the gradient of the step before
    patience: float = 600.0  # seconds to wait for the device

    def decision(self, *, skip: bool = False, factor: float = 1.0, loss: float = 0.0) -> StepDecision:
        """What is decided of this step, which clips by `factor`."""
        return StepDecision(skip, factor / self.loss_scale, self.number, self.factors, loss)

    def slice_of(self, b: int) -> slice:
        """Of a bucket's elements those that this rank keeps and updates."""
        return slice(*self.layout.buckets[b].slice_of(self.ranks.rank, self.ranks.world))


Stage = Callable[[Op, Memory, StepContext], None]
