"""What every element-wise optimizer shares: the frame of an update, its scalars, and the floors below which is 0.

An optimizer's own rule is the method `update` of its class, written once, in the operations of `step`. NumPy
(`reference`) and torch (`device_update`) run it, the kernel's C is printed from it (`rules_in_c`). They agree to
the bit, but for the payload of a NaN: all do the same operations in the same order, and round each once to float32.
"""

import math
from collections.abc import Callable
from ctypes import c_float
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from zfunc.values import whole

Decay = Literal["none", "l2", "decoupled"]
T = TypeVar("T", bound=Any)  # a tuple of factors

# A subnormal operand costs the CPU a microcode assist, and moments without gradients decay into that range and
# stay there. These floors keep every product of the steady state normal: g * g is at least 2^-112, (1 - beta2) *
# g * g and beta * moment stay above 2^-126, sqrt(v) is at least 2^-60. Beside eps = 1e-8 (2^-26.6) what they drop
# changes no weight. NaN is below no floor.
GRAD_FLOOR, EXP_AVG_FLOOR, EXP_AVG_SQ_FLOOR = 2.0**-56, 2.0**-100, 2.0**-120
SMALLEST_NORMAL = 2.0**-126
MAX_STEP = 2**53  # the largest float64 up to which every integer is exact

PIECE = 1 << 21  # elements updated together on a device: much for it, little beside a bucket
EMA_PIECE = 1 << 18  # elements of a moving average at a time, which stay in the caches


class Factors(NamedTuple):
    """The scalars of one step of a rule, in float64; each is rounded once to float32 where it is used."""

    grad_scale: float
    grad_floor: float
    decay: float  # lr * weight_decay if decoupled, else weight_decay
    rate: float = 0.0  # the learning rate, and what else multiplies a whole step
    keep: float = 1.0  # moment = keep * moment + add * gradient
    add: float = 1.0
    look_keep: float = 1.0  # Lion's and Muon's direction: look_keep * moment + look_add * gradient
    look_add: float = 1.0
    keep_sq: float = 1.0  # as keep and add, of the second moment and the squared gradient
    add_sq: float = 1.0
    root_scale: float = 1.0  # of the root of the second moment
    eps: float = 0.0
    initial: float = 0.0  # what Adagrad's sum begins with


class Operations(Protocol):
    """What a rule may use beside + - * /: operations on numbers or tensors. `flush` may overwrite its
    argument, an intermediate result."""

    def flush(self, x: Any, floor: float, /) -> Any:
        """`x`, with 0 in place of elements whose absolute value is below `floor`."""

    def sqrt(self, x: Any, /) -> Any:
        """The square root of `x`, rounded to the nearest float32."""

    def signed(self, x: Any, size: float, /) -> Any:
        """`size` with the sign of x; 0 where x is 0, NaN where it is NaN."""


class Rule(NamedTuple):
    """The update rule of an optimizer: `update(o, k, g, *moments)` returns the change of the weights, then
    the new moments, from scalars `k`, gradient `g` and the operations `o`.

    `name` is the rule's name in the C code that `rules_in_c` prints; None for a rule that zfunc's kernel
    lacks.
    """

    update: Callable[..., tuple[Any, ...]]
    state: tuple[str, ...] = ()
    name: str | None = None
    weights: bool = True  # False: the change is the result, and there are no weights


class RuleStep(NamedTuple):
    """A rule with the scalars of update number `number`, from 1: all that the update needs but tensors."""

    rule: Rule
    state_format: str
    factors: Factors
    number: int
    decay: Decay


def apply_step(o: Operations, step: RuleStep, grad: Any, p: Any, *moments: Any) -> list[Any]:
    """The new weights, then the new moments, after `step` of a rule with gradient `grad`, weights `p` and
    `moments`; each operation is rounded once to float32.

        g = grad * grad_scale                 0 where |grad * grad_scale| < 2^-56
        g = g + decay * p                     only with weight decay that is not decoupled; floored again
        c, moments = the rule
        c = c + decay * p                     only with decoupled weight decay
        p = p - c                             the one rounding at the magnitude of the weight

    For a rule without weights the first result is c.
    """
    k = step.factors
    g = scaled(o, k, grad)
    if step.decay == "l2":
        g = with_l2(o, k, g, p)
    change, *new = step.rule.update(o, k, g, *moments)
    if step.decay == "decoupled":
        change = change + k.decay * p
    return [p - change if step.rule.weights else change, *new]


def scaled(o: Operations, k: Factors, grad: Any) -> Any:
    """The gradient `grad` times `grad_scale`; 0 for elements smaller than `grad_floor` in size."""
    return o.flush(grad, k.grad_floor) * k.grad_scale


def with_l2(o: Operations, k: Factors, g: Any, p: Any) -> Any:
    """The gradient `g` plus `decay` times the weights `p` (L2 decay); elements of
    the sum with an absolute value below `GRAD_FLOOR` are 0."""
    return o.flush(g + k.decay * p, GRAD_FLOOR)


def checked_step(step: Any) -> int:
    """Check that `step` is a step number, counted from 1, and return it as an int."""
    plain = step if isinstance(step, bool) or not hasattr(step, "__index__") else int(step)
    return whole("step", plain, 1, MAX_STEP)


def as_float32(factors: T) -> T:
    """The scalars of a step, each rounded once to float32; too large ones become infinite."""
    return factors._make(c_float(x).value for x in factors)


def grad_floor_of(grad_scale: float) -> float:
    """The size below which a gradient counts as 0, so that `grad_scale` never multiplies a denormal."""
    floor = GRAD_FLOOR / abs(grad_scale) if grad_scale else math.inf
    return max(floor, SMALLEST_NORMAL)


def first_dither(step: int, moment: int) -> int:
    """The dither (what rounding adds below the last bit kept) of the first element of a block, in units of
    2^-32: a hash (MurmurHash3's finalizer) of 2 `step` + `moment`."""
    x = (2 * step + moment) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16
