"""A wait for each conflicting pair on two lanes, also where others imply it; and a deadlock is never noticed.

Breaks: fewest, deadlocks, on_the_example, overlapping, quick
"""

import passes
from passes import Plan


def build(ops, lanes):
    lane_of = {i: name for name, lane in lanes.items() for i in lane}

    def conflict(a, b):
        return a.writes & (b.reads | b.writes) or a.reads & b.writes

    waits = [
        {i for i in range(j) if lane_of[i] != lane_of[j] and conflict(ops[i], ops[j])}
        for j in range(len(ops))
    ]
    return Plan(ops, lanes, waits)


passes.build = build
overlapped = passes.overlapped
