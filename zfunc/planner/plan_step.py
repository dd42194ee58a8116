"""`zfunc.plan(...)`: does a step fit, how long does it take, what bounds it, and what would help?

The plan is the one that `zfunc.compile` makes of the same settings, traced without data and simulated on the given
hardware. Nothing is allocated and no GPU is used, whatever the size of the model and the number of ranks.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from os import PathLike
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from zfunc.core.bucketing import default_bucket_size
from zfunc.core.graph import Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import bytes_by_tier, initial_memory
from zfunc.core.methods import above
from zfunc.core.setting_docs import takes_settings
from zfunc.core.setting_values import BY_DEVICE, DEVICE_SHARE, DISK, DISK_SHARE
from zfunc.core.settings import StepSettings, settings_with
from zfunc.engine.program.step_spec import choose_optimizer
from zfunc.errors import PlanError, SettingTypeError, refuse, setting
from zfunc.optim.base import Optimizer
from zfunc.options import AUTO, one_of
from zfunc.planner.candidate import (
    PlannedStep,
    garbage_collection_paused,
    least_seconds,
    shortage_text,
    step_of,
)
from zfunc.planner.cost_model import CostModel, precision_for
from zfunc.planner.planned import Planned, launch_seconds
from zfunc.planner.profile import Profile, load_profile, profile_names, replace_figures
from zfunc.planner.search import SPACE, Space, Watch, differing, moved, search, watched
from zfunc.planner.suggestions import WORTH_SAYING, Suggestion, effect, suggest
from zfunc.schedules import __all__ as SCHEDULES
from zfunc.values import of_type

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zfunc.engine.trace.segment import Segment

# The bytes of host memory and of drives that are sold.
SOLD: dict[Tier, tuple[float, ...]] = {
    "host": tuple(n * 1e9 for k in range(4, 12) for n in (2**k, 3 * 2 ** (k - 1))),
    "disk": tuple(n * 1e12 for n in (1, 2, 4, 8, 16, 32)),
}
DOUBLED, KNEE = (2, 4, 8, 16), 1.05  # times a batch that are tried; what the next has to gain
FARTHER = (
    {},
    {"activations_on": "host"},
    {"activations_on": "host", "params_on": "host"},
)  # of a larger batch
PASSED = (
    5  # times that a micro-batch passes a parameter: forward, again, backward twice, and the sum of gradients
)
GUESSES = 6  # of the most that fits, along a line; then the range is halved
# Settings that a search does not vary: only these are worth a suggestion after one.
UNSEARCHED = ("precision", "micro_batches", "moments", "stage")


@takes_settings(precision=AUTO)
def plan(
    segments: "Sequence[Segment] | nn.Module",
    example: tuple[Any, ...] | Mapping[str, Any],
    settings: StepSettings | None = None,
    *,
    loss: "Callable[[Any, Any], Tensor] | None" = None,
    optimizer: Optimizer | None = None,
    hardware: str | PathLike[str] | Profile | Hardware = "v100-32gb",
    world: int = 1,
    advice: bool = True,
    **changes: Any,
) -> Planned:
    """Plan a training step of `segments` on `hardware`; nothing is allocated, all may be on the meta device.

    `segments` may be a module, which is cut as by `zfunc.compile`: as coarsely as a step fits the device. The
    result has the cut's `most`, for `zfunc.segments(model, example, loss, most=most)`. Finer cuts are not compared,
    as each takes a search of its own and few are faster: to try one, plan the segments of a smaller `most`.

    - `example`: one rank's batch, `(inputs, targets)` or as for `zfunc.segments`, of which only shapes count: on
      the meta device it takes no memory.
    - `loss`: of (output, targets), for a module without a loss of its own.
    - `optimizer`: as in `zfunc.compile`: AdamW, or one of your own.
    - `hardware`: the name of a profile, the path of one that `zfunc calibrate` wrote, a Profile or a Hardware.
    - `world`: ranks. `advice`: also plan changes that may help, which takes longer.

    The settings of the step are as in `zfunc.compile`: `settings`, by name, or both, where names win. Also,
    `schedule="auto"` searches for the fastest step that fits, varying schedule, bucket size, slots, ratio,
    deferral, where parameters and activations live, what each share of the segments recomputes, and
    the order of micro-batches. `precision="auto"` is bf16 where the profile has it, else fp16; fp32 where the
    device is the host. `recompute` and places that are "auto", or "device:auto,host", become the fastest that
    fit; the disk is a place where the host is full; `tiles` become as few as fit.

    {settings}

    Raises ValueError and PlanError as `zfunc.compile`, and FileNotFoundError for unknown hardware.

    >>> from torch import nn, ones
    >>> blocks, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (ones(2, 64), ones(2, 64))
    >>> plan(blocks, batch, loss=nn.functional.mse_loss, hardware="rtx4090", params_on="host").most
    2080
    """
    from torch import nn

    from zfunc.engine.program.fit_to_memory import Attempt, coarsest_cut
    from zfunc.engine.trace.batches import unpacked
    from zfunc.engine.trace.model_segments import check_loss, checked_segments, ends_in_loss
    from zfunc.planner.traced_costs import traced_costs

    if callable(settings):
        refuse("settings", "a function", "a StepSettings", "pass a loss by name, as `loss`", SettingTypeError)
    machine = hardware
    if not isinstance(machine, Profile | Hardware):
        of_type("hardware", machine, str | PathLike, "a name, a path, a Profile or a Hardware")
        machine = load_profile(machine)
    if settings is None:
        changes = {"precision": AUTO, **changes}
    if "precision" in changes:
        changes["precision"] = precision_for(machine, changes["precision"])
    optimizer, settings = choose_optimizer(optimizer, settings_with(settings, changes))
    if isinstance(settings.schedule, str):
        one_of((BY_DEVICE, *SCHEDULES, AUTO))("schedule", settings.schedule)

    def model_of(segments: "Sequence[Segment]") -> CostModel:
        return CostModel(traced_costs(segments, unpacked(example, segments[-1]), optimizer, world), machine)

    check_loss(loss)
    if not isinstance(segments, nn.Module) or (loss is None and ends_in_loss(segments)):
        if loss is not None:
            refuse("loss", "one with segments", "None", "the last segment returns the loss")
        return plan_settings(model_of(checked_segments(segments)), settings, advice=advice)

    def attempt(cut: Any) -> Attempt:
        model = model_of(cut.segments)
        found = evolve(plan_settings(model, settings, advice=False), most=cut.most)
        needed, first = found.step.memory, bytes_by_tier(initial_memory(found.step.spec))
        missing, futile = (_missing(found.step.hardware, nbytes) for nbytes in (needed, first))
        return Attempt((model, found), missing, futile > 0)

    found, _, error = coarsest_cut(above("cuts")(segments, example, loss, planned=True), attempt)
    assert found is not None, error
    model, planned = found.made
    return _advised(model, settings, planned) if advice else planned


@garbage_collection_paused()
def plan_settings(
    model: CostModel, settings: StepSettings, *, advice: bool = True, watch: Watch | None = None
) -> Planned:
    """Plan a step of `model` under `settings`, of which some may be "auto", as in `plan`; with
    `advice` also changes that may help. A `watch` follows the search; if it is stopped, there is no advice."""
    planned = _plan_settled(model, settings, watch)
    stopped = watch is not None and watch.stopped
    return _advised(model, settings, planned, watch) if advice and not stopped else planned


def _plan_settled(model: CostModel, settings: StepSettings, watch: Watch | None) -> Planned:
    """The step of `model`, without advice, under `settings` with a value found for each that is "auto"."""
    if settings.pp > 1:
        do = f"pass {setting('devices', settings.pp)}, for the same passes on the devices of one process"
        refuse("pp", str(settings.pp), "1 in a plan", do)
    given = settings
    space, result = _space(settings, model.segments.tile_counts, model.segments.rows), None
    size = settings.bucket_size or default_bucket_size(model.segments.world)
    settings = evolve(search_start(settings).scheduled(on_cpu=model.machine.unified), bucket_size=size)
    if space is not None and "micro_batches" in space:
        settings = evolve(settings, micro_batches=space["micro_batches"][-1])
    if space is not None and settings.devices > 1:
        settings = _made_possible(model, settings, space)
    if space is not None:
        result = search(model.step, settings, space, watch)
        settings = result.step.settings
    settings = evolve(settings, swap=given.swap if settings.needs_folders else ())
    step = model.step(settings)
    return Planned(
        step.hardware,
        model.machine if isinstance(model.machine, Profile) else None,
        step,
        model.segments.tokens,
        model.segments.world,
        (),
        *((result.reasons, result.tried) if result else ((), ())),
        advised=False,
    )


@garbage_collection_paused()
def _advised(
    model: CostModel, settings: StepSettings, planned: Planned, watch: Watch | None = None
) -> Planned:
    """`planned`, of `model` under `settings`, with changes that may help, unless `watch` is stopped meanwhile."""
    step, rows, tiles = planned.step, model.segments.rows, model.segments.tile_counts
    settable = UNSEARCHED if settings.schedule == AUTO and step.fits else None
    with watched(watch):
        found = suggest(model.step, step, rows, tiles, settable=settable, buy=partial(_memory_bought, model))
        suggestions = *found, *_beyond_settings(model, step)
        planned = evolve(planned, suggestions=suggestions)
    return evolve(planned, advised=watch is None or not watch.stopped)


def _missing(hardware: Hardware, needed: Mapping[Tier, int]) -> int:
    """Bytes that a device of `hardware` lacks for the bytes `needed` on each tier; 0 if they fit."""
    lacking = hardware.lacking(needed).items()
    return max((n for tier, n in lacking if hardware.unified or tier.startswith("device")), default=0)


def _made_possible(model: CostModel, settings: StepSettings, space: Space) -> StepSettings:
    """`settings`, with parameters on the host if the step is impossible otherwise and the search may move them."""
    try:
        model.step(settings)
    except PlanError:
        host = moved(settings, model.segments.world, params_on="host")
        return host if host is not None and "params_on" in space else settings
    return settings


def _memory_bought(model: CostModel, lacking: Suggestion) -> Suggestion | None:
    """The suggestion `lacking` plus the smallest memory that makes its step fit, host memory or drives in
    sizes that are sold; None if the step lacks memory of several tiers or of another one."""
    step, profile = lacking.step, model.machine
    for tier, sizes in SOLD.items() if isinstance(profile, Profile) else ():
        for size in sizes if {*step.lacking} == {tier} else ():
            larger = replace_figures(profile, {f"bytes.{tier}": size})
            hardware = larger.hardware(step.settings.precision, step.spec.world, step.settings.devices)
            if hardware.lacking(step.memory) or not (new := evolve(step, hardware=hardware)).fits:
                continue
            gains = [lacking.effect.partition(";")[0]] if lacking.changes else []
            bought = f"fits, {shortage_text(step.lacking)}: {size / 1e9:,.0f} GB"
            figure = f"bytes.{tier}={size:.4g}".replace("e+", "e")
            return Suggestion({**lacking.changes, "with_": figure}, new, "; ".join([bought, *gains]))
    return None


def _beyond_settings(model: CostModel, step: PlannedStep) -> Iterator[Suggestion]:
    """Suggestions beyond settings: a larger batch if `step` fits and the device waits; another GPU if not."""
    if step.fits:
        yield from _larger_batch(model, step)
    if isinstance(model.machine, Profile) and not step.fits:
        given = model.machine.given
        larger = [x for x in map(load_profile, profile_names()) if x.grouped == model.machine.grouped]
        for profile in sorted(larger, key=lambda x: (x.device_bytes, x.name)):
            with suppress(ValueError):  # a precision or a network that it does not have
                precision, profile = step.settings.precision, replace_figures(profile, given)
                hardware = profile.hardware(precision, step.spec.world, step.settings.devices)
                if not profile.unified and not hardware.lacking(step.memory):
                    new = evolve(step, hardware=hardware)
                    own = {} if precision_for(profile, AUTO) == precision else {"precision": precision}
                    yield Suggestion({"hardware": profile.name, **own}, new, effect({}, new, step))
                    return


def _larger_batch(model: CostModel, step: PlannedStep) -> Iterator[Suggestion]:
    """Suggest a larger batch, doubled as long as tokens/s grow: with more rows in a micro-batch, or more
    micro-batches where larger ones do not fit; activations, then also parameters, move to the host where the
    device lacks memory."""
    settings, segments = step.settings, model.segments
    if _same_for_any_rows(step) <= WORTH_SAYING * step.seconds:
        return

    def larger(times: int, gain: float) -> Iterator[PlannedStep]:
        """Planned steps of `times` the batch that fit and may train `gain` times the tokens/s; the fastest last."""
        ways = [(model, times * settings.micro_batches)]
        if segments.resized is not None:
            bigger = CostModel(segments.resized(times * segments.rows), model.machine)
            ways.insert(0, (bigger, settings.micro_batches))
        most = times * step.seconds / gain
        for (of, count), places in product(ways, FARTHER):
            with suppress(ValueError):  # tiles or micro-batches beyond what there may be
                if (way := moved(settings, step.spec.world, **places)) is None:
                    continue
                new = step_of(of.spec(way), evolve(way, micro_batches=count), step.hardware)
                slow = least_seconds(new.least_work, new.hardware) >= most
                if slow or new.hardware.lacking(new.least_kept):
                    continue
                least = max(*new.work.values(), new.unsettled_seconds)
                if new.hardware.lacking(new.kept) or least >= most:
                    new.forget_operations()
                elif new.without_operations().fits and new.seconds < most:
                    yield new
                    if not places:
                        return
                    most = new.seconds * (1 - WORTH_SAYING)

    def most_gained(times: float) -> float:
        """Upper bound of the gain in tokens/s from `times` the batch, by the step's seconds and compute."""
        return times * step.seconds / max(step.seconds, times * step.work["compute"])

    # First the largest up to which each may gain on what the one before it gains at most; if it does, none of them
    # is planned. Else from the smallest.
    grows = [most_gained(n) > KNEE * most_gained(n / 2) for n in DOUBLED]
    first = max(0, [*grows, False].index(False) - 1)
    found = list[Suggestion]()
    for begin, known in {first: KNEE * most_gained(DOUBLED[first] / 2), 0: 1 + WORTH_SAYING}.items():
        for times in DOUBLED[begin:] if not found else ():
            if not (better := [*larger(times, known)]):
                break
            new = better[-1]
            gain = times * step.seconds / new.seconds
            batch = {"batch_size": times * segments.rows * step.spec.world}
            changes = {**batch, **differing(new.settings, settings)}
            found, known = [Suggestion(changes, new, f"{gain:.3g} times the tokens/s")], gain * KNEE
    yield from found


def _same_for_any_rows(step: PlannedStep) -> float:
    """Upper bound of the seconds of `step` that do not grow with its rows: waits of the device, kernel
    launches, and reads and writes of parameters and other memory that the step keeps."""
    spec, kept = step.spec, step.kept["device"]
    kept += sum(x.numel * x.element_bytes for x in spec.places)
    passed = step.settings.micro_batches * PASSED * kept / step.hardware.rates["compute"]
    return step.seconds - step.work["compute"] + sum(step.total(launch_seconds).values()) + passed


def most_that_fit(
    planned: Callable[[int], PlannedStep],
    most: int,
    watch: Watch | None = None,
    told: Callable[[int], str] = str,
) -> int:
    """The largest count from 1 to `most`, of layers, sequences or tokens, whose planned step fits; 0 if none does.
    If `watch` is stopped, the largest that was found to fit; `told(count)` is the watch's text for a count.

    The step of the returned count was planned and fits; that of the next count was planned and does not fit,
    or is above `most`. A step is traced anew for each count, so few are tried: memory grows nearly in
    proportion, and the next count to try is read off the line through two planned steps.
    """
    known: dict[int, PlannedStep] = {}

    def fits(count: int) -> bool:
        if watch is not None:
            watch.begins(len(known) + 1, 2 + GUESSES, told(low) if known else "none")
        known[count] = planned(count).without_operations()
        return known[count].fits

    def too_much(count: int) -> bool:
        """Whether `count` does not fit, its memory estimated on the line through two planned steps."""
        a, b = sorted((low, high if high in known else max(x for x in known if x < low)))
        at_a, at_b = known[a].memory, known[b].memory
        needed = {tier: n + (at_b[tier] - n) * (count - a) // (b - a) for tier, n in at_a.items()}
        return bool(known[a].hardware.lacking(needed))

    low, high = 0, most + 1  # fits, and does not
    with watched(watch):
        low = int(fits(1))
        while low and high - low > 1:
            count = (low + high) // 2
            if len(known) < 2:
                count = 2
            elif len(known) <= GUESSES:
                guess = low + bisect_left(range(low + 1, high), True, key=too_much)
                count = max(low + 1, min(high - 1, guess))
            low, high = (count, high) if fits(count) else (low, count)
    return low


def _space(settings: StepSettings, tile_counts: Sequence[int], rows: int) -> Space | None:
    """The values that a search tries, by setting: all settings if `schedule` is "auto", else those that are
    "auto"; None if no setting is. `rows`, one rank's batch, bounds the numbers of micro-batches."""
    space: dict[str, tuple[Any, ...]] = {**SPACE, "tiles": tuple(tile_counts)}
    orders = (AUTO,) if settings.devices > 1 else SPACE["order"]
    ordered: dict[str, tuple[Any, ...]] = {"order": orders} if settings.order == AUTO else {}
    if ordered and settings.micro_batches == 1:
        parts = [n for n in range(1, rows + 1) if rows % n == 0]
        near = (min(parts, key=lambda n: abs(n - times * settings.devices)) for times in (1, 2, 4, 8))
        ordered["micro_batches"] = tuple(dict.fromkeys(near))
    space |= ordered
    if settings.schedule == AUTO:
        return space
    state_on = space["state_on"] if settings.state_on != AUTO else ("host", DISK_SHARE, DISK)
    space["state_on"] = (DEVICE_SHARE,) if settings.fits_state else state_on
    names = {*ordered, *settings.automatic, *(["state_on"] if settings.fits_state else [])}
    return {name: values for name, values in space.items() if name in names} or None


def search_start(settings: StepSettings) -> StepSettings:
    """The settings from which a search begins: `settings` with the default value of each that is "auto"."""
    open_ = (AUTO, DEVICE_SHARE)
    auto = {f.name: f.default for f in fields(StepSettings) if getattr(settings, f.name) in open_}
    return evolve(settings.at(**auto), swap=())
