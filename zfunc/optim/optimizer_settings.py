"""Fields of optimizers' settings, and their checks: no torch.

A field's converter raises TypeError or ValueError, with what was got, what was expected and what to do. A
schedule, a pure function of the step counted from 1, is checked at each step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from attrs import field

from zfunc.core.optimizer_state import MOMENTS
from zfunc.optim.rules import SMALLEST_NORMAL
from zfunc.values import number, whole

MAX_STEP = 2**53  # the largest float64 up to which every integer is exact
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


# ---- fields ---------------------------------------------------------------------------------------------


def lr_field(default: float) -> Any:
    """A learning rate of at least 0, or a schedule."""
    return field(default=default, converter=_schedule_or(partial(number, "lr", least=0)))


def betas_field(default: Betas) -> Any:
    """Two decay rates in [0, 1), or a schedule of them."""
    return field(default=default, kw_only=True, converter=_schedule_or(partial(checked_betas, "betas")))


def _schedule_or(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A schedule is a function of the step: neither a tensor nor a class."""
    return lambda x: x if callable(x) and not isinstance(x, type) else check(x)


def number_field(name: str, default: float, *, least: float = 0.0, **bounds: float) -> Any:
    """A finite number of at least `least`, within the `bounds` that `number` has: `most`, or `below`."""
    return field(default=default, kw_only=True, converter=partial(number, name, least=least, **bounds))


def eps_field(default: float) -> Any:
    """0 or a normal float32: the kernel flushes subnormal values to 0."""

    def converted(value: Any) -> float:
        if 0.0 < (eps := number("eps", value, least=0)) < SMALLEST_NORMAL:
            refuse("eps", repr(value), "a float32 of at least 1.2e-38, or 0", "pass such as 1e-8")
        return eps

    return field(default=default, kw_only=True, converter=converted)


def decay_field() -> Any:
    """Which parameters weight decay applies to."""

    def check(_: object, __: object, value: Any) -> None:
        if not callable(value):
            refuse("decay", repr(value), "(name, shape) -> bool", "pass such as matrices_only", TypeError)

    return field(default=decay_all, kw_only=True, validator=check)


def choice_field(name: str, default: str, choices: tuple[str, ...]) -> Any:
    """One of some names."""

    def check(_: object, __: object, value: Any) -> None:
        if not isinstance(value, str) or value not in choices:
            refuse(name, repr(value), f"one of {', '.join(choices)}", "choose one")

    return field(default=default, kw_only=True, validator=check)


def moments_field() -> Any:
    """The format of the moments between steps."""
    return choice_field("moments", "fp32", MOMENTS)


# ---- checks ---------------------------------------------------------------------------------------------


def checked_betas(name: str, betas: Any) -> Betas:
    """Two decay rates in [0, 1)."""
    try:
        beta1, beta2 = (number(name, beta, least=0.0) for beta in betas)
        if max(beta1, beta2) < 1.0:
            return beta1, beta2
    except (TypeError, ValueError, RuntimeError):
        pass
    refuse(name, repr(betas), "two numbers in [0, 1)", "pass such as (0.9, 0.999)")


def checked_step(step: Any) -> int:
    """A step number, counted from 1."""
    plain = step if isinstance(step, bool) or not hasattr(step, "__index__") else int(step)
    return whole("step", plain, 1, MAX_STEP)


def refuse(name: str, got: str, expected: str, do: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise `kind` with what was got, what was expected, and what to do."""
    raise kind(f"{name}: got {got}, expected {expected}: {do}")
