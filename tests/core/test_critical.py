"""Laws of the critical path: a chain of the plan that adds up to the step, and alone decides how long that is."""

from itertools import pairwise
from random import Random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from table import every_plan, hardware, plan_of, plans

from zfunc.core.critical_path import bound_by, bounds_in_words, critical_path_of, events_of, held_up_by
from zfunc.core.graph import KINDS, Graph, Kind, Op, Region
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Plan, build, topological_order
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event, Timeline


def timed(plan: Plan, seconds: dict[int, float], late: dict[int, float] | None = None) -> Timeline:
    """A run of the plan in which operations take `seconds`, and begin `late` seconds after they could."""
    free, end, events = [0.0] * len(plan.lanes), dict[int, float](), dict[int, Event]()
    behind = plan.behind()
    for i in topological_order(plan, plan.waits):
        op, (lane, _) = plan.graph.ops[i], plan.place[i]
        start = max([free[lane], *(end[n] for n in (*plan.waits[i], *behind.get(i, ())))])
        start += (late or {}).get(i, 0.0)
        free[lane] = end[i] = start + seconds[i]
        events[i] = Event(plan.lanes[lane].name, op.name, op.kind, start, end[i])
    return Timeline(tuple(events[i] for lane in plan.lanes for i in lane.ops), "measured")


def jittered(plan: Plan, seed: int) -> Timeline:
    """A run with gaps, and with clocks that disagree: some operations begin before what they waited for ended."""
    random = Random(seed)
    ops = range(len(plan.graph))
    late = {i: random.choice([0.0, random.random(), -random.random() / 4]) for i in ops}
    return timed(plan, {i: 1 + random.random() for i in ops}, late)


PIECES = st.tuples(st.sampled_from([*KINDS]), st.integers(0, 40), st.integers(0, 20))


@given(
    st.lists(PIECES, max_size=12),
    st.sets(st.sampled_from([*KINDS]), min_size=1, max_size=3),
    st.floats(1e-6, 1e3),
)
def test_the_hidden_share_is_that_of_the_moments_in_which_both_run(
    pieces: list[tuple[Kind, int, int]], kinds: set[Kind], unit: float
) -> None:
    events = [Event(str(n), str(n), k, a * unit, (a + long) * unit) for n, (k, a, long) in enumerate(pieces)]

    def moments(of: set[Kind]) -> set[int]:
        return {t for kind, a, long in pieces if kind in of for t in range(a, a + long)}

    own = moments(kinds)
    both = own & moments({"compute"})
    expected = len(both) / len(own) if own else None
    assert Timeline(events, "measured").hidden(*kinds) == (
        None if expected is None else pytest.approx(expected)
    )


def test_a_kind_that_is_none_is_not_said_to_have_no_time() -> None:
    for asked in (Timeline((), "measured").hidden, Timeline((), "measured").seconds_of):
        with pytest.raises(
            ValueError, match="kind: got 'h2h', expected one of compute, .*did you mean 'h2d'"
        ):
            asked("h2h")  # type: ignore


def check_chain(plan: Plan, timeline: Timeline) -> None:
    """Connected from an operation that follows none to the last to end; running and idling add up to the step."""
    chain = critical_path_of(plan, timeline)
    at = [plan.graph.position[link.event.op] for link in chain]
    for (a, b), link in zip(pairwise(at), chain[1:], strict=True):
        lane, position = plan.place[b]
        before = plan.lanes[lane].ops[position - 1] if position else None
        reasons = {"wait": plan.waits[b], "thread": plan.behind().get(b, ()), "lane": [before]}
        assert a in reasons[link.after]
        others = [n for own in reasons.values() for n in own if n is not None]
        assert chain[at.index(a)].event.end == max(events_of(plan, timeline)[n].end for n in others)
    if chain:
        assert chain[0].after == ""
        assert chain[-1].event.end == timeline.seconds
        assert not plan.waits[at[0]]
        assert plan.place[at[0]][1] == 0
    assert all(link.idle >= 0 and link.ran >= 0 for link in chain)
    assert sum(link.idle + link.ran for link in chain) == pytest.approx(timeline.seconds, rel=1e-9)
    assert sum(bound_by(chain).values()) == pytest.approx(1.0 if chain else 0.0)


@every_plan(on=(ROUND, hardware()))
def test_the_chain_is_one_of_the_plan_and_adds_up_to_the_step(plan: Plan, on: Hardware) -> None:
    check_chain(plan, simulate(plan, on))


@given(plans(), st.integers(0, 1000))
def test_the_chain_adds_up_with_gaps_and_clocks_that_disagree(plan: Plan, seed: int) -> None:
    check_chain(plan, jittered(plan, seed))


@given(plans(), hardware())
def test_in_a_simulated_step_the_operations_of_the_chain_touch(plan: Plan, on: Hardware) -> None:
    on = evolve(on, unified=False)  # where a thread also waits for what the chain takes for a stream's
    handed = critical_path_of(plan, simulate(plan, on))
    handoff = on.handoff * (
        len(plan.lanes) if on.issue else 1
    )  # all of them may need Python's lock meanwhile
    assert all(link.idle <= handoff + link.event.end * 1e-12 for link in handed)
    chain = critical_path_of(plan, simulate(plan, evolve(on, handoff=0.0)))
    assert all(link.idle == 0 for link in chain)
    assert all(a.event.end == b.event.start for a, b in pairwise(chain))
    assert "waiting" not in bound_by(chain)


@given(plans(), st.integers(0, 1000))
def test_only_the_chain_decides_how_long_the_step_is(plan: Plan, seed: int) -> None:
    random = Random(seed)
    seconds = {i: 1 + random.random() for i in range(len(plan.graph))}
    timeline = timed(plan, seconds)
    chain = {plan.graph.position[link.event.op] for link in critical_path_of(plan, timeline)}
    without = timed(plan, {i: s if i in chain else 0.0 for i, s in seconds.items()})
    assert without.seconds == pytest.approx(timeline.seconds, rel=1e-12)


def test_a_small_chain() -> None:
    x, y = Region("x"), Region("y")
    ops = (
        Op("make", (), "compute", writes=(x,)),
        Op("copy", (), "d2h", reads=(x,), writes=(y,)),
        Op("more", (), "compute"),
        Op("use", (), "host", reads=(y,)),
    )
    plan = build(Graph(ops), {"gpu": [0, 2], "d2h": [1], "cpu": [3]})
    events = (
        Event("gpu", "make", "compute", 1.0, 3.0),
        Event("gpu", "more", "compute", 3.0, 4.5),
        Event("d2h", "copy", "d2h", 3.0, 4.0),
        Event("cpu", "use", "host", 6.0, 10.0),
    )
    timeline = Timeline(events, "measured")
    chain = critical_path_of(plan, timeline)
    assert [(link.event.op, link.after, link.idle, link.ran) for link in chain] == [
        ("make", "", 1.0, 2.0),
        ("copy", "wait", 0.0, 1.0),
        ("use", "wait", 2.0, 4.0),
    ]
    assert bound_by(chain) == {"host": 0.4, "waiting": 0.3, "compute": 0.2, "d2h": 0.1}
    assert bounds_in_words(bound_by(chain)) == "host 40%, waiting 30%, compute 20%, d2h 10%"
    assert held_up_by(plan, events_of(plan, timeline)) == (-1, 0, 0, 1)


def test_an_operation_measured_before_its_dependency_took_no_time() -> None:
    x, y = Region("x"), Region("y")
    ops = (
        Op("make", (), "compute", writes=(x,)),
        Op("copy", (), "d2h", reads=(x,), writes=(y,)),
        Op("use", (), "host", reads=(y,)),
    )
    plan = build(Graph(ops), {"gpu": [0], "d2h": [1], "cpu": [2]})
    events = (
        Event("gpu", "make", "compute", 5.0, 6.0),
        Event("d2h", "copy", "d2h", 1.0, 2.0),
        Event("cpu", "use", "host", 3.0, 10.0),
    )
    chain = critical_path_of(plan, Timeline(events, "measured"))
    assert [(link.idle, link.ran) for link in chain] == [(2.0, 0.0), (0.0, 0.0), (1.0, 7.0)]


def test_an_empty_step_has_no_chain() -> None:
    plan = Plan(Graph(()), (), ())
    assert critical_path_of(plan, Timeline((), "measured")) == ()
    assert bound_by(()) == {}
    assert bounds_in_words({}) == "nothing"


OTHER_PLANS = {
    "without update[0]": lambda events: [e for e in events if e.op != "update[0]"],
    "with update[0] twice": lambda events: [*events, next(e for e in events if e.op == "update[0]")],
    "with update[9] on lane host": lambda events: [
        evolve(e, op="update[9]") if e.op == "update[0]" else e for e in events
    ],
    "with update[0] on lane other": lambda events: [
        evolve(e, lane="other") if e.op == "update[0]" else e for e in events
    ],
}


@pytest.mark.parametrize("change", OTHER_PLANS)
def test_a_timeline_of_another_plan_is_refused(change: str) -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = Timeline(OTHER_PLANS[change](simulate(plan, ROUND).events), "measured")
    with pytest.raises(
        ValueError, match=rf"got a measured timeline {change.replace('[', '.').replace(']', '.')}.*expected"
    ):
        critical_path_of(plan, timeline)
