"""Schedules: each a callable `Graph -> Plan` that chooses lanes and the order on each, and nothing else.

    serial          one lane, the graph's own order
    overlapped      a lane for each kind of operation
    interleaved     the same, other lanes in the order in which operations become possible
    critical_path   a list scheduler for given hardware
    search          the fastest of the others that fits, by simulation

Any of them can be made without arguments. A new one is one file here, one line in this list, and one line in
the table of laws in the tests.
"""

from typing import Any

import attrs

from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.settings import Schedule
from zfunc.options import one_of

from .critical_path import CriticalPath
from .interleaved import Interleaved
from .overlapped import Overlapped
from .search import Search
from .serial import Serial

__all__ = ["CriticalPath", "Interleaved", "Overlapped", "Search", "Serial"]


def make_schedule(schedule: str | Schedule, hardware: Hardware = ROUND) -> Schedule:
    """The schedule of that name, made for `hardware` if it takes one; one that is made already is left as it is.

    >>> make_schedule("CriticalPath").hardware is ROUND
    True
    """
    if not isinstance(schedule, str):
        return schedule
    one_of(__all__)("schedule", schedule)
    kind: Any = globals()[schedule]
    takes_one = any(f.name == "hardware" for f in attrs.fields(kind))
    return kind(hardware=hardware) if takes_one else kind()
