"""Search: simulates the other schedules and returns the fastest plan that fits into memory.

If none fits, it returns the plan that exceeds memory by the fewest bytes. Equal graphs give equal plans, so ranks
agree. `zfunc.planner.search` varies what a graph does not contain: bucket size, slots, recipe.
"""

from collections.abc import Callable

from attrs import field, frozen

from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate

from .critical_path import CriticalPath
from .plain import Interleaved, Overlapped, Serial


@frozen
class Search:
    """A schedule that simulates the plans of `schedules` on `hardware` and takes the fastest that fits its
    memory; if none fits, the one that exceeds the memory by fewest bytes.

    Without `schedules` those for an accelerator are tried.
    """

    hardware: Hardware = ROUND
    schedules: tuple[Callable[[Graph], Plan], ...] = field(default=(), converter=tuple)

    def __call__(self, graph: Graph) -> Plan:
        """The best plan of `graph` among those of all schedules, by simulation; the first of equal ones."""
        usual = (Serial(), Overlapped(), Interleaved(), CriticalPath(self.hardware))
        return min((schedule(graph) for schedule in self.schedules or usual), key=self._cost)

    def _cost(self, plan: Plan) -> tuple[int, float]:
        """The cost of `plan`, lower is better: first bytes beyond the hardware's memory, then seconds."""
        lacking = self.hardware.lacking({tier: peak.nbytes for tier, peak in peak_memory(plan).items()})
        return sum(lacking.values()), simulate(plan, self.hardware).seconds
