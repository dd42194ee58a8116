"""A scale of 2 bytes for each block: 8.25 bits. And zero has no code of its own.

Says: got 528 bytes
Breaks: sizes, zeros
"""

import numpy as np
import passes


def encode(values, signed):
    tiny = np.where(values == 0, np.float32(1e-30), values)
    return passes.encode(tiny, signed) + bytes(14)


def decode(data, signed):
    return passes.decode(data[:514], signed)
