"""A pair counts as a race unless one waits for the other directly: waits by way of others are forgotten.

Breaks: racing, fifty_plans
"""

from passes import conflicts, declare, waits  # noqa: F401


def races(plan):
    place = {i: (name, n) for name, lane in plan.lanes.items() for n, i in enumerate(lane)}

    def sure(i, j):
        return i in plan.waits[j] or (place[i][0] == place[j][0] and place[i][1] < place[j][1])

    return {(i, j) for i, j in conflicts(plan.ops) if not sure(i, j)}
