"""Coordinate descent over a step's settings: which make it fastest on given hardware, and why.

One setting is varied at a time, by simulation, until no single change helps. A choice that by arithmetic cannot fit
or cannot be faster is not simulated.

The invariant: of all choices tried, none that fits is faster than the result by more than `WORTH`, and neither is
any with one thing in a nearer tier; where none fits, none lacks fewer bytes, and nothing that moves alone makes one
fit. Delay, which changes numbers, is tried only if the space says so. The result is the same on
every rank: no clock is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from attrs import define, evolve, field, frozen

from zfunc.core.bucketing import default_bucket_size
from zfunc.core.display import brief
from zfunc.core.graph import Graph, Kind, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.planner.candidate import PlannedStep, gains_and_costs, shortage_text
from zfunc.planner.disk_traffic import DRIVES
from zfunc.planner.moves import COORDINATES, SPACE, WORTH, Space, differing, giving_way, may_give_way, moved
from zfunc.planner.steady_state import Estimate
from zfunc.units import format_seconds

AS_FAST = 0.001  # of a step's time: a difference that is none
ROUNDS = 8  # over all settings; the last mostly changes nothing


@frozen(eq=False)
class TriedChoice:
    """Settings that were tried, and the outcome in words. `seconds` is None where nothing was simulated."""

    settings: StepSettings
    seconds: float | None
    lacking: dict[Tier, int]
    outcome: str

    def __repr__(self) -> str:
        return brief(self)


@frozen(eq=False)
class SearchResult:
    """The best step, why each setting differs from the start's, and all that was tried."""

    step: PlannedStep
    reasons: tuple[str, ...]
    tried: tuple[TriedChoice, ...]

    def __repr__(self) -> str:
        return brief(self, "step", "reasons")


def search(
    spec_of: Callable[[StepSettings], StepSpec],
    hardware: Hardware,
    start: StepSettings | None = None,
    space: Space = SPACE,
) -> SearchResult:
    """The fastest step on `hardware` that fits its memory; if none does, the one that lacks least.

    `spec_of` is the spec of settings. Varies what `space` allows. Values of `start` stay where others gain nothing.
    Takes seconds for 50 layers.

    >>> from zfunc.core.spec import SegmentCost
    >>> from zfunc.core.hardware import ROUND
    >>> from zfunc.core.layout import Parameter, make_layout
    >>> layout = make_layout([[Parameter(f"w{n}", (1000, 1000))] for n in range(8)], bucket_size=1 << 20)
    >>> costs = [SegmentCost(flops=10**10, backward_flops=10**10)] * 8
    >>> start = StepSettings(bucket_size=1 << 20, clip_norm=1.0)
    >>> search(lambda x: StepSpec(layout, costs, x), ROUND, start, SPACE | {"offload_ratio": (1.0,)}).reasons
    ('defer True instead of False: 9 % faster',)
    """
    start = start or StepSettings()
    if start.bucket_size is None:
        start = evolve(start, bucket_size=default_bucket_size(spec_of(start).world))
    first = Estimate(spec_of(start), start, hardware).step
    walk = _Walk(spec_of, hardware, space, first)
    for number in range(ROUNDS):
        before = walk.best
        for coordinate in COORDINATES:
            base = walk.best
            for changes in coordinate(base, space, number == 0):
                if (settings := moved(base.settings, base.spec.world, **changes)) is not None:
                    walk.weigh(settings)
        if walk.best is before and (number or before.fits):
            break  # the first round looks at the disk only for what the host lacks
    walk.undo_idle_changes()
    return SearchResult(walk.best, tuple(_reasons(walk)), tuple(walk.tried))


@define(eq=False)
class _Walk:
    """A search in progress: the best step so far, the time of the fastest that fits, and what was tried."""

    spec_of: Callable[[StepSettings], StepSpec]
    hardware: Hardware
    space: Space
    first: PlannedStep
    best: PlannedStep = field(init=False)
    fastest: float = field(init=False)
    seen: dict[StepSettings, PlannedStep | None] = field(factory=dict[StepSettings, PlannedStep | None])
    tried: list[TriedChoice] = field(factory=list[TriedChoice])
    last: tuple[StepSettings, dict[int, Graph]] | None = None  # the last graphs, and their settings

    def __attrs_post_init__(self) -> None:
        self.best, self.fastest = self.first, self.first.seconds
        self.seen[self.first.settings] = self.first
        self._record(self.first, "the start")

    def weigh(self, settings: StepSettings) -> None:
        """Try `settings`, unless arithmetic says that it cannot win. The better one stays best.

        What does not fit is tried again with less of the state where memory is short.
        """
        step = self._try(settings)
        if step is not None and not step.fits:
            for smaller in giving_way(step, self.space):
                self._try(smaller)

    def _try(self, settings: StepSettings) -> PlannedStep | None:
        """The step of `settings`, if it was simulated now: unless it was tried or arithmetic excludes it."""
        if settings in self.seen:
            return None
        self.seen[settings] = None
        estimate = self._estimate(settings)
        lacking = self.hardware.lacking(estimate.kept)
        lane, least = max(estimate.work.items(), key=lambda item: item[1])
        change = _change(settings, self.best.settings)
        gains = not self.best.fits or _spares_drives(estimate.work, self.best.work)
        enough = math.inf if gains else self.best.seconds * (1 - WORTH)
        short = sum(lacking.values()) > sum(self.best.lacking.values())
        if least > enough:
            outcome, lacking = f"{change}: cannot be faster, {lane} alone takes {format_seconds(least)}", {}
        elif short and not may_give_way(settings, lacking, self.space):
            outcome = f"{change}: cannot fit, {shortage_text(lacking)} for what is kept from step to step"
        elif (unsettled := estimate.unsettled_seconds) > enough:
            outcome = f"{change}: not faster, {format_seconds(unsettled)} as a few micro-batches go"
            lacking = {}
        else:
            return self._simulate(estimate)
        self.tried.append(TriedChoice(settings, None, lacking, outcome))
        return None

    def _simulate(self, estimate: Estimate) -> PlannedStep:
        settings, step = estimate.settings, estimate.step
        self.seen[settings] = step
        self._record(step, f"{_change(settings, self.best.settings)}: {gains_and_costs(step, self.best)}")
        if _better(step, self.best):
            self.best = step
        return step

    def _record(self, step: PlannedStep, outcome: str) -> None:
        if step.fits:
            self.fastest = min(self.fastest, step.seconds) if self.best.fits else step.seconds
        shortage = f"; {shortage_text(step.lacking)}" if step.lacking else ""
        self.tried.append(TriedChoice(step.settings, step.seconds, step.lacking, outcome + shortage))

    def _estimate(self, settings: StepSettings) -> Estimate:
        """The estimate of `settings`, with the operations of the last one if only their schedules differ."""
        plain = evolve(settings, schedule="")
        if self.last is None or self.last[0] != plain:
            self.last = plain, {}
        return Estimate(self.spec_of(settings), settings, self.hardware, self.last[1])

    def simulated(self, settings: StepSettings) -> PlannedStep:
        """The step of `settings`, simulated even where it cannot win."""
        return self.seen.get(settings) or self._simulate(self._estimate(settings))

    def undo_idle_changes(self) -> None:
        """Restore the start's value of every setting whose change gains next to nothing."""
        for name in differing(self.best.settings, self.first.settings):
            settings = _back(self, name)
            if settings is None:
                continue
            back = self.simulated(settings)
            equal = sum(back.lacking.values()) == sum(self.best.lacking.values())
            as_good = back.seconds <= self.fastest * (1 + WORTH) and not _spares_drives(
                self.best.work, back.work
            )
            if equal and (not back.fits or as_good):
                self.best = back


def _better(new: PlannedStep, old: PlannedStep) -> bool:
    """Whether `new` lacks fewer bytes, or as few and is faster by what is worth a change, or as fast and spares the
    drives: they wear."""
    lacking, before = sum(new.lacking.values()), sum(old.lacking.values())
    faster = new.seconds < old.seconds * (1 - WORTH)
    spares = new.seconds < old.seconds * (1 + AS_FAST) and _spares_drives(new.work, old.work)
    return lacking < before or (lacking == before and (faster or spares))


def _spares_drives(new: Mapping[Kind, float], old: Mapping[Kind, float]) -> bool:
    """Whether work asks less of the drives, by what is worth a change."""
    now, before = (sum(work[kind] for kind in DRIVES) for work in (new, old))
    return now < before * (1 - WORTH)


# --- in words --------------------------------------------------------------------------------------------


def _reasons(walk: _Walk) -> Iterator[str]:
    """For each setting that differs from the start's, what the start's value would cost."""
    for name in differing(walk.best.settings, walk.first.settings):
        settings = _back(walk, name)
        if settings is None:
            continue
        back = walk.simulated(settings)
        change = f"{_named(name, walk.best.settings)} instead of {_value(name, back.settings)}"
        shortage = f"; otherwise {shortage_text(back.lacking)}" if back.lacking and walk.best.fits else ""
        yield f"{change}: {gains_and_costs(walk.best, back)}{shortage}"


def _back(walk: _Walk, name: str) -> StepSettings | None:
    """The best settings with the start's value, unless what else has changed since excludes that."""
    return moved(walk.best.settings, walk.best.spec.world, **{name: getattr(walk.first.settings, name)})


def _change(new: StepSettings, old: StepSettings) -> str:
    return ", ".join(_named(name, new) for name in differing(new, old)) or "nothing new"


def _named(name: str, settings: StepSettings) -> str:
    return f"{name} {_value(name, settings)}"


def _value(name: str, settings: StepSettings) -> str:
    value = settings.schedule_name if name == "schedule" else getattr(settings, name)
    return f"{value:,}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)
