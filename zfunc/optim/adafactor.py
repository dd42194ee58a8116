"""Adafactor as a value with checked settings. `adafactor_reference` defines an update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import evolve

from zfunc.core.decision import StepDecision
from zfunc.core.layout import ALIGNMENT
from zfunc.core.optimizer_state import HIGH_HALF, Moments, stored_buffers
from zfunc.optim.adafactor_reference import AdafactorFactors, adafactor_factors, matrices_of, round_sizes
from zfunc.optim.base import ParameterPart
from zfunc.optim.compact_reference import join, split
from zfunc.optim.kernel_optimizer import KernelOptimizer
from zfunc.optim.optimizer_settings import (
    Decay,
    LearningRate,
    at_least_0,
    check_moments_and_decay,
    decay_all,
    lr_setting,
)
from zfunc.optim.setting_checks import check_same_optimizer, checked_finite, refuse
from zfunc.optim.workspaces import adafactor_workspace
from zfunc.values import FLOAT32_MAX

if TYPE_CHECKING:
    from torch import Tensor

FP32_EPS = 2.0**-23


def _eps(value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        refuse(ValueError, "eps", repr(value), "two numbers", "pass such as (1e-7, 1e-3)")
    first, second = value
    return (
        checked_finite("eps[0]", FP32_EPS if first is None else first, minimum=0.0),
        checked_finite("eps[1]", second, minimum=0.0),
    )


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

    lr: LearningRate = attrs.field(default=1e-2, converter=lr_setting)
    beta2_decay: float = attrs.field(default=-0.8, kw_only=True)
    eps: tuple[float, float] = attrs.field(default=(None, 1e-3), kw_only=True, converter=_eps)
    d: float = attrs.field(default=1.0, kw_only=True)
    weight_decay: float = attrs.field(default=0.0, kw_only=True, converter=at_least_0("weight_decay"))
    decay: Decay = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)

    @beta2_decay.validator  # pyright: ignore
    def _check_beta2_decay(self, _: object, value: Any) -> None:
        if checked_finite("beta2_decay", value) > 0:
            refuse(ValueError, "beta2_decay", repr(value), "a number of at most 0", "pass such as -0.8")

    @d.validator  # pyright: ignore
    def _check_d(self, _: object, value: Any) -> None:
        checked_finite("d", value, minimum=1.0)

    def __attrs_post_init__(self) -> None:
        """Check what the fields do not check themselves; a schedule's values are checked at each step."""
        check_moments_and_decay(self.moments, self.decay)
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

    def with_moments(self, moments: Moments, *, split_master: bool) -> Adafactor:
        """The same optimizer with its weights in another format."""
        del split_master
        return evolve(self, moments=moments)

    def host_kernel(self, *args: Any, **arguments: Any) -> None:
        """Adafactor in host memory (`zfunc.optim.host_adafactor`)."""
        from zfunc.optim.host_adafactor import host_adafactor_

        host_adafactor_(*args, **arguments)

    def device_kernel(self, *args: Any, **arguments: Any) -> None:
        """Adafactor in torch operations (`zfunc.optim.device_adafactor`)."""
        from zfunc.optim.device_adafactor import device_adafactor_

        device_adafactor_(*args, **arguments)

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters allocates."""
        return adafactor_workspace(numel)

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int = 0
    ) -> dict[str, Tensor]:
        """From another format of Adafactor's, exactly; CheckpointError for one of another optimizer."""
        from zfunc.optim.compact import as_array, as_state

        del step
        wanted = self.state_format(group)
        check_same_optimizer(state_format, wanted)
        arrays = {name: as_array(x) for name, x in state.items()}
        p = arrays["master"] if "master" in state else join(arrays[HIGH_HALF], arrays["master_low"])
        kinds = stored_buffers(wanted)
        values = [*([p] if len(kinds) == 2 else split(p)), arrays[kinds[-1].name]]
        return as_state(values, wanted)

    def num_measures(self, shape: tuple[int, ...], *, group: int) -> tuple[int, ...]:
        """How many numbers each round has (`zfunc.optim.adafactor_rounds`)."""
        del group
        return round_sizes(matrices_of(shape))

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
        from zfunc.optim.device_adafactor import device_adafactor_round
        from zfunc.optim.host_adafactor import host_adafactor_round
        from zfunc.runtime.accelerator import on_accelerator

        measure = device_adafactor_round if on_accelerator(grad.device) else host_adafactor_round
        return measure(state, grad, **self.arguments(decision, group, part))

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
        factors = adafactor_factors(
            step=decision.number,
            lr=decision.factors["lr"],
            beta2_decay=self.beta2_decay,
            eps=self.eps,
            d=self.d,
            weight_decay=0.0 if group & 1 else self.weight_decay,
            grad_scale=checked_finite("grad_scale", decision.grad_scale),
        )
        checked_finite("Adafactor's settings (as decay)", factors.decay, minimum=-FLOAT32_MAX)
        return factors
