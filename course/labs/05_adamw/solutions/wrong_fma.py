"""Products are not rounded before they are added, as a compiler does that contracts to fused multiply-adds.

Says: a fused multiply-add
Breaks: one_step, ten_steps
"""

import numpy as np
import passes
from passes import begin_step, copy, load, master, save, start, to_bf16, update_chunk  # noqa: F401


def fma(a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32)


def updated(k, p, m, v, g):
    m = fma(k.keep, m, k.add * g)
    v = fma(k.keep_sq, v, k.add_sq * (g * g))
    change = k.rate * (m / fma(np.sqrt(v), k.root_scale, k.eps))
    return p - fma(k.decay, p, change), m, v


passes.updated = updated
