"""Adam and AdamW as a value with checked settings. `adam_reference` defines what an update computes."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from attrs import evolve
from torch import Tensor

from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import MOMENTS, AdamFormat, Moments
from zfunc.optim.adam_reference import coefficients
from zfunc.optim.argument_checks import check_factors, checked_betas, checked_eps, checked_finite, refuse
from zfunc.optim.compact import convert_moments
from zfunc.optim.device_adam import device_adam_, workspace
from zfunc.optim.host_adam import host_adam_


def decay_all(name: str, shape: tuple[int, ...]) -> bool:
    """Decay every parameter, as torch.optim.AdamW does."""
    del name, shape
    return True


def matrices_only(name: str, shape: tuple[int, ...]) -> bool:
    """Decay matrices and embeddings, but not norms and biases, which are vectors.

    >>> matrices_only("head.weight", (8, 4)), matrices_only("head.bias", (8,))
    (True, False)
    """
    del name
    return len(shape) >= 2


Betas = tuple[float, float]


def _is_schedule(x: Any) -> bool:
    """Whether `x` is a function of the step: neither a tensor nor a class."""
    return callable(x) and not isinstance(x, type)


def _lr(lr: Any) -> Any:
    return lr if _is_schedule(lr) else checked_finite("lr", lr, minimum=0.0)


def _betas(betas: Any) -> Any:
    return betas if _is_schedule(betas) else checked_betas(betas)


def _decay(weight_decay: Any) -> float:
    return checked_finite("weight_decay", weight_decay, minimum=0.0)


@attrs.frozen
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); `decoupled=False` is Adam with L2.

    `lr` and `betas` are values or pure functions of the step, counted from 1. `decay(name, shape)` says whether
    weight decay applies to a parameter; `matrices_only` leaves out norms and biases. Bias correction uses the betas
    of the current step alone, as in torch: it is exact while they are constant.

    `moments` is the format of the optimizer state between steps, in bytes a parameter: "fp32", 12 (master, exp_avg,
    exp_avg_sq); "16bit", 8 (the master in two exact halves, both moments in bf16); "8bit", 6 (the same master, both
    moments in 8 bits, with a scale for every 64 elements). Arithmetic is always fp32
    (`zfunc.optim.compact_reference`).

    With `split_master` the master of "fp32" is in two halves too, one of which is the bf16 copy for the device: the
    same 12 bytes and the same bits, without 2 bytes more for a copy.

    NumPy scalars and tensors of one element become floats. Raises ValueError or TypeError for values out of range
    and for a learning rate that overflows fp32 in the first step.

    >>> AdamW(lr=3e-4, weight_decay=0.1, decay=matrices_only).lr_at(1)
    0.0003
    """

    lr: float | Callable[[int], float] = attrs.field(default=1e-3, converter=_lr)
    betas: Betas | Callable[[int], Betas] = attrs.field(default=(0.9, 0.999), kw_only=True, converter=_betas)
    eps: float = attrs.field(default=1e-8, kw_only=True, converter=checked_eps)
    weight_decay: float = attrs.field(default=0.01, kw_only=True, converter=_decay)
    decoupled: bool = attrs.field(default=True, kw_only=True)
    decay: Callable[[str, tuple[int, ...]], bool] = attrs.field(default=decay_all, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)
    split_master: bool = attrs.field(default=False, kw_only=True, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.decoupled, bool):
            refuse(
                TypeError, "decoupled", repr(self.decoupled), "True or False", "pass False for Adam with L2"
            )
        if not isinstance(self.moments, str) or self.moments not in MOMENTS:
            refuse(ValueError, "moments", repr(self.moments), f"one of {', '.join(MOMENTS)}", "choose one")
        if not callable(self.decay):
            refuse(
                TypeError, "decay", repr(self.decay), "(name, shape) -> bool", "pass such as matrices_only"
            )
        if not callable(self.lr) and not callable(self.betas):
            self._check_factors(1, self.lr, self.betas)  # of all steps the first has the largest

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1; TypeError or ValueError where the schedule returns none."""
        lr = self.lr
        if callable(lr):
            lr = checked_finite(f"lr at step {step}", lr(step), minimum=0.0)
        if callable(self.lr) or callable(self.betas):
            self._check_factors(step, lr, self.betas_at(step))
        return lr

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        """0 for a parameter with weight decay, 1 for one without."""
        return int(not self.decay(name, shape))

    def state_format(self, group: int = 0) -> AdamFormat:
        """A row of `zfunc.core.optimizer_state.STATE_FORMATS`."""
        del group
        return "fp32-split" if self.moments == "fp32" and self.split_master else self.moments

    def with_moments(self, moments: Moments, *, split_master: bool) -> "AdamW":
        """The same optimizer with its moments in another format, on a split master if they are fp32 or not."""
        return evolve(self, moments=moments, split_master=self.split_master or split_master)

    def factors(self, step: int) -> dict[str, Any]:
        """The learning rate and the betas of step `step`, counted from 1."""
        return {"lr": self.lr_at(step), "betas": self.betas_at(step)}

    def describe(self) -> dict[str, Any]:
        """The settings that are constant over all steps."""
        return {name: getattr(self, name) for name in ("eps", "weight_decay", "decoupled", "moments")}

    def host_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        """The update by the compiled kernel (`zfunc.optim.host_adam`)."""
        host_adam_(state, grad, out=out, into=into, **self._arguments(decision, group))

    def device_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        out: Tensor | None = None,
    ) -> None:
        """The same update, to the bit, in torch operations (`zfunc.optim.device_adam`)."""
        device_adam_(state, grad, out=out, **self._arguments(decision, group))

    def device_workspace(self, numel: int) -> int:
        """An upper bound of the bytes that `device_update` of `numel` parameters allocates."""
        return workspace(numel, self.state_format())

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int = 0
    ) -> dict[str, Tensor]:
        """From any format of Adam's (`zfunc.optim.compact.convert_moments`); CheckpointError for another."""
        return convert_moments(state, state_format, self.state_format(group), step)

    def _arguments(self, decision: StepDecision, group: int) -> dict[str, Any]:
        return {
            "step": decision.number,
            "lr": decision.factors["lr"],
            "betas": decision.factors["betas"],
            "eps": self.eps,
            "weight_decay": 0.0 if group else self.weight_decay,
            "decoupled": self.decoupled,
            "grad_scale": decision.grad_scale,
        }

    def _check_factors(self, step: int, lr: float, betas: Betas) -> None:
        check_factors(coefficients(step, lr, betas, self.eps, self.weight_decay, self.decoupled, 1.0))

    def betas_at(self, step: int) -> Betas:
        """The betas of a step, counted from 1; ValueError where one is not in [0, 1)."""
        if not callable(self.betas):
            return self.betas
        return checked_betas(self.betas(step), f"betas at step {step}")
