"""Adafactor as a value with checked settings. `adafactor_update` defines an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from zfunc.core.decision import StepDecision
from zfunc.core.layout import ALIGNMENT, UpdateWork
from zfunc.core.optimizer_state import Moments
from zfunc.optim.adafactor_matrices import PIECE, SUMMED, AdafactorFactors, matrices_of
from zfunc.optim.base import ParameterPart
from zfunc.optim.elementwise import KernelOptimizer
from zfunc.optim.optimizer_settings import (
    Decay,
    LearningRate,
    decay_field,
    lr_field,
    moments_field,
    number_field,
    refuse,
)
from zfunc.optim.rules import EXP_AVG_SQ_FLOOR, grad_floor_of
from zfunc.values import FLOAT32_MAX, number

if TYPE_CHECKING:
    from torch import Tensor

FP32_EPS = 2.0**-23
FP64 = 8  # bytes


def _eps(value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        refuse("eps", value, "two numbers", "pass such as (1e-7, 1e-3)")
    first = FP32_EPS if value[0] is None else value[0]
    return number("eps[0]", first, least=0), number("eps[1]", value[1], least=0)


@attrs.frozen
class Adafactor(KernelOptimizer):
    """Adafactor (Shazeer & Stern 2018), with the settings and the meaning of `torch.optim.Adafactor`.

    Of a matrix it keeps the means of the squared gradients of every row and column, of a vector all of them. A step
    is relative to the size (root mean square) of a parameter, but at least `eps[1]`, times min(lr, 1 / sqrt(step));
    updates whose size is above `d` are scaled down to it. The means decay by 1 - step**beta2_decay. `eps[0]` bounds
    what small gradients are divided by; None is float32's, 2^-23. Weight decay is decoupled: lr * weight_decay.

    `lr` is a value or a pure function of the step, counted from 1; `decay(name, shape)` says whether weight decay
    applies to a parameter. The state takes 4.06 bytes a parameter, of vectors and small matrices 8. `moments` is
    the format of the weights alone: "fp32" is the master, "16bit" and "8bit" are its two exact halves, one of which
    a device that computes in bf16 gets as it is.

    Raises ValueError or TypeError for values out of range.

    >>> Adafactor(lr=1e-2, moments="16bit").state_format()
    'adafactor-16bit'
    """

    usual: ClassVar = 5e-2, 0.0, {}

    lr: LearningRate = lr_field(1e-2)
    beta2_decay: float = number_field("beta2_decay", -0.8, least=-math.inf, most=0.0)
    eps: tuple[float, float] = attrs.field(default=(None, 1e-3), kw_only=True, converter=_eps)
    d: float = number_field("d", 1.0, least=1.0)
    weight_decay: float = number_field("weight_decay", 0.0)
    decay: Decay = decay_field()
    moments: Moments = moments_field()

    def __attrs_post_init__(self) -> None:
        """Check what the fields make together; a schedule's values are checked at each step."""
        if not callable(self.lr):
            self._step_factors(StepDecision(False, 1.0, 1, self.factors(1)), 0)

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """Whether weight decay does not apply to a parameter, and 2 more for a vector or a small matrix."""
        matrices = matrices_of(shape)
        room = -(-matrices.count * matrices.rows * matrices.columns // ALIGNMENT)
        small = not matrices.factored or sum(matrices.kept) > room
        return int(not self.decay(name, shape)) + 2 * small

    def state_format(self, group: int = 0) -> str:
        """A row of `zfunc.core.optimizer_state.STATE_FORMATS`."""
        return f"adafactor-{'small-' if group & 2 else ''}{self.moments}"

    def host_kernel(self, *args: Any, **arguments: Any) -> None:
        """Adafactor in host memory, by the compiled kernel."""
        from zfunc.optim.adafactor_update import KernelAdafactor

        KernelAdafactor(*args, **arguments).finish()

    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """Adafactor in torch operations."""
        from zfunc.optim.adafactor_update import AdafactorUpdate

        AdafactorUpdate(*args, **arguments).finish()

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of a parameter of `numel` elements allocates.

        It holds for matrices of at least 64 rows and columns, and for any other one below PIECE elements.
        """
        return 6 * numel + 128 * min(numel + SUMMED, PIECE) + (1 << 16)

    def update_work(self, shape: tuple[int, ...], *, group: int) -> UpdateWork:
        """What each round of `adafactor_update` measures of a parameter.

        >>> Adafactor().update_work((8, 4), group=0).measured, Adafactor().update_work((8,), group=0).measured
        ((192, 96, 16, 16), (0, 0, 16, 16))
        """
        del group
        matrices = matrices_of(shape)
        lines = matrices.num_lines if matrices.factored else 0
        first = lines + sum(matrices.kept) if matrices.factored else 0
        return UpdateWork(measured=tuple(FP64 * x for x in (first, lines, 2, 2)))

    def measure(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        part: ParameterPart,
    ) -> Tensor:
        """What a part of a parameter has of the next round, where the tensors are."""
        from zfunc.optim.adafactor_update import AdafactorUpdate, KernelAdafactor
        from zfunc.runtime.accelerator import on_accelerator

        update = AdafactorUpdate if on_accelerator(grad.device) else KernelAdafactor
        return update(state, grad, **self.arguments(decision, group, part)).measure()

    def arguments(
        self, decision: StepDecision, group: int, part: ParameterPart | None = None
    ) -> dict[str, Any]:
        """What both kernels take besides tensors."""
        assert part is not None  # by the format of its state
        return {
            "state_format": self.state_format(group),
            "part": part,
            "factors": self._step_factors(decision, group),
        }

    def _step_factors(self, decision: StepDecision, group: int) -> AdafactorFactors:
        """The scalars of a step; ValueError for one that float32 cannot hold."""
        lr, add = decision.factors["lr"], decision.number**self.beta2_decay
        grad_scale = number("grad_scale", decision.grad_scale)
        decay = lr * (0.0 if group & 1 else self.weight_decay)
        number("Adafactor's settings (as decay)", decay)
        return AdafactorFactors(
            grad_scale,
            grad_floor_of(grad_scale),
            1.0 - add,
            add,
            max(self.eps[0], EXP_AVG_SQ_FLOOR),
            1.0 / max(self.eps[0], 1.0 / FLOAT32_MAX),
            min(lr, 1.0 / decision.number**0.5),
            self.eps[1],
            self.d,
            decay,
        )
