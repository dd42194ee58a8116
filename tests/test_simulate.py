"""Laws of simulate: between the critical path and the serial sum, lanes in order, nothing before its waits."""

from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given
from table import HARDWARE, every_graph, every_plan, graph_of, graphs, hardware, plan_of, plans
from zfunc.schedules import Serial

from zfunc.graph import KINDS, Graph, Op, Region
from zfunc.plan import Lane, Plan, PlanError, build
from zfunc.simulate import ROUND, Hardware, critical_path, serial_time, simulate

ROUNDING = 1e-9  # additions in another order


def check(plan: Plan, on: Hardware) -> None:
    timeline = simulate(plan, on)
    longest, shortest = serial_time(plan.graph, on), critical_path(plan.graph, on)
    assert shortest <= timeline.seconds <= longest * (1 + ROUNDING)

    events = {e.op: e for e in timeline.events}
    assert sorted(events) == sorted(op.name for op in plan.graph)
    assert [e.op for e in timeline.events] == [
        plan.graph.ops[i].name for lane in plan.lanes for i in lane.ops
    ]
    for lane in plan.lanes:
        of_lane = list(timeline.on(lane.name))
        assert all(a.end <= b.start for a, b in pairwise(of_lane))
        for previous, i, e in zip([None, *of_lane], lane.ops, of_lane, strict=False):
            awaited = [events[plan.graph.ops[n].name].end for n in plan.waits[i]]
            assert e.start == max([previous.end if previous else 0.0, *awaited])
            assert e.seconds == pytest.approx(on.seconds(plan.graph.ops[i]), rel=1e-6, abs=e.end * 1e-12)
            assert e.kind == plan.graph.ops[i].kind


@pytest.mark.parametrize("machine", HARDWARE)
@every_plan
def test_time_lies_between_critical_path_and_serial_sum(
    recipe: str, name: str, schedule: str, machine: str
) -> None:
    check(plan_of(recipe, name, schedule), HARDWARE[machine])


@given(plans(), hardware())
def test_so_it_does_on_any_job_and_machine(plan: Plan, on: Hardware) -> None:
    check(plan, on)


@every_graph
def test_serial_takes_the_serial_sum(recipe: str, name: str) -> None:
    graph = graph_of(recipe, name)
    assert simulate(Serial()(graph)).seconds == pytest.approx(serial_time(graph))


@given(graphs(), hardware())
def test_the_critical_path_is_reached_when_every_operation_has_its_own_lane(
    graph: Graph, on: Hardware
) -> None:
    free = build(graph, {op.name: [i] for i, op in enumerate(graph)})
    assert simulate(free, on).seconds == critical_path(graph, on)


def test_work_takes_latency_and_arithmetic_and_bytes() -> None:
    on = Hardware("unit", flops=10.0, rates={**ROUND.rates, "compute": 5.0}, latency=1.0)
    assert on.seconds(Op("f", (), "compute", flops=20, nbytes=15)) == 1 + 2 + 3


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


def test_a_deadlock_raises() -> None:
    graph = Graph((Op("a", (), "host"), Op("b", (), "host")))
    with pytest.raises(PlanError, match="deadlock"):
        simulate(Plan(graph, (Lane("x", (0,)), Lane("y", (1,))), ((1,), (0,))))


def test_nothing_takes_no_time() -> None:
    assert simulate(build(Graph(()), {})).seconds == critical_path(Graph(())) == serial_time(Graph(())) == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("what", ["flops", *KINDS])
def test_a_rate_is_a_positive_number(what: str, rate: float) -> None:
    flops, rates = (rate, ROUND.rates) if what == "flops" else (1.0, {**ROUND.rates, what: rate})
    with pytest.raises(ValueError, match=f"mine: got a {what} rate of {rate}, expected a positive number"):
        Hardware("mine", flops=flops, rates=rates)


def test_a_missing_rate_and_a_negative_latency_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got a disk rate of 0\.0"):
        Hardware("mine", flops=1.0, rates={k: 1.0 for k in KINDS if k != "disk"})
    with pytest.raises(ValueError, match=r"got a latency of -1.*, expected seconds, 0 or more"):
        evolve(ROUND, latency=-1)
