"""What to change, each found by planning the step again: to make it fit, or to make it faster.

The invariant: a piece of advice is a change of settings that was planned on the same hardware, and what came of it.
Nothing general is said, and nothing that was not tried.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from attrs import field, frozen

from zfunc.core.settings import StepSettings
from zfunc.options import flag
from zfunc.planner.candidate import PlannedStep, gains_and_costs, shortage_text, with_changes
from zfunc.planner.search_space import ratios_that_fit

WORTH = 0.02  # of a step's time: advice that gains less is not given
MOST = 5  # pieces of advice
REDUCTIONS = 6  # changes that are combined until a step fits

OTHER_NUMBERS = {
    "moments": "rounds otherwise",
    "delay": "applies every gradient a step late",
    "precision": "rounds otherwise",
}
SMALLER_MOMENTS = {"fp32": ("16bit", "8bit"), "16bit": ("8bit",), "8bit": ()}

Replan = Callable[[StepSettings], PlannedStep]
Trial = Callable[[StepSettings, Iterable[dict[str, Any]]], "list[Suggestion]"]


def _dict(given: Mapping[str, Any]) -> dict[str, Any]:
    return dict(given)


@frozen(eq=False)
class Suggestion:
    """Settings to change, by name, the step that came of it, and what it gains and costs."""

    changes: Mapping[str, Any] = field(converter=_dict)
    step: PlannedStep
    told: str

    def __str__(self) -> str:
        """As one writes it in Python, with what came of it."""
        return f"{', '.join(f'{name}={value!r}' for name, value in self.changes.items())}: {self.told}"

    @property
    def flags(self) -> str:
        """The changes as one types them.

        Such as "--micro-batches 2 --offload-ratio 1".
        """
        return " ".join(as_flag(name, value) for name, value in self.changes.items())


def as_flag(name: str, value: Any) -> str:
    """A setting as one types it.

    >>> as_flag("offload_ratio", 0.5), as_flag("max", True)
    ('--offload-ratio 0.5', '--max')
    """
    told = f"{value:g}" if isinstance(value, float) else value
    return flag(name) if value is True else f"{flag(name)} {told}"


def suggest(
    settings: StepSettings,
    step: PlannedStep,
    *,
    rows: int,
    replan: Replan,
    settable: Collection[str] | None = None,
) -> tuple[Suggestion, ...]:
    """What to change about `step`, the best first. `rows` is the size of a rank's batch; `replan` plans others.

    Where `step` does not fit: every single change after which it does, the fastest first; if there is none, a
    combination; if not even all of them together are enough, those. Where it fits: what is faster and still fits.
    Only names in `settable` are with_changes, if there is such a list.
    """

    def tried(base: StepSettings, changes: Iterable[dict[str, Any]]) -> list[Suggestion]:
        possible = [c for c in changes if settable is None or c.keys() <= set(settable)]
        return list(_tried(base, step, possible, replan))

    if step.fits:
        return tuple(_faster(settings, step, rows, tried))[:MOST]
    singles = tried(settings, _smaller(settings, step, rows))
    fitting = sorted((a for a in singles if a.step.fits), key=lambda a: a.step.seconds)
    if fitting or not singles:
        return tuple(_distinct(fitting))[:MOST]
    least = {name: value for a in singles for name, value in a.changes.items()}  # of each setting the last
    together = tuple(tried(settings, [least]))
    return _combined(settings, step, rows, tried) if together and together[0].step.fits else together


def _tried(
    settings: StepSettings, step: PlannedStep, changes: list[dict[str, Any]], replan: Replan
) -> Iterator[Suggestion]:
    for change in changes:
        try:
            new = replan(with_changes(settings, **change))
        except ValueError:  # a combination that is refused is no advice
            continue
        yield Suggestion(change, new, _told(change, new, step))


def _told(change: Mapping[str, Any], new: PlannedStep, old: PlannedStep) -> str:
    end = f"fits, {gains_and_costs(new, old)}" if new.fits and not old.fits else gains_and_costs(new, old)
    short = f"; still {shortage_text(new.lacking)}" if new.lacking else ""
    other = ", ".join(OTHER_NUMBERS[name] for name in change if name in OTHER_NUMBERS)
    return f"{end}{short}{f' ({other})' if other else ''}"


def _distinct(found: list[Suggestion]) -> Iterator[Suggestion]:
    """Of several values of one setting the first."""
    seen: set[tuple[str, ...]] = set()
    for advice in found:
        if (names := tuple(advice.changes)) not in seen:
            seen.add(names)
            yield advice


# --- to make it fit ----------------------------------------------------------------------------------------


def _smaller(settings: StepSettings, step: PlannedStep, rows: int) -> Iterator[dict[str, Any]]:
    """Changes that need less of what is lacking."""
    tiers = {"device", "host"} if step.hardware.unified else set(step.lacking)
    if "device" in tiers:
        yield from _smaller_on_device(settings, rows)
    if "host" in tiers:
        yield from _smaller_on_host(settings)
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


def _smaller_on_host(settings: StepSettings) -> Iterator[dict[str, Any]]:
    yield from ({"moments": moments} for moments in SMALLER_MOMENTS[settings.moments])
    if settings.precision == "fp32":
        yield {"precision": "bf16"}
    if settings.host_slots > 1:
        yield {"host_slots": 1}
    if settings.speculate:
        yield {"speculate": 0}


def _combined(settings: StepSettings, step: PlannedStep, rows: int, tried: Trial) -> tuple[Suggestion, ...]:
    """One change after the other, always the one after which least is lacking, until it fits or none helps."""
    changes: dict[str, Any] = {}
    now = step
    for _ in range(REDUCTIONS):
        base = with_changes(settings, **changes)
        options = tried(base, _smaller(base, now, rows))
        best = min(options, key=lambda a: (sum(a.step.lacking.values()), a.step.seconds), default=None)
        if best is None or sum(best.step.lacking.values()) >= sum(now.lacking.values()):
            break
        changes, now = {**changes, **best.changes}, best.step
        if now.fits:
            break
    return (Suggestion(changes, now, _told(changes, now, step)),) if changes else ()


def _divisors(rows: int) -> list[int]:
    return [n for n in range(1, rows + 1) if rows % n == 0]


# --- to make it faster ---------------------------------------------------------------------------------------


def _faster(settings: StepSettings, step: PlannedStep, rows: int, tried: Trial) -> Iterator[Suggestion]:
    found = [a for a in tried(settings, _changes(settings, step, rows)) if a.step.fits]
    if any("recompute" in a.changes for a in found):  # or keeping everything takes even more room
        found += (a for a in tried(settings, [{"recompute": "none"}]) if a.step.fits)
    gain = [a for a in found if a.step.seconds < step.seconds * (1 - WORTH)]
    yield from _distinct(sorted(gain, key=lambda a: a.step.seconds))


def _changes(settings: StepSettings, step: PlannedStep, rows: int) -> Iterator[dict[str, Any]]:
    """Changes that may make the step faster."""
    if settings.recompute == "all":
        yield {"recompute": "min-cut"}
    fewer = [n for n in _divisors(rows) if n < settings.micro_batches]
    yield from ({"micro_batches": n} for n in fewer[-1:])
    if step.spec.barrier and not settings.delayed and settings.speculate < len(step.spec.offloaded):
        yield {"speculate": len(step.spec.offloaded)}
    yield from ({"moments": moments} for moments in SMALLER_MOMENTS[settings.moments][-1:])
    yield from ({"offload_ratio": x} for x in ratios_that_fit(step) if x < settings.offload_ratio)
    yield from ({"schedule": name} for name in ("Overlapped", "CriticalPath") if name != settings.schedule)
    yield from ({"bucket_size": size} for size in (25_000_000, 200_000_000) if size != settings.bucket_size)
    yield from ({name: getattr(settings, name) + 1} for name in ("grad_slots", "host_slots"))
    if not settings.delayed:
        yield {"delay": True, "speculate": 0} if settings.speculate else {"delay": True}
