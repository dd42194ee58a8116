"""Checks of an optimizer's settings: no torch.

A failed check raises TypeError or ValueError with what was got, what was expected and what to do.
"""

from typing import Any, NoReturn

from zfunc.errors import CheckpointError
from zfunc.optim.adam_reference import SMALLEST_NORMAL, Coefficients
from zfunc.values import FLOAT32_MAX, number


def checked_betas(betas: Any, name: str = "betas") -> tuple[float, float]:
    """Two decay rates in [0, 1)."""
    try:
        beta1, beta2 = (number(name, beta, least=0.0) for beta in betas)
        good = beta1 < 1.0 and beta2 < 1.0
    except (TypeError, ValueError, RuntimeError):
        beta1 = beta2 = None
        good = False
    if not good:
        refuse(ValueError, name, repr(betas), "two numbers in [0, 1)", "pass such as (0.9, 0.999)")
    return beta1, beta2


def checked_finite(name: str, value: Any, minimum: float = -FLOAT32_MAX) -> float:
    """A finite float32 number of at least `minimum`, as a float."""
    try:
        return number(name, value, least=minimum)
    except TypeError:
        refuse(TypeError, name, repr(value), "a number", "pass a float")
    except ValueError:
        floor = " at or above 0" if minimum == 0.0 else ""
        refuse(ValueError, name, repr(value), f"a finite float32{floor}", "correct it, or skip this step")


def checked_eps(value: Any) -> float:
    """0 or a normal float32: the kernel flushes subnormal values to 0."""
    eps = checked_finite("eps", value, minimum=0.0)
    if 0.0 < eps < SMALLEST_NORMAL:
        refuse(ValueError, "eps", repr(value), "a float32 of at least 1.2e-38, or 0", "pass such as 1e-8")
    return eps


def check_factors(factors: Coefficients) -> None:
    """Raise ValueError where a coefficient of a step is too large for float32."""
    for name, factor in factors._asdict().items():
        if name not in ("grad_floor", "inv_sqrt_bias2"):
            checked_finite(f"lr, betas and weight_decay (as {name})", factor)


def refuse(kind: type[Exception], name: str, got: str, expected: str, action: str) -> NoReturn:
    """Raise `kind` with what was got, what was expected, and what to do."""
    raise kind(f"{name}: got {got}; expected {expected}; {action}")


def check_same_optimizer(state_format: str, wanted: str) -> None:
    """Raise CheckpointError unless two formats of states are one optimizer's, whatever its moments."""
    if state_format.rpartition("-")[0] != wanted.rpartition("-")[0]:
        raise another_optimizer(state_format, wanted)


def another_optimizer(state_format: str, wanted: str) -> CheckpointError:
    """The error of a state that this program's optimizer cannot read."""
    return CheckpointError(
        f"got optimizer state in the format {state_format!r}, expected {wanted!r}, this program's: load it with "
        "the optimizer that saved it, --optimizer of zfunc train, or pass its parameters to "
        "init(program, params=...)"
    )
