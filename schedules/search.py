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
    """The fastest of `schedules` on `hardware` that fits into its memory; by default of those for an accelerator.

    If none fits, the one that exceeds memory by the fewest bytes.
    """

    hardware: Hardware = ROUND
    schedules: tuple[Callable[[Graph], Plan], ...] = field(default=(), converter=tuple)

    def __call__(self, graph: Graph) -> Plan:
        """Plan and simulate with each schedule; of equals the first, which is the simplest."""
        usual = (Serial(), Overlapped(), Interleaved(), CriticalPath(self.hardware))
        return min((schedule(graph) for schedule in self.schedules or usual), key=self._cost)

    def _cost(self, plan: Plan) -> tuple[int, float]:
        """The bytes that exceed memory, then seconds."""
        lacking = self.hardware.lacking({tier: peak.nbytes for tier, peak in peak_memory(plan).items()})
        return sum(lacking.values()), simulate(plan, self.hardware).seconds
