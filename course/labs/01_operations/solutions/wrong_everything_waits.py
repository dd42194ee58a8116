"""Every operation waits for all earlier ones of other lanes: right, and as slow as without lanes. And update is
declared to write alone, though it also reads what it changes.

Breaks: declared, needed
"""

import passes
from passes import conflicts, races  # noqa: F401


def declare():
    return passes.declare() | {"update_1": ({"slot"}, {"master1"})}


def waits(ops, lanes):
    lane_of = {i: name for name, lane in lanes.items() for i in lane}
    return [{i for i in range(j) if lane_of[i] != lane_of[j]} for j in range(len(ops))]
