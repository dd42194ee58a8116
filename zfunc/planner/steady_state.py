"""Time and memory of a step of many micro-batches, from steps of a few.

Once a step has settled, one more micro-batch, or group of them, inserts a period into every lane and changes
nothing else: what is before it runs at the same times, what is after it runs a period later. Where the simulated
steps of n and n + 1 show that, those of larger numbers follow; where they do not, the step is simulated in full. So
is one whose micro-batches are a single group, because every pass of that gets longer. Nothing here knows what the
operations do.

The invariant: the result is that of the full simulation, memory to the byte and time within `CLOSE`. A schedule
that compares plans compares those of the few.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from attrs import evolve, frozen

from zfunc.core.graph import KINDS, TIERS, Graph, Kind, Op, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import Peak, persistent_bytes, transient_bytes
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import Speeds
from zfunc.core.spec import StepSpec
from zfunc.core.timeline import Event
from zfunc.planner.candidate import PlannedStep, operations_of, planned_step, simulate_choice

FEW = (3, 6)  # micro-batches after which a step may have settled
WORTH = 3  # times as many micro-batches as a few: fewer are simulated in full
MANY = WORTH * FEW[0]
CLOSE = 1e-5  # of a step's time
Key = TypeVar("Key")
Amount = TypeVar("Amount", int, float)


def estimate(
    spec: StepSpec, settings: StepSettings, hardware: Hardware, graph: Graph | None = None
) -> PlannedStep:
    """The step of `simulate_choice`, from a few micro-batches where it settles. Raises PlanError likewise."""
    group = settings.group_size
    # The passes of a single group get longer with every micro-batch, and nothing repeats.
    for few in (n for n in FEW if group < spec.micro_batches >= WORTH * n * group):
        count = few * group + spec.micro_batches % group
        small, large = (simulate_choice(_of(spec, n), settings, hardware) for n in (count, count + group))
        insertions = _insertions(small, large)
        if insertions is not None:
            more = (spec.micro_batches - count) // group
            seconds = small.seconds + more * (large.seconds - small.seconds)
            return planned_step(spec, settings, hardware, seconds, _peaks(small, large, insertions, more))
    return simulate_choice(spec, settings, hardware, graph)


def kept_bytes(spec: StepSpec, settings: StepSettings, graph: Graph | None = None) -> dict[Tier, int]:
    """The bytes of the kept regions by tier, whatever the schedule; of many micro-batches from those of a few."""
    return _from_few(spec, settings, persistent_bytes, graph)


def work_of(
    spec: StepSpec, settings: StepSettings, hardware: Hardware, graph: Graph | None = None
) -> dict[Kind, float]:
    """The seconds of all operations of each kind: under no schedule does a step take less than the most of them."""

    def seconds(graph: Graph) -> dict[Kind, float]:
        total = dict.fromkeys(KINDS, 0.0)
        for op in graph:
            total[op.kind] += hardware.seconds(op)
        return total

    return _from_few(spec, settings, seconds, graph)


def _from_few(
    spec: StepSpec,
    settings: StepSettings,
    measure: Callable[[Graph], dict[Key, Amount]],
    graph: Graph | None,
) -> dict[Key, Amount]:
    """What `measure` sums over the operations: those of `graph`, or of many micro-batches from a few."""
    repeated = 1 if settings.group_size >= spec.micro_batches else settings.group_size
    if spec.micro_batches < MANY * repeated:
        return measure(graph or operations_of(spec, settings))
    few = FEW[0] * repeated + spec.micro_batches % repeated
    more = (spec.micro_batches - few) // repeated
    one, two = (measure(operations_of(_of(spec, n), settings)) for n in (few, few + repeated))
    return {key: amount + more * (two[key] - amount) for key, amount in one.items()}


def _of(spec: StepSpec, micro_batches: int) -> StepSpec:
    return evolve(spec, micro_batches=micro_batches)


@frozen
class _Insertion:
    """One more group of micro-batches on a lane: `count` operations at position `at` of the smaller step."""

    at: int
    count: int


def _insertions(small: PlannedStep, large: PlannedStep) -> list[_Insertion] | None:
    """The insertion on each lane that makes the larger step of the smaller one; None unless both have settled."""
    period = large.seconds - small.seconds
    if [lane.name for lane in small.plan.lanes] != [lane.name for lane in large.plan.lanes] or period <= 0:
        return None
    insertions: list[_Insertion] = []
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
            insertions.append(_Insertion(first + count, count))
        elif _runs_ahead(large, n, before, count, period):
            insertions.append(_Insertion(before, count))
        else:
            return None
    return insertions


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


def _peaks(
    small: PlannedStep, large: PlannedStep, insertions: list[_Insertion], more: int
) -> dict[Tier, Peak]:
    """The peaks with `more` insertions. The bytes at every moment grow by as many with each of them."""
    few, many = transient_bytes(small.plan), transient_bytes(large.plan)
    peaks: dict[Tier, Peak] = {}
    for tier in TIERS:
        bounds = [(0, "")] if tier not in few else []
        for n, lane in enumerate(small.plan.lanes if tier in few else ()):
            if lane.ops:
                at, count = insertions[n].at, insertions[n].count
                alive = [
                    nbytes + more * (many[tier][n][i + (count if i > at else 0)] - nbytes)
                    for i, nbytes in enumerate(few[tier][n])
                ]
                highest = max(alive)
                op = lane.ops[max(0, alive.index(highest) - 1)]
                bounds.append((highest, small.plan.graph.ops[op].name))
        kept = small.peaks[tier].kept
        kept += more * (large.peaks[tier].kept - kept)
        peaks[tier] = Peak(tier, kept, *min(bounds))
    return peaks
