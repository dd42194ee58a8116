"""Search: the other schedules tried by simulation, and the fastest that fits taken.

The invariant: of the plans tried, none that fits the hardware's memory is faster on it than the one returned; where
none fits, none is short of fewer bytes. The same graph gives the same plan, so ranks agree. What else could be
chosen besides the schedule (bucket size, slots, recipe) is not in a graph: `zfunc.planner.search` varies that.
"""

from collections.abc import Callable

from attrs import field, frozen

from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate

from .critical_path import CriticalPath
from .interleaved import Interleaved
from .overlapped import Overlapped
from .serial import Serial


@frozen
class Search:
    """The best of `schedules` on `hardware`; by default of all others that there are, made for it.

    None of the plans tried that fits its memory is faster there; where none fits, none is short of fewer bytes.
    """

    hardware: Hardware = ROUND
    schedules: tuple[Callable[[Graph], Plan], ...] = field(default=(), converter=tuple)

    def __call__(self, graph: Graph) -> Plan:
        """Plan, simulate and weigh under each; of equals the simplest, which come first."""
        all_there_are = (Serial(), Overlapped(), Interleaved(), CriticalPath(self.hardware))
        return min((schedule(graph) for schedule in self.schedules or all_there_are), key=self._cost)

    def _cost(self, plan: Plan) -> tuple[int, float]:
        """Bytes there is no room for, then seconds."""
        lacking = self.hardware.lacking({tier: peak.nbytes for tier, peak in peak_memory(plan).items()})
        return sum(lacking.values()), simulate(plan, self.hardware).seconds
