"""Mistakes of who writes a recipe or a schedule for the first time: each is a PlanError that says what to write."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve
from table import SPECS
from zfunc.schedules import Overlapped

from zfunc.core.graph import Graph, Op, Region
from zfunc.core.ops import OpBuilder
from zfunc.core.plan import build
from zfunc.core.recipes import zero_offload
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import simulate
from zfunc.core.spec import StepSpec
from zfunc.core.verifier import plan_with, verify
from zfunc.errors import PlanError

SPEC = SPECS["one segment"]
GRAPH = Graph(zero_offload(SPEC))
EVERY = range(len(GRAPH))
X = Region("x", lifetime="value")


def without_return(graph: Graph) -> None:
    build(graph, {"all": EVERY})


def generator(graph: Graph) -> Iterator[Any]:
    yield build(graph, {"all": EVERY})


SCHEDULES: dict[str, tuple[Any, str]] = {
    "no return": (
        without_return,
        "got None from .*without_return.*return zfunc.*function without return gives",
    ),
    "the graph": (lambda graph: graph, "got Graph.* expected a Plan.*a graph has no lanes"),
    "a list": (lambda graph: list(graph), "got .* expected a Plan: return zfunc.core.plan.build"),
    "the lanes": (lambda _: {"all": EVERY}, r"got {'all': range\(.* expected a Plan: return zfunc.core.plan"),
    "yield": (generator, "got <generator.*a function with yield gives a generator"),
    "the name of one": ("Overlapped", r"got 'Overlapped', expected a function.*schedules\.Overlapped\(\)"),
    "its class": (Overlapped, r"got <class .* or an object such as zfunc\.schedules\.Overlapped\(\)"),
    "names": (
        lambda g: build(g, {"all": [op.name for op in g]}),
        r"got \['load.* as integers.*graph.position",
    ),
    "operations": (
        lambda g: build(g, {"all": g.ops}),
        "got .* expected positions of operations in the graph",
    ),
    "one number": (lambda g: build(g, {"all": 0}), r"got 0, expected positions .*\[i for i, op in enumerate"),
    "no lanes": (lambda g: build(g, EVERY), "got range.*expected lanes by name: {'gpu': positions"),
    "arguments swapped": (lambda g: build({"all": EVERY}, g), "got Graph.*expected lanes by name"),
    "counted from 1": (lambda g: build(g, {"all": range(1, len(g) + 1)}), "operations 0 to"),
    "twice": (
        lambda g: build(g, {"a": EVERY, "b": [0]}),
        r"load\[0\]: got it on the lanes 2 times.*leave it on",
    ),
    "left out": (lambda g: build(g, {"all": EVERY[1:]}), r"load\[0\]: got it .* 0 times.*put it on lane all"),
    "a typo in a kind": (
        lambda g: build(
            g, {k: [i for i in EVERY if g.ops[i].kind == k] for k in ("copute", "d2h", "h2d", "host")}
        ),
        r"forward\[0,0\]: got it on the lanes 0 times.*give compute a lane",
    ),
    "backwards": (
        lambda g: build(g, {"all": reversed(EVERY)}),
        "deadlock.*expected every operation after those",
    ),
    "of another graph": (
        lambda _: build(Graph((Op("mine", (), "host"),)), {"all": [0]}),
        "got a plan of another graph, expected one of the graph that was passed",
    ),
}

RECIPES: dict[str, tuple[Callable[[StepSpec], Any], str]] = {
    "no yield": (lambda _: None, "got None, expected operations: yield each .*without yield and return"),
    "one operation": (lambda _: Op("mine", (), "host"), "got Op.* expected operations: yield it, or return a list"),
    "a word": (lambda _: "adam", "got 'adam', expected operations: yield each, or return a list"),
    "the recipe, not called": (lambda _: zero_offload, "expected operations: call zero_offload, with what it"),
    "a name": (lambda _: ["adam"], "got 'adam' among the operations.*Op: yield each"),
    "nothing": (lambda _: [None], "got None among the operations"),
    "a generator": (lambda spec: [zero_offload(spec)], "got <generator.*write yield from"),
    "a method, not called": (lambda spec: [OpBuilder(spec).decide], "got <bound method.* call decide"),
    "a typo in a verb": (lambda spec: [OpBuilder(spec).foward(0, 0)], r"got .*'foward'.*mean 'forward'\?"),
    "a kind": (lambda _: [Op("mine", (), "hots")], r"mine: got the kind 'hots', expected .*mean 'host'\?"),
    "a lane for a kind": (lambda _: [Op("mine", (), "gpu")], "got the kind 'gpu', expected one of compute"),
    "an index without a comma": (lambda _: [Op("mine", 3, "host")], r"got 3, expected a tuple: pass \(x,\)"),
    "an index of words": (lambda _: [Op("mine", ("3",), "host")], "got the index .* pass a tuple of int"),
    "a fraction": (lambda _: [Op("mine", (), "host", (Region("x", (1.5,)),))], "region x: got the index"),
    "one region": (lambda _: [Op("mine", (), "host", X)], r"got Region.* expected a tuple: pass \(x,\)"),
    "the name of a region": (lambda _: [Op("mine", (), "host", ("x",))], "mine: got 'x' among its regions"),
    "no region": (lambda _: [Op("mine", (), "host", [None])], "mine: got None among its regions"),
    "a space": (lambda _: [Op("my own", (), "host")], "got the name 'my own', expected a word without spaces"),
    "twice": (lambda spec: [*zero_offload(spec)] * 2, r"got two operations named load\[0\].*or leave one out"),
    "another size": (
        lambda _: [Op("a", (), "host", (), (X,)), Op("b", (), "host", (Region("x", (), 4, "host"),))],
        "b declares x as .* declare a region the same way everywhere",
    ),
    "read, never written": (
        lambda _: [Op("mine", (), "host", (Region("x"),))],
        "mine reads x, which no operation before it writes.* Correct the recipe",
    ),
    "a tier": (lambda _: [Region("x", tier="gpu")], "x: got tier 'gpu', expected one of device"),
}  # fmt: skip


@pytest.mark.parametrize("what", SCHEDULES)
def test_a_mistake_in_a_schedule_is_a_plan_error_that_says_what_to_do(what: str) -> None:
    schedule, message = SCHEDULES[what]
    with pytest.raises(PlanError, match=f"(?s){message}"):
        plan_with(schedule, GRAPH)


@pytest.mark.parametrize("what", RECIPES)
def test_a_mistake_in_a_recipe_is_a_plan_error_that_says_what_to_do(what: str) -> None:
    recipe, message = RECIPES[what]
    with pytest.raises(PlanError, match=f"(?s){message}") as error:
        plan_with(lambda graph: build(graph, {"all": range(len(graph))}), Graph(recipe(SPEC)))
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("function", [verify, simulate])
def test_what_is_no_plan_is_refused_where_a_plan_is_checked_or_simulated(
    function: Callable[[Any], Any],
) -> None:
    with pytest.raises(PlanError, match=re.escape("got None, expected a Plan: return zfunc.core.plan.build")):
        function(None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("costs", (), "costs: got 0, expected 1, one for each segment"),
        ("costs", True, r"costs: got a bool, expected one for each .*: pass \(x,\) \* len"),
        ("settings", StepSettings(recompute="all,all"), "recompute: got 'all,all' for 1 segment, expected"),
        ("settings", StepSettings(params_on="auto"), "params_on: got 'auto', expected what it stands for"),
    ],
)
def test_a_mistake_in_a_spec_says_what_to_pass(field: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        evolve(SPEC, **{field: value})


@pytest.mark.parametrize("ask", ["simulate", "lower_bound"])
def test_hardware_by_its_name_is_refused(ask: str) -> None:
    plan = plan_with(Overlapped(), GRAPH)
    with pytest.raises(TypeError, match=rf"{ask}: hardware: got a str, expected .*load_profile\('rtx4090'\)"):
        getattr(plan, ask)("rtx4090")
