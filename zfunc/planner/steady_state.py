"""Time and memory of a step of many micro-batches, from steps of a few.

Once a step has settled, one more micro-batch, or group of them, inserts a period into every lane and changes
nothing else: what is before it runs at the same times, what is after it runs a period later. Where the simulated
steps of n and n + 1 show that, those of larger numbers follow; where they do not, the step is simulated in full.

A single group has no such period, because each of its passes gets longer. It has settled once the step gets longer
by about as much as if all work that does not grow with it took no time: then nearly all passes hide that work, and
longer ones hide more. Each further micro-batch takes no less than the last, and no more than that. Nothing here
knows what the operations do.

The invariant: the result is that of the full simulation, memory to the byte and time within `CLOSE`, or `NEAR` for
a single group. A schedule that compares plans compares those of the few.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from attrs import evolve, field, frozen

from zfunc.core.graph import TIERS, Graph, Kind, Op, Tier, label
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import Moment, Peak, persistent_bytes, transient_bytes
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import Speeds, seconds_alone, simulate
from zfunc.core.spec import StepSpec
from zfunc.core.timeline import Event
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
CLOSE = 1e-5  # of a step's time
NEAR = 5e-3  # the same, where a pass may be too short among a few micro-batches to show


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
    _simulations: dict[int, PlannedStep] = field(factory=dict[int, PlannedStep], init=False)

    @property
    def exact_step(self) -> PlannedStep:
        """The step of `simulate_choice`, from a few micro-batches where that is `CLOSE`."""
        return self._in_full() if self._is_one_group else self._estimated()

    @cached_property
    def step(self) -> PlannedStep:
        """The step of `simulate_choice`, from a few micro-batches where it settles, without its operations: those
        of all candidates are too many to keep. Raises PlanError likewise."""
        return evolve(self._few_say.step or self._in_full().summary, work=self.work)

    @property
    def unsettled_seconds(self) -> float:
        """The least that a step takes that does not settle, if it goes on as a few micro-batches do; else 0."""
        return self._few_say.unsettled

    def starts_faster(self, than: PlannedStep, gain: float) -> bool:
        """Whether a few micro-batches take less time than those of another step, by a share of `gain`; True where
        that is not known."""
        few, other = next(self._few, None), than.of_few
        if few is None or other is None or other.spec.micro_batches != few:
            return True
        self._simulations[few] = self._simulated(few)
        return self._simulations[few].seconds <= other.seconds * (1 - gain)

    @cached_property
    def _few_say(self) -> "_FewSay":
        found = self._from_few()
        self._simulations.clear()
        return evolve(found, step=found.step and found.step.summary)

    def _estimated(self) -> PlannedStep:
        return self._from_few().step or self._in_full()

    def _from_few(self) -> "_FewSay":
        simulated = self._simulations
        least: list[float] = []
        for few in self._few:
            for n in (few, few + self._period):
                simulated[n] = simulated.get(n) or self._simulated(n)
            small, large = simulated[few], simulated[few + self._period]
            more = (self.spec.micro_batches - few) // self._period
            settled = _longer_passes(small, large) if self._is_one_group else _inserted_periods(small, large)
            if settled is not None:
                insertions, period = settled
                seconds = small.seconds + more * period
                peaks, moments = _peaks(small, large, insertions, more, self.kept)
                of = Repetition(small, large, more, moments)
                step = PlannedStep(self.settings, self._spec, self.hardware, seconds, peaks, None, of)
                return _FewSay(step, 0.0)
            least.append(small.seconds + more * (large.seconds - small.seconds))
        return _FewSay(None, min(least, default=0.0))

    @cached_property
    def kept(self) -> dict[Tier, int]:
        """The bytes of the kept regions by tier, whatever the schedule."""
        return self._sum(persistent_bytes)

    @cached_property
    def work(self) -> dict[Kind, float]:
        """The seconds of all operations of each kind: under no schedule is a step faster than the most of them."""
        return self._sum(lambda graph: work_of(graph, self.hardware))

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
        for few in self._few_groups:
            if total >= WORTH * few * period:
                yield few * period + total % period

    @property
    def _few_groups(self) -> tuple[int, ...]:
        return FEW_OF_ONE_GROUP if self._is_one_group else FEW

    @cached_property
    def _spec(self) -> StepSpec:
        return with_settings(self.spec, self.settings)

    def _of(self, micro_batches: int) -> StepSpec:
        return evolve(self._spec, micro_batches=micro_batches)

    def _graph(self, micro_batches: int) -> Graph:
        if micro_batches not in self.graphs:
            self.graphs[micro_batches] = operations_of(self._of(micro_batches))
        return self.graphs[micro_batches]

    def _in_full(self) -> PlannedStep:
        return self._simulated(self.spec.micro_batches)

    def _simulated(self, micro_batches: int) -> PlannedStep:
        graph, spec = self._graph(micro_batches), self._of(micro_batches)
        return simulate_operations(graph, spec, self.settings, self.hardware)

    def _sum(self, measure: Callable[[Graph], dict[Key, Amount]]) -> dict[Key, Amount]:
        """What `measure` sums over the operations of all micro-batches."""
        total, period = self.spec.micro_batches, self._period
        few = self._few_groups[0] * period + total % period
        if total < WORTH * few:
            return measure(self._graph(total))
        one, two = (measure(self._graph(n)) for n in (few, few + period))
        return extrapolate_linearly(one, two, (total - few) // period)


@frozen(eq=False)
class _FewSay:
    """A step from a few micro-batches, if it has settled; else the seconds that it takes at least if it goes on as
    they do."""

    step: PlannedStep | None
    unsettled: float


@frozen
class _Insertion:
    """What one more group of micro-batches adds to a lane: `count` operations, `at` one of the smaller step."""

    at: int
    count: int


Insertions = list[list[_Insertion]]  # of each lane


class _Settled(NamedTuple):
    """What a step gets with one more group of micro-batches, or with one more in a single group; in seconds."""

    insertions: Insertions
    period: float


def _comparable(small: PlannedStep, large: PlannedStep) -> bool:
    return [lane.name for lane in small.plan.lanes] == [lane.name for lane in large.plan.lanes]


def _inserted_periods(small: PlannedStep, large: PlannedStep) -> _Settled | None:
    """The insertion on each lane that makes the larger step of the smaller one; None unless both have settled."""
    period = large.seconds - small.seconds
    if not _comparable(small, large) or period <= 0:
        return None
    insertions: Insertions = []
    for n, (few, more) in enumerate(zip(_lanes(small), _lanes(large), strict=True)):
        count = len(more) - len(few)
        before = _alike(few, more, 0.0, CLOSE * period)
        after = _alike(reversed(few), reversed(more), period, CLOSE * period)
        first = len(few) - after
        if count < 0 or before < first:
            return None
        # From `first` on, the larger step repeats the smaller one a period later. Where that overlaps what they
        # have in common by a period, each period repeats the one before it.
        if before >= first + count:
            insertions.append([_Insertion(first + count, count)])
        elif _runs_ahead(large, n, before, count, period):
            insertions.append([_Insertion(before, count)])
        else:
            return None
    return _Settled(insertions, period)


def _longer_passes(small: PlannedStep, large: PlannedStep) -> _Settled | None:
    """The same of one more micro-batch of a single group, which inserts operations into each pass."""
    if not _comparable(small, large):
        return None
    least, most = large.seconds - small.seconds, _longest_period(small, large)
    if abs(most - least) > 2 * NEAR * most:
        return None
    insertions: Insertions = []
    for few, more in zip(small.plan.lanes, large.plan.lanes, strict=True):
        ops = [[step.plan.graph.ops[i] for i in lane.ops] for step, lane in ((small, few), (large, more))]
        found = _additions(*ops, small.spec.micro_batches // 2)
        if found is None:
            return None
        insertions.append(found)
    return _Settled(insertions, (least + most) / 2)


def _longest_period(small: PlannedStep, large: PlannedStep) -> float:
    """The seconds that one more micro-batch adds to a step of many: only what grows with the passes takes time."""
    counts = [Counter(op.verb for op in step.plan.graph) for step in (small, large)]
    grows = {verb for verb in counts[1] if counts[1][verb] > counts[0][verb]}

    def seconds(step: PlannedStep) -> float:
        alone = seconds_alone(step.plan.graph, step.hardware)
        growing = [x if op.verb in grows else 0.0 for x, op in zip(alone, step.plan.graph, strict=True)]
        return simulate(step.plan, step.hardware, growing).seconds

    return seconds(large) - seconds(small)


def _additions(few: Sequence[Op], more: Sequence[Op], earlier: int) -> list[_Insertion] | None:
    """Where a lane has operations of one more micro-batch; None if the lanes differ in anything else.

    The last ones of both correspond, and what is new comes before them in a pass. It is found `earlier`
    micro-batches before that, away from both ends of the pass.
    """
    names = _names_in_larger(few, more)
    insertions: list[_Insertion] = []
    at = 0
    for op in more:
        if at < len(few) and names[at] == op.name:
            at += 1
        elif insertions and insertions[-1].at == at:
            insertions[-1] = _Insertion(at, insertions[-1].count + 1)
        else:
            insertions.append(_Insertion(at, 1))
    if at < len(few):
        return None
    added = 0
    for n, x in enumerate(insertions):
        first, added = x.at - earlier * x.count, added + x.count
        if any(few[i].verb != more[i + added].verb for i in range(max(0, first), x.at)):
            return None
        insertions[n] = _Insertion(first, x.count)
    ends = [0, *(x.at for x in insertions)]
    return insertions if all(a <= b for a, b in pairwise(ends)) else None


def _names_in_larger(few: Iterable[Op], more: Iterable[Op]) -> list[str]:
    """What each operation is called where there is one micro-batch more: that of the last has its number then."""
    new = {op.name for op in more}.difference(op.name for op in few)

    def name(op: Op) -> str:
        if not op.index:
            return op.name
        later = label(op.verb, (op.index[0] + 1, *op.index[1:]))
        return later if later in new else op.name

    return [name(op) for op in few]


def _lanes(step: PlannedStep) -> list[list[tuple[Op, Event]]]:
    """The operations of each lane and when they run."""
    events, ops = iter(step.timeline.events), step.plan.graph.ops
    return [[(ops[i], next(events)) for i in lane.ops] for lane in step.plan.lanes]


def _alike(
    few: Iterable[tuple[Op, Event]], more: Iterable[tuple[Op, Event]], later: float, slack: float
) -> int:
    """How many operations are the same, from the first on, in the larger step `later` by so many seconds."""
    count = 0
    for (op, a), (other, b) in zip(few, more, strict=False):
        if (
            op.verb != other.verb
            or abs(b.start - a.start - later) > slack
            or abs(b.end - a.end - later) > slack
        ):
            break
        count += 1
    return count


def _runs_ahead(step: PlannedStep, lane: int, at: int, count: int, period: float) -> bool:
    """Whether a lane does what a micro-batch inserts for all of them at once, because it waits for nothing: loads.

    It must keep up, and what it slows the other lanes down while it runs beside them must be `CLOSE` to nothing.
    """
    lanes, ops = step.plan.lanes, step.plan.graph.ops
    inserted = lanes[lane].ops[at : at + count]
    own = {ops[i].kind for i in inserted}
    others = {ops[i].kind for n, other in enumerate(lanes) if n != lane for i in other.ops}
    if own & others or any(step.plan.waits[i] for i in inserted):
        return False
    speeds = Speeds(step.hardware)
    alone, beside = (speeds.of(dict.fromkeys(kinds, 1)) for kinds in (others, others | own))
    slowed = max((1 - beside[kind] / alone[kind] for kind in others), default=0.0)
    busy = sum(step.hardware.seconds(ops[i]) for i in inserted)
    return busy <= period and busy * slowed <= CLOSE * period


def _later(positions: int, insertions: list[_Insertion]) -> Iterator[int]:
    """Where each position of a lane is in the larger step."""
    edges = [0, *(x.at + 1 for x in insertions), positions]
    later = accumulate((x.count for x in insertions), initial=0)
    for (start, stop), by in zip(pairwise(edges), later, strict=True):
        yield from range(start + by, stop + by)


def _peaks(
    small: PlannedStep, large: PlannedStep, insertions: Insertions, more: int, kept: dict[Tier, int]
) -> tuple[dict[Tier, Peak], tuple[dict[Tier, Moment], dict[Tier, Moment]]]:
    """The peaks with `more` insertions, and their moments in both steps. The bytes at every moment grow by as many
    with each insertion."""
    few, many = transient_bytes(small.plan), transient_bytes(large.plan)
    peaks: dict[Tier, Peak] = {}
    moments: dict[Tier, tuple[Moment, Moment]] = {}
    for tier in TIERS:
        bounds = [(0, "", (0, 0), (0, 0))] if tier not in few else []
        for n, lane in enumerate(small.plan.lanes if tier in few else ()):
            if lane.ops:
                now, then = few[tier][n], many[tier][n]
                later = [*_later(len(now), insertions[n])]
                alive = [nbytes + more * (then[i] - nbytes) for i, nbytes in zip(later, now, strict=True)]
                highest = max(alive)
                at = alive.index(highest)
                op, moved = _started(small, n, at), _started(large, n, later[at])
                index = [a + more * (b - a) for a, b in zip(op.index, moved.index, strict=True)]
                bounds.append((highest, label(op.verb, tuple(index)), (n, at), (n, later[at])))
        nbytes, name, *moments[tier] = min(bounds)
        peaks[tier] = Peak(tier, kept[tier], nbytes, name)
    return peaks, tuple({tier: at[k] for tier, at in moments.items()} for k in range(2))


def _started(step: PlannedStep, lane: int, moment: int) -> Op:
    """The operation of a lane that has just started at a moment."""
    return step.plan.graph.ops[step.plan.lanes[lane].ops[max(0, moment - 1)]]
