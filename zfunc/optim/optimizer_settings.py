"""Settings that every optimizer has: learning rate, betas, weight decay and who gets it, the format of the moments.

The converters of fields raise TypeError or ValueError for a value out of range. A schedule, a pure function of the
step counted from 1, is checked at each step.
"""

from collections.abc import Callable
from typing import Any

from zfunc.core.optimizer_state import MOMENTS
from zfunc.optim.setting_checks import checked_betas, checked_finite, refuse

Betas = tuple[float, float]
LearningRate = float | Callable[[int], float]
Decay = Callable[[str, tuple[int, ...]], bool]


def decay_all(name: str, shape: tuple[int, ...]) -> bool:
    """Decay every parameter, as torch's optimizers do."""
    del name, shape
    return True


def matrices_only(name: str, shape: tuple[int, ...]) -> bool:
    """Decay matrices and embeddings, but not norms and biases, which are vectors.

    >>> matrices_only("head.weight", (8, 4)), matrices_only("head.bias", (8,))
    (True, False)
    """
    del name
    return len(shape) >= 2


def hidden_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Matrices but those of embeddings and of the head, by their names in zfunc's GPT and Hugging Face's models.

    >>> [hidden_matrices(x, (8, 4)) for x in ("block0.up.weight", "embed.tok.weight", "lm_head.weight")]
    [True, False, False]
    """
    return len(shape) == 2 and not any(x in name for x in ("embed", "lm_head", "wte", "wpe"))


def _is_schedule(x: Any) -> bool:
    """Whether `x` is a function of the step: neither a tensor nor a class."""
    return callable(x) and not isinstance(x, type)


def lr_setting(lr: Any) -> Any:
    """A learning rate of at least 0, or a schedule."""
    return lr if _is_schedule(lr) else checked_finite("lr", lr, minimum=0.0)


def betas_setting(betas: Any) -> Any:
    """Two betas, or a schedule of them."""
    return betas if _is_schedule(betas) else checked_betas(betas)


def at_least_0(name: str) -> Callable[[Any], float]:
    """The converter of a field with this name to a finite number of at least 0."""
    return lambda value: checked_finite(name, value, minimum=0.0)


def lr_at_step(lr: LearningRate, step: int) -> float:
    """The learning rate of a step; TypeError or ValueError where the schedule returns none."""
    return checked_finite(f"lr at step {step}", lr(step), minimum=0.0) if callable(lr) else lr


def betas_at_step(betas: Betas | Callable[[int], Betas], step: int) -> Betas:
    """The betas of a step; ValueError where one is not in [0, 1)."""
    return checked_betas(betas(step), f"betas at step {step}") if callable(betas) else betas


def check_moments_and_decay(moments: Any, decay: Any) -> None:
    """Raise ValueError for an unknown format, TypeError for a `decay` that is no function."""
    if not isinstance(moments, str) or moments not in MOMENTS:
        refuse(ValueError, "moments", repr(moments), f"one of {', '.join(MOMENTS)}", "choose one")
    if not callable(decay):
        refuse(TypeError, "decay", repr(decay), "(name, shape) -> bool", "pass such as matrices_only")
