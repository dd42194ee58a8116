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
    """A schedule: the fastest of `schedules`, by simulation, whose plan fits into the memory of `hardware`.

    By default schedules for an accelerator are tried. If none fits, the plan that exceeds memory by fewest bytes.
    """

    hardware: Hardware = ROUND
    schedules: tuple[Callable[[Graph], Plan], ...] = field(default=(), converter=tuple)

    def __call__(self, graph: Graph) -> Plan:
        """The best plan of `graph` by simulation of all schedules; of equal ones, that of the first schedule."""
        usual = (Serial(), Overlapped(), Interleaved(), CriticalPath(self.hardware))
        return min((schedule(graph) for schedule in self.schedules or usual), key=self._cost)

    def _cost(self, plan: Plan) -> tuple[int, float]:
        """Cost of `plan`, compared as a tuple: bytes that exceed the hardware's memory, then simulated seconds."""
        lacking = self.hardware.lacking({tier: peak.nbytes for tier, peak in peak_memory(plan).items()})
        return sum(lacking.values()), simulate(plan, self.hardware).seconds
