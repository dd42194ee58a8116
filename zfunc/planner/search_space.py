"""The choices that a search tries: settings that differ from the best in one, and in what follows from it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal

from attrs import evolve, fields, frozen

from zfunc.core.bucketing import lay_out
from zfunc.core.graph import Tier
from zfunc.core.settings import DISK, HOST_OR_DISK, PLACES, TIERS_OF, StepSettings
from zfunc.core.spec import in_equal_shares
from zfunc.planner.candidate import PlannedStep
from zfunc.planner.steady_state import Estimate

WORTH = 0.01  # of a step's time: a change that gains less is not made
ALMOST = 1e-9  # a share of the state in which there is no bucket
# By the share of the state that is further away: where the rest is, and the tiers that share that memory.
NEARER: dict[str, tuple[Tier, tuple[Tier, ...]]] = {
    "offload_ratio": ("device", ("device",)),
    "disk_ratio": ("host", ("host", "pinned")),
}
QUARTERS = 4  # shares of the segments, in the first of which activations go further away
SEARCHED = (
    "schedule",
    "bucket_size",
    "grad_slots",
    "host_slots",
    "offload_ratio",
    "defer",
    "params_on",
    "activations_on",
    "recompute",
    "stage",
    "accumulate",
    "weight_slots",
    "persistent_params",
    "state_on",
    "disk_ratio",
    "grads_on",
    "state_slots",
)
"""The settings that are varied: they change how a step runs not its result."""


@frozen
class SearchSpace:
    """The values to try. `offload_ratios` of None are those that fit.

    Shares of `recompute` and `activations_on` keep most in the last segments, whose backward comes first; of the
    best of `activations_on`, those of a quarter of the segments move on. `accumulate` and `stages` are tried where
    there are several micro-batches and ranks. `persistent` parameters are as many as there is room for. State,
    parameters, gradients and activations move to the disk, alone or together, only where a step does not fit the
    host, or memory alone; `disk_ratios` of None are those that fit.
    """

    schedules: tuple[str, ...] = ("Overlapped", "Interleaved", "CriticalPath")
    bucket_sizes: tuple[int, ...] = tuple(n * 1_000_000 for n in (10, 25, 50, 100, 200, 500))
    grad_slots: tuple[int, ...] = (1, 2, 3, 4)
    host_slots: tuple[int, ...] = (1, 2, 3, 4)
    offload_ratios: tuple[float, ...] | None = None
    defer: tuple[bool, ...] = (False, True)
    params_on: tuple[str, ...] = (*PLACES, DISK)
    activations_on: tuple[str, ...] = (
        *("device", "host,device", "host,host,host,device", "host", "disk,host", "disk"),
    )
    recompute: tuple[str, ...] = (
        *("none", "min-cut", "all,min-cut,min-cut,min-cut", "all,min-cut", "all,all,all,min-cut", "all"),
    )
    stages: tuple[Literal[2, 3], ...] = (2, 3)
    accumulate: tuple[str | int, ...] = ("horizontal", "vertical", 2, 4, 8)
    weight_slots: tuple[int, ...] = (1, 2, 3, 4)
    persistent: tuple[bool, ...] = (False, True)
    state_on: tuple[Literal["host", "disk"], ...] = HOST_OR_DISK
    grads_on: tuple[Literal["host", "disk"], ...] = HOST_OR_DISK
    disk_ratios: tuple[float, ...] | None = None
    state_slots: tuple[int, ...] = (1, 2, 3, 4, 6)

    @classmethod
    def only(cls, **values: tuple[Any, ...] | None) -> "SearchSpace":
        """A space that varies nothing but these."""
        return cls(**{f.name: () for f in fields(cls)} | values)


Coordinate = Callable[[PlannedStep, SearchSpace, bool], Iterator[StepSettings]]


def _places(best: PlannedStep, space: SearchSpace, first: bool) -> Iterator[StepSettings]:
    """Parameters and activations on the device, on the host, or on the disk."""
    settings = best.settings
    for params_on in _worth_trying(best, space.params_on, settings.params_on, first):
        for activations_on in _worth_trying(best, space.activations_on, settings.activations_on, first):
            if activations_on.count(",") >= best.spec.num_segments:
                continue
            changes: dict[str, Any] = {"params_on": params_on, "activations_on": activations_on}
            if params_on != "device":
                changes |= {"stage": 3 if best.spec.world > 1 else settings.stage}
            yield from _possible(settings, **changes)


def _nearer(best: PlannedStep, space: SearchSpace, _first: bool) -> Iterator[StepSettings]:
    """Activations of a quarter of the segments in the next tier: further away where the step does not fit."""
    known = {place for places in space.activations_on for place in places.split(",")}
    if len(known) > 1 and (not best.fits or may_gain(best)):
        count = min(QUARTERS, best.spec.num_segments)
        for places in moved_by_a_share(best.settings.activations_on, count, nearer=best.fits):
            if known >= {*places.split(",")}:
                yield from _possible(best.settings, activations_on=places)


def moved_by_a_share(activations_on: str, count: int, *, nearer: bool) -> Iterator[str]:
    """Places of activations with those of one of `count` shares in the next tier, and none nearer than a later one.

    >>> [*moved_by_a_share("disk,host", 4, nearer=True)]
    ['disk,host,host,host', 'disk,disk,host,device']
    """
    tiers, now = TIERS_OF["activations_on"], activations_on.split(",")
    shares = [tiers.index(in_equal_shares(now, s, count)) for s in range(count)]
    for s, tier in enumerate(shares):
        moved = [*shares[:s], tier - 1 if nearer else tier + 1, *shares[s + 1 :]]
        if moved == sorted(moved, reverse=True) and {*moved} <= {*range(len(tiers))}:
            yield _in_fewest_shares([tiers[x] for x in moved])


def _in_fewest_shares(places: list[str]) -> str:
    count = len(places)
    shares = (places[:: count // n] for n in range(1, count + 1) if count % n == 0)
    return ",".join(next(x for x in shares if places == [in_equal_shares(x, s, count) for s in range(count)]))


def may_gain(step: PlannedStep) -> bool:
    """Whether a step may gain from anything in a nearer tier: its device waits, or its drives wear."""
    return step.spec.uses_disk or step.work["compute"] < step.seconds * (1 - WORTH)


def _worth_trying(best: PlannedStep, places: tuple[str, ...], now: str, first: bool) -> list[str]:
    """Those of `places` that may be better than `now`: the disk where the host is full, where it is in use, or
    where memory was not enough in the first round.

    Where the device is the host, only the disk, and the way back from it.
    """
    there, elsewhere = DISK in now.split(","), not best.hardware.unified
    on_disk = there or lacks_host(best) or not (first or best.fits)
    return [
        x for x in places or (now,) if x == now or (on_disk if DISK in x.split(",") else there or elsewhere)
    ]


def _tiers(best: PlannedStep, space: SearchSpace, first: bool) -> Iterator[StepSettings]:
    """State on the disk, then parameters and gradients too; where it is there, less of that."""
    settings = best.settings
    if settings.state_on == DISK:
        if "host" in space.state_on:
            changes = {"state_on": "host", "grads_on": "host", "disk_ratio": 1.0}
            on_host = {"params_on": "host"} if settings.params_on == DISK else {}
            yield from _possible(settings, **changes, **on_host)
        streamed = (x for x in space.params_on if x != "device")
        for params_on in streamed if settings.params_on != "device" else ("device",):
            for grads_on in space.grads_on if best.spec.barrier else ("host",):
                yield from _possible(settings, params_on=params_on, grads_on=grads_on)
    elif DISK in space.state_on and (lacks_host(best) or not (first or best.fits)):
        for more in on_the_disk(settings, waits=best.spec.barrier, world=best.spec.world):
            if all(DISK in getattr(space, x) for x in ("params_on", "grads_on") if more.get(x) == DISK):
                yield from _possible(settings, **more)


def lacks_host(step: PlannedStep) -> bool:
    """Whether a step does not fit the host, which may be the device."""
    return "host" in step.lacking or (step.hardware.unified and "device" in step.lacking)


def on_the_disk(settings: StepSettings, *, waits: bool, world: int) -> Iterator[dict[str, Any]]:
    """Changes that move state to the disk, then parameters, then gradients that wait, each beside those before."""
    changes: dict[str, Any] = {"state_on": DISK}
    changes |= {"offload_ratio": 1.0} if settings.offload_ratio != 1 else {}
    if settings.state_on != DISK:
        yield dict(changes)
    if settings.params_on != DISK:
        changes |= {"params_on": DISK} | ({"stage": 3} if world > 1 and settings.stage != 3 else {})
        yield dict(changes)
    if waits and settings.grads_on != DISK:
        yield {**changes, "grads_on": DISK}


def _recompute(best: PlannedStep, space: SearchSpace, first: bool) -> Iterator[StepSettings]:
    """What is recomputed, with what is kept instead where activations are now, and in the first round elsewhere."""
    now = best.settings.activations_on
    for activations_on in dict.fromkeys(
        (now, *(_worth_trying(best, space.activations_on, now, first) if first else ()))
    ):
        for recompute in space.recompute:
            if max(activations_on.count(","), recompute.count(",")) < best.spec.num_segments:
                yield from _possible(best.settings, activations_on=activations_on, recompute=recompute)


def _stages(best: PlannedStep, space: SearchSpace, _first: bool) -> Iterator[StepSettings]:
    if best.spec.world > 1 and best.settings.stage > 1 and best.settings.params_on == "device":
        for stage in space.stages:
            yield from _possible(best.settings, stage=stage)


def _accumulate(best: PlannedStep, space: SearchSpace, _first: bool) -> Iterator[StepSettings]:
    known = {best.settings.group_size}
    for order in space.accumulate:
        for settings in _possible(best.settings, accumulate=order):
            if settings.group_size not in known:
                known.add(settings.group_size)
                yield settings


def _slots(name: str, useful: Callable[[PlannedStep], bool] = lambda _: True) -> Coordinate:
    """One slot fewer and one more, of those in the space."""

    def beside(best: PlannedStep, space: SearchSpace, _first: bool) -> Iterator[StepSettings]:
        if useful(best):
            for count in _beside(getattr(space, name), getattr(best.settings, name)):
                yield evolve(best.settings, **{name: count})

    return beside


def _persistent(best: PlannedStep, space: SearchSpace, first: bool) -> Iterator[StepSettings]:
    if best.settings.streams and first:
        for persistent in space.persistent:
            yield evolve(best.settings, persistent_params=most_persistent(best) if persistent else 0)


def most_persistent(step: PlannedStep) -> int:
    """The most elements of a parameter if those of no more stay on the device and fit it; 0 if all of them do."""
    capacity = step.hardware.memory.get("device")
    sizes = sorted({p.name: p.numel for own in step.spec.layout.parameters for p in own}.values())
    if capacity is None:
        return 0
    free = (capacity - step.memory["device"]) // step.spec.element_bytes
    if sum(sizes) <= free:
        return 0  # without `params_on`, nothing has to be streamed
    whole = [size for size, total in zip(sizes, accumulate(sizes), strict=True) if total <= free]
    # Of equal sizes all stay, or none.
    return max((x for x in whole if whole.count(x) == sizes.count(x)), default=0)


def _possible(settings: StepSettings, **changes: Any) -> Iterator[StepSettings]:
    """The settings with `changes`, unless they exclude each other."""
    with suppress(ValueError):
        yield evolve(settings, **changes)


def _schedules(best: PlannedStep, space: SearchSpace, _first: bool) -> Iterator[StepSettings]:
    for name in space.schedules:
        yield evolve(best.settings, schedule=name)


def _defer(best: PlannedStep, space: SearchSpace, _first: bool) -> Iterator[StepSettings]:
    if best.spec.barrier:
        for defer in space.defer:
            yield evolve(best.settings, defer=defer)


def _shares(name: str) -> Coordinate:
    """The settings with each share in the space, or with those that fit; after the first round, the least."""

    def shares(best: PlannedStep, space: SearchSpace, first: bool) -> Iterator[StepSettings]:
        given: tuple[float, ...] | None = getattr(space, f"{name}s")
        if given is None:
            fitting = shares_that_fit(best, name) if first or (best.fits and may_gain(best)) else ()
            given = fitting if first else fitting[-2:-1]
        for share in given:
            yield from _possible(best.settings, **{name: share})

    return shares


def giving_way(step: PlannedStep, space: SearchSpace) -> Iterator[StepSettings]:
    """The settings of a step that does not fit, with as much more of the state further away as makes it fit."""
    name = share_of_state(step.settings)
    if may_give_way(step.settings, step.lacking, space):
        enough = shares_that_fit(step, name)[-2:][0]
        if enough > getattr(step.settings, name):
            yield evolve(step.settings, **{name: enough})


def may_give_way(settings: StepSettings, lacking: Mapping[Tier, int], space: SearchSpace) -> bool:
    """Whether only that tier is full whose part of the state may be smaller."""
    name = share_of_state(settings)
    full = lacking.keys() == {NEARER[name][0]}
    return full and getattr(space, f"{name}s") is None and getattr(settings, name) < 1


def share_of_state(settings: StepSettings) -> str:
    """The setting for the share of the state that is further away."""
    return "disk_ratio" if settings.state_on == DISK else "offload_ratio"


def shares_that_fit(best: PlannedStep, name: str) -> tuple[float, ...]:
    """Values of the ratio `name` from 1 down to where the tier of the rest is full, and half way.

    What is kept there grows linearly from a ratio of 1 to one of 0. The last value is the lowest by arithmetic: it
    may be too low by a bucket, by which the one before is higher. 1 alone where the rest is nowhere nearer.
    """
    nearer, tiers = NEARER[name]
    unified, capacity = best.hardware.unified, best.hardware.memory.get(nearer)
    if name != share_of_state(best.settings) or (unified and nearer == "device"):
        return (1.0,)
    if capacity is None:
        return (1.0, 0.5, 0.0)
    tiers = (*tiers, "device") if unified else tiers
    plain = evolve(best.spec, commit=False)  # with a ratio of 0 there is nothing to commit

    def kept(ratio: float) -> int:
        other = Estimate(plain, evolve(best.settings, **{name: ratio}), best.hardware)
        return sum(other.kept[tier] for tier in tiers)

    # Between the ends, where buckets may be smaller and no slot is left out.
    half, least = kept(0.5), kept(1 - ALMOST)
    free = capacity - sum(best.memory[tier] - best.peaks[tier].kept for tier in tiers) - least
    lowest = min(1.0, max(0.0, 1.0 - free / (half - least) / 2)) if half > least else 1.0
    percent, sizes = math.ceil(lowest * 100), [b.numel for b in best.spec.layout.buckets]
    bucket = math.ceil(max(sizes) / sum(sizes) * 100)
    higher = min(100, percent + max(2, bucket))
    return tuple(dict.fromkeys(n / 100 for n in (100, (100 + percent) // 2, higher, percent)))


def _buckets(best: PlannedStep, space: SearchSpace, first: bool) -> Iterator[StepSettings]:
    sizes = space.bucket_sizes if first else _beside(space.bucket_sizes, best.settings.bucket_size)
    known = {cuts_of(best, best.settings.bucket_size)}
    for size in sizes:
        if (cuts := cuts_of(best, size)) not in known:
            known.add(cuts)
            yield evolve(best.settings, bucket_size=size)


def cuts_of(best: PlannedStep, bucket_size: int) -> tuple[int, ...]:
    """Where buckets of that size end: two sizes with equal cuts are one choice."""
    settings = evolve(best.settings, bucket_size=bucket_size, offload_ratio=1.0)
    layout = lay_out(best.spec.layout.parameters, settings, best.spec.world)
    return tuple(b.stop for b in layout.buckets)


COORDINATES: tuple[Coordinate, ...] = (
    *(
        _schedules,
        _places,
        _tiers,
        _nearer,
        _stages,
        _accumulate,
        _defer,
        _recompute,
        _shares("offload_ratio"),
    ),
    *(_buckets, _slots("host_slots")),
    _slots("grad_slots", lambda best: best.spec.stage > 1),  # in stage 1 every bucket has a slot
    *(_slots("weight_slots", lambda best: best.settings.streams), _persistent, _shares("disk_ratio")),
    _slots("state_slots", lambda best: best.settings.state_on == DISK),
)


def _beside(values: tuple[int, ...], value: int) -> Iterator[int]:
    """The next smaller and the next larger value."""
    yield from sorted(v for v in values if v < value)[-1:]
    yield from sorted(v for v in values if v > value)[:1]
