"""Weight decay shrinks the weight that is already updated. And a chunk is padded to 4 elements, over others.

Says: decay of the weight that is already updated
Breaks: one_step, ten_steps, any_chunking, any_order
"""

import numpy as np
import passes
from passes import begin_step, copy, load, master, save, start, to_bf16  # noqa: F401

right = passes.updated


def updated(k, p, m, v, g):
    decay, k.decay = k.decay, np.float32(0)
    p, m, v = right(k, p, m, v, g)
    return p - decay * p, m, v


def update_chunk(state, first, grad):
    room = min(-len(grad) % 4, len(state.master) - first - len(grad))
    passes.update_chunk(state, first, np.concatenate([grad, np.zeros(room, np.float32)]))


passes.updated = updated
