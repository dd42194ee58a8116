"""Time and memory of a step of many micro-batches, from steps of a few.

Once a step has settled, each further group of micro-batches adds the same seconds, and the same bytes to the same
peaks: its inputs, which wait. It has settled where one more group adds as many seconds as where all work that does
not grow takes no time: then nothing hides behind that work, which more groups would bring to light. A step that has
not, or whose micro-batches pass in one group, is simulated in full. Nothing here knows what the operations do.

The invariant: the result is that of the full simulation, memory to the byte, and time within `CLOSE`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property

from attrs import evolve, field, frozen

from zfunc.core.graph import Graph, Kind, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import persistent_bytes
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import seconds_alone, simulate
from zfunc.core.spec import StepSpec
from zfunc.planner.candidate import (
    Amount,
    Key,
    PlannedStep,
    Repetition,
    extrapolate_linearly,
    operations_of,
    simulate_operations,
    with_settings,
    work_of,
)

FEW = (3, 6)  # groups of micro-batches after which a step may have settled
WORTH = 3  # times as many micro-batches as a few: fewer are simulated in full
MANY = WORTH * FEW[0]
CLOSE = 1e-5  # of a step's time


@frozen(eq=False)
class Estimate:
    """The step of these settings, and by arithmetic what it needs at least: all from a few micro-batches.

    `graphs` are its operations by the number of micro-batches. They do not depend on the schedule, so candidates
    that differ in nothing else may share them.
    """

    spec: StepSpec
    settings: StepSettings
    hardware: Hardware
    graphs: dict[int, Graph] = field(factory=dict[int, Graph])

    @property
    def exact_step(self) -> PlannedStep:
        """The step of `simulate_choice`, with its operations, or those of the few that it repeats."""
        return self._from_few()[0] or self._simulated(self.settings.micro_batches)

    @cached_property
    def step(self) -> PlannedStep:
        """The same without operations: those of all candidates are too many to keep. Raises PlanError likewise."""
        return evolve(
            self._few_say[0] or self._simulated(self.settings.micro_batches).summary, work=self.work
        )

    @property
    def unsettled_seconds(self) -> float:
        """The least that a step takes that does not settle, if it goes on as a few micro-batches do; else 0."""
        return self._few_say[1]

    @cached_property
    def kept(self) -> dict[Tier, int]:
        """The bytes of the kept regions by tier, whatever the schedule."""
        return self._sum(persistent_bytes)

    @cached_property
    def work(self) -> dict[Kind, float]:
        """The seconds of all operations of each kind: under no schedule is a step faster than the most of them."""
        return self._sum(lambda graph: work_of(graph, self.hardware))

    @cached_property
    def _few_say(self) -> tuple[PlannedStep | None, float]:
        step, unsettled = self._from_few()
        return step and step.summary, unsettled

    def _from_few(self) -> tuple[PlannedStep | None, float]:
        """The step, if it has settled after a few micro-batches; else the least seconds, if it goes on so."""
        least: list[float] = []
        for few in self._few:
            small, large = self._simulated(few), self._simulated(few + self.settings.group_size)
            more = (self.settings.micro_batches - few) // self.settings.group_size
            grown, most = large.seconds - small.seconds, _longest_period(small, large)
            least.append(small.seconds + more * grown)
            at = [peak.op for peak in small.peaks.values()]
            same = at == [peak.op for peak in large.peaks.values()]
            if same and abs(most - grown) <= 2 * CLOSE * most:
                seconds = small.seconds + more * (grown + most) / 2
                bytes_then = extrapolate_linearly(small.memory, large.memory, more)
                peaks = {
                    x: evolve(peak, kept=self.kept[x], transient=bytes_then[x] - self.kept[x])
                    for x, peak in small.peaks.items()
                }
                repeats = Repetition(small, large, more)
                return PlannedStep(
                    self.settings, self._spec, self.hardware, seconds, peaks, repetition=repeats
                ), 0.0
        return None, min(least, default=0.0)

    @property
    def _few(self) -> Iterator[int]:
        """The numbers of micro-batches, a part of all of them, after which the step may have settled."""
        total, group = self.settings.micro_batches, self.settings.group_size
        yield from (few * group + total % group for few in FEW if total >= WORTH * few * group)

    @cached_property
    def _spec(self) -> StepSpec:
        return with_settings(self.spec, self.settings)

    def _spec_of(self, micro_batches: int) -> StepSpec:
        return evolve(self._spec, settings=evolve(self.settings, micro_batches=micro_batches))

    def _graph(self, micro_batches: int) -> Graph:
        if micro_batches not in self.graphs:
            self.graphs[micro_batches] = operations_of(self._spec_of(micro_batches))
        return self.graphs[micro_batches]

    def _simulated(self, micro_batches: int) -> PlannedStep:
        return simulate_operations(
            self._graph(micro_batches), self._spec_of(micro_batches), self.settings, self.hardware
        )

    def _sum(self, measure: Callable[[Graph], dict[Key, Amount]]) -> dict[Key, Amount]:
        """What `measure` sums over the operations of all micro-batches."""
        total, group = self.settings.micro_batches, self.settings.group_size
        if (few := next(self._few, total)) == total:
            return measure(self._graph(total))
        small, large = (measure(self._graph(n)) for n in (few, few + group))
        return extrapolate_linearly(small, large, (total - few) // group)


def _longest_period(small: PlannedStep, large: PlannedStep) -> float:
    """The seconds that one more group adds to a step of many: only what grows takes time."""
    grows = {*(Counter(op.verb for op in large.plan.graph) - Counter(op.verb for op in small.plan.graph))}

    def seconds(step: PlannedStep) -> float:
        alone = seconds_alone(step.plan.graph, step.hardware)
        growing = [x if op.verb in grows else 0.0 for x, op in zip(alone, step.plan.graph, strict=True)]
        return simulate(step.plan, step.hardware, growing).seconds

    return seconds(large) - seconds(small)
