"""Settings applied to a spec, and the step that comes of it by simulation.

The invariant: equal specs, settings and hardware give equal steps, on every rank. No torch: what segments cost is
in the spec.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from attrs import evolve, frozen

from zfunc.core.graph import Graph, Op, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import Peak, peak_memory
from zfunc.core.plan import Plan
from zfunc.core.recipes import delayed, zero_offload
from zfunc.core.settings import StepSettings, in_buckets, lay_out, settings_with
from zfunc.core.simulator import simulate
from zfunc.core.spec import StepSpec
from zfunc.core.timeline import Timeline
from zfunc.core.verifier import verify
from zfunc.schedules import make_schedule
from zfunc.units import format_bytes


@frozen(eq=False)
class PlannedStep:
    """Settings played through on `hardware`. `lacking` is the bytes there is no room for, by tier."""

    settings: StepSettings
    spec: StepSpec
    hardware: Hardware
    plan: Plan
    timeline: Timeline
    peaks: dict[Tier, Peak]
    lacking: dict[Tier, int]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.timeline.seconds

    @property
    def fits(self) -> bool:
        """Whether there is room for it on every tier whose size is known."""
        return not self.lacking

    @cached_property
    def memory(self) -> dict[Tier, int]:
        """Bytes needed on each tier."""
        return {tier: peak.nbytes for tier, peak in self.peaks.items()}


def with_settings(spec: StepSpec, settings: StepSettings) -> StepSpec:
    """`spec` in the buckets and slots of the settings, in a step of all that are delayed, if they are.

    What else there is to set is in the spec: its costs depend on it.
    """
    layout = lay_out(spec.layout.parameters, settings, spec.world)
    return evolve(spec, **in_buckets(layout, settings), pending=settings.delayed)


def with_changes(settings: StepSettings, **changes: Any) -> StepSettings:
    """The settings with others, by their names in `zfunc.plan`: there `delay` is a `delay_from` of 1.

    >>> with_changes(StepSettings(), delay=True).delay_from
    1
    """
    if "delay" in changes:
        changes["delay_from"] = (settings.delay_from or 1) if changes.pop("delay") else None
    return settings_with(settings, changes)


def operations_of(spec: StepSpec, settings: StepSettings) -> Graph:
    """The operations of the step; of a delayed one, of a step with a gradient that waits."""
    return _graph(with_settings(spec, settings))


def simulate_choice(
    spec: StepSpec, settings: StepSettings, hardware: Hardware, graph: Graph | None = None
) -> PlannedStep:
    """The step that `settings` make of `spec`, on `hardware`. `graph` is what `operations_of` gives, where it is at
    hand.

    Raises PlanError for a schedule whose plan is wrong.
    """
    spec = with_settings(spec, settings)
    plan = verify(make_schedule(settings.schedule, hardware)(graph or _graph(spec)))
    peaks = peak_memory(plan)
    lacking = hardware.lacking({tier: peak.nbytes for tier, peak in peaks.items()})
    return PlannedStep(settings, spec, hardware, plan, simulate(plan, hardware), peaks, lacking)


def _graph(spec: StepSpec) -> Graph:
    recipe: Callable[[StepSpec], Iterator[Op]] = delayed if spec.delayed else zero_offload
    return Graph(tuple(recipe(spec)))


def gains_and_costs(new: PlannedStep, old: PlannedStep) -> str:
    """What `new` gains and costs against `old`: "3 % faster, 0.4 GiB more pinned"."""
    return ", ".join([_faster(new.seconds, old.seconds), *_bytes(new.memory, old.memory)])


def shortage_text(lacking: dict[Tier, int]) -> str:
    """What there is no room for.

    >>> shortage_text({"device": 5 << 29})
    '2.5 GiB of device memory short'
    """
    return ", ".join(f"{format_bytes(nbytes)} of {tier} memory short" for tier, nbytes in lacking.items())


def _faster(new: float, old: float) -> str:
    change = new / old - 1 if old else 0.0
    if abs(change) < 0.0005:
        return "as fast"
    return f"{_percent(abs(change))} {'slower' if change > 0 else 'faster'}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.0095 else f"{share:.1%}".replace("%", " %")


def _bytes(new: dict[Tier, int], old: dict[Tier, int]) -> Iterator[str]:
    """The tiers whose need changes by what can be seen."""
    for tier, nbytes in new.items():
        change = nbytes - old[tier]
        if abs(change) > 0.01 * max(nbytes, old[tier]) and abs(change) >= 1 << 20:
            yield f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'} {tier}"
