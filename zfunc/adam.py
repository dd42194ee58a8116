"""The optimizer as a value: what Adam is told, checked at birth. What a step computes is in adam_reference.py."""

from collections.abc import Callable
from typing import Any

import attrs

from zfunc.checks import checked_betas, checked_finite, refuse
from zfunc.moments import BUFFERS, Moments


def everything(name: str, shape: tuple[int, ...]) -> bool:
    """Every parameter is decayed, as in torch."""
    del name, shape
    return True


def matrices_only(name: str, shape: tuple[int, ...]) -> bool:
    """Decay matrices and embeddings, not the vectors of norms and biases.

    >>> matrices_only("head.weight", (8, 4)), matrices_only("head.bias", (8,))
    (True, False)
    """
    del name
    return len(shape) >= 2


Betas = tuple[float, float]


def _pair(betas: Any) -> Any:
    return tuple(betas) if isinstance(betas, list) else betas


@attrs.frozen
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); `decoupled=False` is Adam with L2.

    `lr` and `betas` are values or pure functions of the step, counted from 1. `decay(name, shape)` says which
    parameters weight decay touches; `matrices_only` leaves out norms and biases. The moments are corrected for
    their start at 0 by the betas of the step alone, as in torch: exact where these stay the same.

    `moments` says what the host keeps of a parameter between steps: "fp32", 12 bytes (master, exp_avg, exp_avg_sq);
    "16bit", 8 bytes (the master in two halves, exact, and both moments in bf16); "8bit", 6 bytes (the same master,
    both moments in 8 bits, with an exponent for every 64). Arithmetic is fp32 always (`zfunc.compact_reference`).

    Values out of range raise ValueError or TypeError here, at birth.

    >>> AdamW(lr=3e-4, weight_decay=0.1, decay=matrices_only).lr_at(1)
    0.0003
    """

    lr: float | Callable[[int], float] = 1e-3
    betas: Betas | Callable[[int], Betas] = attrs.field(default=(0.9, 0.999), kw_only=True, converter=_pair)
    eps: float = attrs.field(default=1e-8, kw_only=True)
    weight_decay: float = attrs.field(default=0.01, kw_only=True)
    decoupled: bool = attrs.field(default=True, kw_only=True)
    decay: Callable[[str, tuple[int, ...]], bool] = attrs.field(default=everything, kw_only=True)
    moments: Moments = attrs.field(default="fp32", kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check every field."""
        if not callable(self.lr):
            checked_finite("lr", self.lr, minimum=0.0)
        if not callable(self.betas):
            checked_betas(self.betas)
        checked_finite("eps", self.eps, minimum=0.0)
        checked_finite("weight_decay", self.weight_decay, minimum=0.0)
        if not isinstance(self.decoupled, bool):
            refuse(
                TypeError, "decoupled", repr(self.decoupled), "True or False", "pass False for Adam with L2"
            )
        if not isinstance(self.moments, str) or self.moments not in BUFFERS:
            refuse(ValueError, "moments", repr(self.moments), f"one of {', '.join(BUFFERS)}", "choose one")
        if not callable(self.decay):
            refuse(
                TypeError, "decay", repr(self.decay), "(name, shape) -> bool", "pass such as matrices_only"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1; ValueError where it is not finite or negative."""
        if not callable(self.lr):
            return self.lr
        return checked_finite(f"lr at step {step}", self.lr(step), minimum=0.0)

    def betas_at(self, step: int) -> Betas:
        """The decay rates of both moments in a step, counted from 1; ValueError where one is not in [0, 1)."""
        if not callable(self.betas):
            return self.betas
        return checked_betas(self.betas(step), f"betas at step {step}")
