"""Some codes are moved by a step, at random: neither the same every time nor in the order of the moments.

Says: got other bytes the second time
Breaks: sizes, monotone
"""

import numpy as np
import passes
from passes import decode  # noqa: F401


def encode(values, signed):
    codes = np.frombuffer(passes.encode(values, signed), np.uint8).copy()
    own, top = codes[2:], 127 if signed else 255
    step = np.random.default_rng().random(len(own)) < 0.05
    size = own & top
    own += np.where((size > 0) & (size < top), step, 0).astype(np.uint8)
    return codes.tobytes()
