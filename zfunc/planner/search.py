"""Coordinate descent over a step's settings: which make it fastest on given hardware, and why.

One setting is varied at a time, by simulation, until no single change helps. A choice that by arithmetic cannot fit
or cannot be faster is not simulated.

A move, of a search or of advice, is one setting changed, with what cannot stay as it is beside it. The values that
are tried of a setting are its field's (`zfunc.core.settings`), those that take most memory of the device first;
only what depends on the step is here: where things may be, the shares that fit, where buckets end.

The invariant: of all choices tried, none that fits is faster than the result by more than `WORTH`, and neither is
any with one thing in a nearer tier; one that by arithmetic gains at most `POSSIBLE`, and moves nothing to another
tier, is not tried. Where none fits, none lacks fewer bytes, and nothing that moves alone makes one fit. A setting
that changes numbers is varied only where the space has it. The result is the same on every rank: no clock is read.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate, product
from typing import Any

from attrs import define, evolve, fields, frozen

from zfunc.core.bucketing import lay_out
from zfunc.core.display import brief
from zfunc.core.graph import Kind, Tier
from zfunc.core.setting_values import DEVICE_SHARE, DISK, DISK_SHARE, TIERS_OF, TRIES
from zfunc.core.settings import StepSettings
from zfunc.core.shares import as_shares, every_part_has_one, two_tiers, word_of, words_of
from zfunc.errors import PlanError
from zfunc.options import AUTO
from zfunc.planner.candidate import (
    DRIVES,
    PlannedStep,
    WorkOf,
    by_kind,
    gains_and_costs,
    least_seconds,
    shortage_text,
    step_of,
)
from zfunc.planner.pipelines import WORTH, best_orders, shifted
from zfunc.units import format_seconds

AS_FAST = 0.001  # of a step's time: a difference that is none
# Of the best step's time: what a candidate has to be able to gain by arithmetic; what it gains is mostly much less.
POSSIBLE = 2 * WORTH
ROUNDS = 8  # over all settings; the last mostly changes nothing
ALMOST = 1e-9  # a share of the state in which there is no bucket
GUESS = 2  # candidates for each value of a setting, about
QUARTERS = 4  # shares of the segments, in the first of which activations go further away
# Settings that change nothing of what the drives have to read and write.
BESIDE_DRIVES = {"order", "micro_batches", "schedule", "slots", "defer", "update_on"}
NUMBERS = ("precision", "micro_batches", "moments")  # settings that change the result
# By values of `state_on` that leave a share open: the nearer place, the one further away, and the tiers that share
# the memory of the nearer one.
NEARER: dict[str, tuple[Tier, str, tuple[Tier, ...]]] = {
    DEVICE_SHARE: ("device", "host", ("device",)),
    DISK_SHARE: ("host", DISK, ("host", "pinned")),
}

Space = Mapping[str, tuple[Any, ...]]
Changes = dict[str, Any]
Coordinate = Callable[[PlannedStep, Space, bool], Iterator[Changes]]  # of the best step, in the first round
FEW_THREADS = "TwoThreads", "Serial"  # schedules of no gain but for steps that Python bounds
VALUES: Space = {f.name: f.metadata[TRIES] for f in fields(StepSettings) if f.metadata[TRIES]}
SPACE: Space = {name: values for name, values in VALUES.items() if name not in NUMBERS}
"""What a search varies: the settings that change how a step runs and not its result, with the values to try."""


def moved(settings: StepSettings, world: int, **changes: Any) -> StepSettings | None:
    """`settings` with `changes` and further changes that these require; None where settings exclude each other.

    With `world` > 1, parameters off the device require ZeRO stage 3. Parameters or gradients on the disk
    require the state on the disk. Tiles require recomputation of all activations.

    >>> differing(moved(StepSettings(state_on="device,host"), 1, params_on="disk"), StepSettings())
    {'params_on': 'disk', 'state_on': 'disk'}
    """
    needs: Changes = {}
    on_disk = DISK in (changes.get("params_on"), changes.get("grads_on"))
    if "state_on" in changes and DISK not in words_of(changes["state_on"]):
        needs = {"grads_on": "device"} | ({"params_on": "host"} if settings.params_on == DISK else {})
    elif on_disk and not settings.pages_state:
        needs = {"state_on": DISK}
    if changes.get("tiles", 1) != 1:
        needs["recompute"] = "all"
    elif changes.get("recompute", "all") != "all":
        needs["tiles"] = 1
    if world > 1 and changes.get("params_on", "device") != "device":
        needs["stage"] = 3
    if world > 1 and changes.get("stage", 3) != 3 and settings.params_on != "device":
        needs["params_on"] = "device"
    with suppress(ValueError):
        return evolve(settings, **{**needs, **changes})
    return None


def differing(new: StepSettings, old: StepSettings) -> Changes:
    """The values of settings of `new` that differ from those of `old`, by name."""
    return {
        f.name: value for f in fields(StepSettings) if (value := getattr(new, f.name)) != getattr(old, f.name)
    }


def beside(values: tuple[int, ...], value: int) -> list[int]:
    """The neighbours of `value` in `values`: the largest below, the smallest above; [] or one at an end."""
    return [*sorted(v for v in values if v < value)[-1:], *sorted(v for v in values if v > value)[:1]]


# --- where things are ----------------------------------------------------------------------------------------


def may_gain(step: PlannedStep) -> bool:
    """Whether `step` may gain from data in nearer memory: its device waits, or it uses drives, which wear."""
    return step.spec.uses_disk or step.work["compute"] < step.seconds * (1 - WORTH)


def bound_by_drives(step: PlannedStep) -> bool:
    """Whether `step`, which fits, is so bound by its drives that only data moved off the drives could gain much."""
    drives = {(kind, n): seconds for (kind, n), seconds in step.least_work.items() if kind in DRIVES}
    return step.fits and least_seconds(drives, step.hardware) > step.seconds * (1 - POSSIBLE)


def lacks_host(step: PlannedStep) -> bool:
    """Whether `step` lacks host memory, or device memory on a machine where the two are one memory."""
    return "host" in step.lacking or (step.hardware.unified and "device" in step.lacking)


def _worth_trying(best: PlannedStep, space: Space, name: str, first: bool) -> list[str]:
    """Values of setting `name`, which says where data is, that may beat the present one. The disk is tried if
    the host is full, if the disk is in use, and after the `first` round of the search if no step has fitted.

    Where device and host share one memory, data other than the state moves only to the disk and back.
    """
    now: str = getattr(best.settings, name)
    there, elsewhere = DISK in words_of(now), name == "state_on" or not best.hardware.unified
    on_disk = there or lacks_host(best) or not (first or best.fits)
    places = dict.fromkeys((now, *space.get(name, ())))
    return [x for x in places if x == now or (on_disk if DISK in words_of(x) else there or elsewhere)]


def _places(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
    """Changes to try of where parameters and activations are. If `best` fits, activations move away from the
    device only together with a move of the parameters."""
    names = ("params_on", "activations_on")
    for places in product(*(_worth_trying(best, space, name, first) for name in names)):
        if best.fits and places[0] == best.settings.params_on and _farther(best, places[1]):
            continue  # nothing comes nearer for it
        if every_part_has_one(places[1], best.spec.num_segments) and (
            places[0] != DISK or best.settings.pages_state
        ):
            yield dict(zip(names, places, strict=True))


def _farther(best: PlannedStep, activations_on: str) -> bool:
    """Whether `activations_on` has every segment's activations as far from the device as `best`, or farther."""
    now, then = (
        _distances(x, best.spec.num_segments) for x in (best.settings.activations_on, activations_on)
    )
    return all(a <= b for a, b in zip(now, then, strict=True))


def _distances(activations_on: str, count: int) -> list[int]:
    """For each of `count` equal shares of the segments, the index of its activations' tier, 0 for the nearest."""
    return [TIERS_OF["activations_on"].index(word_of(activations_on, s, count)) for s in range(count)]


def _state_moves(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
    """Changes of `state_on` to try: to memory; and to the disk, alone or together with parameters off the
    device and waiting gradients elsewhere. `first`: the search is in its first round."""
    now = best.settings
    waits = [x for x in space.get("grads_on", ()) if x != "host"] if best.spec.barrier else ()
    for state_on in (x for x in _worth_trying(best, space, "state_on", first) if x not in NEARER):
        if DISK not in words_of(state_on):
            yield {"state_on": state_on}
            continue
        streamed = [x for x in space.get("params_on", ()) if x != "device"]
        streamed = streamed if now.params_on != "device" else [x for x in streamed if x == DISK]
        for params_on, grads_on in product(
            dict.fromkeys((now.params_on, *streamed)), dict.fromkeys((now.grads_on, *waits))
        ):
            yield {"state_on": state_on, "params_on": params_on, "grads_on": grads_on}


def _activation_moves(best: PlannedStep, space: Space, _first: bool) -> Iterator[Changes]:
    """Changes that move the activations of a quarter of the segments nearer to the device, or one tier further if
    the step lacks memory."""
    known = {place for places in space.get("activations_on", ()) for place in words_of(places)}
    if len(known) > 1 and (not best.fits or may_gain(best)):
        count = min(QUARTERS, best.spec.num_segments)
        for places in moved_by_a_share(best.settings.activations_on, count, nearer=best.fits):
            if known >= {*words_of(places)}:
                yield {"activations_on": places}


def moved_by_a_share(activations_on: str, count: int, *, nearer: bool) -> Iterator[str]:
    """Yield values of `activations_on` in which one of `count` equal shares of the segments is in a tier
    `nearer` to the device, or else one tier further. Later shares are never further than earlier ones.

    >>> [*moved_by_a_share("disk,host", 4, nearer=True)]
    ['disk:0.25,host', 'disk:0.25,host:0.5,device', 'disk:0.5,host:0.25,device']
    >>> [*moved_by_a_share("host", 4, nearer=False)]
    ['disk:0.25,host']
    """
    tiers, shares = TIERS_OF["activations_on"], _distances(activations_on, count)
    for tier in sorted({*shares}, reverse=True):
        rest = [*shares[: shares.index(tier)], *shares[shares.index(tier) + 1 :]]
        for new in reversed(range(tier)) if nearer else range(tier + 1, len(tiers))[:1]:
            yield as_shares([tiers[x] for x in sorted((*rest, new), reverse=True)])


def _recompute(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
    """Changes of `recompute`, with activations where they are now, and in the first round elsewhere too.

    No change where `best` fits and would be no faster if compute took no time: `recompute` changes compute alone.
    """
    if best.fits and best.seconds_without_compute > best.seconds * (1 - WORTH):
        return
    now = best.settings.activations_on
    everywhere = _worth_trying(best, space, "activations_on", first) if first else [now]
    for activations_on, recompute in product(everywhere, space.get("recompute", ())):
        if all(every_part_has_one(x, best.spec.num_segments) for x in (activations_on, recompute)):
            yield {"activations_on": activations_on, "recompute": recompute}


def most_persistent(step: PlannedStep) -> int:
    """The largest `persistent_params`, in elements, with which the device still has room beside `step`;
    parameters of up to so many elements then stay on the device. 0 if all parameters fit, so that none has to
    be streamed."""
    capacity, spec = step.hardware.memory.get("device"), step.spec
    if capacity is None:
        return 0
    buckets = zip(spec.layout.all_buckets, spec.places, strict=True)
    spans = sorted((x.numel, place.element_bytes) for b, place in buckets for x in b.spans)
    sizes, ends = [n for n, _ in spans], [*accumulate(n * nbytes for n, nbytes in spans)]
    free = capacity - step.memory["device"]
    if ends[-1] <= free:
        return 0  # without `params_on`, nothing has to be streamed
    whole = [size for size, end in zip(sizes, ends, strict=True) if end <= free]
    # Of equal sizes all stay, or none.
    return max((x for x in whole if whole.count(x) == sizes.count(x)), default=0)


def _persistent(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
    if best.settings.streams and first:
        for most in space.get("persistent_params", ()):
            yield {"persistent_params": most_persistent(best) if most == AUTO else most}


# --- shares of the state -------------------------------------------------------------------------------------


def open_share(settings: StepSettings) -> str:
    """The value of `state_on` under which a search chooses the share of the state in each of its two places."""
    return DISK_SHARE if settings.pages_state else DEVICE_SHARE


def with_farther_share(opened: str, share: float) -> str:
    """`opened`, a value of `open_share`, with a `share` (0 to 1) of the state in the farther of its two places."""
    nearer, further, _ = NEARER[opened]
    return two_tiers(nearer, 1 - share, further)


def _shares(opened: str) -> Coordinate:
    """Make a function of the search that yields changes of `state_on` to shares of the state in the two
    places of `opened` that fit; the last two only after the first round, and none unless the search varies
    `opened`."""

    def shares(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
        searched = opened in space.get("state_on", ()) and opened == open_share(best.settings)
        fitting = (
            shares_that_fit(best, opened) if searched and (first or (best.fits and may_gain(best))) else ()
        )
        yield from ({"state_on": with_farther_share(opened, x)} for x in (fitting if first else fitting[-2:]))

    return shares


def giving_way(step: PlannedStep, lacking: Mapping[Tier, int], space: Space) -> Iterator[StepSettings]:
    """Settings with more of the state in the farther tier, so that `step`, which lacks `lacking` bytes, fits."""
    opened = open_share(step.settings)
    if may_give_way(step.settings, lacking, space):
        enough = shares_that_fit(step, opened)[-2:][0]
        if enough > step.settings.share_of_state(NEARER[opened][1]):
            yield evolve(step.settings, state_on=with_farther_share(opened, enough))


def may_give_way(settings: StepSettings, lacking: Mapping[Tier, int], space: Space) -> bool:
    """Whether only one tier lacks memory, and the search may move more of the state away from that tier."""
    opened = open_share(settings)
    nearer, further, _ = NEARER[opened]
    searched = lacking.keys() == {nearer} and opened in space.get("state_on", ())
    return searched and settings.share_of_state(further) < 1


def shares_that_fit(best: PlannedStep, opened: str) -> tuple[float, ...]:
    """Shares (0 to 1) of the state to try in the farther place of `opened`: 1, the least share with which the
    rest fits the nearer tier, and values between.

    The nearer tier's bytes grow linearly as the share falls. The last value is the least by arithmetic, and may be
    a bucket too low; the value before is a bucket higher. 1 alone if the nearer tier is a device that is the host.
    """
    nearer, _, tiers = NEARER[opened]
    unified, capacity = best.hardware.unified, best.hardware.memory.get(nearer)
    if unified and nearer == "device":
        return (1.0,)
    if capacity is None:
        return (1.0, 0.5, 0.0)
    tiers = (*tiers, "device") if unified else tiers
    if best.settings.devices > 1:  # which have their parts of what stays
        return (1.0, 0.0)
    plain = evolve(best.spec, commit=False)  # with a share of 0 there is nothing to commit

    def kept(share: float) -> int:
        other = step_of(
            plain, evolve(best.settings, state_on=with_farther_share(opened, share)), best.hardware
        )
        return sum(other.kept[tier] for tier in tiers)

    # Between the ends, where buckets may be smaller and no slot is left out.
    half, least = kept(0.5), kept(1 - ALMOST)
    free = capacity - sum(best.memory[tier] - best.peaks[tier].kept for tier in tiers) - least
    lowest = min(1.0, max(0.0, 1.0 - free / (half - least) / 2)) if half > least else 1.0
    percent, sizes = math.ceil(lowest * 100), [b.numel for b in best.spec.layout.buckets]
    bucket = math.ceil(max(sizes) / sum(sizes) * 100)
    higher = min(100, percent + max(2, bucket))
    return tuple(dict.fromkeys(n / 100 for n in (100, (100 + percent) // 2, higher, percent)))


# --- buckets, slots, and what has a few values -----------------------------------------------------------------


def _buckets(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
    sizes = space.get("bucket_size", ())
    known = {cuts_of(best, best.settings.bucket_size)}
    for size in sizes if first else beside(sizes, best.settings.bucket_size):
        if (cuts := cuts_of(best, size)) not in known:
            known.add(cuts)
            yield {"bucket_size": size}


def cuts_of(best: PlannedStep, bucket_size: int) -> tuple[int, ...]:
    """The ends, in elements, of buckets of `bucket_size`: two sizes with equal ends are one choice."""
    state_on = best.settings.state_on if best.settings.pages_state else "host"
    settings = evolve(best.settings, bucket_size=bucket_size, state_on=state_on)
    layout = lay_out(best.spec.layout.parameters, settings, best.spec.world)
    return tuple(b.stop for b in layout.buckets)


def _values(
    name: str, useful: Callable[[PlannedStep], bool] = lambda _: True, least: Any = None
) -> Coordinate:
    """Make a function of the search that yields changes of setting `name` while `useful(step)`: to every
    value in the space from `least` on; of `slots` only to the next lower and higher value."""

    def values(best: PlannedStep, space: Space, _first: bool) -> Iterator[Changes]:
        if useful(best):
            tried = space.get(name, ())
            tried = beside(tried, getattr(best.settings, name)) if name == "slots" else tried
            yield from ({name: x} for x in tried if least is None or x >= least)

    return values


def _group_orders(best: PlannedStep, space: Space, _first: bool) -> Iterator[Changes]:
    """Changes of `order` to try on one device, one for each number of micro-batches that run as a group."""
    known, several = {best.settings.group_size}, best.settings.micro_batches > 1 == best.settings.stages
    for x in space.get("order", ()) if several else ():
        settings = moved(best.settings, best.spec.world, order=x)
        if settings is not None and settings.group_size not in known:
            known.add(settings.group_size)
            yield {"order": x}


def _schedules(best: PlannedStep, space: Space, _first: bool) -> Iterator[Changes]:
    """Changes to each schedule in the space, and, if Python's issue times are known, to TwoThreads and Serial."""
    if "schedule" in space:
        yield from (
            {"schedule": x} for x in (*space["schedule"], *(FEW_THREADS if best.hardware.issue else ()))
        )


# --- orders of several devices -------------------------------------------------------------------------------


def _orders(best: PlannedStep, space: Space, first: bool) -> Iterator[Changes]:
    """Changes to pipeline orders cut by cost, and `micro_batches`; after the `first` round moves of a segment."""
    if best.settings.devices > 1 and AUTO in space.get("order", ()) and not bound_by_drives(best):
        # Where weights and activations are decides which orders there are.
        places = ({"params_on": "device"}, {"params_on": "host", "activations_on": "host"}) if first else ()
        places = [x for x in places if x.keys() <= space.keys()]
        yield from best_orders(best, space.get("micro_batches", ()), places)
        if not first:
            yield from ({"order": order} for order in shifted(best))


COORDINATES: tuple[Coordinate, ...] = (
    _orders,
    _values("micro_batches", lambda x: x.settings.devices == 1),
    _values("precision"),
    _values("moments"),
    _schedules,
    _places,
    _state_moves,
    _activation_moves,
    _values(
        "stage", lambda x: x.spec.world > 1 and x.settings.stage > 1 and x.settings.params_on == "device", 2
    ),
    _group_orders,
    _values("defer", lambda x: x.spec.barrier),
    _recompute,
    _shares(DEVICE_SHARE),
    _values("grads_on", lambda x: x.spec.barrier and any(y.staged for y in x.spec.places)),
    _values("update_on", lambda x: bool(x.spec.offloaded) and not x.hardware.unified),
    _buckets,
    _values("slots"),
    _persistent,
    _shares(DISK_SHARE),
    _values("tiles", lambda x: not x.fits or x.settings.tiles != 1),
    _values("keys_on", lambda x: x.settings.tiles != 1),
)


# --- the search ----------------------------------------------------------------------------------------------


@frozen(eq=False)
class SearchResult:
    """The best step of a search, why each setting differs from the start's, and all steps that were simulated."""

    step: PlannedStep
    reasons: tuple[str, ...]
    tried: tuple[PlannedStep, ...]

    def __repr__(self) -> str:
        return brief(self, "step", "reasons")


@define(eq=False)
class Watch:
    """The caller's side of a running search: before each candidate the search calls `tell` with a line on its
    progress. Ctrl-C ends the search with the best candidate so far and sets `stopped`."""

    tell: Callable[[str], None]
    stopped: bool = False

    def begins(self, tried: int, about: int, best: str) -> None:
        """Call `tell` with a line: candidate `tried` of about `about` begins; `best` is text on the best so far."""
        self.tell(f"searching: {tried} of about {max(tried, about)} candidates; the best so far: {best}")


@contextmanager
def watched(watch: Watch | None) -> Generator[None]:
    """A context in which Ctrl-C ends the block and sets `watch.stopped`; without a watch Ctrl-C is raised."""
    try:
        yield
    except KeyboardInterrupt:
        if watch is None:
            raise
        watch.stopped = True


def search(
    planned: Callable[[StepSettings], PlannedStep],
    start: StepSettings,
    space: Space = SPACE,
    watch: Watch | None = None,
) -> SearchResult:
    """The fastest step that fits its hardware's memory; if no step fits, the one that lacks the fewest bytes.

    `planned` plans the step of settings. Values of `space` are tried, beginning from `start`, whose values
    stay unless others gain enough. `watch` is told of progress, and Ctrl-C then stops the search. Takes
    seconds for 50 layers.
    """
    first = planned(start)
    begin = _with_state_on_disk(planned, first, space).without_operations()
    walk = _Walk(planned, space, first, begin, begin.seconds, {begin.settings: begin}, watch)
    reasons: tuple[str, ...] = ()
    with watched(watch):
        walk.descend()
        walk.undo_idle_changes()
        reasons = tuple(walk.reasons())
    return SearchResult(walk.best, reasons, tuple(x for x in walk.seen.values() if x))


def _with_state_on_disk(
    planned: Callable[[StepSettings], PlannedStep], step: PlannedStep, space: Space
) -> PlannedStep:
    """`step`; or, if it has several devices and the host has too little memory for it, `step` with its state
    on the disk, provided that the search may use the disk and the step then fits the host."""
    short = step.hardware.lacking(step.least_kept)
    if step.settings.devices > 1 and "host" in short and DISK in space.get("state_on", ()):
        settings = moved(step.settings, step.spec.world, state_on=DISK)
        with suppress(ValueError):
            if settings is not None and "host" not in (x := planned(settings)).hardware.lacking(x.least_kept):
                return x
    return step


@define(eq=False)
class _Walk:
    """A search in progress: the best step so far, the seconds of the fastest step that fits, and every step
    seen, by its settings; None for settings that a lower bound excluded without simulation."""

    planned: Callable[[StepSettings], PlannedStep]
    space: Space
    first: PlannedStep
    best: PlannedStep
    fastest: float
    seen: dict[StepSettings, PlannedStep | None]
    watch: Watch | None = None

    def descend(self) -> None:
        """Vary one setting of the best step after the other, until no single change improves the step."""
        for number in range(ROUNDS):
            before = self.best
            for coordinate in COORDINATES:
                base = self.best
                for changes in coordinate(base, self.space, number == 0):
                    if (settings := moved(base.settings, base.spec.world, **changes)) is not None:
                        self.weigh(settings)
            if self.best is before and (number or before.fits):
                return  # the first round looks at the disk only for what the host lacks

    def weigh(self, settings: StepSettings) -> None:
        """Try `settings`: their step replaces the best if better; a lower bound may exclude it unplanned.

        A step that does not fit is tried again with less of its state in the tier that lacks memory.
        """
        step = self._try(settings)
        if step is not None and not step.fits:
            for smaller in giving_way(step, step.lacking, self.space):
                self._try(smaller)

    def _try(self, settings: StepSettings) -> PlannedStep | None:
        """Simulate and return the step of `settings`; None if tried before, invalid, or too slow by
        bounds."""
        if settings in self.seen:
            return None
        self.seen[settings] = None
        if differing(settings, self.best.settings).keys() <= BESIDE_DRIVES and bound_by_drives(self.best):
            return None
        if self.watch is not None:
            best = self.best
            found = f"{format_seconds(best.seconds)} a step" if best.fits else shortage_text(best.lacking)
            self.watch.begins(len(self.seen), GUESS * sum(map(len, self.space.values())), found)
        try:
            step = self.planned(settings)
        except ValueError:  # a segment that has no tiles
            return None
        if _same(step, self.best) or self._slow(step, step.least_work) or self._lacks(step, step.least_kept):
            return None
        slow = self._slow(step, step.work_of) or step.unsettled_seconds > self._to_beat(step.work)
        if slow or self._lacks(step, step.kept):
            step.forget_operations()
            return None
        return self._simulated(step)

    def _to_beat(self, work: Mapping[Kind, float]) -> float:
        """The most seconds that a step with `work` (seconds by kind) may take to replace the best step."""
        gains = not self.best.fits or _spares_drives(work, self.best.work)
        return math.inf if gains else self.best.seconds * (1 - WORTH)

    def _slow(self, step: PlannedStep, work: WorkOf) -> bool:
        """Whether a step with at least `work` seconds is too slow to replace the best step; a change that
        moves no data must gain more to be worth a simulation."""
        moves = not TIERS_OF.keys().isdisjoint(differing(step.settings, self.best.settings))
        little = 1 if moves else (1 - POSSIBLE) / (1 - WORTH)
        return least_seconds(work, step.hardware) > self._to_beat(by_kind(work)) * little

    def _lacks(self, step: PlannedStep, kept: dict[Tier, int]) -> bool:
        """Whether a step that keeps at least the bytes `kept` lacks more memory than the best step, also with more
        of the state moved to the farther tier."""
        lacking = step.hardware.lacking(kept)
        if sum(lacking.values()) <= sum(self.best.lacking.values()):
            return False
        if not may_give_way(step.settings, lacking, self.space):
            return True
        # How much gives way on several devices needs no simulation.
        several = step.settings.devices > 1
        return several and self.seen.keys() >= {*giving_way(step, lacking, self.space)}

    def _simulated(self, step: PlannedStep) -> PlannedStep:
        better = _better(step, self.best)
        _ = step.seconds_without_compute if better and step.fits else None  # needs the operations
        self.seen[step.settings] = step.without_operations()
        if step.fits:
            self.fastest = min(self.fastest, step.seconds) if self.best.fits else step.seconds
        self.best = step if better else self.best
        return step

    def undo_idle_changes(self) -> None:
        """Return each setting of the best step to its start's value if the step then is no worse by over
        1 %."""
        for _, back in self._reverted():
            equal = sum(back.lacking.values()) == sum(self.best.lacking.values())
            as_fast = back.seconds <= self.fastest * (1 + WORTH)
            if equal and (not back.fits or (as_fast and not _spares_drives(self.best.work, back.work))):
                self.best = back

    def reasons(self) -> Iterator[str]:
        """For each setting of the best step unlike the start's, text on what the start's value would cost."""
        for name, back in self._reverted():
            change = f"{name} {_value(name, self.best)} instead of {_value(name, back)}"
            shortage = f"; otherwise {shortage_text(back.lacking)}" if back.lacking and self.best.fits else ""
            yield f"{change}: {gains_and_costs(self.best, back)}{shortage}"

    def _reverted(self) -> Iterator[tuple[str, PlannedStep]]:
        """Yield for each setting of the best step that differs from the start's: its name, and the best step
        with the start's value, simulated even if slow. Settings whose old value the other changes exclude are
        left out."""
        for name in differing(self.best.settings, self.first.settings):
            settings = moved(
                self.best.settings, self.best.spec.world, **{name: getattr(self.first.settings, name)}
            )
            with suppress(PlanError):  # an order that needs what has changed
                if settings is not None:
                    yield name, self.seen.get(settings) or self._simulated(self.planned(settings))


def _better(new: PlannedStep, old: PlannedStep) -> bool:
    """Whether `new` lacks fewer bytes than `old`; or as few, and is over 1 % faster, or about as fast with
    less use of the drives, which wear."""
    lacking, before = sum(new.lacking.values()), sum(old.lacking.values())
    faster = new.seconds < old.seconds * (1 - WORTH)
    spares = new.seconds < old.seconds * (1 + AS_FAST) and _spares_drives(new.work, old.work)
    return lacking < before or (lacking == before and (faster or spares))


def _same(new: PlannedStep, old: PlannedStep) -> bool:
    """Whether two steps differ in `grads_on` alone, and every bucket's gradient is in the same place."""
    other = differing(new.settings, old.settings)
    return other.keys() == {"grads_on"} and new.spec.places == old.spec.places


def _spares_drives(new: Mapping[Kind, float], old: Mapping[Kind, float]) -> bool:
    """Whether the work `new` takes fewer seconds of the drives than `old`, by more than 1 %."""
    now, before = (sum(work[kind] for kind in DRIVES) for work in (new, old))
    return now < before * (1 - WORTH)


def _value(name: str, step: PlannedStep) -> str:
    value = step.settings.schedule_name if name == "schedule" else getattr(step.settings, name)
    return f"{value:,}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)
