"""Every chunk counts as a step, so bias correction depends on the chunking. And save forgets the count.

Says: as with one chunk a step
Breaks: any_chunking, any_order, resumed
"""

import passes
from passes import copy, load, master, start, to_bf16  # noqa: F401


def begin_step(state):
    pass


def update_chunk(state, first, grad):
    state.step += 1
    passes.update_chunk(state, first, grad)


def save(state):
    return bytes(8) + passes.save(state)[8:]
