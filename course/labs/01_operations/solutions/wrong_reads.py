"""Only what is written and then read is taken for a conflict: a slot can be overwritten while it is read.

Breaks: conflicting, enough, racing, fifty_plans
"""

from passes import declare, waits as right_waits  # noqa: F401
import passes


def conflict(a, b):
    return bool(a.writes & b.reads)


passes.conflict = conflict
conflicts, waits, races = passes.conflicts, passes.waits, passes.races
