"""The search over schedules, buckets, slots, ratio and recipe; advice; the largest of a family. No torch here."""

import time
from collections.abc import Callable
from itertools import product

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from table import RECIPES, SPECS, chain, layouts, spec

from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.layout import Parameter, make_layout, resident_buckets
from zfunc.core.memory_model import peak_memory, persistent_bytes
from zfunc.core.ops import SegmentCost, StepSpec
from zfunc.core.settings import StepSettings
from zfunc.planner.candidate import (
    PlannedStep,
    gains_and_costs,
    operations_of,
    simulate_choice,
    with_changes,
    with_settings,
)
from zfunc.planner.max_layers import MOST, max_layers, with_layers
from zfunc.planner.search import WORTH, search
from zfunc.planner.search_space import SearchSpace, ratios_that_fit
from zfunc.planner.suggestions import suggest

COMPUTE, HOST = 10**12, 10**9  # FLOP/s, B/s: Adam takes as long as backward
BALANCED = Hardware(
    "balanced",
    flops=COMPUTE,
    rates={"compute": 1e12, "network": 1e9, "d2h": 1e9, "h2d": 1e9, "host": HOST, "disk": 1e9},
    latency=1e-6,
)


def model(num_layers: int = 6, *, width: int = 256, **given: object) -> StepSpec:
    """Equal layers of two matrices, whose arithmetic takes about as long as their way to the host and back."""
    parameters = [
        [Parameter(f"{s}.up", (width, width)), Parameter(f"{s}.down", (width, width))]
        for s in range(num_layers)
    ]
    layout = make_layout(parameters, bucket_size=1 << 18, world=given.get("world", 1))
    cost = SegmentCost(10**9, 1 << 16, 0, 1 << 14, 1 << 15, 3 * 10**9)
    return StepSpec(layout, [cost] * num_layers, [True] * num_layers, target_bytes=512, **given)


START = StepSettings(bucket_size=1 << 18)
SPACE = SearchSpace(bucket_sizes=(1 << 16, 1 << 17, 1 << 18, 1 << 19))


def with_room(**memory: int) -> Hardware:
    return evolve(BALANCED, memory=memory)


# --- a choice and its step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_laid_out_anew_alike_is_the_same_layout(name: str) -> None:
    layout = SPECS[name].layout
    for size in (64, 128, 1000):
        once = make_layout(layout.parameters, bucket_size=size, world=SPECS[name].world)
        assert make_layout(once.parameters, bucket_size=size, world=SPECS[name].world) == once
        assert (once.numel >= layout.num_trainable, once.segments) == (True, layout.segments)


@given(layouts())
def test_so_it_is_for_any_parameters(made: tuple[list[list[Parameter]], int, int]) -> None:
    segments, bucket_size, world = made
    layout = make_layout(segments, bucket_size=bucket_size, world=world)
    assert make_layout(layout.parameters, bucket_size=bucket_size, world=world) == layout


@pytest.mark.parametrize(
    ("ratio", "speculate", "delay"),
    [(ratio, *way) for ratio, way in product((1.0, 0.5, 0.0), ((0, False), (3, False), (0, True)))],
)
def test_settings_are_what_the_recipe_gets(ratio: float, speculate: int, delay: bool) -> None:
    settings = with_changes(START, offload_ratio=ratio, speculate=speculate, delay=delay)
    made = with_settings(model(barrier=True), settings)
    assert made.resident == resident_buckets(made.layout, ratio)
    assert (made.shadows, made.delayed, made.pending) == (speculate, delay, delay)
    recipe = RECIPES["delayed" if delay else "zero_offload"]
    assert operations_of(model(barrier=True), settings) == Graph(tuple(recipe(made)))


def test_what_is_kept_is_what_memory_says() -> None:
    graph = operations_of(model(), START)
    peaks = peak_memory(simulate_choice(model(), START, BALANCED).plan)
    assert persistent_bytes(graph) == {tier: peak.kept for tier, peak in peaks.items()}


def test_two_steps_compare_in_words() -> None:
    slow, fast = (
        simulate_choice(model(), evolve(START, schedule=s), BALANCED) for s in ("Serial", "Overlapped")
    )
    assert gains_and_costs(fast, slow).endswith(" % faster")
    assert gains_and_costs(slow, fast).endswith(" % slower")
    assert gains_and_costs(fast, fast) == "as fast"
    more = simulate_choice(model(), evolve(START, host_slots=20), BALANCED)
    assert "MB more pinned" in gains_and_costs(more, fast)


# --- the search --------------------------------------------------------------------------------------------


def check_found(
    given: StepSpec, on: Hardware, start: StepSettings = START, space: SearchSpace = SPACE
) -> PlannedStep:
    """What is promised of every search; returns the best step."""
    found = search(given, on, start, space)
    again = search(given, on, start, space)
    assert (found.step.settings, found.reasons) == (again.step.settings, again.reasons)
    fitting = [t for t in found.tried if t.seconds is not None and not t.lacking]
    if fitting:
        assert found.step.fits
        assert found.step.seconds <= min(t.seconds or 0.0 for t in fitting) * (1 + WORTH) ** 2
    else:
        assert sum(found.step.lacking.values()) <= min(sum(t.lacking.values()) for t in found.tried)
    assert all(t.told for t in found.tried)
    fresh = simulate_choice(given, found.step.settings, on)
    assert (fresh.seconds, fresh.memory) == (found.step.seconds, found.step.memory)
    changed = ("schedule", "bucket_size", "grad_slots", "host_slots", "offload_ratio", "speculate")
    differs = [f for f in changed if getattr(found.step.settings, f) != getattr(start, f)]
    assert [r.partition(" ")[0] for r in found.reasons] == differs
    assert not found.step.settings.delayed or start.delayed or True in space.delay
    return found.step


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_found_is_faster_than_the_start(barrier: bool, micro_batches: int) -> None:
    given = model(barrier=barrier, micro_batches=micro_batches)
    best = check_found(given, with_room(device=1 << 40, host=1 << 40))
    assert best.fits
    assert best.seconds < simulate_choice(given, START, BALANCED).seconds


@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_it_holds_whatever_room_there_is(device: int, host: int, barrier: bool, parts: int) -> None:
    room = with_room(device=device * 100_000, host=host * 300_000)
    check_found(model(4, barrier=barrier, micro_batches=parts), room)


@pytest.mark.parametrize("name", ["tied accumulated", "frozen", "stage 1", "8 bits", "scalars"])
def test_it_searches_any_job(name: str) -> None:
    check_found(
        SPECS[name], BALANCED, StepSettings(bucket_size=128), SearchSpace(bucket_sizes=(64, 128, 1000))
    )


def test_with_a_barrier_speculation_is_found_and_told() -> None:
    found = search(model(barrier=True), BALANCED, START, evolve(SPACE, offload_ratios=(1.0,)))
    (told,) = (r for r in found.reasons if r.startswith("speculate"))
    assert "instead of 0: " in told
    assert " % faster, " in told
    assert " more host" in told


def test_state_stays_on_the_device_as_far_as_it_fits() -> None:
    slow = evolve(BALANCED, rates={**BALANCED.rates, "host": 1e8})
    free = simulate_choice(model(), START, slow).memory["device"]
    all_of_it = 12 * model().layout.numel
    for share in (0.0, 0.4, 1.0):
        room = int(free + share * all_of_it + 100_000)
        best = check_found(model(), evolve(slow, memory={"device": room}))
        assert best.fits
        assert best.settings.offload_ratio == pytest.approx(1 - share, abs=0.1)


def test_the_ratios_that_fit_end_where_the_device_is_full() -> None:
    started = simulate_choice(model(), START, BALANCED)
    room = started.memory["device"] + 6 * model().layout.numel
    *_, lowest = ratios_that_fit(simulate_choice(model(), START, with_room(device=room)))
    assert lowest == pytest.approx(0.5, abs=0.1)
    assert ratios_that_fit(started) == (1.0, 0.5, 0.0), "no limit is known"
    assert ratios_that_fit(simulate_choice(model(), START, evolve(BALANCED, unified=True))) == (1.0,)
    assert ratios_that_fit(simulate_choice(model(), START, with_room(device=1))) == (1.0,)


def test_delay_is_tried_only_if_asked_for() -> None:
    assert not search(model(barrier=True), BALANCED, START, SPACE).step.settings.delayed
    asked = search(
        model(barrier=True), BALANCED, START, evolve(SPACE, offload_ratios=(1.0,), delay=(False, True))
    )
    assert asked.step.settings.delayed
    assert asked.step.settings.speculate == 0


def test_where_nothing_fits_the_least_is_taken() -> None:
    best = check_found(model(), with_room(device=1000, host=1000))
    assert best.settings.grad_slots == best.settings.host_slots == 1


def test_what_cannot_win_is_not_simulated() -> None:
    """By arithmetic: buffers that are always there, and the lane that is busy longest."""
    room = simulate_choice(model(), START, BALANCED).memory["device"] + 1000
    found = search(model(), with_room(device=room), START, evolve(SPACE, offload_ratios=(0.0,)))
    told = [t.told for t in found.tried if t.settings.offload_ratio == 0.0]
    assert told
    assert all(x.startswith("offload_ratio 0: cannot fit, ") for x in told)
    fast = evolve(BALANCED, flops=1e9)  # compute is all there is
    tried = search(model(), fast, START, SPACE).tried
    assert any("cannot be faster, compute alone takes" in t.told for t in tried)


def test_what_gains_nothing_is_left_as_it_was() -> None:
    compute_alone = evolve(BALANCED, flops=1e8)
    found = search(model(), compute_alone, START, SPACE)
    assert found.step.settings == START
    assert found.reasons == ()


def test_a_search_over_one_setting_changes_no_other() -> None:
    only = SearchSpace((), (), (), (), speculate=(), delay=())
    choice = search(model(barrier=True), BALANCED, START, only).step.settings
    assert evolve(choice, offload_ratio=1.0) == START


def test_fifty_layers_take_less_than_ten_seconds() -> None:
    """Of this process's own time: whoever else uses the machine does not count."""
    given = model(50, width=4096, barrier=True)
    before = time.process_time()
    found = search(given, evolve(ROUND, memory={"device": 32 * 10**9, "host": 10**12}))
    assert time.process_time() - before < 10
    assert found.step.fits
    assert len(found.tried) > 10


# --- advice ------------------------------------------------------------------------------------------------


def replanning(on: Hardware, **given: object) -> tuple[PlannedStep, Callable[[StepSettings], PlannedStep]]:
    """A step, and how it is planned again: micro-batches cut its activations, recomputing is all or nothing."""

    def replan(settings: StepSettings) -> PlannedStep:
        made = model(barrier=True, micro_batches=settings.micro_batches, state_format=settings.moments)
        keeps = settings.recompute != "all"
        parts = settings.micro_batches
        costs = [
            evolve(
                cost,
                input_bytes=cost.input_bytes // parts,
                residual_bytes=(1 << 20) // parts if keeps else 0,
                flops=cost.flops // parts,
                backward_flops=(2 if keeps else 3) * cost.flops // parts,
            )
            for cost in made.costs
        ]
        return simulate_choice(evolve(made, costs=costs, recompute=[not keeps] * len(costs)), settings, on)

    return replan(SETUP), replan


SETUP = evolve(START, precision="fp16", clip_norm=1.0)


def test_what_is_advised_to_fit_fits() -> None:
    needed = replanning(BALANCED)[0].memory
    for tier, short in (("device", 100_000), ("host", 1_000_000)):
        counted = needed[tier] + (needed["pinned"] if tier == "host" else 0)
        made, replan = replanning(with_room(**{tier: counted - short}))
        assert not made.fits
        advice = suggest(SETUP, made, rows=8, replan=replan)
        assert advice
        for a in advice:
            assert replan(with_changes(SETUP, **a.changes)).fits
            assert a.told.startswith("fits, ")
        times = [a.step.seconds for a in advice]
        assert times == sorted(times)


def test_where_no_single_change_is_enough_several_are_combined() -> None:
    needed = replanning(BALANCED)[0].memory
    host = needed["host"] + needed["pinned"]
    made, replan = replanning(with_room(device=needed["device"] - 100_000, host=host - 1_000_000))
    (advice,) = suggest(SETUP, made, rows=8, replan=replan)
    assert len(advice.changes) > 1
    assert replan(with_changes(SETUP, **advice.changes)).fits


def test_where_nothing_is_enough_what_still_lacks_is_told() -> None:
    made, replan = replanning(with_room(device=100_000))
    (advice,) = suggest(SETUP, made, rows=8, replan=replan)
    assert not advice.step.fits
    assert "; still " in advice.told
    assert "of device memory short" in advice.told


def test_what_is_advised_to_go_faster_is_and_fits() -> None:
    made, replan = replanning(with_room(device=1 << 40, host=1 << 40))
    advice = suggest(SETUP, made, rows=8, replan=replan)
    assert {"speculate", "offload_ratio", "delay"} <= {name for a in advice for name in a.changes}
    for a in advice:
        again = replan(with_changes(SETUP, **a.changes))
        assert again.fits
        assert again.seconds < made.seconds
        assert " % faster" in a.told
    (delay,) = (a for a in advice if "delay" in a.changes)
    assert "applies every gradient a step late" in delay.told
    assert str(delay).startswith("delay=True: ")
    assert delay.flags == "--delay"


def test_only_what_can_be_set_is_advised() -> None:
    made, replan = replanning(BALANCED)
    advice = suggest(SETUP, made, rows=8, replan=replan, settable=("moments", "micro_batches"))
    assert {name for a in advice for name in a.changes} <= {"moments", "micro_batches"}


# --- the largest of a family ---------------------------------------------------------------------------------


def family(num_layers: int) -> StepSpec:
    """An embedding, so many layers, a head."""
    segments = chain((300, 16), *[(16, 16)] * num_layers, (16, 300))
    return spec(segments, bucket_size=512, recompute=[True] * (num_layers + 2))


def test_a_stretched_job_is_the_job_of_the_longer_model() -> None:
    costs = family(1).costs
    for count in (0, 1, 5):
        long = evolve(family(count), costs=(costs[0], *[costs[1]] * count, costs[2]))
        a, b = (simulate_choice(j, START, BALANCED) for j in (with_layers(family(1), count), long))
        assert (a.memory, a.seconds) == (b.memory, b.seconds)


@pytest.mark.parametrize("most", [0, 1, 2, 9, 40])
def test_the_largest_fits_and_one_more_does_not(most: int) -> None:
    fits, one_more = (
        simulate_choice(with_layers(family(1), n), START, BALANCED).memory for n in (most, most + 1)
    )
    for tier in ("device", "host"):
        between = fits[tier] + (one_more[tier] - fits[tier]) // 2
        on = with_room(**{tier: between + (fits["pinned"] if tier == "host" else 0)})
        assert max_layers(family(1), START, on) == most


def test_a_family_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=f"--max: got a family of which {MOST} layers and more fit"):
        max_layers(family(1), START, with_room(host=1 << 50))
