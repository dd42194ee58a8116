"""Laws of verify: it accepts every schedule, and agrees with reachability, the definition, on everything else."""

import contextlib
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from table import SPECS, Scattered, every_plan, graph_of, graphs
from test_graph import conflicting_pairs
from zfunc.schedules import Overlapped

from zfunc.core.graph import Graph, Op, Region
from zfunc.core.plan import Lane, Plan, PlanError, build, parse
from zfunc.core.verifier import races, verify
from zfunc.engine.program import make_plan

X = Region("x", lifetime="value")
CHAIN = Graph(
    tuple(Op(verb, (), kind, (X,), (X,)) for verb, kind in (("a", "h2d"), ("b", "compute"), ("c", "d2h")))
)


def finished_before(plan: Plan) -> list[set[int]] | None:
    """For each operation all that is sure to finish before it starts, by brute force; None on a deadlock."""
    before = [set(waits) for waits in plan.waits]
    for lane in plan.lanes:
        for p, op in enumerate(lane.ops):
            before[op].update(lane.ops[:p])
    grown = True
    while grown:
        sizes = [len(known) for known in before]
        for known in before:
            known.update(*(before[n] for n in tuple(known)))
        grown = sizes != [len(known) for known in before]
    return None if any(i in known for i, known in enumerate(before)) else before


def without_each_wait(plan: Plan) -> Iterator[Plan]:
    for i, waits in enumerate(plan.waits):
        for n in waits:
            fewer = tuple(w for w in waits if w != n)
            yield evolve(plan, waits=(*plan.waits[:i], fewer, *plan.waits[i + 1 :]))


def with_each_conflict_swapped(plan: Plan) -> Iterator[Plan]:
    for a, b in conflicting_pairs(plan.graph):
        lane = next(lane for lane in plan.lanes if a in lane.ops)
        if b in lane.ops:
            swap = {a: b, b: a}
            swapped = Lane(lane.name, [swap.get(op, op) for op in lane.ops])
            yield evolve(plan, lanes=tuple(swapped if x is lane else x for x in plan.lanes))


@every_plan
def test_every_schedule_verifies_on_every_recipe(plan: Plan) -> None:
    assert verify(plan) is plan
    assert list(races(plan)) == []


@every_plan
def test_without_any_one_wait_a_plan_is_refused(plan: Plan) -> None:
    less = list(without_each_wait(plan))
    assert len(less) == plan.num_waits
    for poorer in less:
        with pytest.raises(PlanError, match="race on"):
            verify(poorer)


@every_plan
@settings(max_examples=40)
def test_with_any_two_conflicting_operations_swapped_a_plan_is_refused(plan: Plan) -> None:
    for swapped in with_each_conflict_swapped(plan):
        with pytest.raises(PlanError):
            verify(swapped)


@given(graphs(), st.randoms(use_true_random=False), st.floats(0, 1))
def test_verify_agrees_with_reachability(graph: Graph, random: Random, kept: float) -> None:
    """On plans with waits left out, waits added, and operations moved about."""
    plan = Scattered(random.randrange(1000), random.randint(1, 4))(graph)
    lanes = [list(lane.ops) for lane in plan.lanes]
    for lane in lanes:
        if len(lane) > 1 and random.random() < 0.2:
            n = random.randrange(len(lane) - 1)
            lane[n : n + 2] = lane[n + 1], lane[n]
    waits = [[n for n in waits if random.random() < kept] for waits in plan.waits]
    for _ in range(random.randint(0, 2) if len(graph) else 0):
        random.choice(waits).append(random.randrange(len(graph)))
    plan = Plan(graph, [Lane(f"lane{n}", ops) for n, ops in enumerate(lanes)], tuple(map(tuple, waits)))

    before = finished_before(plan)
    if before is None:
        with pytest.raises(PlanError, match="deadlock"):
            verify(plan)
        return
    expected = [c for c in graph.conflicts if c.before not in before[c.after]]
    assert list(races(plan)) == expected
    assert bool(expected) == any(a not in before[b] for a, b in conflicting_pairs(graph))
    if expected:
        with pytest.raises(PlanError, match="race on"):
            verify(plan)
    else:
        assert verify(plan) is plan


# --- what the messages say -------------------------------------------------------------------------------


def message(plan: Plan) -> str:
    with pytest.raises(PlanError) as error:
        verify(plan)
    return str(error.value)


def arrows(said: str) -> list[str]:
    return [line.removeprefix("->").strip() for line in said.splitlines() if line.startswith("->")]


def test_a_race_names_region_operations_and_lanes_and_marks_them() -> None:
    plan = build(CHAIN, {"in": [0], "gpu": [1], "out": [2]})
    said = message(evolve(plan, waits=((), (0,), ())))
    assert "race on x: b (lane gpu) writes it, c (lane out) " in said
    assert "Let c come after b" in said
    assert arrows(said) == ["b  after a", "c"]
    assert "    a\n" in said  # the rest of the plan is shown, unmarked


def test_a_hand_made_plan_without_a_wait_is_refused() -> None:
    text = build(CHAIN, {"in": [0], "gpu": [1], "out": [2]}).text()
    assert verify(parse(text))
    assert "race on x: b (lane gpu)" in message(parse(text.replace("c  after b", "c")))


def test_a_missing_and_a_repeated_operation_are_named() -> None:
    for ops, times in (((0, 2), 0), ((0, 1, 1, 2), 2)):
        said = message(Plan(CHAIN, (Lane("all", ops),), ((),) * 3))
        assert said.startswith(
            f"b: got it on the lanes {times} times, expected every operation of the graph once"
        )
        assert arrows(said) == ["b"] * times
        assert "  lane all\n" in said


def test_an_operation_twice_on_two_lanes_is_named() -> None:
    assert "b: got it on the lanes 2 times" in message(
        Plan(CHAIN, (Lane("x", (0, 1, 2)), Lane("y", (1,))), ((),) * 3)
    )


def test_positions_that_are_not_in_the_graph_are_named() -> None:
    assert "operation number 7 on a lane" in message(Plan(CHAIN, (Lane("all", (0, 1, 2, 7)),), ((),) * 3))
    assert "b waits for operation number 9" in message(Plan(CHAIN, (Lane("all", (0, 1, 2)),), ((), (9,), ())))
    assert "waits for 2 operations" in message(Plan(CHAIN, (Lane("all", (0, 1, 2)),), ((), ())))


def test_a_deadlock_names_the_cycle_and_marks_it() -> None:
    said = message(Plan(CHAIN, (Lane("x", (0, 1)), Lane("y", (2,))), ((2,), (), (1,))))
    cycle = said.removeprefix("deadlock: ").partition(".")[0].split(" waits for ")
    assert sorted(cycle[:-1]) == ["a", "b", "c"]
    assert cycle[0] == cycle[-1]
    assert arrows(said) == ["a  after c", "b", "c  after b"]


def test_what_is_only_stuck_behind_a_deadlock_is_not_named() -> None:
    said = message(Plan(CHAIN, (Lane("x", (0,)), Lane("y", (1,)), Lane("z", (2,))), ((1,), (2,), (1,))))
    assert said.startswith(("deadlock: b waits for c waits for b.", "deadlock: c waits for b waits for c."))
    assert arrows(said) == ["b  after c", "c  after b"]


def test_an_operation_that_waits_for_itself_is_a_deadlock() -> None:
    assert message(Plan(CHAIN, (Lane("x", (0, 1, 2)),), ((), (1,), ()))).startswith(
        "deadlock: b waits for b."
    )


def test_misordered_on_one_lane_is_a_race() -> None:
    said = message(Plan(CHAIN, (Lane("x", (0, 2, 1)),), ((),) * 3))
    assert "race on x: b (lane x) writes it, c (lane x) " in said
    assert arrows(said) == ["c", "b"]


def test_what_is_read_before_it_is_written_is_named() -> None:
    y = Region("y")
    graph = Graph((Op("use", (), "compute", (y,)), Op("make", (), "compute", (), (y,))))
    said = message(build(graph, {"gpu": [0, 1]}))
    assert "use reads y, which no operation before it writes" in said
    assert arrows(said) == ["use"]


def test_a_long_plan_is_shown_near_the_marks_only() -> None:
    graph = Graph(tuple(Op("op", (n,), ("compute", "host")[n % 2], (X,), (X,)) for n in range(400)))
    plan = Overlapped()(graph)
    said = message(evolve(plan, waits=(*plan.waits[:200], (), *plan.waits[201:])))
    assert arrows(said) == ["op[200]", "op[199]  after op[198]"]
    assert "..." in said
    assert len(said.splitlines()) < 30
    assert {"lane compute", "lane host"} <= {line.strip() for line in said.splitlines()}


def test_the_first_race_of_a_real_plan_is_readable() -> None:
    """As a reader meets it: a wait taken out of the text of a plan."""
    plan = Overlapped()(graph_of("zero_offload", "tied"))
    i = next(i for i, op in enumerate(plan.graph) if op.verb == "to_host")
    (n,) = plan.waits[i]
    said = message(evolve(plan, waits=tuple(() if k == i else w for k, w in enumerate(plan.waits))))
    assert plan.graph.ops[i].name in said
    assert plan.graph.ops[n].name in said
    assert "(lane compute) writes it" in said


# --- each way a schedule can be wrong: operations, region, lanes, and the plan with the place marked ---------


def inserted(said: str) -> list[str]:
    return [line.removeprefix("+>").strip() for line in said.splitlines() if line.startswith("+>")]


def test_a_dropped_operation_has_its_lane_its_place_and_what_misses_it() -> None:
    plan = Overlapped()(graph_of("zero_offload", "tied"))
    dropped = plan.graph.position["adam[1]"]
    less = [Lane(lane.name, [i for i in lane.ops if i != dropped]) for lane in plan.lanes]
    said = message(evolve(plan, lanes=less))
    assert "without it param_slot[1] is not written before to_device[1] (lane h2d)" in said
    assert "put it on lane host, with the others of kind host" in said
    assert inserted(said) == ["adam[1]  is missing"]
    lines = [line[2:].strip() for line in said.splitlines()]
    host = lines[lines.index("lane host") : lines.index("lane d2h")]
    place = host.index("adam[1]  is missing")
    assert plan.graph.position[host[place - 1].split()[0]] < dropped
    assert plan.graph.position[host[place + 1].split()[0]] > dropped


def test_a_dropped_operation_whose_kind_has_no_lane_is_told_to_get_one() -> None:
    said = message(Plan(CHAIN, (Lane("x", (0, 2)),), ((),) * 3))
    assert "give compute a lane" in said
    assert inserted(said) == ["b  is missing"]


def test_a_repeated_operation_has_both_its_lanes_and_what_it_writes_twice() -> None:
    said = message(Plan(CHAIN, (Lane("in", (0, 1)), Lane("out", (1, 2))), ((),) * 3))
    assert "leave it on one of in and out, or it writes x again" in said
    assert arrows(said) == ["b", "b"]


junk = st.recursive(
    st.one_of(
        st.none(), st.text(max_size=3), st.floats(), st.integers(-2, 4), st.just(Graph(())), st.just(int)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["x", "y", " ", ""]), inner, max_size=3),
        st.builds(lambda *a: (Lane, a), inner, inner),
        st.builds(lambda *a: (Plan, a), st.just(CHAIN) | inner, inner, inner),
        st.builds(lambda *a: (build, a), st.just(CHAIN), inner),
    ),
    max_leaves=8,
)


def made(given: Any) -> Any:
    """What such a schedule returns: calls are made here, where their errors are looked at."""
    if isinstance(given, tuple):
        function, arguments = given
        return function(*map(made, arguments))
    if isinstance(given, list):
        return [made(x) for x in given]
    return {k: made(v) for k, v in given.items()} if isinstance(given, dict) else given


@given(junk)
@settings(max_examples=400)
@example((build, (CHAIN, {"x": [0, 1, 2, 3]})))
@example((build, (CHAIN, {"x": [0, 0, 1, 2]})))
@example((build, (CHAIN, {"x": [0, -1, 2]})))
@example((build, (CHAIN, {"x": ["0", 1, 2]})))
@example((build, (CHAIN, {"x": [0.0, 1, 2]})))
@example((build, (CHAIN, {"x": "012"})))
@example((build, (CHAIN, {"x": None})))
@example((build, (CHAIN, {0: [0, 1, 2]})))
@example((build, (CHAIN, {"a lane": [0, 1, 2]})))
@example((build, (CHAIN, [[0, 1, 2]])))
@example((Plan, (CHAIN, [(Lane, ("x", [0, 1])), (Lane, ("x", [2]))], [[], [], []])))
@example((Plan, (CHAIN, [(Lane, ("x", [0, 1, 2]))], [[], None, []])))
@example((Plan, (CHAIN, [(Lane, ("x", [0, 1, 2]))], [[], [None], []])))
def test_whatever_a_schedule_returns_is_a_right_plan_or_a_plan_error(given: Any) -> None:
    plan = "the error"
    with contextlib.suppress(PlanError):
        plan = make_plan(SPECS["one segment"], lambda _: made(given), lambda _: CHAIN.ops)
    assert plan == "the error" or sorted(i for lane in plan.lanes for i in lane.ops) == [0, 1, 2]


def test_a_schedule_that_returns_no_plan_is_told_what_to_return() -> None:
    for returned in (None, "plan", {"x": [0]}):
        with pytest.raises(PlanError) as error:
            make_plan(SPECS["one segment"], lambda _, returned=returned: returned)
        assert f"schedule: got {returned!r} from <function" in str(error.value)
        assert "expected a Plan: return zfunc.core.plan.build(graph, lanes)" in str(error.value)


def test_a_deadlock_has_lanes_and_regions() -> None:
    with pytest.raises(PlanError) as error:
        build(CHAIN, {"x": [1, 0], "y": [2]})
    said = str(error.value)
    assert said.startswith("deadlock: b waits for a waits for b.")
    assert "b (lane x) waits for a (lane x) because of x" in said
    assert "a is after b on lane x" in said
    assert arrows(said) == ["b", "a"]


def test_a_wait_that_no_region_asks_for_is_told_as_one() -> None:
    graph = Graph((Op("a", (), "h2d"), Op("b", (), "compute")))
    said = message(Plan(graph, (Lane("x", (0,)), Lane("y", (1,))), ((1,), (0,))))
    assert "a (lane x) waits for b (lane y)" in said
    assert "because of" not in said


def test_what_is_no_operation_is_told_with_its_lane() -> None:
    assert "operation number 7 on a lane (all)" in message(
        Plan(CHAIN, (Lane("all", (0, 1, 2, 7)),), ((),) * 3)
    )
