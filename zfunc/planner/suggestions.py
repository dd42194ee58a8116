"""Changes that make a step fit, or make it faster: each a step of the search from where it is, planned.

A change is one move (`zfunc.planner.search`) to another value of a setting, here also of those that change numbers.
Where no single one is enough, the one that helps most is made, and so on, and what was not needed is taken back.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from attrs import field, frozen

from zfunc.core.display import brief
from zfunc.core.graph import Tier
from zfunc.core.optimizer_state import STATE_FORMATS, format_with
from zfunc.core.settings import DISK, TIERS_OF, StepSettings
from zfunc.planner.candidate import PlannedStep, gains_and_costs, shortage_text
from zfunc.planner.pipelines import shifted
from zfunc.planner.search import (
    VALUES,
    beside,
    cuts_of,
    differing,
    lacks_host,
    most_persistent,
    moved,
    share_of_state,
    shares_that_fit,
)

WORTH_SAYING = 0.02  # of a step's time: a change that gains less is not suggested
MOST = 5  # suggestions
TAKE_ROOM = (
    "recompute",
    "tiles",
    "micro_batches",
)  # tried with activations on the host, too, where one does not fit

NOTES = {"moments": "different rounding", "precision": "different rounding"}
FOLDERS = "needs folders for it: swap"
# The settings whose values further on take less memory of a tier, by what they cost a step at most.
SAVING: dict[Tier, tuple[str, ...]] = {
    "device": (
        *(
            "order",
            "update_slots",
            "grads_on",
            "update_on",
            "grad_slots",
            "bucket_size",
            "stage",
            "recompute",
            "offload_ratio",
            "activations_on",
        ),
        *("params_on", "micro_batches", "tiles", "keys_on"),
    ),
    "host": (
        *("moments", "precision", "host_slots", "bucket_size", "activations_on", "state_on"),
        *("disk_ratio", "params_on", "grads_on"),
    ),
    "disk": ("moments", "bucket_size"),
}


@frozen(eq=False)
class Suggestion:
    """Settings to change, by name, the step with them, and what that gains and costs."""

    changes: Mapping[str, Any] = field(converter=dict[str, Any])
    step: PlannedStep
    effect: str

    def __repr__(self) -> str:
        return brief(self, "changes", "effect")

    def __str__(self) -> str:
        """The changes as Python arguments, and their effect."""
        return f"{self.arguments}: {self.effect}"

    @property
    def arguments(self) -> str:
        """The changes as Python arguments, such as "micro_batches=2, offload_ratio=1.0"."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


def suggest(
    step_of: Callable[[StepSettings], PlannedStep],
    step: PlannedStep,
    rows: int,
    tile_counts: Sequence[int] = (1,),
    *,
    settable: Collection[str] | None = None,
) -> tuple[Suggestion, ...]:
    """Changes that help `step`, the best first. `rows` is the size of a rank's batch, `tile_counts` are the tiles
    of a row to try; `step_of` plans others.

    Where `step` does not fit: every setting that alone makes it fit, changed as little as that takes, the fastest
    first; if there is none, a combination of which none can be left out; if all of them together are not enough,
    those. Where it fits: changes that make it faster and still fit. Only settings in `settable` change, if it is
    given.
    """
    advisor = _Advisor(step_of, step, rows, tile_counts, settable)
    return tuple([*(advisor.faster() if step.fits else advisor.fitting())][:MOST])


@frozen(eq=False)
class _Advisor:
    """A step, and how others are planned."""

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

    def above(self, name: str) -> Sequence[Any]:
        """The values of a setting that take more memory of the device than the present one."""
        values, now = self._values(name), getattr(self.settings, name)
        return values[: values.index(now)] if now in values else ()

    def below(self, name: str) -> Sequence[Any]:
        """The values that take less."""
        values, now = self._values(name), getattr(self.settings, name)
        return values[values.index(now) + 1 :] if now in values else ()

    def _values(self, name: str) -> list[Any]:
        """The values of a setting, those that take most memory of the device first."""
        now, spec = getattr(self.settings, name), self.step.spec
        match name:
            case "micro_batches":
                return [n for n in range(1, self.rows + 1) if self.rows % n == 0]
            case "tiles":
                return sorted({*self.tile_counts, now})
            case "offload_ratio" | "disk_ratio":
                return sorted({*(shares_that_fit(self.step, name) if self.step.fits else (1.0,)), now})
            case "order":
                return [now, *shifted(self.step)]
            case "bucket_size":
                return sorted({*VALUES[name], now}, reverse=True)
            case "moments":  # without those that have the buffers of others, as Adafactor's of 8 bits have
                formats, first = {b.state_format for b in spec.layout.buckets}, dict[tuple[Any, ...], Any]()
                for x in VALUES[name][VALUES[name].index(now) :]:
                    first.setdefault(tuple(STATE_FORMATS.get(format_with(y, x)) for y in formats), x)
                return [*first.values()]
            case _:
                # One rank has no slices.
                values = VALUES[name][:2] if name == "stage" and spec.world == 1 else VALUES[name]
                return [x for x in values if str(x).count(",") < spec.num_segments]

    def planned(self, changes: Mapping[str, Any] | None) -> Suggestion | None:
        """The step with these changes and all that they need; None where they are not possible or not settable, or
        where it is by arithmetic not faster than one that fits."""
        new = moved(self.settings, self.step.spec.world, **changes) if changes else None
        found = differing(new, self.settings) if new is not None else {}
        if new is None or not found or not (self.settable is None or found.keys() <= {*self.settable}):
            return None
        with suppress(ValueError):
            step = self.step_of(new)
            if not self.step.fits or max(*step.work.values(), step.unsettled_seconds) < self._enough:
                step = step.without_operations()
                return Suggestion(found, step, effect(found, step, self.step))
            step.forget_operations()
        return None

    # --- to make it faster ---------------------------------------------------------------------------------

    def faster(self) -> list[Suggestion]:
        """The first value of each setting that fits, with activations on the host or not, and is faster."""
        found: dict[str, Suggestion] = {}
        for name, values in self._alternatives():
            for value in values:
                new = self.planned({name: value})
                if name in TAKE_ROOM and new is not None and "device" in new.step.lacking:
                    new = self.planned({name: value, "activations_on": "host"})
                if new is None or not new.step.fits or new.step.seconds >= self._enough:
                    continue
                if name not in found or new.step.seconds < found[name].step.seconds:
                    found[name] = new
                break
        # The deferred update first: it changes no number and takes no memory.
        return sorted(found.values(), key=lambda x: ("defer" not in x.changes, x.step.seconds))

    def _alternatives(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Settings with values that may be faster, the fastest first: the first that fits is enough."""
        settings, step = self.settings, self.step
        yield "recompute", self.above("recompute")
        yield "tiles", self.above("tiles")
        yield "micro_batches", self.above("micro_batches")[-1:]
        if settings.group_size < settings.micro_batches:
            yield "accumulate", ("vertical",)
        cuts = cuts_of(step, settings.bucket_size)
        for size in beside(VALUES["bucket_size"], settings.bucket_size):
            yield "bucket_size", [size] if cuts_of(step, size) != cuts else ()
        if step.work["compute"] >= self._enough:
            return  # the others take no arithmetic from a device that does not wait
        yield from ((place, self.above(place)) for place in TIERS_OF)
        share = share_of_state(settings)
        yield share, self.above(share)
        if step.spec.offloaded and not step.hardware.unified:
            yield "update_on", [x for x in VALUES["update_on"] if x != settings.update_on]
        if step.spec.barrier and not settings.defer:
            if step.total(_after_decision)["decide"] >= WORTH_SAYING * step.seconds:
                yield "defer", (True,)
                yield "moments", self.below("moments")[-1:]
        else:
            yield "moments", self.below("moments")[-1:]
        if max(step.work.values()) < self._enough:  # these do the same work
            yield from (("schedule", (x,)) for x in VALUES["schedule"] if x != settings.schedule)
            yield from ((name, (getattr(settings, name) + 1,)) for name in ("grad_slots", "host_slots"))
        if settings.state_on == DISK:
            yield "state_slots", (settings.state_slots + 1,)
        if settings.streams:
            yield "weight_slots", (settings.weight_slots + 1,)
            if not settings.persistent_params:
                yield "persistent_params", (most_persistent(step),)

    # --- to make it fit ------------------------------------------------------------------------------------

    def fitting(self) -> list[Suggestion]:
        """Single changes after which it fits, or as few together as can be, or all of them."""
        smaller = self._smaller(self.step)
        known = {
            name: x for name, values in smaller.items() if (x := self._least({}, name, values)) is not None
        }
        fitting = [self._needed(x) for x in known.values() if x.step.fits]
        if fitting or len(known) < 2:
            once = {frozenset(x.changes): x for x in sorted(fitting, key=lambda x: -x.step.seconds)}
            return [*reversed(once.values())] or [*known.values()]
        together, options = min(known.values(), key=_shortage), [*known.values()]
        while options and not together.step.fits:  # what has moved may be too much for its new tier
            more = {x: values[-1] for x, values in self._smaller(together.step).items()}
            names = more.keys() - together.changes.keys()
            tried = (self.planned({**together.changes, x: more[x]}) for x in sorted(names))
            options = [x for x in tried if x is not None and _shortage(x)[0] <= _shortage(together)[0]]
            together = min(options, key=_shortage, default=together)
        if not together.step.fits:
            return [together]
        # What slows a step most, alone, is taken back first.
        slowest = sorted(together.changes, key=lambda x: -known[x].step.seconds if x in known else 0.0)
        return [self._needed(together, slowest)]

    def _smaller(self, step: PlannedStep) -> dict[str, Sequence[Any]]:
        """The settings that save what `step` lacks, with the values that do so, the least change first."""
        unified, off_host = step.hardware.unified, lacks_host(step)
        tiers = {
            cast("Tier", place.partition(":")[0]) for place in step.lacking
        }  # of several devices, of any
        off_device = "device" in tiers and not unified
        tiers = ("device", "host") if unified else sorted(tiers)
        found: dict[str, Sequence[Any]] = {}
        for name in dict.fromkeys(x for tier in tiers for x in SAVING[tier]):
            values = self.below(name)
            if name == "grads_on" and not step.spec.staged:  # which wait there already
                values = [x for x in values if x != "host"]
            if name in TIERS_OF:
                values = [x for x in values if (off_host if DISK in x.split(",") else off_device)]
            if name == "tiles" and step.settings.micro_batches < self.rows:  # rows one by one cost less
                values = []
            stays = not (off_device or self.settings.stashes)  # on the device, which has room
            useless = stays if name == "activations_on" else name == "grads_on" and not self.step.spec.barrier
            found |= {name: values} if values and not useless else {}
        return found

    def _least(self, others: Mapping[str, Any], name: str, values: Sequence[Any]) -> Suggestion | None:
        """Beside `others` the least of the changes after which it fits; else the strongest."""
        strongest = self.planned({**others, name: values[-1]})
        if strongest is None or not strongest.step.fits:
            return strongest
        tried = (self.planned({**others, name: value}) for value in values[:-1])
        return next((x for x in tried if x is not None and x.step.fits), strongest)

    def _needed(self, found: Suggestion, order: Sequence[str] = ()) -> Suggestion:
        """Without the changes without which it fits, in this order, and the others as small as they can be."""
        for name in order or (*found.changes,):
            others = {x: value for x, value in found.changes.items() if x != name}
            without = self.planned(others)
            if without is not None and without.step.fits:
                found = without
            elif order and (values := [*self.below(name)]):
                least = self._least(others, name, values[: values.index(found.changes[name]) + 1])
                found = least if least is not None and least.step.fits else found
        return found


def _shortage(suggestion: Suggestion) -> tuple[int, float]:
    """The bytes that are lacking; the less, and the faster, the better."""
    return sum(suggestion.step.lacking.values()), suggestion.step.seconds


def effect(changes: Mapping[str, Any], new: PlannedStep, old: PlannedStep) -> str:
    """The gains and costs of the `new` step against the `old` one, with notes on the changes between them."""
    fits = "fits, " if new.fits and not old.fits else ""
    shortage = f"; still {shortage_text(new.lacking)}" if new.lacking else ""
    notes = [NOTES[name] for name in changes if name in NOTES]
    notes += [FOLDERS] if DISK in changes.values() and not old.settings.needs_folders else []
    numbers = ", ".join(notes)
    return f"{fits}{gains_and_costs(new, old)}{shortage}{f' ({numbers})' if numbers else ''}"


def _after_decision(step: PlannedStep) -> dict[str, float]:
    """The seconds after the decision: with a barrier no update comes before, and nothing else after."""
    return {e.op: step.seconds - e.end for e in step.timeline.events if e.op == "decide"}
