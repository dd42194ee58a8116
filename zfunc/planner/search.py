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

from attrs import define, field, frozen

from zfunc.core.display import brief
from zfunc.core.graph import Kind
from zfunc.core.settings import StepSettings
from zfunc.planner.candidate import PlannedStep, gains_and_costs, shortage_text
from zfunc.planner.disk_traffic import DRIVES
from zfunc.planner.moves import COORDINATES, SPACE, WORTH, Space, differing, giving_way, may_give_way, moved

AS_FAST = 0.001  # of a step's time: a difference that is none
ROUNDS = 8  # over all settings; the last mostly changes nothing


@frozen(eq=False)
class SearchResult:
    """The best step, why each setting differs from the start's, and all steps that were simulated."""

    step: PlannedStep
    reasons: tuple[str, ...]
    tried: tuple[PlannedStep, ...]

    def __repr__(self) -> str:
        return brief(self, "step", "reasons")


def search(
    step_of: Callable[[StepSettings], PlannedStep], start: StepSettings, space: Space = SPACE
) -> SearchResult:
    """The fastest step that fits its hardware's memory; if none does, the one that lacks least.

    `step_of` is the step of settings. Varies what `space` allows. Values of `start` stay where others gain nothing.
    Takes seconds for 50 layers.
    """
    walk = _Walk(step_of, space, step_of(start).without_operations())
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
    return SearchResult(walk.best, tuple(walk.reasons()), tuple(x for x in walk.seen.values() if x))


@define(eq=False)
class _Walk:
    """A search in progress: the best step so far, the time of the fastest that fits, and the steps that were seen,
    None where arithmetic excluded one."""

    step_of: Callable[[StepSettings], PlannedStep]
    space: Space
    first: PlannedStep
    best: PlannedStep = field(init=False)
    fastest: float = field(init=False)
    seen: dict[StepSettings, PlannedStep | None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.best, self.fastest = self.first, self.first.seconds
        self.seen = {self.first.settings: self.first}

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
        step = self.step_of(settings)
        lacking = step.hardware.lacking(step.kept)
        gains = not self.best.fits or _spares_drives(step.work, self.best.work)
        enough = math.inf if gains else self.best.seconds * (1 - WORTH)
        short = sum(lacking.values()) > sum(self.best.lacking.values())
        if (
            max(step.work.values()) > enough
            or (short and not may_give_way(settings, lacking, self.space))
            or step.unsettled_seconds > enough
        ):
            return None
        return self._simulated(step)

    def _simulated(self, step: PlannedStep) -> PlannedStep:
        self.seen[step.settings] = step.without_operations()
        if step.fits:
            self.fastest = min(self.fastest, step.seconds) if self.best.fits else step.seconds
        if _better(step, self.best):
            self.best = step
        return step

    def undo_idle_changes(self) -> None:
        """Restore the start's value of every setting whose change gains next to nothing."""
        for _, back in self._backs():
            equal = sum(back.lacking.values()) == sum(self.best.lacking.values())
            as_fast = back.seconds <= self.fastest * (1 + WORTH)
            if equal and (not back.fits or (as_fast and not _spares_drives(self.best.work, back.work))):
                self.best = back

    def reasons(self) -> Iterator[str]:
        """For each setting that differs from the start's, what the start's value would cost."""
        for name, back in self._backs():
            change = f"{name} {_value(name, self.best)} instead of {_value(name, back)}"
            shortage = f"; otherwise {shortage_text(back.lacking)}" if back.lacking and self.best.fits else ""
            yield f"{change}: {gains_and_costs(self.best, back)}{shortage}"

    def _backs(self) -> Iterator[tuple[str, PlannedStep]]:
        """The best step with the start's value of each setting that differs, unless what else has changed since
        excludes that; simulated even where it cannot win."""
        for name in differing(self.best.settings, self.first.settings):
            settings = moved(
                self.best.settings, self.best.spec.world, **{name: getattr(self.first.settings, name)}
            )
            if settings is not None:
                yield name, self.seen.get(settings) or self._simulated(self.step_of(settings))


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


def _value(name: str, step: PlannedStep) -> str:
    value = step.settings.schedule_name if name == "schedule" else getattr(step.settings, name)
    return f"{value:,}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)
