"""SGD, Lion and Adagrad in NumPy float32: the definition of what kernel and device compute, operation by operation.

They keep at most one buffer beside the weights: momentum_buffer, exp_avg or sum. An update is unpack, a rule, pack,
as in `compact_reference`: the split master, and the buffer in bfloat16 or in 8-bit codes. The codes are those of
exp_avg_sq, with a scale for every 64 elements; of momenta they have a sign, and so one mantissa bit less.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from zfunc.core.dtypes import Dtype
from zfunc.core.optimizer_state import HIGH_HALF, moment_buffers, weight_buffers
from zfunc.optim.adam_reference import (
    EXP_AVG_FLOOR,
    GRAD_FLOOR,
    Array,
    flush_small,
    grad_floor_of,
    round_to,
    to_float32,
)
from zfunc.optim.compact_reference import (
    EXP_AVG,
    dither,
    join,
    pack_bf16,
    pack_floats,
    split,
    unpack_floats,
)

Rule = Literal["sgd", "nesterov", "lion", "adagrad", "direction"]


class RuleFactors(NamedTuple):
    """The scalars of one step, in double; each is rounded once to float32 where it is used."""

    grad_scale: float
    grad_floor: float
    rate: float  # the learning rate
    decay: float  # lr * weight_decay if decoupled, else weight_decay
    keep: float = 1.0  # buffer = keep * buffer + add * gradient
    add: float = 1.0
    look_keep: float = 1.0  # direction: look_keep * buffer + look_add * gradient
    look_add: float = 1.0
    eps: float = 0.0
    initial: float = 0.0  # what Adagrad's sum begins with


def rule_factors(*, grad_scale: float, rate: float, decay: float, **others: float) -> RuleFactors:
    """The factors of a step, with the floor of its gradient."""
    return RuleFactors(grad_scale, grad_floor_of(grad_scale), rate, decay, **others)


class OneBufferUpdate(NamedTuple):
    """The result of a reference step; `out` is None without a copy."""

    state: dict[str, Array]
    out: Array | None  # [n] fp32, fp16, or uint16 holding bf16


def reference_one_buffer_update(
    state: Mapping[str, Array],
    grad: Array,
    *,
    state_format: str,
    rule: Rule,
    factors: RuleFactors,
    step: int,
    decoupled: bool,
    out: Dtype | None = None,
) -> OneBufferUpdate:
    """One step over the buffers of `state_format`, by name; they are not changed. bfloat16 is in uint16.

    The order of operations, each rounded once to float32:

        g = grad * grad_scale                     0 where |grad * grad_scale| < 2^-56
        g = g + decay * p                         only with weight decay that is not decoupled; floored again
        SGD:        m = keep * m + add * g        0 where |m| < 2^-100, as in the next two
                    c = rate * m
        Nesterov:   m = keep * m + add * g
                    c = rate * (g + keep * m)
        Lion:       d = look_keep * m + look_add * g
                    m = keep * m + add * g
                    c = rate with the sign of d; 0 where d is 0
        Adagrad:    m = m + g * g
                    c = rate * (g / (sqrt(m + initial) + eps))
        c = c + decay * p                         only with decoupled weight decay
        p = p - c

    The rule "direction" reads and changes no weights; there `out` is the direction:

        m = keep * m + add * g
        d = look_keep * m + look_add * g
    """
    with np.errstate(all="ignore"):  # inf and NaN propagate
        k = RuleFactors._make(np.float32(x) for x in factors)
        g = flush_small(to_float32(grad), k.grad_floor) * k.grad_scale
        if rule == "direction":
            m = _unpack_buffer(state, state_format, grad.size)
            m = flush_small(k.keep * m + k.add * g, EXP_AVG_FLOOR)
            direction = k.look_keep * m + k.look_add * g
            new = _pack_buffer(m, state_format, step)
            return OneBufferUpdate(new, None if out is None else round_to(direction, out))
        p, m = unpack_one_buffer(state, state_format)
        if factors.decay and not decoupled:
            g = flush_small(g + k.decay * p, GRAD_FLOOR)
        if rule == "adagrad":
            m = m + g * g
            change = k.rate * (g / (np.sqrt(m + k.initial) + k.eps))
        else:
            direction = k.look_keep * m + k.look_add * g
            m = flush_small(k.keep * m + k.add * g, EXP_AVG_FLOOR)
            if rule == "lion":
                change = np.where(direction == 0, np.float32(0), np.copysign(k.rate, direction))
                change = np.where(np.isnan(direction), direction, change)
            else:
                change = k.rate * (m if rule == "sgd" else g + k.keep * m)
        if factors.decay and decoupled:
            change = change + k.decay * p
        p = p - change
        new = pack_one_buffer(p, m, state_format=state_format, step=step)
        return OneBufferUpdate(new, None if out is None else round_to(p, out))


def unpack_one_buffer(state: Mapping[str, Array], state_format: str) -> tuple[Array, Array]:
    """The float32 weights and buffer of a state; exact. Without a buffer it is 0."""
    master = state["master"] if "master" in state else join(state[HIGH_HALF], state["master_low"])
    return master, _unpack_buffer(state, state_format, master.size)


def _unpack_buffer(state: Mapping[str, Array], state_format: str, n: int) -> Array:
    own = [state[x.name] for x in moment_buffers(state_format)]
    if not own:
        return np.zeros(n, np.float32)
    return to_float32(own[0]) if len(own) == 1 else unpack_floats(*own, signed=has_sign(state_format))


def pack_one_buffer(master: Array, buffer: Array, *, state_format: str, step: int) -> dict[str, Array]:
    """A state of float32 weights and buffer [n], rounded as step `step` does."""
    names = weight_buffers(state_format)
    weights = dict(zip(names, [master] if len(names) == 1 else split(master), strict=True))
    return weights | _pack_buffer(buffer, state_format, step)


def _pack_buffer(buffer: Array, state_format: str, step: int) -> dict[str, Array]:
    own, spread = moment_buffers(state_format), dither(buffer.size, step, EXP_AVG)
    values: Sequence[Array] = ()
    if len(own) == 2:
        values = pack_floats(buffer, spread, signed=has_sign(state_format))
    elif own:
        values = (buffer if own[0].dtype == "fp32" else pack_bf16(buffer, spread),)
    return {x.name: value for x, value in zip(own, values, strict=True)}


def has_sign(state_format: str) -> bool:
    """Whether the buffer of a format has a sign: a sum of squares has none."""
    return not state_format.startswith("adagrad")
