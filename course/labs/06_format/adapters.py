"""Lab 6: a number format for moments in 8.03 bits. Copy this file, fill the functions, and grade it:

    python -m course.grade 6 --adapters PATH

A page is 512 moments, that is 8 blocks of 64 neighbours, as a NumPy array of float32. `signed` says which: True for
the first moments, False for the second ones, which are never negative.
"""

import numpy as np  # noqa: F401


def encode(values, signed: bool) -> bytes:
    """Encode the page `values` [512] in at most 514 bytes: 8 bits an element, and 2 bits a block."""
    raise NotImplementedError


def decode(data: bytes, signed: bool):
    """Decode what `encode` returned: a page [512], float32, near the encoded values."""
    raise NotImplementedError
