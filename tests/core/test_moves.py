"""Operations that only copy: what each row of `MOVES` moves, and a fifth tier, which is some rows more."""

from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve
from table import SCHEDULES, SPECS, TIED, every_graph, spec

from zfunc.core import graph as graphs
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.memory_model import persistent_bytes
from zfunc.core.moves import BETWEEN_DEVICES, LANES, MOVES, THINGS, Item, Move, Place, Thing
from zfunc.core.ops import OpBuilder
from zfunc.core.optimizer_state import EMA
from zfunc.core.recipes import zero_offload
from zfunc.core.spec import StepSpec
from zfunc.core.verifier import verify


def test_every_move_is_between_tiers_that_have_its_thing() -> None:
    for row in MOVES.values():
        assert {row.source, row.to} <= THINGS[row.thing].places.keys()
        assert (row.source, row.to) in LANES
    assert {row.thing for row in MOVES.values()} == THINGS.keys()
    rows = [(row.thing, row.source, row.to) for row in MOVES.values()]
    assert len({*rows}) == len(rows)


@every_graph
def test_a_move_reads_one_tier_and_writes_another_on_the_lane_between_them(graph: Graph) -> None:
    for op in graph:
        if op.verb in MOVES:
            row = MOVES[op.verb]
            if row.thing in BETWEEN_DEVICES and op.kind == "network":  # from rank to rank
                assert (op.kind, op.reads[0].tier, op.writes[0].tier) == ("network", row.source, row.to)
                continue
            assert op.kind == LANES[row.source, row.to]
            assert {r.tier for r in op.writes} == {row.to}
            others = {r for r in op.reads if r not in op.writes and r.buffer != "decision"}
            if row.thing in BETWEEN_DEVICES and {r.tier for r in others} == {"device"} == {row.to}:
                assert {r.device for r in others} != {op.device}  # from a peer
                continue
            assert {r.tier for r in others if r.nbytes} <= {row.source}
            assert op.touches("decision") == row.decided
            assert len(op.writes) == 1 or row.thing in ("activations", "page of activations", "updated state")
            assert op.nbytes > 0 or all(r.nbytes == 0 for r in op.writes)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth tier, such as another machine's memory: where averages wait from step to step."""

    def away(x: Item) -> tuple[Region, ...]:
        return (evolve(x.at.of_state(EMA, x.b), buffer="ema_away", tier="remote"),)

    toy: Any = "remote"
    monkeypatch.setattr(graphs, "TIERS", (*graphs.TIERS, toy))
    monkeypatch.setattr("zfunc.core.memory_model.TIERS", graphs.TIERS)
    monkeypatch.setitem(LANES, ("host", toy), "network")
    monkeypatch.setitem(LANES, (toy, "host"), "network")
    places = {"host": Place(otherwise=lambda x: (x.at.of_state(EMA, x.b),)), toy: Place(otherwise=away)}
    monkeypatch.setitem(THINGS, "average", Thing(lambda x: x.at.of_state(EMA, x.b).nbytes, places))
    monkeypatch.setitem(MOVES, "lend", Move("average", "host", toy))
    monkeypatch.setitem(MOVES, "call_back", Move("average", toy, "host"))


def lending(job: StepSpec) -> Iterator[Op]:
    """The plain recipe, in which each average comes back before its update and leaves after it."""
    emit = OpBuilder(job)
    for op in zero_offload(job):
        if op.verb == "average":
            yield emit.call_back(*op.index)
        yield op
        if op.verb == "average":
            yield emit.lend(*op.index)


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fifth_tier_is_a_few_rows(schedule: str) -> None:
    job = spec(TIED, ema=0.5, barrier=True)
    graph = Graph(lending(job))
    plan = verify(SCHEDULES[schedule](graph))
    assert [str(op) for op in graph if op.kind == "network"][:2] == ["call_back[1]", "lend[1]"]
    averages = sum(4 * b.numel for b in job.layout.buckets)
    assert persistent_bytes(graph)["remote"] == averages  # pyright: ignore
    at = {op.name: i for i, op in enumerate(plan.graph)}
    assert all(at[f"call_back[{b}]"] < at[f"average[{b}]"] < at[f"lend[{b}]"] for b in job.offloaded)


def test_what_has_no_slot_cannot_move() -> None:
    emit = OpBuilder(SPECS["tied"])
    with pytest.raises(graphs.PlanError, match=r"item 0 of grad_slot before one that gives it a slot"):
        emit.to_host(0, 0, 0)
    with pytest.raises(graphs.PlanError, match=r"item 0 of weight_slot before one that gives it a slot"):
        emit.fetch(0)
    with pytest.raises(graphs.PlanError, match=r"got the operation 'fetsh'.*did you mean 'fetch'"):
        emit.fetsh(0)
