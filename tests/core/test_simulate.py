"""Laws of simulate: between the critical path and the serial sum, lanes in order, nothing before its waits."""

import time
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import assume, given
from table import HARDWARE, every_graph, every_plan, hardware, plans
from zfunc.schedules import Serial

from zfunc.core.graph import KINDS, Graph, Op, Region
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Lane, Plan, PlanError, build, topological_order
from zfunc.core.simulator import lower_bound, simulate

ROUNDING = 1e-9  # additions in another order


def serial_time(graph: Graph, on: Hardware = ROUND) -> float:
    """Seconds of one operation after another: what `Serial` takes."""
    return sum(map(on.seconds, graph))


def simple(plan: Plan, on: Hardware) -> dict[int, tuple[float, float]]:
    """When each operation runs if none gets in another's way, in three lines."""
    times: dict[int, tuple[float, float]] = {}
    free = [0.0] * len(plan.lanes)
    for i in topological_order(plan, plan.waits):
        lane, _ = plan.place[i]
        start = max([free[lane], *(times[n][1] + on.handoff for n in plan.waits[i])])
        free[lane] = start + on.seconds(plan.graph.ops[i])
        times[i] = start, free[lane]
    return times


def check(plan: Plan, on: Hardware) -> None:
    timeline = simulate(plan, on)
    longest, shortest = serial_time(plan.graph, on), lower_bound(plan.graph, on)
    longest += on.handoff * len({n for waits in plan.waits for n in waits})
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
            awaited = [events[plan.graph.ops[n].name].end + on.handoff for n in plan.waits[i]]
            assert e.start == max([previous.end if previous else 0.0, *awaited])
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
    alone = evolve(on, shared={})
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
    on = evolve(on, handoff=0.0, shared={"everything": dict.fromkeys(KINDS, 1.0)})
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


def test_a_deadlock_raises() -> None:
    graph = Graph((Op("a", (), "host"), Op("b", (), "host")))
    with pytest.raises(PlanError, match="deadlock"):
        simulate(Plan(graph, (Lane("x", (0,)), Lane("y", (1,))), ((1,), (0,))))
