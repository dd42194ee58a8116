"""All forwards, then all backwards: as fast as 1F1B, and every micro-batch is kept. And a split that gains nothing,
because each W follows its I at once.

Says: keeps 2 micro-batches
Breaks: one_f_one_b_memory, idle_less
"""

from passes import cycle, one_f_one_b as right, times  # noqa: F401


def one_f_one_b(devices, micro_batches):
    return [[(way, m, d) for way in "FB" for m in range(micro_batches)] for d in range(devices)]


def split(devices, micro_batches):
    halves = {"F": "F", "B": "IW"}
    return [
        [(half, m, s) for way, m, s in own for half in halves[way]] for own in right(devices, micro_batches)
    ]
