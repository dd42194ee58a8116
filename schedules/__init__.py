"""Schedules: each a callable `Graph -> Plan` that chooses lanes and the order on each, and nothing else.

Any of them can be made without arguments. A new one is one file here, one line in this list, and one line in
the table of laws in the tests.
"""

from .critical_path import CriticalPath
from .interleaved import Interleaved
from .overlapped import Overlapped
from .search import Search
from .serial import Serial

__all__ = ["CriticalPath", "Interleaved", "Overlapped", "Search", "Serial"]
