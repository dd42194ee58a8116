"""The optimizers Adam and AdamW as a value with checked settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve, field, frozen

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import Moments, adam_format
from zfunc.optim.elementwise import (
    Betas,
    Elementwise,
    LearningRate,
    betas_field,
    eps_field,
    lr_field,
    number_field,
)
from zfunc.optim.rules import EXP_AVG_FLOOR, EXP_AVG_SQ_FLOOR, Factors, Operations, checked_step
from zfunc.values import truth

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class AdamW(Elementwise):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); `decoupled=False` is Adam with L2.

    `lr` and `betas` are values or pure functions of the step, counted from 1. `decay(name, shape)` says whether
    weight decay applies to a parameter; `matrices_only` leaves out norms and biases. Bias correction uses the betas
    of the current step alone, as in torch: it is exact while they are constant.

    `moments` is the format of the optimizer state between steps, in bytes a parameter: "fp32", 12 (master, exp_avg,
    exp_avg_sq); "16bit", 8 (the master in two exact halves, both moments in bf16); "8bit", 6 (the same master, both
    moments in 8 bits, with a scale for every 64 elements). Arithmetic is always fp32 (`zfunc.optim.formats`).

    With `split_master` the master of "fp32" is in two halves too, one of which is the bf16 copy for the device: the
    same 12 bytes and the same bits, without 2 bytes more for a copy.

    NumPy scalars and tensors of one element become floats. Raises ValueError or TypeError for values out of range
    and for a learning rate that overflows fp32 in the first step.

    >>> from zfunc import matrices_only
    >>> AdamW(lr=3e-4, weight_decay=0.1, decay=matrices_only).factors(1)
    {'lr': 0.0003, 'betas': (0.9, 0.999)}
    """

    state: ClassVar = ("exp_avg", "exp_avg_sq")
    kernel: ClassVar = "adamw"
    usual: ClassVar = 4e-3, 0.1, {"betas": (0.9, 0.95)}
    deepspeed: ClassVar = "betas eps"

    lr: LearningRate = lr_field(1e-3)
    betas: Betas | Callable[[int], Betas] = betas_field((0.9, 0.999))
    eps: float = eps_field(1e-8)
    weight_decay: float = number_field("weight_decay", 0.01)
    decoupled: bool = field(default=True, kw_only=True, converter=partial(truth, "decoupled"))
    split_master: bool = field(default=False, kw_only=True, repr=False)

    def update(self, o: Operations, k: Factors, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
        """Adam's rule (Kingma & Ba 2015, algorithm 1) for gradient `g` and moments `m`, `v`: returns the
        change of the weights, then the two new moments."""
        m = o.flush(k.keep * m + k.add * g, EXP_AVG_FLOOR)
        v = o.flush(k.keep_sq * v + k.add_sq * (g * g), EXP_AVG_SQ_FLOOR)
        return k.rate * (m / (o.sqrt(v) * k.root_scale + k.eps)), m, v

    def scalars(self, step: int, lr: float, betas: Betas) -> dict[str, float]:
        """The scalars of Adam's rule in step `step`, with bias corrections (Kingma & Ba 2015, section 3)."""
        beta1, beta2 = betas
        return {
            "rate": lr / (1.0 - beta1**step),
            "keep": beta1,
            "add": 1.0 - beta1,
            "keep_sq": beta2,
            "add_sq": 1.0 - beta2,
            "root_scale": 1.0 / math.sqrt(1.0 - beta2**step),
            "eps": self.eps,
        }

    @classmethod
    def kind(cls) -> str:
        """The prefix of the names of Adam's state formats: "", since these are "fp32", "16bit" and the like."""
        return ""

    def state_format(self, group: int = 0) -> str:
        """The name of Adam's state format, alike for all groups, in `zfunc.core.optimizer_state.STATE_FORMATS`."""
        del group
        return adam_format(self.moments, split_master=self.split_master)

    def with_moments(self, moments: Moments, *, split_master: bool) -> AdamW:
        """A copy with moments in format `moments`; with `split_master`, the master of "fp32" is split."""
        return evolve(self, moments=moments, split_master=self.split_master or split_master)


def adam_update_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    step: int,
    lr: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    threads: int | None = None,
) -> None:
    """One Adam step over 1-D contiguous host buffers, in place, in one pass over memory.

    - `master`, `exp_avg`, `exp_avg_sq`: [n] fp32, updated. State in other formats, or into other buffers:
      `AdamW(...).host_update`.
    - `grad`: [n] fp32, bf16 or fp16, read only. It is multiplied by `grad_scale`: unscaling and clipping in one.
    - `out`: [n] bf16, fp16 or fp32, receives the rounded new weights.
    - `step` counts from 1. `decoupled=False` is Adam with L2. `threads` (None: `default_threads()`) change no bit.

    Raises TypeError or ValueError, with every buffer unchanged, for a wrong dtype, device, shape or layout, buffers
    that overlap, memory whose ends are read-only, and factors out of range or not finite: skip a step with a norm
    of inf or NaN. Gradients may hold inf and NaN, which propagate.

    >>> import torch
    >>> weights, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> adam_update_(weights, m, v, torch.tensor([0.5, 0.0]), step=1, lr=0.25, eps=0.25)
    >>> weights
    tensor([0.8333, 1.0000])
    """
    adam = AdamW(lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=decoupled)
    decision = StepDecision(False, grad_scale, checked_step(step), adam.factors(step))
    state = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    adam.host_update(state, grad, decision, group=0, out=out, threads=threads)
