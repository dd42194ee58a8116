"""Changes of settings that make a step fit, or make it faster: each was planned on the same hardware."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from attrs import evolve, field, frozen

from zfunc.core.display import brief
from zfunc.core.optimizer_state import STATE_FORMATS, Moments, format_with
from zfunc.core.settings import DISK, StepSettings
from zfunc.options import flag
from zfunc.planner.candidate import PlannedStep, gains_and_costs, shortage_text
from zfunc.planner.search_space import (
    QUARTERS,
    cuts_of,
    lacks_host,
    most_persistent,
    on_the_disk,
    share_of_state,
    shares_that_fit,
)
from zfunc.planner.steady_state import Estimate

WORTH = 0.02  # of a step's time: a change that gains less is not suggested
MOST = 5  # suggestions
REDUCTIONS = 6  # changes that are combined until a step fits

NOTES = {
    "moments": "different rounding",
    "precision": "different rounding",
}
FOLDERS = "needs folders for it: swap"
SMALLER_MOMENTS: dict[Moments, tuple[Moments, ...]] = {
    "fp32": ("16bit", "8bit"),
    "16bit": ("8bit",),
    "8bit": (),
}

Replan = Callable[[StepSettings], Estimate]
Attempt = Callable[[StepSettings, Iterable[dict[str, Any]]], "list[Suggestion]"]
Smaller = Callable[[StepSettings, PlannedStep], list[dict[str, Any]]]


@frozen(eq=False)
class Suggestion:
    """Settings to change, by name, the step with them, and what that gains and costs."""

    changes: Mapping[str, Any] = field(converter=dict[str, Any])
    step: PlannedStep
    effect: str

    def __repr__(self) -> str:
        return brief(self, "flags", "effect")

    def __str__(self) -> str:
        """The changes as Python arguments, and their effect."""
        return f"{', '.join(f'{name}={value!r}' for name, value in self.changes.items())}: {self.effect}"

    @property
    def flags(self) -> str:
        """The changes as command-line flags, such as "--micro-batches 2 --offload-ratio 1"."""
        return " ".join(as_flag(name, value) for name, value in self.changes.items())


def as_flag(name: str, value: Any) -> str:
    """A setting as a command-line flag.

    >>> as_flag("offload_ratio", 0.5), as_flag("max", True)
    ('--offload-ratio 0.5', '--max')
    """
    if value is True:
        return flag(name)
    return f"{flag(name)} {f'{value:g}' if isinstance(value, float) else value}"


def suggest(
    settings: StepSettings,
    step: PlannedStep,
    *,
    rows: int,
    replan: Replan,
    settable: Collection[str] | None = None,
) -> tuple[Suggestion, ...]:
    """Changes that help `step`, the best first. `rows` is the size of a rank's batch; `replan` plans others.

    Where `step` does not fit: every single change after which it does, the fastest first; if there is none, a
    combination of which none can be left out; if all of them together are not enough, those. Where it fits: changes
    that make it faster and still fit. Only settings in `settable` change, if it is given.
    """

    def allowed(changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [c for c in changes if settable is None or c.keys() <= set(settable)]

    def attempt(base: StepSettings, changes: Iterable[dict[str, Any]]) -> list[Suggestion]:
        return list(_planned(base, step, allowed(changes), replan))

    def smaller(base: StepSettings, now: PlannedStep) -> list[dict[str, Any]]:
        return allowed(_smaller(base, now, rows))

    if step.fits:
        return _faster(settings, step, rows, attempt)[:MOST]
    singles = attempt(settings, smaller(settings, step))
    fitting = [_only_needed(settings, a, rows, attempt) for a in singles if a.step.fits]
    if fitting or not singles:
        return _one_of_each(sorted(fitting, key=lambda a: a.step.seconds))[:MOST]
    together = _together(settings, singles, smaller, attempt)
    if together is None or not together.step.fits:
        return (together,) if together else ()
    found = _one_by_one(settings, step, smaller, attempt) or together
    return (_only_needed(settings, found, rows, attempt),)


def _planned(
    settings: StepSettings, step: PlannedStep, changes: list[dict[str, Any]], replan: Replan
) -> Iterator[Suggestion]:
    for change in changes:
        try:
            estimate = replan(evolve(settings, **change))
            if step.fits and not _may_be_faster(estimate, step):
                continue
            new = estimate.step
        except ValueError:  # settings that exclude each other
            continue
        yield Suggestion(change, new, _effect(change, new, step))


def _may_be_faster(estimate: Estimate, step: PlannedStep) -> bool:
    """Whether a change may be worth it, by what is known before all micro-batches are simulated."""
    enough = step.seconds * (1 - WORTH)  # under no schedule is a step shorter than its work
    return max(*estimate.work.values(), estimate.unsettled_seconds) < enough


def _effect(change: Mapping[str, Any], new: PlannedStep, old: PlannedStep) -> str:
    fits = "fits, " if new.fits and not old.fits else ""
    shortage = f"; still {shortage_text(new.lacking)}" if new.lacking else ""
    notes = [NOTES[name] for name in change if name in NOTES]
    notes += [FOLDERS] if DISK in change.values() and not old.settings.needs_folders else []
    numbers = ", ".join(notes)
    return f"{fits}{gains_and_costs(new, old)}{shortage}{f' ({numbers})' if numbers else ''}"


def _one_of_each(suggestions: list[Suggestion]) -> tuple[Suggestion, ...]:
    """The first of those that change the same settings."""
    first: dict[tuple[str, ...], Suggestion] = {}
    for suggestion in suggestions:
        first.setdefault(tuple(suggestion.changes), suggestion)
    return tuple(first.values())


# --- to make it fit ----------------------------------------------------------------------------------------


def _smaller(settings: StepSettings, step: PlannedStep, rows: int) -> Iterator[dict[str, Any]]:
    """Changes that need less of what is lacking."""
    tiers = {"device", "host"} if step.hardware.unified else set(step.lacking)
    if "device" in tiers:
        yield from _smaller_on_device(settings, rows)
        if not step.hardware.unified:
            yield from _to_host(settings, step.spec.world)
    if "host" in tiers:
        yield from _smaller_on_host(settings, step)
    if lacks_host(step):
        if settings.stashes and not settings.spills_activations:
            places = ("disk,host,host,host", "disk,host") if step.spec.num_segments >= QUARTERS else ()
            yield from ({"activations_on": x} for x in (*places, DISK))
        yield from on_the_disk(settings, waits=step.spec.barrier, world=step.spec.world)
    if "disk" in tiers:
        yield from _smaller_moments(settings, step)
    for size in (100_000_000, 25_000_000, 10_000_000):
        if size < settings.bucket_size:
            yield {"bucket_size": size}


def _smaller_on_device(settings: StepSettings, rows: int) -> Iterator[dict[str, Any]]:
    more = [parts for parts in _divisors(rows) if parts > settings.micro_batches]
    yield from ({"micro_batches": parts} for parts in dict.fromkeys((*more[:1], *more[-1:])))
    if settings.grad_slots > 1 and settings.stage == 2:
        yield {"grad_slots": 1}
    if settings.recompute != "all":
        yield {"recompute": "all"}
    if settings.offload_ratio < 1:
        yield {"offload_ratio": 1.0}
    if settings.stage == 1:
        yield {"stage": 2}


def _to_host(settings: StepSettings, world: int) -> Iterator[dict[str, Any]]:
    """Activations and parameters that move from the device to the host; of several ranks, each has its slice."""
    if settings.activations_on == "device":
        yield from ({"activations_on": places} for places in ("host,device", "host"))
    if settings.params_on == "device":
        sliced = {"stage": 3} if world > 1 and settings.stage != 3 else {}
        if sliced:
            yield sliced
        yield {"params_on": "host", **sliced}


def _smaller_moments(settings: StepSettings, step: PlannedStep) -> list[dict[str, Any]]:
    """Without those that have the buffers of others, as Adafactor's of 8 bits have those of 16."""
    formats = {b.state_format for b in step.spec.layout.buckets}
    first: dict[tuple[Any, ...], Moments] = {}
    for moments in (settings.moments, *SMALLER_MOMENTS[settings.moments]):
        first.setdefault(tuple(STATE_FORMATS.get(format_with(x, moments)) for x in formats), moments)
    return [{"moments": moments} for moments in first.values() if moments != settings.moments]


def _smaller_on_host(settings: StepSettings, step: PlannedStep) -> Iterator[dict[str, Any]]:
    yield from _smaller_moments(settings, step)
    if settings.precision == "fp32":
        yield {"precision": "bf16"}
    if settings.host_slots > 1:
        yield {"host_slots": 1}


def _together(
    settings: StepSettings, singles: list[Suggestion], smaller: Smaller, attempt: Attempt
) -> Suggestion | None:
    """The last of each setting's changes, and of those that they make possible, until it fits or none is left."""
    found, more = None, {name: value for a in singles for name, value in a.changes.items()}
    while more and (tried := attempt(settings, [{**(found.changes if found else {}), **more}])):
        (found,) = tried
        base = evolve(settings, **found.changes)
        more = {} if found.step.fits else {x: y for c in smaller(base, found.step) for x, y in c.items()}
    return found


def _one_by_one(
    settings: StepSettings, step: PlannedStep, smaller: Smaller, attempt: Attempt
) -> Suggestion | None:
    """One change after the other, each the one after which least is lacking, until it fits."""
    changes: dict[str, Any] = {}
    now = step
    for _ in range(REDUCTIONS):
        base = evolve(settings, **changes)
        options = attempt(base, smaller(base, now))
        best = min(options, key=lambda a: (sum(a.step.lacking.values()), a.step.seconds), default=None)
        if best is None or sum(best.step.lacking.values()) >= sum(now.lacking.values()):
            break
        changes, now = {**changes, **best.changes}, best.step
        if now.fits:
            return Suggestion(changes, now, _effect(changes, now, step))
    return None


def _only_needed(settings: StepSettings, found: Suggestion, rows: int, attempt: Attempt) -> Suggestion:
    """Without the changes without which it fits, and with the fewest micro-batches that do, if that is faster.

    One after the other, each the one after which a step is fastest.
    """

    def fitting(changes: Iterable[dict[str, Any]]) -> Iterator[Suggestion]:
        return (a for one in changes for a in attempt(settings, [one]) if a.step.fits)

    while True:
        now = found.changes
        parts = range(settings.micro_batches + 1, now.get("micro_batches", 0))
        fewest = islice(fitting({**now, "micro_batches": n} for n in _divisors(rows) if n in parts), 1)
        options = [a for a in fewest if a.step.seconds < found.step.seconds]
        if len(now) > 1:
            options += fitting({x: y for x, y in now.items() if x != name} for name in now)
        if not options:
            return found
        found = min(options, key=lambda a: a.step.seconds)


def _divisors(rows: int) -> list[int]:
    return [n for n in range(1, rows + 1) if rows % n == 0]


# --- to make it faster ---------------------------------------------------------------------------------------


def _faster(settings: StepSettings, step: PlannedStep, rows: int, attempt: Attempt) -> tuple[Suggestion, ...]:
    changes = [*_changes(settings, step, rows)]
    fitting = [a for a in attempt(settings, changes) if a.step.fits]
    fitting += _least_share(settings, step, attempt)
    if any("recompute" in a.changes for a in fitting):  # otherwise keeping everything does not fit either
        fitting += (a for a in attempt(settings, [{"recompute": "none"}]) if a.step.fits)
    elif settings.recompute == "all":
        fitting += (a for a in attempt(settings, [{"recompute": "all,min-cut"}]) if a.step.fits)
    faster = [a for a in fitting if a.step.seconds < step.seconds * (1 - WORTH)]
    # The deferred update first: it changes no number and takes no memory.
    return _one_of_each(sorted(faster, key=lambda a: ("defer" not in a.changes, a.step.seconds)))


def _changes(settings: StepSettings, step: PlannedStep, rows: int) -> Iterator[dict[str, Any]]:
    """Changes that may make the step faster."""
    if settings.recompute == "all":
        yield {"recompute": "min-cut"}
    fewer = [n for n in _divisors(rows) if n < settings.micro_batches]
    yield from ({"micro_batches": n} for n in fewer[-1:])
    if settings.group_size < settings.micro_batches:
        yield {"accumulate": "vertical"}
    cuts = cuts_of(step, settings.bucket_size)
    yield from ({"bucket_size": x} for x in (25_000_000, 200_000_000) if cuts_of(step, x) != cuts)
    enough = step.seconds * (1 - WORTH)
    if step.work["compute"] >= enough:
        return  # the others take no arithmetic from a device that does not wait
    yield from _less_moved(settings)
    yield from _changed_updates(settings, step)
    if max(step.work.values()) < enough:  # these do the same work
        yield from (
            {"schedule": name} for name in ("Overlapped", "CriticalPath") if name != settings.schedule
        )
        yield from ({name: getattr(settings, name) + 1} for name in ("grad_slots", "host_slots"))
    if settings.state_on == DISK:
        yield {"state_slots": settings.state_slots + 1}
    if settings.streams:
        yield {"weight_slots": settings.weight_slots + 1}
        if not settings.persistent_params and (most := most_persistent(step)):
            yield {"persistent_params": most}


def _least_share(settings: StepSettings, step: PlannedStep, attempt: Attempt) -> Iterator[Suggestion]:
    """The least share of the state on the host, or on the disk, that fits."""
    if step.work["compute"] >= step.seconds * (1 - WORTH):
        return
    name = share_of_state(settings)
    for share in sorted(x for x in shares_that_fit(step, name) if x < getattr(settings, name)):
        if found := [a for a in attempt(settings, [{name: share}]) if a.step.fits]:
            yield from found
            return


def _changed_updates(settings: StepSettings, step: PlannedStep) -> Iterator[dict[str, Any]]:
    """Changes of the updates on the host, where these may take long enough."""
    if step.spec.barrier and not settings.defer:
        if step.total(_after_decision)["decide"] < WORTH * step.seconds:
            return
        yield {"defer": True}
    yield from _smaller_moments(settings, step)[-1:]


def _after_decision(step: PlannedStep) -> dict[str, float]:
    """The seconds after the decision: with a barrier no update comes before, and nothing else after."""
    return {e.op: step.seconds - e.end for e in step.timeline.events if e.op == "decide"}


def _less_moved(settings: StepSettings) -> Iterator[dict[str, Any]]:
    """Changes after which fewer bytes cross a bus."""
    yield from (
        {x: "host"} for x in ("params_on", "grads_on", "activations_on") if getattr(settings, x) == DISK
    )
    yield from (
        {place: "device"} for place in ("params_on", "activations_on") if getattr(settings, place) == "host"
    )
