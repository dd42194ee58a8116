"""Muon as a value with checked settings.

Its rules are the direction and the update along it, `Muon.orthogonalize` is what is between them.
How a library adds up a product is its own affair, so equal bits need the same library, device and number of
threads, as those of forward do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import attrs
from attrs import evolve

from zfunc.core.decision import StepDecision
from zfunc.core.layout import UpdateWork, round_up
from zfunc.core.spec import ALLOCATION
from zfunc.optim.elementwise import Elementwise, LearningRate, choice_field, lr_field, number_field
from zfunc.optim.rules import EXP_AVG_FLOOR, Factors, Operations, Rule, RuleStep
from zfunc.values import number, whole

if TYPE_CHECKING:
    from torch import Tensor

AdjustLr = Literal["original", "match_rms_adamw"]
Quintic = tuple[float, float, float]
QUINTIC: Quintic = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5: steep at 0, so that singular values come near 1 in few steps (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks")."""


def _quintic_setting(value: Any) -> Quintic:
    a, b, c = (number("ns_coefficients", x) for x in value)
    return a, b, c


@attrs.frozen
class Muon(Elementwise):
    """Muon for matrices (Jordan et al. 2024), as in `torch.optim.Muon`; other parameters need another
    optimizer.

    The momentum is the running mean momentum * momentum_buffer + (1 - momentum) * gradient; the direction is
    the momentum, or with `nesterov` the same mean of momentum and gradient. Newton-Schulz iterations bring
    the direction's singular values near 1; the weights move along the result. The learning rate of a matrix
    [rows, columns] is `lr` * max(1, rows / columns) ** 0.5 or, with `adjust_lr_fn="match_rms_adamw"`, `lr` *
    0.2 * max(rows, columns) ** 0.5, which suits AdamW's learning rates (Liu et al. 2025, "Muon is Scalable
    for LLM Training"). Weight decay is decoupled, and uses `lr` itself.

    `lr` is a value or a pure function of the step, counted from 1; `decay(name, shape)` says whether weight
    decay applies to a parameter. `moments` is the format of momentum_buffer, as in SGD. `ns_steps`,
    `ns_coefficients` and `eps` are settings of Newton-Schulz.

    Raises ValueError or TypeError for values out of range. `compile` raises ValueError for a parameter that
    is no matrix.

    >>> Muon(lr=0.02).lr_ratio((400, 100))
    2.0
    """

    state: ClassVar = ("momentum_buffer",)
    kernel: ClassVar = "muon"
    usual: ClassVar = 4e-3, 0.1, {"betas": (0.9, 0.95)}  # AdamW's beside it
    deepspeed: ClassVar = "momentum betas eps"
    decoupled: ClassVar = True
    matrix: ClassVar = True

    lr: LearningRate = lr_field(1e-3)
    momentum: float = number_field("momentum", 0.95, below=1)
    nesterov: bool = attrs.field(default=True, kw_only=True)
    weight_decay: float = number_field("weight_decay", 0.1)
    adjust_lr_fn: AdjustLr = choice_field("adjust_lr_fn", "original", get_args(AdjustLr))
    ns_steps: int = attrs.field(default=5, kw_only=True, converter=lambda x: whole("ns_steps", x, 1, 99))
    ns_coefficients: Quintic = attrs.field(default=QUINTIC, kw_only=True, converter=_quintic_setting)
    eps: float = number_field("eps", 1e-7)

    def update(self, o: Operations, k: Factors, g: Any) -> tuple[Any, ...]:
        """Muon's rule for weights: returns their change, given the orthogonalized direction as `g`."""
        return (k.rate * o.flush(0.0 + g, EXP_AVG_FLOOR),)

    @property
    def rule(self) -> Rule:
        """Muon's rule that moves the weights along the orthogonalized direction, as a `Rule`."""
        return Rule(self.update, (), self.kernel)

    @property
    def look_ahead_rule(self) -> Rule:
        """Muon's rule that updates the momentum and returns the direction to orthogonalize, as a `Rule`."""
        return Rule(self.look_ahead, self.state, "direction", weights=False)

    def look_ahead(self, o: Operations, k: Factors, g: Any, m: Any) -> tuple[Any, ...]:
        """Muon's rule for gradient `g`, momentum `m`: the direction to orthogonalize, and the new
        momentum."""
        m = o.flush(k.keep * m + k.add * g, EXP_AVG_FLOOR)
        return k.look_keep * m + k.look_add * g, m

    def scalars(self, step: int, lr: float) -> dict[str, float]:
        """The scalars of both of Muon's rules (fields of `Factors`) in step number `step`."""
        del step
        mean = {"keep": self.momentum, "add": 1.0 - self.momentum}
        look = mean if self.nesterov else {"keep": 1.0, "add": 0.0}
        return {"rate": lr, **mean, "look_keep": look["keep"], "look_add": look["add"]}

    def lr_ratio(self, shape: tuple[int, ...]) -> float:
        """The factor by which the learning rate of a matrix of `shape` [rows, columns] differs from `lr`."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def rule_step(self, decision: StepDecision, group: int, shape: tuple[int, ...] | None = None) -> RuleStep:
        """The rule that moves a matrix of `shape` along its orthogonalized direction, with the scalars that
        `decision` gives."""
        assert shape is not None  # by the format of its state
        step = super().rule_step(evolve(decision, grad_scale=1.0), group)
        rate = number("lr of a matrix", step.factors.rate * self.lr_ratio(shape))
        return step._replace(state_format=f"weights-{self.moments}", factors=step.factors._replace(rate=rate))

    def direction_step(self, decision: StepDecision) -> RuleStep:
        """The rule that updates the momentum and makes the update direction, with its scalars for
        `decision`."""
        return super().rule_step(decision, 1)._replace(rule=self.look_ahead_rule)

    def direction(
        self, state: Mapping[str, Tensor], grad: Tensor, decision: StepDecision, *, group: int, out: Tensor
    ) -> None:
        """Update the momentum in `state` with `grad`, and write the direction to orthogonalize to `out`, in
        bf16; the bits are the same on any device."""
        from zfunc.optim.updates import device_update_, host_update_
        from zfunc.runtime.accelerator import on_accelerator

        del group
        update = device_update_ if on_accelerator(grad.device) else host_update_
        update(self.direction_step(decision), state, grad, out=out)

    def orthogonalize(self, direction: Tensor, *, group: int) -> Tensor:
        """The `direction` [rows, columns] bf16 with singular values near 1, by Newton-Schulz iterations.

        The matrix is divided by its norm, at least `eps`, first. The argument may be overwritten.
        """
        del group
        from torch import addmm

        a, b, c = self.ns_coefficients
        wide = direction if direction.size(0) <= direction.size(1) else direction.T
        wide.div_(wide.norm().clamp(min=self.eps))
        for _ in range(self.ns_steps):
            gram = wide @ wide.T
            wide = addmm(wide, addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
        return wide if direction.size(0) <= direction.size(1) else wide.T

    def update_work(self, shape: tuple[int, ...], *, group: int) -> UpdateWork:
        """The FLOPs, bytes and kernel launches of `orthogonalize` for a matrix of `shape`.

        A Newton-Schulz step takes 4 m m n + 2 m m m FLOPs, n the longer side: 6 h a parameter if h x h.

        >>> Muon().update_work((1024, 1024), group=0).flops / 1024**2 / 1024
        30.0
        """
        del group
        m, n = sorted(shape)
        two_wide, two_square = (2 * round_up(2 * x, ALLOCATION) for x in (m * n, m * m))
        workspace = two_wide + two_square + 3 * ALLOCATION
        return UpdateWork(self.ns_steps * (4 * m * m * n + 2 * m**3), workspace, 3 * self.ns_steps + 3)
