"""Laws of verify: it accepts every schedule, and agrees with reachability, the definition, on everything else."""

import contextlib
import re
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from table import RECIPES, SCHEDULES, SPECS, Scattered, every_plan, graph_of, graphs, plan_of
from test_graph import conflicting_pairs
from zfunc.schedules import Overlapped

from zfunc.core.graph import Graph, Op, Region
from zfunc.core.plan import Lane, Plan, PlanError, build, project
from zfunc.core.verifier import races, verify
from zfunc.engine.program.program import make_plan

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


def with_a_conflict_swapped(plan: Plan, most: int = 12) -> Iterator[Plan]:
    """Two that conflict and share a lane change places: every n-th such pair, so that a long plan has few more."""
    on = {i: lane for lane in plan.lanes for i in lane.ops}
    pairs = sorted((a, b) for a, b in conflicting_pairs(plan.graph) if on[a] is on[b])
    step = len(pairs) // most + 1
    for a, b in pairs[len(pairs) % step :: step]:
        swap = {a: b, b: a}
        swapped = Lane(on[a].name, [swap.get(op, op) for op in on[a].ops])
        yield evolve(plan, lanes=tuple(swapped if x is on[a] else x for x in plan.lanes))


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
    for swapped in with_a_conflict_swapped(plan):
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


STAGED = [
    (recipe, name, schedule)
    for recipe, name, schedule in product(RECIPES, SPECS, SCHEDULES)
    if SPECS[name].mesh.over_ranks
]


@pytest.mark.parametrize("row", STAGED, ids=str)
def test_stages_execute_the_plan_of_all_and_keep_its_order(row: tuple[str, str, str]) -> None:
    """Each operation is that of one stage, or of all; two of a stage that conflict keep their order."""
    plan, stages = plan_of(*row), SPECS[row[1]].settings.pp
    parts = [project(plan, stage) for stage in range(stages)]
    for op in plan.graph:
        expected = {*range(stages)} if op.joint else {op.device}
        assert {n for n, part in enumerate(parts) if op.name in part.graph.position} == expected
    for stage, part in enumerate(parts):
        assert list(races(part)) == []
        before, at = finished_before(part), part.graph.position
        assert before is not None
        for a, b in conflicting_pairs(plan.graph):
            first, second = plan.graph.ops[a], plan.graph.ops[b]
            if {first.device, second.device} == {stage} and not (first.joint or second.joint):
                assert at[first.name] in before[at[second.name]]
        for lane in plan.lanes:
            own = [at[plan.graph.ops[i].name] for i in lane.ops if plan.graph.ops[i].name in at]
            assert not own or own in ([i for i in x.ops if i in own] for x in part.lanes)


@pytest.mark.parametrize("row", [x for x in STAGED if x[2] == "SharedCores"], ids=str)
def test_without_any_one_message_a_step_is_refused(row: tuple[str, str, str]) -> None:
    graph = graph_of(*row[:2])
    messages = [op for op in graph if op.kind == "network" and op.verb.startswith(("send_", "recv_"))]
    assert len(messages) >= 4 or row[0] in ("checkpoint", "flush")
    for op in messages:
        fewer = Graph(tuple(x for x in graph if x is not op))
        with pytest.raises(PlanError, match="which no operation before it writes"):
            verify(SCHEDULES[row[2]](fewer))


# --- what the messages say -------------------------------------------------------------------------------


def message(plan: Plan) -> str:
    with pytest.raises(PlanError) as error:
        verify(plan)
    return str(error.value)


def marked(text: str) -> list[str]:
    return [line.removeprefix("->").strip() for line in text.splitlines() if line.startswith("->")]


def chain_on(*waits: tuple[int, ...], **lanes: tuple[int, ...]) -> Plan:
    return Plan(CHAIN, [Lane(name, ops) for name, ops in lanes.items()], waits or ((),) * 3)


READS_FIRST = Graph((Op("use", (), "compute", (Region("y"),)), Op("make", (), "compute", (), (Region("y"),))))
UNRELATED = Graph((Op("a", (), "h2d"), Op("b", (), "compute")))
# A plan, what is said of it, the lines that are marked.
MESSAGES: dict[str, tuple[Plan, list[str], list[str]]] = {
    "a race": (
        chain_on((), (0,), (), **{"in": (0,), "gpu": (1,), "out": (2,)}),
        [r"race on x: b \(lane gpu\) writes it, c \(lane out\) ", "Let c come after b", "    a\n"],
        ["b  after a", "c"],
    ),
    "misordered on one lane": (
        chain_on(x=(0, 2, 1)),
        [r"race on x: b \(lane x\) writes it, c \(lane x\) "],
        ["c", "b"],
    ),
    "missing": (
        chain_on(all=(0, 2)),
        ["^b: got it on the lanes 0 times, expected every .* once", "give compute a lane", "  lane all\n"],
        ["c"],
    ),
    "repeated": (chain_on(all=(0, 1, 1, 2)), ["^b: got it on the lanes 2 times, expected"], ["b", "b"]),
    "on two lanes": (
        chain_on(**{"in": (0, 1), "out": (1, 2)}),
        ["^b: got it on the lanes 2 times", "leave it on one of in and out, or it writes x again"],
        ["b", "b"],
    ),
    "no such operation": (chain_on(all=(0, 1, 2, 7)), [r"operation number 7 on a lane \(all\)"], []),
    "waits for no such": (chain_on((), (9,), (), all=(0, 1, 2)), ["b waits for operation number 9"], []),
    "too few waits": (chain_on((), (), all=(0, 1, 2)), ["waits for 2 operations"], []),
    "a deadlock": (
        chain_on((2,), (), (1,), x=(0, 1), y=(2,)),
        [r"^deadlock: (\w)( waits for (?!\1)\w){2} waits for \1\."],
        ["a  after c", "b", "c  after b"],
    ),
    "behind a deadlock": (
        chain_on((1,), (2,), (1,), x=(0,), y=(1,), z=(2,)),
        [r"^deadlock: ([bc]) waits for [bc] waits for \1\."],
        ["b  after c", "c  after b"],
    ),
    "waits for itself": (
        chain_on((), (1,), (), x=(0, 1, 2)),
        [r"^deadlock: b waits for b\."],
        ["b  after b"],
    ),
    "waits for no region's sake": (
        Plan(UNRELATED, (Lane("x", (0,)), Lane("y", (1,))), ((1,), (0,))),
        [r"a \(lane x\) waits for b \(lane y\)", r"(?s)\A(?!.*because of)"],
        ["a  after b", "b  after a"],
    ),
    "read before it is written": (
        build(READS_FIRST, {"gpu": [0, 1]}),
        ["use reads y, which no operation before it writes"],
        ["use"],
    ),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_wrong_plan_is_refused_with_its_operations_lanes_and_regions_marked(what: str) -> None:
    plan, patterns, lines = MESSAGES[what]
    text = message(plan)
    for pattern in patterns:
        assert re.search(pattern, text), text
    assert marked(text) == lines


def test_a_long_plan_is_shown_near_the_marks_only() -> None:
    graph = Graph(tuple(Op("op", (n,), ("compute", "host")[n % 2], (X,), (X,)) for n in range(400)))
    plan = Overlapped()(graph)
    text = message(evolve(plan, waits=(*plan.waits[:200], (), *plan.waits[201:])))
    assert marked(text) == ["op[200]", "op[199]  after op[198]"]
    assert "..." in text
    assert len(text.splitlines()) < 30
    assert {"lane compute", "lane host"} <= {line.strip() for line in text.splitlines()}


def test_of_a_dropped_operation_it_is_said_where_it_belongs_and_what_needs_it_is_marked() -> None:
    plan = Overlapped()(graph_of("zero_offload", "tied"))
    dropped = plan.graph.position["update[1]"]
    less = [Lane(lane.name, [i for i in lane.ops if i != dropped]) for lane in plan.lanes]
    text = message(evolve(plan, lanes=less))
    assert "without it param_slot[0] is not written before to_device[1] (lane h2d)" in text
    assert "put it on lane host, with the others of kind host" in text
    assert [line.split()[0] for line in marked(text)] == ["to_device[1]"]


def test_an_order_that_deadlocks_is_refused_with_lanes_and_regions() -> None:
    with pytest.raises(PlanError) as error:
        build(CHAIN, {"x": [1, 0], "y": [2]})
    text = str(error.value)
    assert text.startswith("deadlock: b waits for a waits for b.")
    assert "b (lane x) waits for a (lane x) because of x" in text
    assert "a is after b on lane x" in text
    assert "Move one of them" in text
    assert marked(text) == ["b", "a"]


# --- whatever a schedule returns -------------------------------------------------------------------------


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


def evaluated(given: Any) -> Any:
    """What such a schedule returns: calls are made here, where their errors are looked at."""
    if isinstance(given, tuple):
        function, arguments = given
        return function(*map(evaluated, arguments))
    if isinstance(given, list):
        return [evaluated(x) for x in given]
    return {k: evaluated(v) for k, v in given.items()} if isinstance(given, dict) else given


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
def test_any_return_value_of_a_schedule_is_a_valid_plan_or_a_plan_error(given: Any) -> None:
    plan = "the error"
    with contextlib.suppress(PlanError):
        plan = make_plan(SPECS["one segment"], lambda _: evaluated(given), lambda _: CHAIN.ops)
    assert plan == "the error" or sorted(i for lane in plan.lanes for i in lane.ops) == [0, 1, 2]
