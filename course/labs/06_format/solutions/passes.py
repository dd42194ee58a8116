"""Lab 6, solved: a code is the logarithm of a moment, in steps between two powers of two, each a byte of the page.

A page of first moments has 127 steps and a sign, one of second moments 255. Code 0 is 0.
"""

import numpy as np


def bounds(size, signed):
    """The least and the greatest power of two that the codes represent."""
    there = size[size > 0]
    if not len(there):
        return -1, 0
    high = int(np.ceil(np.log2(there.max())))
    low = int(np.floor(np.log2(there.min())))
    if signed:  # a first moment far below those of its block may be 0
        blocks = np.sqrt(np.mean(size.reshape(-1, 64) ** 2, 1))
        low = max(low, int(np.floor(np.log2(blocks[blocks > 0].min()))) - 7)
    return max(-128, min(low, high - 1)), min(high, 127)


def encode(values, signed):
    wide = values.astype(np.float64)
    size, top = abs(wide), 127 if signed else 255
    low, high = bounds(size, signed)
    with np.errstate(divide="ignore"):
        steps = np.round((np.log2(size) - low) / (high - low) * (top - 1)) + 1
    least = 0 if signed else 1
    codes = np.where(size == 0, 0, np.clip(steps, least, top)).astype(np.uint8)
    if signed:
        codes |= (wide < 0).astype(np.uint8) << 7
    return np.array([low, high], np.int8).tobytes() + codes.tobytes()


def decode(data, signed):
    low, high = (int(x) for x in np.frombuffer(data[:2], np.int8))
    codes, top = np.frombuffer(data[2:], np.uint8), 127 if signed else 255
    steps = (codes & top).astype(np.float64)
    size = np.where(steps == 0, 0, 2.0 ** (low + (steps - 1) / (top - 1) * (high - low)))
    return (np.where(codes > top, -size, size) if signed else size).astype(np.float32)
