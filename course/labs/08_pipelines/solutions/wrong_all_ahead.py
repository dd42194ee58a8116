"""Each device is equally far ahead, so the last one waits for itself. W is made before I where a device would wait.
And a pass begins when its device is free, whether or not what it needs is there.

Says: got a deadlock: B[0,1], which waits for F[0,1], which waits for B[0,1]
Breaks: simulated, one_f_one_b_whole, split_whole, idle_less
"""

import passes
from passes import cycle  # noqa: F401


def times(order, seconds):
    return passes.times(order[:1], seconds) | {
        x: span for own in order[1:] for x, span in passes.times([own], seconds).items()
    }


def one_f_one_b(devices, micro_batches):
    order = passes.one_f_one_b(devices, micro_batches)
    return [own if d == 0 or not own else [own[-1], *own[:-1]] for d, own in enumerate(order)]


def split(devices, micro_batches):
    return [
        sorted(own, key=lambda x: (x[1], "FWI".index(x[0]))) for own in passes.split(devices, micro_batches)
    ]
