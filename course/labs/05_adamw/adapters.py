"""Lab 5: AdamW to the bit, for any chunking. Copy this file, fill the functions, and grade it:

    python -m course.grade 5 --adapters PATH

Buffers are flat NumPy arrays of float32; a bfloat16 is its 16 bits, in an array of uint16. `settings` has the
fields lr, beta1, beta2, eps and weight_decay, all floats. What a state is, is up to you.
"""

import numpy as np  # noqa: F401


def to_bf16(x):
    """The bits of the bfloat16 nearest to each float32 of x: to the nearest, ties to even. NaN stays NaN."""
    raise NotImplementedError


def start(weights, settings):
    """A state before the first step, with a copy of `weights` [n] as its master."""
    raise NotImplementedError


def begin_step(state):
    """A step begins. Its chunks follow: each element is in one of them. Changes `state`, returns nothing."""
    raise NotImplementedError


def update_chunk(state, first, grad):
    """Update the elements from number `first` on, as many as `grad` has. Changes `state`, returns nothing."""
    raise NotImplementedError


def master(state):
    """The weights [n], float32."""
    raise NotImplementedError


def copy(state):
    """What goes to the device: the weights [n] as the bits of bfloat16, uint16."""
    raise NotImplementedError


def save(state) -> bytes:
    """The state as bytes, between two steps."""
    raise NotImplementedError


def load(data: bytes, settings):
    """The state that `save` made bytes of. The settings are those of `start`."""
    raise NotImplementedError
