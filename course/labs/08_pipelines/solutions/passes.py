"""Lab 8, solved."""

from itertools import pairwise


def waits_for(order):
    """For each pass, the passes it waits for: whose results it needs, and the one before on its device."""
    there = {x for own in order for x in own}
    found = {}
    for way, m, s in there:
        needs = {"F": [("F", m, s - 1)], "W": [("I", m, s)]}
        others = [("F", m, s), ("B", m, s + 1), ("I", m, s + 1)]
        found[way, m, s] = {x for x in needs.get(way, others) if x in there}
    for own in order:
        for x, y in pairwise(own):
            found[y].add(x)
    return found


def ended(waits, seconds=None):
    """The times of each pass that can run: when it begins and ends, in seconds."""
    found, left = {}, dict(waits)
    while ready := [x for x, before in left.items() if before <= found.keys()]:
        for x in ready:
            begin = max((found[y][1] for y in left.pop(x)), default=0.0)
            found[x] = begin, begin + (seconds[x[0]] if seconds else 0.0)
    return found


def times(order, seconds):
    return ended(waits_for(order), seconds)


def cycle(order):
    waits = waits_for(order)
    can = ended(waits).keys()
    path = [x for x in waits if x not in can][:1]
    while path:  # what cannot run waits for something that cannot run
        following = next(y for y in waits[path[-1]] if y not in can)
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return []


def one_f_one_b(devices, micro_batches):
    order = []
    for d in range(devices):
        ahead = min(devices - 1 - d, micro_batches)
        own = [("F", m, d) for m in range(ahead)]
        for m in range(micro_batches):
            own += [("F", m + ahead, d)] if m + ahead < micro_batches else []
            own.append(("B", m, d))
        order.append(own)
    return order


def split(devices, micro_batches):
    """Zero bubble: 1F1B with I for B, and device d is d gradients of weights behind (ZB-H1, 2401.10241)."""
    order = []
    for d, own in enumerate(one_f_one_b(devices, micro_batches)):
        made = []
        for way, m, _ in own:
            made.append(("I" if way == "B" else way, m, d))
            made += [("W", m - d, d)] if way == "B" and m >= d else []
        order.append([*made, *(("W", m, d) for m in range(max(0, micro_batches - d), micro_batches))])
    return order
