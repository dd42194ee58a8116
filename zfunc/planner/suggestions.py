"""Changes of settings that make a step fit, or make a step faster: each one move of the search, planned.

A change is one move of the search (`zfunc.planner.search`), here also of settings that change numbers. Where no
single change is enough, the search goes on, and changes of its result that are not needed are taken back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

from attrs import field, frozen

from zfunc.core.display import brief
from zfunc.core.optimizer_state import STATE_FORMATS, format_with
from zfunc.core.setting_values import DISK, OF_OPTIMIZER
from zfunc.core.settings import StepSettings
from zfunc.core.shares import words_of
from zfunc.errors import Message, PlanError, setting
from zfunc.planner.candidate import PlannedStep, gains_and_costs, shortage_text
from zfunc.planner.pipelines import shifted
from zfunc.planner.search import COORDINATES, NUMBERS, VALUES, Space, differing, moved, search

WORTH_SAYING = 0.02  # of a step's time: a change that gains less is not suggested
MOST = 5  # suggestions
TRACED = ("tiles", "micro_batches")  # with each value, which takes longest: others only where the last fits
TAKE_ROOM = (*TRACED, "recompute")  # tried with activations on the host, too, where one does not fit
LESS_ARITHMETIC = (*TAKE_ROOM, "order", "bucket_size")  # what is worth trying where no device waits

NOTES = {"moments": "different rounding", "precision": "different rounding"}
FOLDERS = "needs folders for it: swap"


@frozen(eq=False)
class Suggestion:
    """Settings to change, by name, with their new values; the step so planned; its gains and costs as text."""

    changes: Mapping[str, Any] = field(converter=dict[str, Any])
    step: PlannedStep
    effect: str

    def __repr__(self) -> str:
        return brief(self, "changes", "effect")

    def __str__(self) -> str:
        """The changes of settings as Python arguments, a colon, and their effect."""
        return f"{self.arguments}: {self.effect}"

    @property
    def arguments(self) -> Message:
        """The changes of settings as Python arguments, such as "micro_batches=2, slots=1"."""
        own = {name: "the optimizer's " * (name in OF_OPTIMIZER) for name in self.changes}
        return Message(", ".join(own[name] + setting(name, value) for name, value in self.changes.items()))


def suggest(
    step_of: Callable[[StepSettings], PlannedStep],
    step: PlannedStep,
    rows: int,
    tile_counts: Sequence[int] = (1,),
    *,
    settable: Collection[str] | None = None,
    buy: Callable[[Suggestion], Suggestion | None] = lambda _: None,
) -> tuple[Suggestion, ...]:
    """Changes of settings that help `step`, the best first. `rows` is the size of a rank's batch, `tile_counts` are
    numbers of tiles of a row to try; `step_of` plans other settings, and `buy` adds the memory that a suggestion
    lacks, if such memory is sold.

    If `step` does not fit: every setting that alone makes the step fit, changed as little as possible, the
    fastest first; if no setting alone does, the changes that a search finds and the step needs; and the least
    memory to buy. If `step` fits: changes with which it is faster and still fits. Only settings in `settable`
    change, unless it is None.
    """
    advisor = _Advisor(step_of, step, rows, tile_counts, settable)
    return tuple(advisor.faster()[:MOST] if step.fits else advisor.fitting(buy))


@frozen(eq=False)
class _Advisor:
    """Finds suggestions for `step`; `step_of` plans the step of other settings."""

    step_of: Callable[[StepSettings], PlannedStep]
    step: PlannedStep
    rows: int
    tile_counts: Sequence[int]
    settable: Collection[str] | None

    @property
    def settings(self) -> StepSettings:
        return self.step.settings

    @property
    def _enough(self) -> float:
        return self.step.seconds * (1 - WORTH_SAYING)

    @cached_property
    def space(self) -> Space:
        """Values to try by setting: a search's, and those that save memory or time but alter training results."""
        now, fits = self.settings, self.step.fits
        formats, moments = {b.state_format for b in self.step.spec.layout.buckets}, dict[Any, Any]()
        for x in VALUES["moments"][VALUES["moments"].index(now.moments) :]:
            # Without those that have the buffers of others, as Adafactor's of 8 bits have.
            moments.setdefault(tuple(STATE_FORMATS.get(format_with(y, x)) for y in formats), x)
        parts = [n for n in range(1, self.rows + 1) if self.rows % n == 0]
        fewer, more = ([n for n in parts if (n - now.micro_batches) * sign > 0] for sign in (-1, 1))
        coarse = VALUES["precision"][-1:] if now.precision == VALUES["precision"][0] else ()
        # Rows one by one cost less than tiles.
        tiles = () if more and not fits else tuple(self.tile_counts)
        numbers = {"moments": tuple(moments.values()), "micro_batches": tuple(fewer[-1:] if fits else more)}
        space = {**VALUES, **numbers, "precision": () if fits else coarse, "tiles": tiles}
        return {x: of for x, of in space.items() if self.settable is None or x in self.settable}

    def moves(self) -> dict[str, list[Any]]:
        """By setting, in order, the values that a search's first round tries in changes of that setting alone."""
        values: dict[str, list[Any]] = {"order": [*shifted(self.step)]}
        for changes in (x for coordinate in COORDINATES for x in coordinate(self.step, self.space, True)):
            new = [(name, value) for name, value in changes.items() if value != getattr(self.settings, name)]
            if len(new) == 1 and new[0][1] not in values.setdefault(new[0][0], []):
                values[new[0][0]].append(new[0][1])
        return values

    def planned(self, changes: Mapping[str, Any] | None) -> Suggestion | None:
        """A Suggestion of `changes` and further ones they need; None where they are impossible or not settable, or,
        by arithmetic, the new step is no faster (if `self.step` fits) or lacks more memory (if it does not)."""
        new = moved(self.settings, self.step.spec.world, **changes) if changes else None
        found = differing(new, self.settings) if new is not None else {}
        if new is None or not found or not (self.settable is None or found.keys() <= {*self.settable}):
            return None
        with suppress(ValueError):
            step = self.step_of(new)
            lacking = sum(step.hardware.lacking(step.kept).values())
            if (
                max(*step.work.values(), step.unsettled_seconds) < self._enough
                if self.step.fits
                else lacking <= sum(self.step.lacking.values())
            ):
                step = step.without_operations()
                return Suggestion(found, step, effect(found, step, self.step))
            step.forget_operations()
        return None

    # --- to make it faster ---------------------------------------------------------------------------------

    def faster(self) -> list[Suggestion]:
        """For each setting the fastest value that fits and speeds up the step, activations moved if needed."""
        found: list[Suggestion] = []
        waits = self.step.work["compute"] < self._enough
        for name, values in self.moves().items():
            tried: list[Suggestion | None] = []
            for value in values if waits or name in LESS_ARITHMETIC else ():
                new = self.planned({name: value})
                if name in TAKE_ROOM and new is not None and "device" in new.step.lacking:
                    new = self.planned({name: value, "activations_on": "host"})
                tried.append(new)
            faster = (x for x in tried if x is not None and x.step.fits and x.step.seconds < self._enough)
            found += sorted(faster, key=lambda x: x.step.seconds)[:1]
        # The deferred update first: it changes no number and takes no memory.
        return sorted(_once(found), key=lambda x: "defer" not in x.changes)

    # --- to make it fit ------------------------------------------------------------------------------------

    def fitting(self, buy: Callable[[Suggestion], Suggestion | None]) -> list[Suggestion]:
        """Suggestions with which the step fits: changes of one setting, or else of several, as a search finds
        them; last, what `buy` adds to the changes with which the step nearly fits."""
        found: list[Suggestion] = []
        short = [Suggestion({}, self.step, "")]
        for name, values in self.moves().items():
            strongest = self.planned({name: values[-1]}) if values else None
            if name in TRACED and (strongest is None or not strongest.step.fits):
                values = values[-1:]
            for new in (x for value in values if (x := self.planned({name: value})) is not None):
                if new.step.fits:
                    found.append(self._needed(new))
                    break
                short.append(new)
        fitting = _once(found)[:MOST] or [self._searched()]
        if {"host", "disk"} & self.step.lacking.keys() or not fitting[0].step.fits:
            short += [x for x in fitting if not x.step.fits]
            short.sort(key=lambda x: (not x.changes.keys().isdisjoint(NUMBERS), len(x.changes), _shortage(x)))
            fitting += [*islice((x for x in map(buy, short) if x is not None), 1)]
        return [x for x in fitting if x.changes]

    def _searched(self) -> Suggestion:
        """The changes that a search finds, without those the step does not need; changes that alter training
        results are searched only if no others make the step fit."""

        def planned(settings: StepSettings) -> PlannedStep:
            if self.settable is not None and not differing(settings, self.settings).keys() <= {
                *self.settable
            }:
                raise PlanError(f"got {settings}, expected changes of {', '.join(self.settable)} alone")
            return self.step_of(settings)

        best, space = self.step, {**self.space, "tiles": tuple(self.tile_counts)}
        for given in ({x: of for x, of in space.items() if x not in NUMBERS}, space):
            if not best.fits:
                best = search(planned, self.settings, given).step
        changes = differing(best.settings, self.settings)
        return self._needed(Suggestion(changes, best, effect(changes, best, self.step)))

    def _needed(self, found: Suggestion) -> Suggestion:
        """`found` without the changes that the step fits without; changes to the disk are taken back first."""
        names = sorted(found.changes, key=lambda x: (DISK not in str(found.changes[x]), x not in NUMBERS))
        for name in 2 * names if len(names) > 1 else ():
            back = moved(found.step.settings, found.step.spec.world, **{name: getattr(self.settings, name)})
            without = None if back is None else self.planned(differing(back, self.settings))
            found = without if without is not None and without.step.fits else found
        return found


def _shortage(suggestion: Suggestion) -> tuple[int, float]:
    """Sort key of a suggestion, least for the best: bytes of memory that its step lacks, then its seconds."""
    return sum(suggestion.step.lacking.values()), suggestion.step.seconds


def _once(found: Sequence[Suggestion]) -> list[Suggestion]:
    """The fastest of each group of suggestions that change the same settings; the fastest of all comes first."""
    by_speed = sorted(found, key=lambda x: x.step.seconds)
    return [*{frozenset(x.changes): x for x in reversed(by_speed)}.values()][::-1]


def effect(changes: Mapping[str, Any], new: PlannedStep, old: PlannedStep) -> str:
    """Text on the gains and costs of the `new` step against the `old` one, with notes on the `changes`."""
    fits = "fits, " if new.fits and not old.fits else ""
    shortage = f"; still {shortage_text(new.lacking)}" if new.lacking else ""
    notes = [NOTES[name] for name in changes if name in NOTES]
    on_disk = any(DISK in words_of(x) for x in changes.values() if isinstance(x, str))
    notes += [FOLDERS] if on_disk and not old.settings.needs_folders else []
    numbers = ", ".join(notes)
    return f"{fits}{gains_and_costs(new, old)}{shortage}{f' ({numbers})' if numbers else ''}"
