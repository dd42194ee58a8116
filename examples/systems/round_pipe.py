"""RoundPipe: layers dealt to the devices like cards, as no device keeps weights of its own.

A pipeline gives each device its layers for good, so they have to be cut into equal stages, and the last one,
with the loss, never is. Where weights come from the host before each pass, any device can take any layer: the
next layer goes to the next device, round after round of as many micro-batches as there are devices. Forward is
dealt out, then backward, and the last layer goes both ways on one device. What backward needs is recomputed
before its gradient arrives.

Published beside planned: R4 updates one step late or, of "in step with its update", at the end;
docs/published.md has the facts of each row.

RoundPipe (github.com/ITcarrot/RoundPipe), with its synchronous update. `zfunc.schedules.RoundPipe` is this
order, with layers that may be joined to stages.
"""

from zfunc.core.pipeline import B, F, R

DEVICES, MICRO_BATCHES = 4, 8
SETTINGS = {"devices": DEVICES, "micro_batches": MICRO_BATCHES, "params_on": "host", "activations_on": "host"}
PUBLISHED = ("R1", "R4")

Passes = list[tuple[str, int, int]]  # (way, micro-batch, layer)


def round_pipe(devices: int, layers: int, micro_batches: int) -> list[Passes]:
    """The passes of each device, in its order."""
    order: list[Passes] = [[] for _ in range(devices)]
    last, turn = layers - 1, 0
    for first in range(0, micro_batches, devices):
        group = range(first, min(first + devices, micro_batches))
        for layer in range(last):
            order[turn % devices] += [(F, m, layer) for m in group]
            turn += 1
        order[turn % devices] += [(way, m, last) for m in group for way in (F, B)]
        turn += 1
        for layer in reversed(range(last)):
            order[turn % devices] += [(way, m, layer) for m in group for way in (R, B)]
            turn += 1
    return order
