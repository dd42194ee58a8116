"""Time and memory of a step of many micro-batches, from steps of a few.

Once a step has settled, each further group of micro-batches adds the same seconds, and the same bytes to every
moment. It has settled where one more group adds as many seconds as where all work that does not grow takes no time:
then nothing hides behind that work, which more groups would bring to light. A step that has not is simulated in
full. Nothing here knows what the operations do.

The invariant: the result is that of the full simulation, memory to the byte, and time within `CLOSE`, or within
`NEAR` for a single group, whose passes only get longer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property

from attrs import evolve, field, frozen

from zfunc.core.graph import TIERS, Graph, Kind, Op, Tier, label
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import Moment, Peak, persistent_bytes, transient_bytes
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
FEW_OF_ONE_GROUP = (6, 12)  # micro-batches, the same
WORTH = 3  # times as many micro-batches as a few: fewer are simulated in full
MANY = WORTH * FEW[0]
CLOSE, NEAR = 1e-5, 1e-3  # of a step's time, of several groups and of one


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
        """The step of `simulate_choice`, from a few micro-batches where that is `CLOSE`."""
        few = None if self._is_one_group else self._from_few()[0]
        return few or self._simulated(self.spec.micro_batches)

    @cached_property
    def step(self) -> PlannedStep:
        """The step of `simulate_choice`, from a few micro-batches where it settles, without its operations: those
        of all candidates are too many to keep. Raises PlanError likewise."""
        return evolve(self._few_say[0] or self._simulated(self.spec.micro_batches).summary, work=self.work)

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
        close, least = NEAR if self._is_one_group else CLOSE, list[float]()
        for few in self._few:
            small, large = self._simulated(few), self._simulated(few + self._period)
            more = (self.spec.micro_batches - few) // self._period
            grown = large.seconds - small.seconds
            least.append(small.seconds + more * grown)
            most, moments = _longest_period(small, large), _moments_of_larger(small, large)
            if moments is not None and abs(most - grown) <= 2 * close * most:
                peaks, at = _peaks(small, large, moments, more, self.kept)
                seconds, of = small.seconds + more * (grown + most) / 2, Repetition(small, large, more, at)
                return PlannedStep(
                    self.settings, self._spec, self.hardware, seconds, peaks, repetition=of
                ), 0.0
        return None, min(least, default=0.0)

    @property
    def _is_one_group(self) -> bool:
        return self.settings.group_size >= self.spec.micro_batches

    @property
    def _period(self) -> int:
        """The micro-batches that repeat."""
        return 1 if self._is_one_group else self.settings.group_size

    @property
    def _few(self) -> Iterator[int]:
        """The numbers of micro-batches, a part of all of them, after which the step may have settled."""
        total, period = self.spec.micro_batches, self._period
        for few in FEW_OF_ONE_GROUP if self._is_one_group else FEW:
            if total >= WORTH * few * period:
                yield few * period + total % period

    @cached_property
    def _spec(self) -> StepSpec:
        return with_settings(self.spec, self.settings)

    def _graph(self, micro_batches: int) -> Graph:
        if micro_batches not in self.graphs:
            self.graphs[micro_batches] = operations_of(evolve(self._spec, micro_batches=micro_batches))
        return self.graphs[micro_batches]

    def _simulated(self, micro_batches: int) -> PlannedStep:
        spec = evolve(self._spec, micro_batches=micro_batches)
        return simulate_operations(self._graph(micro_batches), spec, self.settings, self.hardware)

    def _sum(self, measure: Callable[[Graph], dict[Key, Amount]]) -> dict[Key, Amount]:
        """What `measure` sums over the operations of all micro-batches."""
        total, period = self.spec.micro_batches, self._period
        few = next(self._few, total)
        if few == total:
            return measure(self._graph(total))
        one, two = (measure(self._graph(n)) for n in (few, few + period))
        return extrapolate_linearly(one, two, (total - few) // period)


def _growing(small: PlannedStep, large: PlannedStep) -> set[str]:
    """The verbs of which the larger step has more."""
    return {*(Counter(op.verb for op in large.plan.graph) - Counter(op.verb for op in small.plan.graph))}


def _longest_period(small: PlannedStep, large: PlannedStep) -> float:
    """The seconds that one more group adds to a step of many: only what grows takes time."""
    grows = _growing(small, large)

    def seconds(step: PlannedStep) -> float:
        alone = seconds_alone(step.plan.graph, step.hardware)
        growing = [x if op.verb in grows else 0.0 for x, op in zip(alone, step.plan.graph, strict=True)]
        return simulate(step.plan, step.hardware, growing).seconds

    return seconds(large) - seconds(small)


def _moments_of_larger(small: PlannedStep, large: PlannedStep) -> list[list[int]] | None:
    """For each lane and each of its moments in the smaller step, the one in the larger; None where that has none.

    An operation of the first half of the micro-batches has the same name in both, counted from the first; one of
    the others is as far from the last.
    """
    grows, half = _growing(small, large), small.spec.micro_batches // 2
    period = large.spec.micro_batches - small.spec.micro_batches

    def place(op: Op, places: dict[str, int]) -> int:
        early = op.verb not in grows or not op.index or op.index[0] < half
        if op.index and not (early and op.name in places):
            return places.get(label(op.verb, (op.index[0] + period, *op.index[1:])), -1)
        return places.get(op.name, -1)

    moments: list[list[int]] = []
    for few, more in zip(small.plan.lanes, large.plan.lanes, strict=True):
        places = {large.plan.graph.ops[i].name: n for n, i in enumerate(more.ops, start=1)}
        moments.append([0, *(place(small.plan.graph.ops[i], places) for i in few.ops)])
    return moments if all(at >= 0 for lane in moments for at in lane) else None


def _peaks(
    small: PlannedStep, large: PlannedStep, moments: list[list[int]], more: int, kept: dict[Tier, int]
) -> tuple[dict[Tier, Peak], tuple[dict[Tier, Moment], dict[Tier, Moment]]]:
    """The peaks `more` periods later, and their moments in both steps."""
    few, many = transient_bytes(small.plan), transient_bytes(large.plan)
    peaks: dict[Tier, Peak] = {}
    known: tuple[dict[Tier, Moment], dict[Tier, Moment]] = {}, {}
    for tier in TIERS:
        bounds = [(0, "", (0, 0), (0, 0))] if tier not in few else []
        for n, lane in enumerate(small.plan.lanes if tier in few else ()):
            if lane.ops:
                alive = [
                    (a := few[tier][n][i]) + more * (many[tier][n][j] - a) for i, j in enumerate(moments[n])
                ]
                at = alive.index(highest := max(alive))
                op, moved = _started(small, n, at), _started(large, n, moments[n][at])
                index = [a + more * (b - a) for a, b in zip(op.index, moved.index, strict=True)]
                bounds.append((highest, label(op.verb, tuple(index)), (n, at), (n, moments[n][at])))
        nbytes, name, known[0][tier], known[1][tier] = min(bounds)
        peaks[tier] = Peak(tier, kept[tier], nbytes, name)
    return peaks, known


def _started(step: PlannedStep, lane: int, moment: int) -> Op:
    """The operation of a lane that has just started at a moment."""
    return step.plan.graph.ops[step.plan.lanes[lane].ops[max(0, moment - 1)]]
