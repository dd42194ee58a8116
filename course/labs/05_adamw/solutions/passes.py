"""Lab 5, solved."""

import math
from types import SimpleNamespace

import numpy as np


def to_bf16(x):
    bits = x.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16  # half of the last bit kept, less one where that is even
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def start(weights, settings):
    zeros = np.zeros_like(weights)
    return made(weights.copy(), zeros, zeros.copy(), 0, settings)


def made(weights, exp_avg, exp_avg_sq, step, settings):
    return SimpleNamespace(
        master=weights,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        copy=to_bf16(weights),
        step=step,
        settings=settings,
    )


def begin_step(state):
    state.step += 1


def factors(settings, step):
    """The scalars of step number `step`, computed in float64 and rounded to float32 once."""
    found = {
        **{"keep": settings.beta1, "add": 1.0 - settings.beta1},
        **{"keep_sq": settings.beta2, "add_sq": 1.0 - settings.beta2},
        "rate": settings.lr / (1.0 - settings.beta1**step),
        "root_scale": 1.0 / math.sqrt(1.0 - settings.beta2**step),
        "eps": settings.eps,
        "decay": settings.lr * settings.weight_decay,
    }
    return SimpleNamespace(**{name: np.float32(x) for name, x in found.items()})


def updated(k, p, m, v, g):
    """The new weights and moments by AdamW; each operation is rounded to float32."""
    m = k.keep * m + k.add * g
    v = k.keep_sq * v + k.add_sq * (g * g)
    change = k.rate * (m / (np.sqrt(v) * k.root_scale + k.eps))
    return p - (change + k.decay * p), m, v


def update_chunk(state, first, grad):
    own = slice(first, first + len(grad))
    k = factors(state.settings, state.step)
    p, m, v = updated(k, state.master[own], state.exp_avg[own], state.exp_avg_sq[own], grad)
    state.master[own], state.exp_avg[own], state.exp_avg_sq[own] = p, m, v
    state.copy[own] = to_bf16(p)


def master(state):
    return state.master


def copy(state):
    return state.copy


def save(state):
    numbers = np.concatenate([state.master, state.exp_avg, state.exp_avg_sq])
    return state.step.to_bytes(8, "little") + numbers.tobytes()


def load(data, settings):
    p, m, v = np.frombuffer(data, np.float32, offset=8).reshape(3, -1).copy()
    return made(p, m, v, int.from_bytes(data[:8], "little"), settings)
