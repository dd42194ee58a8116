"""Laws of simulate: between the critical path and the serial sum, lanes in order, nothing before its waits."""

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given
from table import HARDWARE, every_graph, every_plan, hardware, plans
from zfunc.schedules import Serial, make_schedule

from zfunc.core.graph import KINDS, Graph, Op, Region
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Lane, Plan, PlanError, build, topological_order
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import lower_bound, simulate
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.gpt_costs import gpt_costs
from zfunc.optim.adamw import AdamW
from zfunc.planner.cost_model import CostModel
from zfunc.planner.search import SPACE, search

ROUNDING = 1e-9  # additions in another order


def serial_time(graph: Graph, on: Hardware = ROUND) -> float:
    """Seconds of one operation after another: what `Serial` takes."""
    return sum(map(on.seconds, graph))


def waited(plan: Plan, on: Hardware) -> dict[int, set[int]]:
    """What each operation comes after: its waits, and what Python waited for before it issued it, on its thread and
    on those that it heard from."""
    python: dict[int, set[int]] = {}
    threads = {thread: set[int]() for thread in plan.threads}
    after: dict[int, set[int]] = {}
    for i in topological_order(plan, plan.waits):
        before = threads[plan.thread_of(i)]
        shared = len({lane.name for lane in plan.lanes if lane.thread == plan.thread_of(i)}) > 1
        after[i] = {*plan.waits[i], *(before if shared else ())}
        python[i] = before.union(*(python[n] for n in plan.waits[i]))
        if on.unified or plan.graph.ops[i].kind in ("host", "read", "write"):
            python[i] |= {i}
        threads[plan.thread_of(i)] = python[i]
    return {i: {n for n in x if plan.place[n][0] != plan.place[i][0]} for i, x in after.items()}


def told(plan: Plan, on: Hardware, before: int, after: int) -> float:
    """Seconds from the end of an operation until one of another lane can begin."""
    return on.handoff if plan.thread_of(before) != plan.thread_of(after) else 0.0


def simple(plan: Plan, on: Hardware) -> dict[int, tuple[float, float]]:
    """When each operation runs if none gets in another's way, in three lines."""
    times: dict[int, tuple[float, float]] = {}
    free, after = [0.0] * len(plan.lanes), waited(plan, on)
    for i in topological_order(plan, plan.waits):
        lane, _ = plan.place[i]
        start = max([free[lane], *(times[n][1] + told(plan, on, n, i) for n in after[i])])
        free[lane] = start + on.seconds(plan.graph.ops[i])
        times[i] = start, free[lane]
    return times


def check(plan: Plan, on: Hardware) -> None:
    timeline = simulate(plan, on)
    longest, shortest = serial_time(plan.graph, on), lower_bound(plan.graph, on)
    after = waited(plan, on)
    longest += on.handoff * max(len(set[int]().union(*after.values())), sum(map(bool, after.values())))
    locked, over_ranks = Counter[int](), any(r.of_rank for r in plan.graph.regions)
    for op in plan.graph:
        locked[op.device if over_ranks else 0] += min(on.seconds(op), on.issue_seconds(op))
    shortest = max([shortest, *locked.values()])  # Python of a process issues one at a time
    assert shortest * (1 - ROUNDING) <= timeline.seconds <= longest * (1 + ROUNDING)

    events = {e.op: e for e in timeline.events}
    assert sorted(events) == sorted(op.name for op in plan.graph)
    assert [e.op for e in timeline.events] == [
        plan.graph.ops[i].name for lane in plan.lanes for i in lane.ops
    ]
    for lane in plan.lanes:
        of_lane = list(timeline.on(lane.name))
        assert all(a.end <= b.start for a, b in pairwise(of_lane))
        for previous, i, e in zip([None, *of_lane], lane.ops, of_lane, strict=False):
            awaited = [events[plan.graph.ops[n].name].end + told(plan, on, n, i) for n in after[i]]
            ready = max([previous.end if previous else 0.0, *awaited])
            assert e.start == ready if not on.issue else e.start >= ready - on.handoff
            assert e.seconds >= on.seconds(plan.graph.ops[i]) * (1 - 1e-6) - e.end * 1e-12
            assert e.kind == plan.graph.ops[i].kind


def one_kind_a_lane(plan: Plan) -> bool:
    kinds = [{plan.graph.ops[i].kind for i in lane.ops} for lane in plan.lanes]
    return sum(map(len, kinds)) == len(set().union(*kinds))


@every_plan(on=(None, hardware()))
def test_time_lies_between_critical_path_and_serial_sum(plan: Plan, on: Hardware | None) -> None:
    for machine in HARDWARE.values() if on is None else [on]:
        check(plan, machine)


@given(plans(), hardware())
def test_where_nothing_is_shared_each_operation_takes_its_own_time_to_the_bit(
    plan: Plan, on: Hardware
) -> None:
    assume(one_kind_a_lane(plan))
    alone = evolve(on, shared={}, issue={})
    expected = simple(plan, alone)
    got = {plan.graph.position[e.op]: (e.start, e.end) for e in simulate(plan, alone).events}
    assert got == expected
    assert simulate(plan, on).seconds >= max((end for _, end in expected.values()), default=0.0) * (
        1 - ROUNDING
    )


@every_graph
def test_serial_takes_the_serial_sum(graph: Graph) -> None:
    assert simulate(Serial()(graph)).seconds == pytest.approx(serial_time(graph))


@given(plans(), hardware())
def test_a_resource_that_everything_needs_whole_takes_the_serial_sum(plan: Plan, on: Hardware) -> None:
    on = evolve(on, handoff=0.0, issue={}, shared={"everything": dict.fromkeys(KINDS, 1.0)})
    assert simulate(plan, on).seconds == pytest.approx(serial_time(plan.graph, on))


def test_two_lanes_run_at_once_and_a_wait_is_waited_for() -> None:
    x = Region("x")
    ops = Op("make", (), "compute", (), (x,)), Op("other", (), "host"), Op("use", (), "host", (x,))
    plan = build(Graph(ops), {"gpu": [0], "cpu": [1, 2]})
    timeline = simulate(plan, evolve(ROUND, latency=2.0))
    assert [(e.op, e.start, e.end) for e in timeline.events] == [
        ("make", 0, 2),
        ("other", 0, 2),
        ("use", 2, 4),
    ]
    assert timeline.source == "simulated"
    assert timeline.lanes == ("gpu", "cpu")
    assert (timeline.busy("gpu"), timeline.busy("cpu")) == (0.5, 1.0)
    assert timeline.seconds_of("host") == 4.0


def beside(first: Op, second: Op, on: Hardware) -> list[tuple[float, float]]:
    timeline = simulate(build(Graph((first, second)), {"a": [0], "b": [1]}), on)
    return [(e.start, e.end) for e in timeline.events]


UNIT = Hardware("unit", flops=1.0, rates=dict.fromkeys(KINDS, 1.0), latency=0.0)
WORK, SWEEP = Op("work", (), "compute", flops=4), Op("sweep", (), "host", nbytes=2)


def test_two_that_share_a_resource_slow_each_other_down_while_both_run() -> None:
    on = evolve(UNIT, shared={"cores": {"compute": 1.0, "host": 0.5}})
    # Both at 1 / 1.5 until the sweep has done its 2 seconds; then what is left of 4 seconds, alone.
    assert beside(WORK, SWEEP, on) == [(0, pytest.approx(5)), (0, pytest.approx(3))]


def test_shares_that_fit_slow_nothing_down() -> None:
    on = evolve(UNIT, shared={"memory": {"compute": 0.5, "host": 0.5}, "cores": {"compute": 1.0}})
    assert beside(WORK, SWEEP, on) == [(0, 4), (0, 2)]


def test_the_scarcest_resource_counts() -> None:
    on = evolve(
        UNIT, shared={"cores": {"compute": 1.0, "host": 0.5}, "memory": {"compute": 1.0, "host": 1.0}}
    )
    assert beside(WORK, SWEEP, on) == [(0, pytest.approx(6)), (0, pytest.approx(4))]


def test_two_lanes_of_one_kind_get_no_more_done_than_one() -> None:
    assert beside(SWEEP, evolve(SWEEP, verb="other"), UNIT) == [(0, 4), (0, 4)]


def test_a_plan_of_many_operations_is_simulated_in_seconds() -> None:
    kinds = ("compute", "d2h", "host", "h2d")
    ops = [Op(f"{kind}{i}", (), kind, nbytes=1 + i % 7) for i in range(10_000) for kind in kinds]
    plan = build(Graph(ops), {kind: range(n, len(ops), len(kinds)) for n, kind in enumerate(kinds)})
    on = evolve(UNIT, shared={"memory": dict.fromkeys(kinds, 0.5)})
    begin = time.process_time()
    assert simulate(plan, on).seconds == pytest.approx(2 * sum(1 + i % 7 for i in range(10_000)))
    assert time.process_time() - begin < 10  # a second; quadratic would be an hour


def test_the_end_of_an_operation_is_known_on_other_lanes_a_little_later() -> None:
    x = Region("x")
    make, use = evolve(WORK, writes=(x,)), evolve(SWEEP, reads=(x,))
    on = evolve(UNIT, handoff=0.5)
    assert beside(make, use, on) == [(0, 4), (4.5, 6.5)]
    assert simulate(build(Graph((make, use)), {"one": [0, 1]}), on).seconds == 6  # on its own lane at once
    slow = evolve(SWEEP, verb="before", nbytes=5)  # it heard of it long ago
    plan = build(Graph((make, slow, use)), {"a": [0], "b": [1, 2]})
    assert simulate(plan, evolve(on, shared={})).seconds == 7


@given(plans(), hardware())
def test_python_that_issues_all_the_time_takes_the_serial_sum(plan: Plan, on: Hardware) -> None:
    on = evolve(on, handoff=0.0, issue=dict.fromkeys(KINDS, serial_time(plan.graph, on) or 1.0))
    assert simulate(plan, on).seconds == pytest.approx(serial_time(plan.graph, on))


def test_two_lanes_issue_in_turns_and_then_run_at_once() -> None:
    on = evolve(UNIT, issue={"compute": 1.0, "host": 1.0})
    assert beside(WORK, SWEEP, on) == [(0, 5), (0, 3)]  # both are issued by 2; 3 and 1 seconds are left
    assert beside(WORK, SWEEP, evolve(on, issue={"host": 1.0})) == [(0, 4), (0, 2)], (
        "of compute it is unknown"
    )


def test_each_rank_of_a_pipeline_has_a_python_of_its_own() -> None:
    on = evolve(UNIT, issue={"compute": 1.0, "host": 1.0})
    ranks = (
        evolve(op, writes=(Region(op.verb, device=n, of_rank=True),)) for n, op in enumerate((WORK, SWEEP))
    )
    assert beside(*ranks, on) == [(0, 4), (0, 2)]


def test_to_wake_a_lane_takes_python_which_others_need_meanwhile() -> None:
    x = Region("x")
    make, use = evolve(SWEEP, writes=(x,)), evolve(SWEEP, verb="use", kind="d2h", reads=(x,))
    plan = build(Graph((make, evolve(SWEEP, verb="next"), use)), {"a": [0, 1], "b": [2]})
    on = evolve(UNIT, issue=dict.fromkeys(KINDS, 1.0), handoff=0.5)
    # The waking takes from 2 to 3, beside "next"; then both are issued, "next" until 4 and "use" until 4.5.
    events = {e.op: (e.start, e.end) for e in simulate(plan, on).events}
    assert events == {"sweep": (0, 2), "next": (2, 5), "use": (3, 5.5)}


# --- small steps on an H200 ---------------------------------------------------------------------------------

# Milliseconds of `benchmarks/results/simulated-nvidia-h200-2026-11-26.json`, by layers x width and schedule.
H200 = {
    "6x768": {"Serial": 55.1, "Overlapped": 51.3, "Interleaved": 50.8, "CriticalPath": 53.9},
    "4x512": {"Serial": 36.8, "Overlapped": 39.0, "Interleaved": 35.2, "CriticalPath": 38.3},
    "4x256": {"Serial": 27.3, "Overlapped": 32.0, "Interleaved": 32.6, "CriticalPath": 34.3},
}
# One set of constants for all, from an account of the step of 6x768 under Serial, by the times of its operations
# and a count of its launches, and of what its 192 hand-overs add under Overlapped. That these need Python's lock
# was seen in the rows Serial and Overlapped of 6x768 and 4x256. The other rows are predicted.
SMALL = Hardware(
    "an H200 and its host, small steps",
    flops=7.936e14,
    attention=4.7e14,
    rates={**ROUND.rates, "compute": 2.33e12, "d2h": 5.57e10, "h2d": 4.41e10, "host": 1.35e11},
    handoff=50e-6,
    launch=38e-6,  # 9.2 ms of passes
    # 31 sums of squares, of 19 launches then, at 180 microseconds, and 34 packs at 80; an update at 360 without its
    # bytes, and 150 to poll what it waits for.
    latencies=(issued := {"compute": 128e-6, "d2h": 30e-6, "h2d": 120e-6, "host": 510e-6}),
    issue=issued,
)


def model_of(size: str, on: Hardware) -> CostModel:
    layers, hidden = map(int, size.split("x"))
    heads = 8 if hidden > 256 else 4
    config = GPTConfig(
        vocab_size=256, seq_length=64, num_layers=layers, hidden_size=hidden, num_attention_heads=heads
    )
    return CostModel(gpt_costs(config, 2, AdamW(lr=1e-5)), on)


@pytest.fixture(scope="module")
def small_steps() -> dict[tuple[str, str], Plan]:
    plans: dict[tuple[str, str], Plan] = {}
    for size in H200:
        step = model_of(size, SMALL).step(
            StepSettings(precision="bf16", bucket_size=1 << 18, schedule="Serial")
        )
        plans |= {(size, x): make_schedule(x, SMALL)(step.graph) for x in H200[size]}
    return plans


def test_steps_that_python_bounds_take_what_they_took_on_an_h200(small_steps: dict[Any, Plan]) -> None:
    """Within 15 %, but for one of 12, of 18 %. Without Python's lock those of several lanes are planned at half."""
    ratios = {k: simulate(plan, SMALL).seconds * 1e3 / H200[k[0]][k[1]] for k, plan in small_steps.items()}
    worst = ratios.pop(("4x256", "CriticalPath"))
    assert 0.82 < worst < 0.85
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios
    blind = evolve(SMALL, issue={})
    for size, schedule in (k for k in small_steps if k[1] != "Serial"):
        assert simulate(small_steps[size, schedule], blind).seconds * 1e3 < 0.61 * H200[size][schedule]


def test_more_lanes_are_slower_where_python_bounds_a_step_of_little_to_hide(
    small_steps: dict[Any, Plan],
) -> None:
    def faster(size: str, on: Hardware) -> bool:
        overlapped, serial = (simulate(small_steps[size, x], on).seconds for x in ("Overlapped", "Serial"))
        return overlapped < serial

    assert [faster(size, SMALL) for size in H200] == [x["Overlapped"] < x["Serial"] for x in H200.values()]
    assert all(faster(size, evolve(SMALL, issue={})) for size in H200)


@pytest.mark.parametrize("size", H200)
def test_two_threads_save_hand_overs_of_a_step_that_python_bounds(
    size: str, small_steps: dict[Any, Plan]
) -> None:
    overlapped = small_steps[size, "Overlapped"]
    two = make_schedule("TwoThreads")(overlapped.graph)
    assert 0.95 < simulate(two, SMALL).seconds / simulate(overlapped, SMALL).seconds < 0.98


@pytest.mark.parametrize(("size", "best"), [("6x768", "TwoThreads"), ("4x256", "Serial")])
def test_a_search_tries_fewer_threads_where_python_bounds_the_step(size: str, best: str) -> None:
    """And nowhere else: where no time to issue is known, these never win."""

    def tried(on: Hardware) -> tuple[str, set[str]]:
        model, settings = model_of(size, on), StepSettings(precision="bf16", bucket_size=1 << 18)
        found = search(model.step, settings, {"schedule": SPACE["schedule"]})
        return found.step.settings.schedule_name, {x.settings.schedule_name for x in found.tried}

    chosen, names = tried(SMALL)
    assert chosen == best
    assert {"TwoThreads", "Serial"} <= names
    assert not {"TwoThreads", "Serial"} & tried(evolve(SMALL, issue={}))[1]


def test_a_thread_comes_to_a_copy_behind_the_update_before_it() -> None:
    """Though the copy waits for nothing."""
    on = evolve(UNIT, handoff=0.5)
    ops = evolve(SWEEP, nbytes=5), evolve(SWEEP, verb="copy", kind="h2d"), evolve(SWEEP, verb="next")
    for thread, began in (("h2d", 0.0), ("host", 5.0)):
        plan = build(Graph(ops), {"host": [0, 2], "h2d": [1]})
        plan = evolve(plan, lanes=[plan.lanes[0], evolve(plan.lanes[1], thread=thread)])
        assert [(e.start, e.end) for e in simulate(plan, on).events] == [(0, 5), (5, 7), (began, began + 2)]


def test_a_deadlock_raises() -> None:
    graph = Graph((Op("a", (), "host"), Op("b", (), "host")))
    with pytest.raises(PlanError, match="deadlock"):
        simulate(Plan(graph, (Lane("x", (0,)), Lane("y", (1,))), ((1,), (0,))))
