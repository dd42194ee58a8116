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
    """A new state before the first step, with a copy of `weights` [n] as its fp32 master weights."""
    raise NotImplementedError


def begin_step(state):
    """Begin a step, whose chunks follow: each element is in one of them. Changes `state`, returns nothing."""
    raise NotImplementedError


def update_chunk(state, first, grad):
    """Update the elements from index `first` on, as many as `grad` has. Changes `state`, returns nothing."""
    raise NotImplementedError


def master(state):
    """The master weights of `state`, float32 [n]."""
    raise NotImplementedError


def copy(state):
    """The weights that go to the device: bits of bfloat16, as uint16 [n]."""
    raise NotImplementedError


def save(state) -> bytes:
    """Encode the state between two steps as bytes, for `load`."""
    raise NotImplementedError


def load(data: bytes, settings):
    """Decode a state that `save` encoded. The settings are those of `start`."""
    raise NotImplementedError
