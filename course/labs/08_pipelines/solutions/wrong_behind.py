"""All gradients of weights at the end: they fill no gap, and all micro-batches are kept. And a cycle is looked for
between two passes alone.

Says: expected passes of which each waits for the next
Breaks: cycles, split_memory, idle_less
"""

from passes import one_f_one_b, times, waits_for  # noqa: F401


def cycle(order):
    waits = waits_for(order)
    return next(([x, y] for x in waits for y in waits[x] if x in waits[y]), [])


def split(devices, micro_batches):
    order = []
    for d, own in enumerate(one_f_one_b(devices, micro_batches)):
        made = [("I" if way == "B" else way, m, s) for way, m, s in own]
        order.append([*made, *(("W", m, d) for m in range(micro_batches))])
    return order
