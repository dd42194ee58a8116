"""eps is added below the root. And bfloat16 is cut off, not rounded.

Says: eps inside the root
Breaks: rounded, one_step, ten_steps
"""

import numpy as np
import passes
from passes import begin_step, copy, load, master, save, start, update_chunk  # noqa: F401


def updated(k, p, m, v, g):
    m = k.keep * m + k.add * g
    v = k.keep_sq * v + k.add_sq * (g * g)
    change = k.rate * (m / np.sqrt(v * k.root_scale * k.root_scale + k.eps))
    return p - (change + k.decay * p), m, v


def to_bf16(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)


passes.updated, passes.to_bf16 = updated, to_bf16
