"""Laws of memory: no timing a plan allows holds more, and on one lane the bound is what is held."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table import every_graph, every_plan, spec
from zfunc.schedules import Overlapped, Serial

from zfunc.core.graph import TIERS, Graph, Op, Region, Tier
from zfunc.core.hardware import ROUND
from zfunc.core.layout import Parameter
from zfunc.core.memory_model import Peak, peak_breakdown, peak_memory
from zfunc.core.plan import Plan, build, topological_order
from zfunc.core.recipes import zero_offload
from zfunc.core.simulator import simulate
from zfunc.core.slots import Ring
from zfunc.core.spec import ALLOCATION
from zfunc.errors import PlanError


def times(plan: Plan, random: Random) -> dict[int, tuple[int, int]]:
    """Start and end of every operation if each takes a random time and is held up at random."""
    free = [0] * len(plan.lanes)
    ran: dict[int, tuple[int, int]] = {}
    for i in topological_order(plan, plan.waits):
        lane, _ = plan.place[i]
        start = max([free[lane], *(ran[n][1] for n in plan.waits[i])]) + random.choice([0, 0, 1, 30])
        free[lane] = start + random.choice([1, 2, 3, 100, 1000])
        ran[i] = start, free[lane]
    return ran


def places_of(plan: Plan) -> set[Tier]:
    """All tiers, and each of several devices."""
    return {*TIERS, *(r.place for r in plan.graph.regions)}


def works_at(op: Op) -> Tier:
    """The device whose memory is its workspace."""
    return next((r.place for r in op.regions if r.tier == "device"), "device")


def kept_bytes(regions: Iterable[Region], tier: Tier) -> int:
    """A buffer is one allocation, on a device of whole units of 512 bytes."""
    sizes: dict[str, int] = {}
    for r in regions:
        if r.kept and r.place == tier:
            sizes[r.buffer] = sizes.get(r.buffer, 0) + r.nbytes
    return sum(-(-n // 512) * 512 if tier.startswith("device") else n for n in sizes.values())


def held(plan: Plan, ran: dict[int, tuple[int, int]]) -> dict[Tier, int]:
    """The most bytes alive at any instant, tier by tier: from the first access's start to the last one's end."""
    peaks: dict[Tier, int] = {}
    for tier in places_of(plan):
        alive: list[tuple[int, int, int]] = []
        kept = kept_bytes(plan.graph.regions, tier)
        for r in plan.graph.regions:
            if r.place == tier and not r.kept:
                uses = [ran[i] for i, op in enumerate(plan.graph) if r in op.reads + op.writes]
                alive.append((min(a for a, _ in uses), max(b for _, b in uses), r.nbytes))
        alive += [(*ran[i], op.workspace) for i, op in enumerate(plan.graph) if works_at(op) == tier]
        # A maximum is reached where something begins.
        peaks[tier] = kept + max((sum(n for a, b, n in alive if a <= t < b) for t, _, _ in alive), default=0)
    return peaks


def check(plan: Plan, random: Random, *, num_timings: int) -> None:
    bound = peak_memory(plan)
    assert set(bound) == places_of(plan)
    for _ in range(num_timings):
        for tier, nbytes in held(plan, times(plan, random)).items():
            assert nbytes <= bound[tier].nbytes, tier


@every_plan(seed=(0, st.integers(0, 1000)))
def test_no_timing_holds_more_than_the_bound(plan: Plan, seed: int) -> None:
    check(plan, Random(seed), num_timings=4)


@st.composite
def short_lived(draw: st.DrawFn) -> Plan:
    """Small plans in which everything comes and goes, on several lanes."""
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=8))
    regions = [Region("r", (n,), size) for n, size in enumerate(sizes)]
    kinds = st.integers(0, 3)
    ops: list[Op] = []
    for n, r in enumerate(regions):
        reads = draw(st.lists(st.sampled_from(regions[:n]), max_size=2).map(tuple)) if n else ()
        ops.append(Op("op", (n,), "compute", reads, (r,), workspace=draw(st.integers(0, 50))))
    lanes: dict[str, list[int]] = {}
    for i in range(len(ops)):
        lanes.setdefault(f"lane{draw(kinds)}", []).append(i)
    return build(Graph(tuple(ops)), lanes)


@given(short_lived(), st.randoms(use_true_random=False))
def test_no_timing_of_short_lived_regions_holds_more_than_the_bound(plan: Plan, random: Random) -> None:
    check(plan, random, num_timings=10)


@every_graph
def test_on_one_lane_the_bound_is_exact(graph: Graph) -> None:
    plan = Serial()(graph)
    assert held(plan, times(plan, Random(0))) == {
        tier: peak.nbytes for tier, peak in peak_memory(plan).items()
    }


@every_plan
def test_the_bound_is_at_most_everything_at_once(plan: Plan) -> None:
    parts = peak_breakdown(plan)
    assert set(parts) == places_of(plan)
    for tier, peak in peak_memory(plan).items():
        regions = [r for r in plan.graph.regions if r.place == tier]
        assert peak.kept == kept_bytes(regions, tier)
        workspaces = sum(op.workspace for op in plan.graph if works_at(op) == tier)
        assert peak.transient <= sum(r.nbytes for r in regions if not r.kept) + workspaces
        assert peak.op in {"", *(op.name for op in plan.graph)}
        assert bool(peak.op) or peak.transient == 0
        assert sum(parts[tier].values()) == peak.nbytes
        assert list(parts[tier].values()) == sorted(parts[tier].values(), reverse=True)


def two_at_once(*, waits: bool) -> Plan:
    """Two producers of 10 and 7 bytes; with `waits` they share a token, so one comes after the other."""
    token, a, b = Region("token", lifetime="value"), Region("a", nbytes=10), Region("b", nbytes=7)
    shared = (token,) if waits else ()
    return build(
        Graph(
            (
                Op("a", (), "compute", shared, (a, *shared)),
                Op("idle", (), "host"),
                Op("b", (), "host", shared, (b, *shared), workspace=5),
            )
        ),
        {"one": [0], "two": [1, 2]},
    )


def test_only_what_may_overlap_is_added() -> None:
    assert peak_memory(two_at_once(waits=False))["device"].nbytes == 22
    assert peak_memory(two_at_once(waits=True))["device"].nbytes == 12


def test_an_empty_lane_bounds_nothing() -> None:
    graph = two_at_once(waits=False).graph
    peaks = peak_memory(build(graph, {"one": [0], "none": [], "two": [1, 2]}))
    assert peaks == peak_memory(two_at_once(waits=False))


def test_a_peak_names_its_operation() -> None:
    small, big = Region("small", nbytes=1, tier="pinned"), Region("big", nbytes=9, tier="pinned")
    kept = Region("kept", nbytes=100, tier="pinned", lifetime="value")
    ops = (
        Op("a", (), "h2d", (kept,), (small,)),
        Op("b", (), "h2d", (small,), (big,)),
        Op("c", (), "h2d", (big,)),
    )
    peaks = peak_memory(Serial()(Graph(ops)))
    assert peaks["pinned"] == Peak("pinned", 100, 10, "b")
    assert peaks["pinned"].nbytes == 110
    assert peaks["disk"] == Peak("disk", 0, 0, "")


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_bound_counts_what_a_fast_producer_can_make(num_slots: int) -> None:
    """Slots hold the producer back, so that many items are alive at once and one more being used."""
    ops: list[Op] = []
    for n in range(10):
        item, slot = Region("item", (n,), 8), Region("slot", (n % num_slots,), lifetime="value")
        ops.append(Op("make", (n,), "compute", (), (item, slot)))
        ops.append(Op("use", (n,), "host", (item, slot)))
    plan = build(Graph(tuple(ops)), {"gpu": range(0, 20, 2), "cpu": range(1, 20, 2)})
    assert peak_memory(plan)["device"].nbytes == 8 * num_slots


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=9), st.data())
def test_staging_slots_serve_as_many_in_a_row_as_slots_of_the_largest_would(
    numels: list[int], data: st.DataObject
) -> None:
    """With no more memory; and what is sent in ascending or descending order never meets its neighbours."""
    sizes, depth = dict(enumerate(numels)), data.draw(st.integers(1, 4))
    drawn = [*sizes, *data.draw(st.lists(st.sampled_from([*sizes])))]
    for planned, order in ((drawn, drawn), ([*sizes], [*sizes]), ([*sizes], [*reversed(sizes)])):
        ring = Ring.passing(Region("slot", lifetime="value"), sizes, planned, depth)
        given = [ring.give(item) for item in order]
        assert all(slot.nbytes >= sizes[item] for slot, item in zip(given, order, strict=True))
        assert all(len({*row}) == depth for row in zip(*(given[i:] for i in range(depth)), strict=False))
        assert sum(count * room for _, count, room in ring.classes) <= depth * max(numels)
        assert ring.slot(order[-1]) == given[-1]
    with pytest.raises(PlanError, match="item 0 of slot before one that gives it a slot"):
        Ring.passing(Region("slot"), sizes, [*sizes], depth).slot(0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_does_not_decide_the_size_of_all_staging(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class of slots is the reference: less memory, and no time."""
    embed = Parameter("embed", (150_000, 8))
    head = embed if tied else Parameter("head", (150_000, 8))
    blocks = [[Parameter(f"block{n}", (12 * 64, 64))] for n in range(6)]
    step = spec([[embed], *blocks, [head]], bucket_size=50_000)

    def planned() -> tuple[float, int, int]:
        plan = Overlapped()(Graph(tuple(zero_offload(step))))
        slots = [r for r in plan.graph.regions if r.buffer in ("grad_slot", "host_slot", "param_slot")]
        return (
            simulate(plan, ROUND).seconds,
            sum(r.nbytes for r in slots),
            sum(peak.nbytes for peak in peak_memory(plan).values()),
        )

    seconds, staged, peak = planned()
    monkeypatch.setattr(
        "zfunc.core.slots.size_classes",
        lambda sizes, _: [sorted(sizes, key=lambda x: -sizes[x])][: len(sizes)],
    )
    before = planned()
    assert seconds <= before[0]
    assert staged < 0.6 * before[1]
    assert before[2] - peak == pytest.approx(before[1] - staged, abs=ALLOCATION)
