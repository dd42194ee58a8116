"""Laws of plans: text round-trips, digests agree between processes, build derives waits and finds deadlocks.

`ZFUNC_GOLDENS=write python -m pytest tests/core/test_plan.py` writes the goldens anew; read the difference.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve
from table import RECIPES, SCHEDULES, SPECS, TIED, every_plan, graph_of, plan_of, spec

from zfunc.core.graph import Graph, Op, Region
from zfunc.core.plan import Lane, Plan, build, parse, topological_order

GOLDENS = Path(__file__).parents[1] / "goldens"
HERE = "import sys; sys.path.insert(0, sys.argv[1]); from table import *; "
X = Region("x", nbytes=4)
MAKE_USE = Graph((Op("make", (), "compute", writes=(X,), flops=5), Op("use", (), "host", reads=(X,))))


@every_plan
def test_text_round_trips(plan: Plan) -> None:
    again = parse(plan.text())
    assert again == plan
    assert again.text() == plan.text()
    assert again.digest == plan.digest
    # Sizes and tiers are no part of a region's identity, so equality does not see them.
    for old, new in zip(plan.graph.regions, again.graph.regions, strict=True):
        assert (old.nbytes, old.tier, old.kept) == (new.nbytes, new.tier, new.kept)


def test_digests_are_the_same_in_another_process() -> None:
    """Of each recipe on each spec, each under another schedule than the one before."""
    rows = [(r, j, [*SCHEDULES][n % len(SCHEDULES)]) for n, (r, j) in enumerate(product(RECIPES, SPECS))]
    code = HERE + f"print(*[plan_of(*row).digest for row in {rows}])"
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1])]
    hashed = {**os.environ, "PYTHONHASHSEED": "12345"}
    out = subprocess.run(command, env=hashed, check=True, capture_output=True, text=True).stdout
    assert out.split() == [plan_of(*row).digest for row in rows]


def test_digests_tell_plans_apart() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    i = next(i for i, waits in enumerate(plan.waits) if waits)
    poorer = evolve(plan, waits=(*plan.waits[:i], (), *plan.waits[i + 1 :]))
    bigger = SCHEDULES["Overlapped"](
        Graph(tuple(RECIPES["zero_offload"](evolve(SPECS["tied"], target_bytes=17))))
    )
    others = [poorer, bigger, plan_of("zero_offload", "tied", "Serial")]
    assert len({p.digest for p in (plan, *others)}) == 4


@every_plan
def test_waits_cross_lanes_and_each_lane_is_waited_for_once(plan: Plan) -> None:
    for i, waits in enumerate(plan.waits):
        lanes = [plan.place[n][0] for n in waits]
        assert plan.place[i][0] not in lanes
        assert len(lanes) == len(set(lanes))
    assert plan.num_waits == sum(map(len, plan.waits))


@every_plan
def test_in_order_keeps_lanes_and_waits(plan: Plan) -> None:
    turn = {op: n for n, op in enumerate(topological_order(plan, plan.waits))}
    assert sorted(turn) == list(range(len(plan.graph)))
    assert all(turn[n] < turn[i] for i, waits in enumerate(plan.waits) for n in waits)
    for lane in plan.lanes:
        assert [turn[op] for op in lane.ops] == sorted(turn[op] for op in lane.ops)
    # What `build` keeps is what lanes and waits say.
    assert evolve(plan).clocks == plan.clocks


@every_plan
def test_threads_keep_lanes_and_what_verify_accepts(plan: Plan) -> None:
    """Each as one lane: so whatever deadlocks or races would be named."""
    merged = Plan(plan.graph, [Lane(*thread) for thread in plan.threads.items()], plan.waits)
    assert merged.verify() is merged
    for lane in plan.lanes:
        assert [i for i in plan.threads[lane.thread] if i in {*lane.ops}] == [*lane.ops]


def test_an_implied_wait_is_dropped() -> None:
    x = Region("x", lifetime="value")
    graph = Graph(tuple(Op(verb, (), "compute", (x,), (x,)) for verb in "abc"))
    plan = build(graph, {"one": [0], "two": [1], "three": [2]})
    assert plan.waits == ((), (0,), (1,))
    assert plan.clocks[2] == (0, 0, 0)


# --- parsing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("op make compute", "op make gpu"),
        ("region x 4 device", "region x 4 attic"),
        ("region x 4 device", "region x four device"),
        ("region x 4 device", "region x"),
        (": -> x", ": -> z"),
        (": -> x", ": x"),
        ("flops=5", "hops=5"),
        ("flops=5", "flops"),
        ("lane compute", "track compute"),
        ("lane compute", "lane"),
        ("  use  after make", "  use  after nothing"),
        ("  use  after make", "  loose  after make"),
        ("lane compute\n", "\n"),
    ],
)
def test_an_unreadable_line_is_named(right: str, wrong: str) -> None:
    text = build(MAKE_USE, {"compute": [0], "host": [1]}).text()
    before, match, after = text.partition(right)
    assert match
    line = (before + wrong).rstrip("\n").count("\n") + 1 if wrong != "\n" else before.count("\n") + 1
    with pytest.raises(ValueError, match=f"line {line} of the plan cannot be read"):
        parse(before + wrong + after)


@pytest.mark.parametrize("text", ["", "\n", "zfunc plan 2\n", "# a plan"])
def test_text_without_the_header_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as the first line, expected 'zfunc plan 1'"):
        parse(text)


def test_an_operation_on_no_lane_round_trips() -> None:
    plan = Plan(MAKE_USE, (Lane("gpu", (0,)),), ((), ()))
    assert parse(plan.text()) == plan


# --- goldens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", [False, True], ids=["", "barrier"])
@pytest.mark.parametrize("schedule", ["Serial", "Overlapped", "Interleaved"])
def test_plans_of_a_small_tied_model_are_as_written_down(schedule: str, barrier: bool) -> None:
    graph = Graph(tuple(RECIPES["zero_offload"](spec(TIED, barrier=barrier, world=2))))
    text = f"{SCHEDULES[schedule](graph)}\n"
    path = GOLDENS / f"{schedule.lower()}{'_barrier' * barrier}.txt"
    if os.environ.get("ZFUNC_GOLDENS") == "write":
        path.write_text(text)
    assert text == path.read_text(), (
        f"the plan differs from {path.name}: if it should, run ZFUNC_GOLDENS=write python -m pytest {__file__} "
        "and read the difference"
    )


def test_every_golden_is_tested() -> None:
    names = {s + b for s in ("serial", "overlapped", "interleaved") for b in ("", "_barrier")}
    assert {path.stem for path in GOLDENS.glob("*.txt")} == names
    assert len(graph_of("zero_offload", "tied")) < 40
