"""Plain int8: a multiple of the largest element's 127th part, for the whole page.

Says: expected it positive
Breaks: positive, outlier, second, first
"""

import numpy as np


def encode(values, signed):
    scale = float(abs(values).max()) or 1.0
    top = 127 if signed else 255
    codes = np.round(values.astype(np.float64) / scale * top)
    return np.float32(scale).tobytes()[2:] + (codes.astype(np.int64) & 255).astype(np.uint8).tobytes()


def decode(data, signed):
    scale = np.frombuffer(b"\0\0" + data[:2], np.float32)[0]  # bfloat16
    codes = np.frombuffer(data[2:], np.int8 if signed else np.uint8)
    return (codes / np.float64(127 if signed else 255) * scale).astype(np.float32)
