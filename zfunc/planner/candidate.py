"""A step planned with given settings: laid out, scheduled, verified, simulated; many micro-batches from a few.

Equal specs, settings and hardware give equal steps on every rank. The costs of the segments are in the spec, so no
torch is needed.

Once a step has settled, every two further groups of micro-batches add the same seconds, and the same bytes to the
same peaks: their inputs, which wait; of several devices a peak must grow as fast as any moment of its lane. Two,
because groups may alternate. It has settled where each operation follows its like of two groups before after the
same seconds, on every lane: then no lane falls behind another. And where two groups add as many seconds as where
all work that does not grow takes no time: then nothing hides behind that work, which more groups would bring to
light. A step that has not, or of few groups, is simulated in full. Nothing here knows what the operations do.

The invariant: the result is that of the full simulation, memory to the byte, and time within ten times `CLOSE`,
since two groups are compared with two, and many pairs are added up.
"""

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise, product, takewhile
from typing import TypeVar

from attrs import asdict, evolve, frozen

from zfunc.core.bucketing import in_buckets, lay_out
from zfunc.core.display import brief
from zfunc.core.extents import whole_blocks
from zfunc.core.graph import KINDS, Graph, Kind, Op, Region, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import (
    Peak,
    bytes_by_tier,
    initial_memory,
    peak_breakdown,
    peak_memory,
    persistent_bytes,
    transient_bytes,
)
from zfunc.core.plan import Plan
from zfunc.core.recipes import recipe_of
from zfunc.core.regions import USED_WHOLLY, Regions, rings
from zfunc.core.setting_values import DISK
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import seconds_alone, simulate
from zfunc.core.spec import StepSpec
from zfunc.core.timeline import Event, Timeline
from zfunc.core.verifier import plan_with
from zfunc.schedules import make_schedule
from zfunc.units import format_bytes

DRIVES: tuple[Kind, ...] = ("read", "write")
FEW = (3, 6)  # groups of micro-batches, or one more, after which a step may have settled
MANY = 6  # times as many micro-batches as a few: fewer are simulated in full, which takes no longer
CLOSE = 1e-5  # of a step's time
Key = TypeVar("Key")
Amount = TypeVar("Amount", int, float)
WorkOf = Mapping[tuple[Kind, int], float]  # seconds of a kind of operation on a device
Placed = tuple[Event, str, bool]  # an operation of a lane: when it runs, its verb, whether it follows others


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which scans a plan's values again and again, and finds no cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@frozen(eq=False, slots=False)
class Repetition:
    """A step of many micro-batches, extrapolated from two steps of few: `small`, plus `more` times the
    difference that two more groups of micro-batches make in `large`."""

    small: "PlannedStep"
    large: "PlannedStep"
    more: int

    def total(self, measure: Callable[["PlannedStep"], dict[Key, Amount]]) -> dict[Key, Amount]:
        """Sums by key for the step of many micro-batches, extrapolated from what `measure` returns for a step."""
        few, many = measure(self.small), measure(self.large)
        added = {key: many.get(key, 0) - few.get(key, 0) for key in {**few, **many}}
        return {key: few.get(key, 0) + self.more * nbytes for key, nbytes in added.items()}

    @cached_property
    def grown(self) -> float:
        """Simulated seconds that two more groups of micro-batches add to the step."""
        return self.large.seconds - self.small.seconds

    def settled(self) -> bool:
        """Whether every lane repeats with two more groups of micro-batches, and later groups add equal seconds."""
        repeats = all(map(self._repeats, self.large.timeline.lanes))
        return repeats and abs((longest := self._longest()) - self.grown) <= 2 * CLOSE * longest

    def peaks_stay(self) -> bool:
        """Whether each device's peak memory stays at the same operation as groups of micro-batches are added,
        and grows by the same number of bytes with each group."""
        small, large = (transient_bytes(step.plan) for step in (self.small, self.large))
        return all(self._stays(at, few, large[at]) for at, few in small.items() if "device" in at)

    def _stays(self, tier: Tier, few: list[list[int]], many: list[list[int]]) -> bool:
        """Whether the same lane still determines the peak bytes of `tier` when groups are added, and no
        moment of that lane grows by more bytes than the peak; `few` and `many` have, by lane, the bytes alive
        at each moment."""
        lanes, bounding = self.small.plan.lanes, self.small.peaks[tier].moment[0]
        grown = [max(after) - max(before) for before, after in zip(few, many, strict=True)]
        bounds = {n: max(few[n]) + self.more * grown[n] for n, lane in enumerate(lanes) if lane.ops}
        own, more = ([*step.on(lanes[bounding].name)] for step in (self.small, self.large))
        before, after = few[bounding], many[bounding]
        first = [y - x <= grown[bounding] for x, y in zip(before, after, strict=False)]
        last = [y - x <= grown[bounding] for x, y in zip(before[::-1], after[::-1], strict=False)]
        # The moments before the further groups begin, and those behind them.
        even = min(_alike(own, more), [*first, False].index(False) - 1)
        even += min(_alike(own[::-1], more[::-1]), [*last, False].index(False) - 1)
        return bounds[bounding] == min(bounds.values()) and even >= len(own)

    @cached_property
    def _grows(self) -> set[str]:
        """The verbs of the operations that two more groups of micro-batches add to the step."""
        large, small = (Counter(op.verb for op in step.graph) for step in (self.large, self.small))
        return {*(large - small)}

    def _repeats(self, lane: str) -> bool:
        """Whether lane `lane` runs the same operations for each group of micro-batches. Exempt are operations
        without predecessors, if in every group they end so early that nothing behind them on the lane waits.
        """
        few, many = ([*step.on(lane)] for step in (self.small, self.large))
        if self._even(few, many):
            return True
        behind = pairwise(many[max(0, _alike(few, many) - 1) :])
        slack = (b.start - a.end for (a, _, held), (b, _, follows) in behind if follows and not held)
        free = [sum(e.seconds for e, _, follows in x if not follows) for x in (few, many)]
        enough = self.more * (free[1] - free[0]) <= min(slack, default=math.inf)
        return enough and self._even(*([x for x in of if x[2]] for of in (few, many)))

    def _even(self, few: list[Placed], many: list[Placed]) -> bool:
        """Whether the end of the large step disturbs no earlier group on its lane `many`: its operations are
        those of lane `few` of the small step with more inserted at one place, and those of the last group but
        one start as long after the like ones two groups before as two groups take."""
        if _alike(few, many) + _alike(few[::-1], many[::-1]) < len(few):
            return False
        starts = [(verb, e.start) for e, verb, _ in many if verb in self._grows]
        added = len(many) - len(few)
        group = (added + 1) // 2
        later, before = (starts[n - 2 * group : n - group] for n in (len(starts), len(starts) - added))
        return all(
            x == y and abs(b - a - self.grown) * self.more <= CLOSE * self.grown
            for (x, a), (y, b) in zip(before, later, strict=False)
        )

    def _longest(self) -> float:
        """Lower bound of the simulated seconds that two more groups add: operations that do not repeat, or
        have no predecessors, take no time."""
        grows = self._grows

        def seconds(step: "PlannedStep") -> float:
            alone = seconds_alone(step.graph, step.hardware)
            for i, (op, before) in enumerate(zip(step.graph, step.graph.predecessors, strict=True)):
                alone[i] *= op.verb in grows and bool(before)
            return simulate(step.plan, step.hardware, alone).seconds

        return seconds(self.large) - seconds(self.small)


def _alike(few: Sequence[Placed], many: Sequence[Placed]) -> int:
    """The number of operations at the beginning of `few` and `many` whose verbs are the same in both."""
    differ = (n for n, ((_, x, _), (_, y, _)) in enumerate(zip(few, many, strict=False)) if x != y)
    return next(differ, min(len(few), len(many)))


@frozen(eq=False, slots=False)
class PlannedStep:
    """The step of a spec on `hardware`; graph, plan, seconds and memory are computed when first read.

    Raises PlanError, when the plan is first read, for a schedule that makes a wrong plan.
    """

    spec: StepSpec
    hardware: Hardware

    def __repr__(self) -> str:
        return brief(self, "settings", "seconds", "fits")

    @property
    def settings(self) -> StepSettings:
        """The StepSettings that the step was planned with, from its spec."""
        return self.spec.settings

    # --- by arithmetic alone -----------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        """The graph of the step's operations."""
        return operations_of(self.spec)

    @cached_property
    def kept(self) -> dict[Tier, int]:
        """Bytes, by tier, of the regions that the whole step keeps allocated, the same for every schedule."""
        return self._sum(persistent_bytes)

    @cached_property
    def least_kept(self) -> dict[Tier, int]:
        """Lower bound of `kept`, in bytes by tier, without making operations."""
        nbytes, at = Counter[Tier](), Regions(self.spec)
        for r in (*at.state(), *self._waiting):
            nbytes[r.place] += r.nbytes
        for device in range(self.settings.devices):
            for ring in takewhile(lambda x: x.region.buffer in USED_WHOLLY, rings(at, device)):
                nbytes[ring.region.place] += sum(count * room for _, count, room in ring.classes)
        return dict(nbytes)

    @cached_property
    def _waiting(self) -> list[Region]:
        """Regions, kept beside the state, of gradients and activations that wait off the device."""
        spec, at = self.spec, Regions(self.spec)
        gradients = (x for x in spec.places if x.waits)
        kept = [at("spilled", x.index) if x.gradient == DISK else at.waiting(x.index) for x in gradients]
        away = (s for s, where in enumerate(spec.activations) if where != "device")
        stashed = product(away, range(spec.settings.in_flight), ("pinned", "disk"))
        return [*dict.fromkeys((*kept, *(r for s, m, tier in stashed for r in at.stash(m, s, tier))))]

    @cached_property
    def least_work(self) -> "WorkOf":
        """Lower bound of `work_of`, in seconds by kind and device, without making operations."""
        spec, seconds = self.spec, self.hardware.seconds
        work = Counter[tuple[Kind, int]]()
        passes = Counter((x.way, x.s, x.device) for own in spec.mesh.listed for x in own)
        for (way, s, device), count in passes.items():
            cost = spec.costs[s].passes[way]
            work["compute", device] += count * seconds(Op("", (), "compute", **asdict(cost)))
        on_disk = [s for s, where in enumerate(spec.activations) if where == DISK]
        spilled = [r.nbytes for r in self._waiting if r.buffer == "spilled"]
        for kind in DRIVES:
            whole, paged = kind == "write" and spec.commit, (spec.extents[b] for b in spec.paged)
            moved = Counter(x.nbytes if whole else x.moved_bytes for x in paged) + Counter(spilled)
            for s in on_disk:
                regions = Regions(spec).stash(0, s, DISK, new=kind == "write")
                moved[sum(r.nbytes for r in regions)] += spec.settings.micro_batches
            times = ((seconds(Op("", (), kind, nbytes=whole_blocks(n))), count) for n, count in moved.items())
            work[kind, 0] = sum(count * taken for taken, count in times)
        return work

    @cached_property
    def work_of(self) -> "WorkOf":
        """Seconds of all operations of the step, summed by kind and device."""

        def of(graph: Graph) -> dict[tuple[Kind, int], float]:
            seconds = {(kind, 0): 0.0 for kind in KINDS}
            for op, alone in zip(graph, seconds_alone(graph, self.hardware), strict=True):
                seconds[op.kind, op.device] = seconds.get((op.kind, op.device), 0.0) + alone
            return seconds

        return self._sum(of)

    @cached_property
    def work(self) -> dict[Kind, float]:
        """Seconds of all the step's operations of each kind, on the device that has most of that kind."""
        return by_kind(self.work_of)

    def _sum(self, measure: Callable[[Graph], dict[Key, Amount]]) -> dict[Key, Amount]:
        """Sums by key of what `measure` returns for the step's graph, extrapolated if micro-batches are many."""
        for few in self._few:
            return few.total(lambda step: measure(step.graph))
        return measure(self.graph)

    # --- simulated ---------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Simulated duration of the step in seconds."""
        return self._figures[0]

    @property
    def peaks(self) -> dict[Tier, Peak]:
        """The step's Peak on each tier: its kept and transient bytes, and when they are reached."""
        return self._figures[1]

    @cached_property
    def _figures(self) -> tuple[float, dict[Tier, Peak]]:
        if (few := self.repetition) is None:
            return self.timeline.seconds, peak_memory(self.plan)
        nbytes, kept = few.total(lambda step: step.memory), self.kept
        return self._from_few[1], {
            tier: evolve(peak, kept=kept[tier], transient=nbytes[tier] - kept[tier])
            for tier, peak in few.small.peaks.items()
        }

    @property
    def memory(self) -> dict[Tier, int]:
        """Peak memory of the step on each tier, in bytes."""
        return bytes_by_tier(self.peaks)

    @cached_property
    def lacking(self) -> dict[Tier, int]:
        """Bytes that the step needs beyond each tier's memory; if the step fits, bytes that `init` lacks."""
        return self.hardware.lacking(self.memory) or self.hardware.lacking(
            bytes_by_tier(initial_memory(self.spec))
        )

    @property
    def fits(self) -> bool:
        """Whether the step and `zfunc.init` fit in the memory of every tier whose size is known."""
        return not self.lacking

    @cached_property
    def held(self) -> dict[Tier, dict[str, int]]:
        """Bytes of the step's peak memory on each tier, by buffer, the largest first."""
        if (few := self.repetition) is not None:
            parts = {x: few.total(lambda step, tier=x: step.held[tier]) for x in self.peaks}
            return {tier: dict(sorted(x.items(), key=lambda item: -item[1])) for tier, x in parts.items()}
        return peak_breakdown(self.plan, {tier: peak.moment for tier, peak in self.peaks.items()})

    def total(self, measure: Callable[["PlannedStep"], dict[Key, Amount]]) -> dict[Key, Amount]:
        """Sums by key of what `measure` returns for this step, extrapolated if the step has a `repetition`."""
        return measure(self) if self.repetition is None else self.repetition.total(measure)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the step, with all its micro-batches."""
        return plan_with(make_schedule(self.settings.schedule, self.hardware), self.graph)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the step, with all its micro-batches."""
        return simulate(self.plan, self.hardware)

    def on(self, lane: str) -> Iterator[Placed]:
        """The events of lane `lane`, each with its operation's verb and whether the operation has predecessors."""
        for e in self.timeline.on(lane):
            i = self.graph.position[e.op]
            yield e, self.graph.ops[i].verb, bool(self.graph.predecessors[i])

    @cached_property
    def seconds_without_compute(self) -> float:
        """Simulated seconds of the step if compute on its devices took no time."""
        if (few := self.repetition) is not None:
            small, large = (step.seconds_without_compute for step in (few.small, few.large))
            return small + few.more * (large - small)
        alone = seconds_alone(self.graph, self.hardware)
        free = (0.0 if op.kind == "compute" else x for op, x in zip(self.graph, alone, strict=True))
        return simulate(self.plan, self.hardware, [*free]).seconds

    def without_operations(self) -> "PlannedStep":
        """Simulate the step, drop its operations, which are many and can be made again, and return the step."""
        _ = self._figures, self.work
        self.forget_operations()
        return self

    def forget_operations(self) -> None:
        """Drop the step's graph, plan and timeline; they are made again when read."""
        for name in ("graph", "_few", "plan", "timeline", "_from_few"):
            self.__dict__.pop(name, None)

    # --- many micro-batches from a few -------------------------------------------------------------------

    @property
    def repetition(self) -> Repetition | None:
        """The Repetition that gives this step's figures from few micro-batches; None if groups do not repeat."""
        return self._from_few[0]

    @property
    def unsettled_seconds(self) -> float:
        """Lower bound of the step's seconds, from few micro-batches, if it has no `repetition`; else 0."""
        return self._from_few[1] if self.repetition is None else 0.0

    @cached_property
    def _from_few(self) -> tuple[Repetition | None, float]:
        """The step's Repetition and its seconds; without a Repetition, None and a lower bound of the seconds."""
        least: list[float] = []
        for few in self._few:
            least.append(few.small.seconds + few.more * few.grown)
            same = [x.op for x in few.small.peaks.values()] == [x.op for x in few.large.peaks.values()]
            if same and few.settled() and (self.settings.devices == 1 or few.peaks_stay()):
                return few, least[-1]
        return None, min(least, default=0.0)

    @cached_property
    def _few(self) -> list[Repetition]:
        """Repetitions to try for the step, each of a few groups of micro-batches and of two groups more."""
        settings = self.settings
        # Of a pipeline as many as there are devices: by then all are busy, and each has what waits for backward.
        total, group = (
            settings.micro_batches,
            settings.group_size if settings.devices == 1 else settings.devices,
        )

        def of(few: int) -> Repetition:
            few += (total // group - few) % 2
            counts = few * group + total % group, (few + 2) * group + total % group
            specs = (evolve(self.spec, settings=evolve(self.settings, micro_batches=n)) for n in counts)
            small, large = (evolve(self, spec=spec) for spec in specs)
            return Repetition(small, large, (total - counts[0]) // group // 2)

        return [of(few) for few in FEW if total >= MANY * few * group]


def step_of(spec: StepSpec, settings: StepSettings, hardware: Hardware) -> PlannedStep:
    """The PlannedStep of `spec` under `settings`, laid out anew; costs of a micro-batch stay those of `spec`."""
    laid_out = in_buckets(lay_out(spec.layout.parameters, settings, spec.world), settings)
    return PlannedStep(evolve(spec, **laid_out), hardware)


def by_kind(work: WorkOf) -> dict[Kind, float]:
    """For each kind of operation in `work`, the seconds on the device that has most of that kind."""
    return {kind: max([0.0, *(x for (k, _), x in work.items() if k == kind)]) for kind in KINDS}


def least_seconds(work: WorkOf, hardware: Hardware) -> float:
    """Lower bound of a step's seconds under any schedule: the most `work` of a kind on a device, or of a resource.

    >>> from zfunc.core.hardware import ROUND
    >>> least_seconds({("read", 0): 2.0, ("write", 0): 3.0, ("compute", 0): 4.0}, ROUND)
    5.0
    """
    used = Counter[tuple[str, int]]()
    for resource, shares in hardware.shared.items():
        group = hardware.neighbours.get(resource, sys.maxsize)
        for (kind, device), seconds in work.items():
            used[resource, device // group] += shares.get(kind, 0.0) * seconds
    return max([0.0, *work.values(), *used.values()])


def operations_of(spec: StepSpec) -> Graph:
    """The graph of the step of `spec`, with the spec's own settings."""
    return Graph(recipe_of(spec)(spec))


def gains_and_costs(new: PlannedStep, old: PlannedStep) -> str:
    """Text of the gains and costs of `new` against `old`: "3 % faster, 0.4 GiB more pinned"."""
    return ", ".join([_speed_change(new.seconds, old.seconds), *_memory_changes(new.memory, old.memory)])


def shortage_text(lacking: dict[Tier, int]) -> str:
    """Text on the bytes of memory that a step lacks, by tier.

    >>> shortage_text({"device": 5 << 29})
    '2.5 GiB of device memory short'
    """
    return ", ".join(f"{format_bytes(nbytes)} of {tier} memory short" for tier, nbytes in lacking.items())


def _speed_change(new: float, old: float) -> str:
    """Text on a step's seconds, `new` against `old`: in percent up to twice or half, beyond that as a factor.

    >>> _speed_change(1.01, 1.0), _speed_change(0.996, 1.0), _speed_change(5.32, 1.0), _speed_change(0.3, 1.0)
    ('1 % slower', '0.4 % faster', '5.3 times as long', '3.3 times as fast')
    """
    change = new / old - 1 if old else 0.0
    if abs(change) < 0.0005:
        return "as fast"
    if new > 2 * old or old > 2 * new:
        return f"{new / old:.2g} times as long" if new > old else f"{old / new:.2g} times as fast"
    digits = 0 if abs(change) >= 0.0095 else 1
    return f"{100 * abs(change):.{digits}f} % {'slower' if change > 0 else 'faster'}"


def _memory_changes(new: dict[Tier, int], old: dict[Tier, int]) -> Iterator[str]:
    """Texts on the tiers where the `new` step needs over 1 % and 1 MiB more or fewer bytes than the `old`."""
    for tier, nbytes in new.items():
        change = nbytes - old[tier]
        if abs(change) > 0.01 * max(nbytes, old[tier]) and abs(change) >= 1 << 20:
            yield f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'} {tier}"
