"""Lab 4, solved: list scheduling. A free lane takes the ready operation with most work behind it."""

from attrs import evolve

from zfunc.core.hardware import ROUND
from zfunc.core.plan import build


def ranks(graph):
    """For each operation, the seconds of the longest chain of operations that begins with it."""
    found = [ROUND.seconds(op) for op in graph]
    own = list(found)
    for j in reversed(range(len(graph))):
        for i in graph.predecessors[j]:
            found[i] = max(found[i], own[i] + found[j])
    return found


def listed(graph, rank):
    """Lanes by kind: each takes, when it is free, the ready operation of the highest rank.

    Compute that allocates memory keeps its order: all forwards before the first backward would fill the device.
    """
    lanes = {op.kind: [] for op in graph}
    busy, ended, left, now = {}, set(), set(range(len(graph))), 0.0
    while left or busy:
        for kind in lanes:
            own = [i for i in sorted(left) if graph.ops[i].kind == kind]
            first = next((i for i in own if allocates(graph.ops[i])), None)
            ready = [
                i for i in own
                if ended >= {*graph.predecessors[i]} and (i == first or not allocates(graph.ops[i]))
            ]  # fmt: skip
            if kind not in busy and ready:
                best = max(ready, key=lambda i: (rank[i], -i))
                busy[kind] = now + ROUND.seconds(graph.ops[best]), best
                lanes[kind].append(best)
                left.remove(best)
        now = min(end for end, _ in busy.values())
        for kind in [kind for kind, (end, _) in busy.items() if end == now]:
            ended.add(busy.pop(kind)[1])
    return lanes


def allocates(op):
    return op.kind == "compute" and not all(r.kept for r in op.regions)


def by_rank(graph):
    return build(graph, listed(graph, ranks(graph)))


def limited(graph, order, room):
    """A plan that runs items in `order`; each fetch waits until the weight that leaves room for it is
    read."""
    position = {n: k for k, n in enumerate(order)}
    lanes = {}
    for i in sorted(range(len(graph)), key=lambda i: position[graph.ops[i].index[0]]):
        lanes.setdefault(graph.ops[i].kind, []).append(i)
    plan = build(graph, lanes)
    fetches, waits = lanes["h2d"], [set(some) for some in plan.waits]
    for k in range(room, len(fetches)):
        (weight,) = graph.ops[fetches[k - room]].writes
        waits[fetches[k]].add(max(i for i, op in enumerate(graph) if weight in op.reads))
    return evolve(plan, waits=[sorted(some) for some in waits])


def puzzle_1(graph):
    return by_rank(graph)


def puzzle_2(graph):
    """Johnson's rule: first what is fetched faster than used, the fastest fetch first; then the rest, last the
    fastest use."""
    times = [(ROUND.seconds(graph.ops[i]), ROUND.seconds(graph.ops[i + 1])) for i in range(0, len(graph), 2)]
    key = [(0, fetch) if fetch < use else (1, -use) for fetch, use in times]
    order = sorted(range(len(times)), key=key.__getitem__)
    return build(graph, {"h2d": [2 * n for n in order], "compute": [2 * n + 1 for n in order]})


def puzzle_3(graph):
    return limited(graph, range(8), 3)


def puzzle_4(graph):
    return by_rank(graph)


def puzzle_5(graph):
    return by_rank(graph)


def puzzle_6(graph):
    """Find a fast order of the weights: move single weights to other places as long as the plan gets
    faster."""
    order = sorted(range(8), key=lambda n: sum(ROUND.seconds(graph.ops[4 * n + k]) for k in (0, 1)))
    best = limited(graph, order, 4)
    improved = True
    while improved:
        improved = False
        for a in range(8):
            for b in range(8):
                other = [n for n in order if n != order[a]]
                other.insert(b, order[a])
                plan = limited(graph, other, 4)
                if plan.simulate(ROUND).seconds < best.simulate(ROUND).seconds - 1e-9:
                    best, order, improved = plan, other, True
    return best
