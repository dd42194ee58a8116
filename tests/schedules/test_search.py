"""The search over the settings of a step; advice; the largest of a family. No torch here."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from table import SPECS, chain, layouts, spec

from zfunc.core.bucketing import default_bucket_size, resident_buckets
from zfunc.core.graph import Graph, Tier
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.recipes import Recipe, deferred, zero_offload
from zfunc.core.setting_values import DEVICE_SHARE, DISK_SHARE, PLACES, TIERS_OF, UPDATE_SHARES
from zfunc.core.settings import StepSettings
from zfunc.core.shares import as_shares, two_tiers, word_of
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.planner.candidate import PlannedStep, gains_and_costs, least_seconds, step_of
from zfunc.planner.plan_step import most_that_fit
from zfunc.planner.search import SPACE as EVERYTHING
from zfunc.planner.search import WORTH, Space, Watch, most_persistent, moved, search, shares_that_fit
from zfunc.planner.suggestions import suggest
from zfunc.units import format_seconds

COMPUTE, HOST = 10**12, 10**9  # FLOP/s, B/s: Adam takes as long as backward
BALANCED = Hardware(
    "balanced",
    flops=COMPUTE,
    rates={"compute": 1e12, "network": 1e9, "d2h": 1e9, "h2d": 1e9, "host": HOST, "read": 1e9, "write": 1e9},
    latency=1e-6,
)


START = StepSettings(bucket_size=1 << 18)


def model(
    num_layers: int = 6, *, width: int = 256, state_format: str = "fp32", world: int = 1, **settings: Any
) -> StepSpec:
    """Equal layers of two matrices, whose arithmetic takes about as long as their way to the host and back."""
    parameters = [
        [Parameter(f"{s}.{x}", (width, width), state_format=state_format) for x in ("up", "down")]
        for s in range(num_layers)
    ]
    layout = make_layout(parameters, bucket_size=1 << 18, world=world)
    cost = SegmentCost(
        PassCost(10**9, workspace=1 << 14), PassCost(3 * 10**9, workspace=1 << 15), input_bytes=1 << 16
    )
    return StepSpec(layout, [cost] * num_layers, evolve(START, **settings), world, target_bytes=512)


def steps(
    spec: StepSpec | Callable[[StepSettings], StepSpec], on: Hardware = BALANCED
) -> Callable[[StepSettings], PlannedStep]:
    """How the step of any settings is planned: of this spec, or of theirs."""
    return lambda settings: step_of(spec(settings) if callable(spec) else spec, settings, on)


COMPUTING = evolve(BALANCED, flops=COMPUTE // 100)
CLIPPED = evolve(START, clip_norm=1.0)
SPACE = EVERYTHING | {"bucket_size": (1 << 16, 1 << 17, 1 << 18, 1 << 19), "recompute": ()}


def with_room(**memory: int) -> Hardware:
    return evolve(BALANCED, memory=memory)


# --- a choice and its step ---------------------------------------------------------------------------------


@given(layouts(), st.integers(1, 2000))
def test_laid_out_again_alike_is_the_same_layout(
    model: tuple[list[list[Parameter]], int, int], other_size: int
) -> None:
    segments, bucket_size, world = model
    layout = make_layout(segments, bucket_size=bucket_size, world=world)
    other = make_layout(layout.parameters, bucket_size=other_size, world=world)
    assert other.segments == layout.segments
    assert make_layout(other.parameters, bucket_size=bucket_size, world=world) == layout


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("way", "recipe"), [({}, zero_offload), ({"defer": True}, deferred)])
def test_settings_are_what_the_recipe_gets(share: float, way: dict[str, Any], recipe: Recipe) -> None:
    settings = evolve(CLIPPED, state_on=two_tiers("device", share, "host"), **way)
    step = step_of(model(), settings, BALANCED)
    assert step.spec.resident == resident_buckets(step.spec.layout, share)
    assert step.settings == settings
    assert step.graph == Graph(tuple(recipe(step.spec)))


def test_two_steps_compare_in_words() -> None:
    slow, fast = (step_of(model(), evolve(START, schedule=s), BALANCED) for s in ("Serial", "Overlapped"))
    assert gains_and_costs(fast, slow).endswith(" % faster")
    assert gains_and_costs(slow, fast).endswith(" % slower")
    assert gains_and_costs(fast, fast) == "as fast"
    more = step_of(model(), evolve(START, slots=20), BALANCED)
    assert "MiB more pinned" in gains_and_costs(more, fast)


# --- the search --------------------------------------------------------------------------------------------


def check_search(step_spec: StepSpec, on: Hardware, space: Space = SPACE) -> PlannedStep:
    """What is promised of every search; returns the best step."""
    start = step_spec.settings
    result = search(steps(step_spec, on), start, space)
    if fitting := [t.seconds for t in result.tried if t.fits]:
        assert result.step.fits
        assert result.step.seconds <= min(fitting) * (1 + WORTH) ** 2
    else:
        assert sum(result.step.lacking.values()) <= min(sum(t.lacking.values()) for t in result.tried)
    away = (t.settings for t in result.tried if t.settings.params_on != "device")
    assert step_spec.world == 1 or {x.stage for x in away} <= {3}, "several ranks have slices there"
    fresh = step_of(step_spec, result.step.settings, on)
    assert (fresh.seconds, fresh.memory) == (result.step.seconds, result.step.memory)
    differs = {f for f in EVERYTHING if getattr(result.step.settings, f) != getattr(start, f)}
    assert {r.partition(" ")[0] for r in result.reasons} == differs
    return result.step


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """Of any speed, with room on the device and the host, or too little."""
    slower = {kind: draw(st.sampled_from((1.0, 0.1))) for kind in ("compute", "d2h", "h2d", "host")}
    rates = {kind: rate * slower.get(kind, 1.0) for kind, rate in BALANCED.rates.items()}
    device, host = (draw(st.integers(1, 60)) * n for n in (100_000, 300_000))
    memory = draw(st.sampled_from(({"device": device, "host": host}, {"device": 1 << 40, "host": 1 << 40})))
    return evolve(BALANCED, flops=COMPUTE * slower["compute"], rates=rates, memory=memory)


@given(machines(), st.booleans(), st.integers(1, 2), st.integers(1, 2))
@settings(max_examples=settings.default.max_examples // 13, deadline=None)
def test_a_search_never_returns_worse_than_its_start(
    on: Hardware, barrier: bool, parts: int, world: int
) -> None:
    spec = model(4, clip_norm=1.0 if barrier else None, micro_batches=parts, world=world)
    best, start = check_search(spec, on), step_of(spec, spec.settings, on)
    assert sum(best.lacking.values()) <= sum(start.lacking.values())
    assert not (best.fits and start.fits) or best.seconds <= start.seconds * (1 + WORTH)


@given(machines())
@settings(max_examples=settings.default.max_examples // 20, deadline=None)
def test_a_suggestion_makes_a_step_fit_or_faster(on: Hardware) -> None:
    """As it was planned; where nothing is enough it is said what is still lacking."""
    step, plan = planning(on)
    for a in suggest(plan, step, rows=4):
        again = plan(evolve(SETUP, **a.changes))
        assert (again.seconds, again.memory) == (a.step.seconds, a.step.memory)
        if step.fits:
            assert again.fits
            assert again.seconds < 0.98 * step.seconds
        else:
            assert ("fits, " in a.effect, "; still " in a.effect) == (again.fits, not again.fits)


@pytest.mark.parametrize("barrier", [False, True])
def test_the_result_is_faster_than_the_start(barrier: bool) -> None:
    step_spec = model(clip_norm=1.0 if barrier else None, micro_batches=2)
    best = check_search(step_spec, with_room(device=1 << 40, host=1 << 40))
    assert best.fits
    assert best.seconds < step_of(step_spec, step_spec.settings, BALANCED).seconds


@pytest.mark.parametrize("name", ["tied accumulated", "frozen", "stage 1", "8 bits", "scalars"])
def test_search_holds_for_any_spec(name: str) -> None:
    sizes = EVERYTHING | {"bucket_size": (64, 128, 1000)}
    spec = SPECS[name]
    check_search(evolve(spec, settings=evolve(spec.settings, bucket_size=128)), BALANCED, sizes)


def test_with_a_barrier_deferral_is_found_each_time() -> None:
    found, again = (search(steps(model()), CLIPPED, SPACE | {"state_on": ("host",)}) for _ in range(2))
    assert (found.step.settings, found.reasons) == (again.step.settings, again.reasons)
    (reason,) = (r for r in found.reasons if "defer" in r)
    assert re.fullmatch(r"defer True instead of False: \d+ % faster", reason), "and no memory"


@pytest.mark.parametrize(
    ("host", "copies", "expected"),
    [(1e12, 1e9, {"host"}), (1e8, 1e10, {"device"}), (1e9, 1e9, set(UPDATE_SHARES))],
)
def test_updates_are_where_they_are_faster(host: float, copies: float, expected: set[str]) -> None:
    """And never slower than the better of the two places."""
    machine = evolve(BALANCED, rates={**BALANCED.rates, "host": host, "d2h": copies, "h2d": copies})
    planned, space = steps(model(clip_norm=1.0), machine), {"update_on": EVERYTHING["update_on"]}
    found = search(planned, evolve(START, clip_norm=1.0), space).step
    assert found.settings.update_on in expected
    better = min(planned(evolve(CLIPPED, update_on=x)).seconds for x in PLACES)
    assert found.seconds <= better * (1 + WORTH)


def test_state_stays_on_the_device_as_far_as_it_fits() -> None:
    slow = evolve(BALANCED, rates={**BALANCED.rates, "host": 1e8})
    free = step_of(model(), START, slow).memory["device"]
    all_of_it = 12 * model().layout.numel
    ratios = SPACE | {"params_on": (), "activations_on": (), "update_on": ()}
    for share in (0.0, 0.4, 1.0):
        room = int(free + share * all_of_it + 100_000)
        best = check_search(model(), evolve(slow, memory={"device": room}), space=ratios)
        assert best.fits
        assert best.settings.share_of_state("device") == pytest.approx(share, abs=0.1)


def test_the_ratios_that_fit_end_where_the_device_is_full() -> None:
    started = step_of(model(), START, BALANCED)
    room = started.memory["device"] + 6 * model().layout.numel
    *_, lowest = shares_that_fit(step_of(model(), START, with_room(device=room)), DEVICE_SHARE)
    assert lowest == pytest.approx(0.5, abs=0.1)
    assert shares_that_fit(started, DEVICE_SHARE) == (1.0, 0.5, 0.0), "no limit is known"
    assert shares_that_fit(step_of(model(), START, evolve(BALANCED, unified=True)), DEVICE_SHARE) == (1.0,)
    assert shares_that_fit(step_of(model(), START, with_room(device=1)), DEVICE_SHARE) == (1.0,)


def test_what_does_not_fit_moves_to_the_host_and_no_more_than_that() -> None:
    spec, start = model(9), evolve(START, micro_batches=4)
    placed = [
        step_of(spec, evolve(start, params_on=params_on, activations_on=activations_on), BALANCED)
        for params_on, activations_on in product(PLACES, PLACES)
    ]
    assert len({step.memory["device"] for step in placed}) == 4
    for step in placed:
        room = with_room(device=step.memory["device"])
        best = search(steps(spec, room), start, {"params_on": PLACES, "activations_on": PLACES}).step
        fitting = [x.seconds for x in placed if x.memory["device"] <= step.memory["device"]]
        assert best.fits
        assert best.seconds <= min(fitting) * (1 + WORTH)
        if not (plain := step_of(spec, start, room)).fits:
            advice = suggest(steps(spec, room), plain, rows=4)
            moved = [a for a in advice if {"params_on", "activations_on"} & a.changes.keys()]
            assert moved
            assert all(a.step.fits and a.effect.startswith("fits, ") for a in moved)


def test_as_much_is_kept_as_fits() -> None:
    """All where there is room, nothing where there is none, the residuals of the last segments in between."""
    all_of_them = [evolve(SETUP, recompute=x) for x in EVERYTHING["recompute"]]
    fixed = {x.recompute: step_of(recomputing(x), x, COMPUTING) for x in all_of_them}
    only, found = {"recompute": tuple(fixed)}, set[str]()
    for step in fixed.values():
        for start in ("all", "none"):
            room = evolve(COMPUTING, memory={"device": step.memory["device"]})
            best = search(steps(recomputing, room), evolve(SETUP, recompute=start), only).step
            fitting = [x.seconds for x in fixed.values() if x.memory["device"] <= step.memory["device"]]
            assert best.fits
            assert best.seconds <= min(fitting) * (1 + WORTH)
            found.add(best.settings.recompute)
    assert found == set(fixed)
    host_bound = evolve(COMPUTING, rates={**COMPUTING.rates, "host": 1e5})
    found = search(steps(recomputing, host_bound), SETUP, only)
    assert found.reasons == (), "what gains nothing takes no memory"


def test_parameters_persist_as_far_as_there_is_room() -> None:
    """Of equal sizes all or none; none where all have room, since then nothing has to be streamed."""
    spec, on_host = model(9), evolve(START, params_on="host")
    sizes = sorted({p.name: p.numel for own in spec.layout.parameters for p in own}.values())
    needed = step_of(spec, on_host, with_room(device=1 << 40)).memory["device"]
    for free in (0, sizes[0], sum(sizes) - 1, sum(sizes)):
        room = with_room(device=needed + free * spec.places[0].element_bytes)
        most = most_persistent(step_of(spec, on_host, room))
        assert sum(size for size in sizes if size <= most) <= free
        larger = [size for size in sizes if size > most]
        assert free == sum(sizes) or sum(x for x in sizes if x <= larger[0]) > free
        assert most == 0 or free < sum(sizes)


# --- no single move is better ------------------------------------------------------------------------------


SLOW_DRIVES = evolve(
    BALANCED,
    rates={**BALANCED.rates, "read": 3e8, "write": 2e8},
    shared={"disk": {"read": 1.0, "write": 1.0}},
)
FAST_DRIVES = evolve(BALANCED, flops=COMPUTE // 4, rates={**BALANCED.rates, "read": 1e10, "write": 1e10})
WHEREVER = {name: EVERYTHING[name] for name in TIERS_OF}
FLOOR = {"state_on": "disk", "params_on": "disk", "activations_on": "disk"}  # as little memory as can be


def single_moves(settings: StepSettings) -> Iterator[dict[str, Any]]:
    """Everything that can be elsewhere, moved alone, with what cannot stay where it is then."""
    quarters = [word_of(settings.activations_on, s, 4) for s in range(4)]
    for s, place in product(range(4), TIERS_OF["activations_on"]):
        yield {"activations_on": as_shares([*quarters[:s], place, *quarters[s + 1 :]])}
    shares = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0)
    yield from ({"params_on": place} for place in TIERS_OF["params_on"])
    if settings.pages_state:
        yield from ({"grads_on": place} for place in TIERS_OF["grads_on"])
        yield {"state_on": "host", "grads_on": "host"}
        yield from ({"state_on": two_tiers("host", 1 - share, "disk")} for share in shares)
    else:
        yield from ({"state_on": "disk", **more} for more in ({}, {"params_on": "disk"}))
        yield from ({"state_on": two_tiers("device", 1 - share, "host")} for share in shares)


def check_single_moves(on: Hardware, barrier: bool, parts: int, device: float, host: float) -> None:
    """The law in the least room there is, and these shares of what having all in memory takes beyond that."""
    spec = model(8)
    start = evolve(START, bucket_size=1 << 17, micro_batches=parts, clip_norm=1.0 if barrier else None)
    away = evolve(start, **FLOOR, grads_on="disk" if barrier else "host")
    least, most = (step_of(spec, x, on).memory for x in (away, start))

    def room(share: float, *tiers: Tier) -> int:
        low, high = (sum(needed[tier] for tier in tiers) for needed in (least, most))
        return int(low + share * (high - low))

    memory = {"device": room(device, "device"), "host": room(host, "host", "pinned"), "disk": 1 << 40}
    on = evolve(on, memory=memory)
    best = search(steps(spec, on), start, WHEREVER).step
    for move in single_moves(best.settings):
        with suppress(ValueError):  # settings that exclude each other
            moved = step_of(spec, evolve(best.settings, **move), on)
            assert best.fits or not moved.fits, f"does not fit, and would with {move}"
            faster = moved.fits and moved.seconds < best.seconds * (1 - WORTH)
            assert not faster, f"{moved.seconds / best.seconds:.2f} of the time with {move}"


@pytest.mark.parametrize(
    ("on", "barrier", "parts", "device", "host"),
    [
        (SLOW_DRIVES, False, 1, 0.05, 0.1),
        (SLOW_DRIVES, True, 1, 0.05, 0.7),
        (FAST_DRIVES, True, 1, 0.0, 0.0),
    ],
)
def test_nothing_moved_alone_to_another_tier_makes_the_result_fit_or_faster(
    on: Hardware, barrier: bool, parts: int, device: float, host: float
) -> None:
    check_single_moves(on, barrier, parts, device, host)


@pytest.mark.slow
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("on", [BALANCED, SLOW_DRIVES, FAST_DRIVES])
def test_nothing_moved_alone_is_better_in_more_rooms(on: Hardware, barrier: bool, parts: int) -> None:
    for device, host in product((0.05, 0.4), (0.1, 0.3, 0.7)):
        check_single_moves(on, barrier, parts, device, host)


def test_as_fast_and_nearer_is_better_for_drives_wear() -> None:
    """Where the device computes all the time, what has room in memory is not on the disk."""
    spec, on = model(8), evolve(FAST_DRIVES, flops=1e9)
    start = evolve(START, micro_batches=4, **FLOOR)
    least = step_of(spec, start, on).memory
    host, device = least["host"] + least["pinned"], least["device"]
    room = evolve(on, memory={"device": device, "host": 2 * host})
    best = search(steps(spec, room), start, WHEREVER).step
    near = best.memory["host"] + best.memory["pinned"]
    assert best.work["write"] < step_of(spec, start, on).work["write"]
    assert 2 * host - near < host / 4


def test_where_nothing_fits_the_least_is_taken() -> None:
    best = check_search(model(2), with_room(device=1000, host=1000))
    assert best.settings.slots == 1


def test_settings_that_cannot_win_are_not_simulated_and_those_that_gain_nothing_stay() -> None:
    """By arithmetic: buffers that are always there, and the lane that is busy longest."""
    asked: list[StepSettings] = []

    def searched(on: Hardware, **space: Any) -> tuple[list[StepSettings], tuple[str, ...]]:
        plan = steps(model(), on)
        result = search(lambda x: asked.append(x) or plan(x), START, SPACE | space)
        return [x.settings for x in result.tried], result.reasons

    room = step_of(model(), START, BALANCED).memory["device"] + 1000
    simulated, _ = searched(with_room(device=room), state_on=("device",))
    assert len(simulated) > 1
    assert "device" in {x.state_on for x in asked} - {x.state_on for x in simulated}
    assert searched(evolve(BALANCED, flops=1e8)) == ([START], ()), "compute is all there is"
    assert len(asked) > 20


def test_of_several_ranks_parameters_off_the_device_are_in_slices() -> None:
    sliced = StepSettings(params_on="host", stage=3)
    stages = [moved(StepSettings(), world, params_on="host").stage for world in (1, 8)]
    assert (stages, moved(sliced, 8, stage=2).params_on) == ([2, 3], "device")


def test_a_search_over_one_setting_changes_no_other() -> None:
    only = {"state_on": (DEVICE_SHARE,)}
    choice = search(steps(model()), CLIPPED, only).step.settings
    assert evolve(choice, state_on="host") == CLIPPED


def test_fifty_layers_take_less_than_ten_seconds() -> None:
    """Of this process's own time: whoever else uses the machine does not count."""
    step_spec = model(50, width=4096)
    before = time.process_time()
    on = evolve(ROUND, memory={"device": 32 * 10**9, "host": 10**12})
    result = search(steps(step_spec, on), StepSettings(bucket_size=default_bucket_size(1), clip_norm=1.0))
    assert time.process_time() - before < 10
    assert result.step.fits
    assert len(result.tried) > 10


# --- advice ------------------------------------------------------------------------------------------------


KEPT = {"all": (0, 3.0), "min-cut": (1 << 20, 2.25), "none": (3 << 20, 2.0)}  # bytes; FLOPs of a forward's


def recomputing(settings: StepSettings) -> StepSpec:
    """The spec of settings: micro-batches cut its activations, what is kept is not computed again."""
    step = model(4, state_format=settings.moments)
    parts, count = settings.micro_batches, step.num_segments
    modes = [settings.recompute_of(s, count) for s in range(count)]
    costs = [
        evolve(
            cost,
            input_bytes=cost.input_bytes // parts,
            residual_bytes=KEPT[mode][0] // parts,
            forward=evolve(cost.forward, flops=cost.forward.flops // parts),
            backward=evolve(cost.backward, flops=int(KEPT[mode][1] * cost.forward.flops) // parts),
        )
        for cost, mode in zip(step.costs, modes, strict=True)
    ]
    return evolve(step, costs=costs, settings=settings)


def planning(on: Hardware, activations: int = 0) -> tuple[PlannedStep, Callable[[StepSettings], PlannedStep]]:
    """A step, of so many bytes of activations a segment if given, and how it is planned again."""

    def spec_of(settings: StepSettings) -> StepSpec:
        spec, nbytes = recomputing(settings), activations // settings.micro_batches
        if nbytes:
            larger = {"input_bytes": nbytes, "stash_bytes": nbytes}
            backward = (evolve(cost.backward, workspace=nbytes) for cost in spec.costs)
            spec = evolve(
                spec,
                costs=[
                    evolve(cost, **larger, backward=x) for cost, x in zip(spec.costs, backward, strict=True)
                ],
            )
        return spec

    plan = steps(spec_of, on)
    return plan(SETUP), plan


SETUP = evolve(START, precision="fp16", clip_norm=1.0)


def with_shares(device: float, host: float, activations: int) -> Hardware:
    """Room for shares of what a step needs."""
    needed = planning(BALANCED, activations)[0].memory
    return with_room(
        device=int(device * needed["device"]), host=int(host * (needed["host"] + needed["pinned"]))
    )


@pytest.mark.parametrize(
    ("device", "host", "activations", "combines"),
    [
        (0.95, 1.0, 0, False),
        (1.0, 0.9, 0, False),
        (0.7, 0.5, 0, True),
        *(pytest.param(*x, 1 << 22, True, marks=pytest.mark.slow) for x in ((0.4, 1.0), (0.8, 0.7))),
    ],
)
def test_advice_fits_and_nothing_of_it_can_be_left_out(
    device: float, host: float, activations: int, combines: bool
) -> None:
    step, plan = planning(with_shares(device, host, activations), activations)

    def planned(changes: dict[str, Any]) -> PlannedStep | None:
        with suppress(ValueError):  # settings that need each other
            return plan(evolve(SETUP, **changes))
        return None

    def fits(changes: dict[str, Any]) -> bool:
        return (new := planned(changes)) is not None and new.fits

    assert not step.fits
    advice = suggest(plan, step, rows=8)
    assert advice
    assert not combines or len(advice[0].changes) > 1
    for a in advice:
        changes = a.changes
        assert fits(changes)
        assert a.effect.startswith("fits, ")
        assert not any(fits({x: changes[x] for x in changes.keys() - {name}}) for name in changes)
        fewer = ({**changes, "micro_batches": n} for n in (2, 4) if n < changes.get("micro_batches", 0))
        least = next((new for x in fewer if (new := planned(x)) and new.fits), a.step)
        assert least.seconds >= a.step.seconds
    times = [a.step.seconds for a in advice]
    assert times == sorted(times)


def test_where_the_host_is_too_small_the_disk_is_searched_and_advised() -> None:
    start, needed = evolve(SETUP, bucket_size=1 << 16), planning(BALANCED)[0].memory
    room = with_room(device=1 << 40, host=(needed["host"] + needed["pinned"]) * 2 // 3)
    plan = planning(room)[1]
    (advice,) = (a for a in suggest(plan, plan(start), rows=8) if a.changes == {"state_on": "disk"})
    assert advice.step.fits
    assert "needs folders" in advice.effect
    found = search(plan, start, {"state_on": ("disk", DISK_SHARE)})
    chosen = found.step.settings
    assert sum(not x.settings.pages_state for x in found.tried) <= 1, (
        "what has to go there is there from the start"
    )
    assert found.step.fits
    assert 0 < chosen.share_of_state("disk") < 1, "what has room stays in memory"
    assert found.step.seconds <= advice.step.seconds
    assert any(re.match(r"state_on host:0\.\d+,disk instead of host: ", x) for x in found.reasons)


def test_no_more_activations_are_advised_to_the_disk_than_the_host_lacks() -> None:
    spec, start = model(8), evolve(START, micro_batches=4, activations_on="host")
    every = [evolve(start, activations_on=x) for x in ("host", "disk:0.25,host", "disk,host", "disk")]
    needed = [x["host"] + x["pinned"] for x in (step_of(spec, y, BALANCED).memory for y in every)]
    assert needed == sorted(needed, reverse=True)
    for places, host in zip(every[1:], needed[1:], strict=True):
        room = with_room(host=host)
        advice = suggest(steps(spec, room), step_of(spec, start, room), rows=4)
        (moved,) = (a for a in advice if "activations_on" in a.changes)
        assert moved.step.fits
        assert moved.step.seconds <= step_of(spec, places, room).seconds


def test_where_nothing_is_enough_the_missing_memory_is_named() -> None:
    step, plan = planning(with_room(device=100_000))
    (advice,) = suggest(plan, step, rows=8)
    assert re.search("; still .* of device memory short", advice.effect)


def test_advice_says_how_much_faster_and_defers_first() -> None:
    step, plan = planning(with_room(device=1 << 40, host=1 << 40))
    defer, *others = suggest(plan, step, rows=8)
    assert str(defer).startswith("defer=True: ")
    assert defer.arguments == "defer=True"
    assert "state_on" in {name for a in others for name in a.changes}
    assert all(re.match(r"\d[\d.]* (% faster|times as fast)", a.effect) for a in (defer, *others))


@pytest.mark.parametrize(
    ("on", "start"),
    [
        (BALANCED, {}),
        (COMPUTING, {}),
        *(
            pytest.param(on, start, marks=pytest.mark.slow)
            for on, start in (
                (evolve(BALANCED, rates={**BALANCED.rates, "host": 1e8}), {}),
                (BALANCED, {"params_on": "host", "activations_on": "host", "micro_batches": 2}),
                (BALANCED, {"params_on": "disk", "state_on": "disk", "grads_on": "disk"}),
                (COMPUTING, {"micro_batches": 32, "defer": True}),
                (BALANCED, {"micro_batches": 32}),
                (BALANCED, {"micro_batches": 32, "params_on": "host", "activations_on": "host"}),
            )
        ),
    ],
)
def test_what_is_not_planned_would_not_have_been_advised(
    on: Hardware, start: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all values: one that makes the step 2 % faster is advised, or another of that setting that is as fast."""
    monkeypatch.setattr("zfunc.planner.suggestions.MOST", 100)
    setup = evolve(SETUP, **start)
    plan = planning(evolve(on, memory={"device": 1 << 40, "host": 1 << 40}))[1]
    step = plan(setup)
    values: dict[str, tuple[Any, ...]] = {
        "recompute": ("min-cut", "none"),
        "micro_batches": (max(1, setup.micro_batches // 2),),
        "order": ("vertical",),
        **dict.fromkeys(("grads_on", "activations_on"), ("host",)),
        **{
            place: ("device",) for place in ("params_on", "activations_on") if getattr(setup, place) == "host"
        },
        "state_on": tuple(
            two_tiers(*(("host", x, "disk") if setup.pages_state else ("device", x, "host")))
            for x in (0.5, 1.0)
        ),
        "schedule": ("Overlapped", "CriticalPath"),
        "slots": (setup.slots + 1,),
        "moments": ("8bit",),
        "defer": (True,),
    }
    advice = suggest(plan, step, rows=64)
    assert advice
    for name, value in ((x, y) for x in values for y in values[x]):
        with suppress(ValueError):  # settings that exclude each other
            new = plan(evolve(setup, **{name: value}))
            if new.fits and new.seconds < step.seconds * 0.98:
                assert any(name in a.changes and a.step.seconds <= new.seconds * 1.0001 for a in advice), name


def test_only_settable_changes_are_advised() -> None:
    step, plan = planning(BALANCED)
    advice = suggest(plan, step, rows=8, settable=("moments", "micro_batches"))
    assert {name for a in advice for name in a.changes} <= {"moments", "micro_batches"}


# --- the largest of a family ---------------------------------------------------------------------------------


def family(num_layers: int) -> StepSpec:
    """An embedding, so many layers, a head."""
    segments = chain((300, 16), *[(16, 16)] * num_layers, (16, 300))
    return spec(segments, bucket_size=512, recompute=[True] * (num_layers + 2))


@pytest.mark.parametrize("most", [0, 1, 2, 9, 40])
def test_the_largest_fits_and_one_more_does_not(most: int) -> None:
    def layers(count: int, on: Hardware = BALANCED) -> PlannedStep:
        return step_of(family(count), START, on)

    fits, one_more = (layers(n).memory for n in (most, most + 1))
    for tier in ("device", "host"):
        between = fits[tier] + (one_more[tier] - fits[tier]) // 2
        on = with_room(**{tier: between + (fits["pinned"] if tier == "host" else 0)})
        assert most_that_fit(partial(layers, on=on), 100) == most
    assert most_that_fit(layers, 3) == 3, "what is more is not tried"


@pytest.mark.parametrize("after", [0, 1, 2])
def test_ctrl_c_leaves_the_largest_that_was_found_to_fit(after: int) -> None:
    planned = list[int]()

    def layers(count: int) -> PlannedStep:
        if len(planned) == after:
            raise KeyboardInterrupt
        planned.append(count)
        return step_of(family(count), START, BALANCED)

    watch = Watch(lambda _: None)
    assert most_that_fit(layers, 40, watch) == max(planned, default=0)
    assert watch.stopped


# --- what a search does not simulate, and who waits for it -----------------------------------------------


@pytest.mark.parametrize("name", [x for x in SPECS if SPECS[x].settings.pp == 1])
def test_what_a_step_has_at_least_is_known_before_its_operations_are(name: str) -> None:
    on = evolve(BALANCED, shared={"disk": {"read": 1.0, "write": 1.0}, "memory": {"host": 1.0, "d2h": 0.5}})
    step = PlannedStep(SPECS[name], on)
    kept, work = step.least_kept, step.least_work
    assert "graph" not in vars(step)
    assert {tier: n for tier, n in kept.items() if n > step.kept[tier]} == {}
    assert {x: s for x, s in work.items() if s > step.work_of.get(x, 0.0) * (1 + 1e-9)} == {}
    assert 0 < least_seconds(work, on) <= least_seconds(step.work_of, on) * (1 + 1e-9)
    assert least_seconds(step.work_of, on) <= step.seconds * (1 + 1e-9)


def test_drives_that_share_a_path_bound_a_step_by_the_sum_of_their_work() -> None:
    step = step_of(model(), evolve(START, state_on="disk", params_on="host"), SLOW_DRIVES)
    both = step.work["read"] + step.work["write"]
    assert max(step.work.values()) < 0.9 * both
    assert least_seconds(step.least_work, SLOW_DRIVES) == pytest.approx(both, rel=0.01)


def test_ctrl_c_ends_a_search_that_is_watched_with_the_best_so_far() -> None:
    spec, told = model(clip_norm=1.0, micro_batches=2), list[str]()

    def planned(settings: StepSettings) -> PlannedStep:
        if len(told) == 12:
            raise KeyboardInterrupt
        return step_of(spec, settings, BALANCED)

    watch = Watch(told.append)
    found = search(planned, spec.settings, SPACE, watch)
    assert watch.stopped
    lines = [
        re.fullmatch(r"searching: (\d+) of about (\d+) candidates; the best so far: (.*) a step", x)
        for x in told
    ]
    assert [int(x[1]) for x in lines if x] == [*range(2, 14)]
    assert all(int(x[2]) >= int(x[1]) for x in lines if x)
    assert found.reasons == ()
    assert format_seconds(found.step.seconds) == lines[-1][3] != lines[0][3]  # pyright: ignore
    assert found.step.seconds <= min(x.seconds for x in found.tried if x.fits) * (1 + WORTH)
    with pytest.raises(KeyboardInterrupt):
        search(planned, spec.settings, SPACE)


def test_the_whole_search_is_as_good_without_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bounds by arithmetic nor what is recomputed where devices wait change it by more than counts."""
    room = {"device": 1 << 40, "host": 1 << 40}
    bound = evolve(BALANCED, rates={**BALANCED.rates, "host": 2e8}, memory=room)
    for on, plan in product((bound, COMPUTING), (model(micro_batches=2), recomputing)):
        found = search(steps(plan, on), SETUP)
        with monkeypatch.context() as patch:
            for name in ("least_kept", "least_work"):
                patch.setattr(PlannedStep, name, {})
            patch.setattr(PlannedStep, "seconds_without_compute", 0.0)
            whole = search(steps(plan, on), SETUP)
        assert len(found.tried) <= len(whole.tried)
        assert found.step.seconds <= whole.step.seconds * (1 + WORTH)
