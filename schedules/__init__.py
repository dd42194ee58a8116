"""Schedules: each a callable `Graph -> Plan` that chooses lanes and the order on each, and nothing else.

    plain           the graph's order on one lane or one for each kind, readiness, what shares a CPU's cores
    critical_path   a list scheduler for given hardware
    search          the fastest of those for an accelerator that fits into memory, by simulation

All have default arguments. A new schedule is one file here and its line in the list above, the imports and
`__all__`; the laws in `tests/table.py` take it from there.
"""

from typing import Any

import attrs

from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.settings import BY_DEVICE, Schedule, schedule_for
from zfunc.options import one_of

from .critical_path import CriticalPath
from .plain import Interleaved, Overlapped, Serial, SharedCores
from .search import Search

__all__ = ["CriticalPath", "Interleaved", "Overlapped", "Search", "Serial", "SharedCores"]


def make_schedule(schedule: str | Schedule, hardware: Hardware = ROUND) -> Schedule:
    """The schedule of this name, for `hardware` if it takes one; a schedule object is returned as it is.

    >>> make_schedule("CriticalPath").hardware is ROUND
    True
    """
    schedule = schedule_for(schedule, on_cpu=hardware.unified)
    if not isinstance(schedule, str):
        return schedule
    one_of((*__all__, BY_DEVICE))("schedule", schedule)
    kind: Any = globals()[schedule]
    takes_hardware = any(f.name == "hardware" for f in attrs.fields(kind))
    return kind(hardware=hardware) if takes_hardware else kind()
