"""A step planned with given settings: laid out, scheduled, verified, simulated.

Equal specs, settings and hardware give equal steps on every rank. The costs of the segments are in the spec, so no
torch is needed.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

from attrs import evolve, frozen

from zfunc.core.bucketing import in_buckets, lay_out
from zfunc.core.display import brief
from zfunc.core.graph import KINDS, TIERS, Graph, Kind, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import Peak, peak_breakdown, peak_memory
from zfunc.core.plan import Plan
from zfunc.core.recipes import recipe_of
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import seconds_alone, simulate
from zfunc.core.spec import StepSpec
from zfunc.core.timeline import Timeline
from zfunc.core.verifier import plan_with
from zfunc.schedules import make_schedule
from zfunc.units import format_bytes

Key = TypeVar("Key")
Amount = TypeVar("Amount", int, float)


def extrapolate_linearly(
    small: Mapping[Key, Amount], large: Mapping[Key, Amount], more: int
) -> dict[Key, Amount]:
    """The amounts of `small`, and `more` times by how much those of `large` exceed them.

    >>> extrapolate_linearly({"a": 3, "b": 1}, {"a": 5, "b": 1}, 10)
    {'a': 23, 'b': 1}
    """
    keys = dict.fromkeys([*small, *large])
    return {key: (few := small.get(key, 0)) + more * (large.get(key, 0) - few) for key in keys}


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector, which looks at every value of a plan again and again, and finds no cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@frozen(eq=False)
class Repetition:
    """A step of many micro-batches that is the `small` one and, `more` times, what the `large` one adds to it."""

    small: "PlannedStep"
    large: "PlannedStep"
    more: int


@frozen(eq=False)
class PlannedStep:
    """The step of `settings` on `hardware`, and its simulated time; with the plan, or what it repeats."""

    settings: StepSettings
    spec: StepSpec
    hardware: Hardware
    seconds: float
    _peaks: dict[Tier, Peak] | None = None
    _simulated: tuple[Plan, Timeline] | None = None
    _repetition: Repetition | None = None
    _work: dict[Kind, float] | None = None

    def __repr__(self) -> str:
        return brief(self, "settings", "seconds", "fits")

    @property
    def plan(self) -> Plan:
        """The plan; made now, if the step was not simulated in full."""
        return self._full[0]

    @property
    def timeline(self) -> Timeline:
        """When each operation would run."""
        return self._full[1]

    @cached_property
    def _full(self) -> tuple[Plan, Timeline]:
        if self._simulated is not None:
            return self._simulated
        full = simulate_operations(operations_of(self.spec), self.spec, self.settings, self.hardware)
        return full.plan, full.timeline

    @cached_property
    def peaks(self) -> dict[Tier, Peak]:
        """The peak of every tier."""
        return peak_memory(self.plan) if self._peaks is None else self._peaks

    @cached_property
    def held(self) -> dict[Tier, dict[str, int]]:
        """Bytes of each tier's peak by buffer, the largest first."""
        if (of := self._repetition) is not None:
            parts = {x: extrapolate_linearly(of.small.held[x], of.large.held[x], of.more) for x in TIERS}
            return {tier: dict(sorted(x.items(), key=lambda item: -item[1])) for tier, x in parts.items()}
        known = {tier: peak.moment for tier, peak in self.peaks.items()} if self._simulated else None
        return peak_breakdown(self.plan, known)

    @property
    def of_few(self) -> "PlannedStep | None":
        """The step of a few micro-batches that this one was made from, if it was."""
        return self._repetition and self._repetition.small

    def total(self, measure: Callable[["PlannedStep"], dict[Key, Amount]]) -> dict[Key, Amount]:
        """What `measure` sums over the operations of a step that was simulated, or over their seconds."""
        if (of := self._repetition) is None:
            return measure(self)
        return extrapolate_linearly(measure(of.small), measure(of.large), of.more)

    @cached_property
    def work(self) -> dict[Kind, float]:
        """The seconds of all operations of each kind."""
        return self._work or self.total(lambda step: work_of(step.plan.graph, step.hardware))

    @property
    def summary(self) -> "PlannedStep":
        """The same without the operations: these are made again where they are asked for."""
        return PlannedStep(self.settings, self.spec, self.hardware, self.seconds, self.peaks)

    @cached_property
    def lacking(self) -> dict[Tier, int]:
        """The bytes that do not fit, by tier."""
        return self.hardware.lacking(self.memory)

    @property
    def fits(self) -> bool:
        """Whether it fits on every tier whose size is known."""
        return not self.lacking

    @cached_property
    def memory(self) -> dict[Tier, int]:
        """Bytes needed on each tier."""
        return {tier: peak.nbytes for tier, peak in self.peaks.items()}


def with_settings(spec: StepSpec, settings: StepSettings) -> StepSpec:
    """`spec` with these settings, in their buckets. Its costs stay those of their micro-batches."""
    layout = lay_out(spec.layout.parameters, settings, spec.world)
    return evolve(spec, **in_buckets(layout, settings))


def operations_of(spec: StepSpec) -> Graph:
    """The operations of the step of a spec with its settings in it."""
    return Graph(recipe_of(spec)(spec))


def work_of(graph: Graph, hardware: Hardware) -> dict[Kind, float]:
    """The seconds of all operations of each kind: under no schedule is a step faster than the most of them."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for op, alone in zip(graph, seconds_alone(graph, hardware), strict=True):
        seconds[op.kind] += alone
    return seconds


def simulate_choice(spec: StepSpec, settings: StepSettings, hardware: Hardware) -> PlannedStep:
    """The step of `spec` with `settings` on `hardware`. Raises PlanError for a schedule whose plan is wrong."""
    spec = with_settings(spec, settings)
    return simulate_operations(operations_of(spec), spec, settings, hardware)


def simulate_operations(
    graph: Graph, spec: StepSpec, settings: StepSettings, hardware: Hardware
) -> PlannedStep:
    """The same of these operations, which are those of `spec`."""
    plan = plan_with(make_schedule(settings.schedule, hardware), graph)
    timeline = simulate(plan, hardware)
    return PlannedStep(settings, spec, hardware, timeline.seconds, simulated=(plan, timeline))


def gains_and_costs(new: PlannedStep, old: PlannedStep) -> str:
    """What `new` gains and costs against `old`: "3 % faster, 0.4 GiB more pinned"."""
    return ", ".join([_speed_change(new.seconds, old.seconds), *_memory_changes(new.memory, old.memory)])


def shortage_text(lacking: dict[Tier, int]) -> str:
    """What does not fit, in words.

    >>> shortage_text({"device": 5 << 29})
    '2.5 GiB of device memory short'
    """
    return ", ".join(f"{format_bytes(nbytes)} of {tier} memory short" for tier, nbytes in lacking.items())


def _speed_change(new: float, old: float) -> str:
    """Up to twice or half as long in percent, beyond that in times.

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
    """The tiers that need at least 1 % and 1 MiB more or less."""
    for tier, nbytes in new.items():
        change = nbytes - old[tier]
        if abs(change) > 0.01 * max(nbytes, old[tier]) and abs(change) >= 1 << 20:
            yield f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'} {tier}"
