"""What CriticalPath and Search promise beyond the laws that every schedule keeps."""

import pytest
from attrs import evolve
from hypothesis import given, settings
from table import HARDWARE, SPECS, every_graph, graph_of, graphs, hardware
from zfunc.schedules import CriticalPath, Interleaved, Overlapped, Search, Serial, SharedCores, make_schedule
from zfunc.schedules.critical_path import upward_ranks

from zfunc import schedules
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import build
from zfunc.core.simulator import lower_bound, simulate


@every_graph(on=(None, hardware()))
def test_it_is_as_fast_as_the_plain_orders_and_needs_no_more_memory(
    graph: Graph, on: Hardware | None
) -> None:
    plain = [Overlapped()(graph), Interleaved()(graph)]
    for machine in [on] if on else [HARDWARE[name] for name in ("round", "slow host", "one memory for all")]:
        plan = CriticalPath(machine)(graph)
        assert simulate(plan, machine).seconds <= min(simulate(p, machine).seconds for p in plain)
        for tier, nbytes in plan.peak_bytes().items():
            assert nbytes <= max(p.peak_bytes()[tier] for p in plain)


@pytest.mark.parametrize("machine", HARDWARE)
def test_critical_path_is_faster_on_some_graph(machine: str) -> None:
    """Or it would only ever give the plain orders back."""
    on = HARDWARE[machine]

    def is_faster(graph: Graph) -> bool:
        plain = min(simulate(p(graph), on).seconds for p in (Overlapped(), Interleaved()))
        return simulate(CriticalPath(on)(graph), on).seconds < plain * 0.999

    assert any(is_faster(graph_of("zero_offload", name)) for name in SPECS)


@given(graphs())
def test_operations_on_temporary_regions_keep_their_order_on_compute(graph: Graph) -> None:
    plan = CriticalPath()(graph)
    (lane,) = [lane.ops for lane in plan.lanes if lane.name == "compute"] or [()]
    kept = [i for i in lane if not all(r.kept for r in graph.ops[i].regions)]
    assert kept == sorted(kept)


@given(graphs())
def test_on_a_cpu_only_what_waits_has_a_lane_of_its_own(graph: Graph) -> None:
    on_cpu, elsewhere = (make_schedule("by-device", evolve(ROUND, unified=x)) for x in (True, False))
    assert (on_cpu, elsewhere) == (SharedCores(), Overlapped())
    for lane in on_cpu(graph).lanes:
        kinds = {graph.ops[i].kind for i in lane.ops}
        assert kinds == {lane.name} <= {"network", "read", "write"} or kinds <= {
            "compute",
            "d2h",
            "h2d",
            "host",
        }
    assert sum(lane.name == "cores" for lane in on_cpu(graph).lanes) <= 1


def forked() -> Graph:
    """A short and a long chain that begin on one lane, the short one first in the graph."""
    short, long = Region("short", lifetime="value"), Region("long", lifetime="value")
    return Graph(
        (
            Op("short", (0,), "host", (), (short,), nbytes=1),
            Op("long", (0,), "host", (), (long,), nbytes=1),
            Op("short", (1,), "d2h", (short,), (), nbytes=1),
            Op("long", (1,), "h2d", (long,), (), nbytes=9),
        )
    )


UNIT = Hardware("unit", flops=1.0, rates=dict.fromkeys(ROUND.rates, 1.0), latency=0.0)


def test_the_longer_chain_goes_first() -> None:
    graph = forked()
    plan = CriticalPath(UNIT)(graph)
    (host,) = (lane.ops for lane in plan.lanes if lane.name == "host")
    assert [graph.ops[i].verb for i in host] == ["long", "short"]
    assert simulate(plan, UNIT).seconds == 10 < simulate(Overlapped()(graph), UNIT).seconds == 11
    assert simulate(plan, UNIT).seconds == lower_bound(graph, UNIT)


@given(graphs())
def test_a_rank_is_the_longest_chain_from_an_operation_on(graph: Graph) -> None:
    seconds = [float(i % 7 + 1) for i in range(len(graph))]
    ranks = upward_ranks(graph, seconds)
    after: list[list[int]] = [[] for _ in graph]
    for i, before in enumerate(graph.predecessors):
        for n in before:
            after[n].append(i)
    for i in range(len(graph)):
        assert ranks[i] == seconds[i] + max((ranks[n] for n in after[i]), default=0.0)


@pytest.mark.parametrize("name", ["CriticalPath", "Search"])
def test_collectives_are_on_one_lane_in_one_order(name: str) -> None:
    for spec in ("tied accumulated", "stage 1", "8 bits"):
        graph = graph_of("zero_offload", spec)
        once, again = (getattr(schedules, name)()(Graph(graph.ops)) for _ in range(2))
        lanes = [lane.name for lane in once.lanes if any(graph.ops[i].kind == "network" for i in lane.ops)]
        assert len(lanes) == 1
        assert once.digest == again.digest


# --- Search ----------------------------------------------------------------------------------------------


@every_graph
@settings(max_examples=settings.default.max_examples // 4)
def test_search_gives_the_fastest_of_its_schedules(graph: Graph) -> None:
    for on in (ROUND, HARDWARE["one memory for all"]):
        tried = [Serial(), Overlapped(), Interleaved(), CriticalPath(on)]
        assert simulate(Search(on)(graph), on).seconds == min(simulate(s(graph), on).seconds for s in tried)


def test_search_prefers_what_fits_to_what_is_fast() -> None:
    """Two temporaries at once on two lanes, one after the other on one."""
    big = [Region("big", (n,), 10) for n in range(2)]
    graph = Graph(
        tuple(Op("work", (n,), kind, (), (big[n],), nbytes=5) for n, kind in enumerate(("compute", "host")))
    )
    tight = evolve(UNIT, memory={"device": 10})
    assert simulate(Search(UNIT)(graph), UNIT).seconds == 5
    assert [lane.name for lane in Search(tight)(graph).lanes] == ["serial"]
    none = evolve(UNIT, memory={"device": 1})
    assert [lane.name for lane in Search(none)(graph).lanes] == ["serial"], "where none fits, the smallest"


def test_search_tries_the_schedules_it_is_given() -> None:
    graph = forked()
    assert Search(UNIT, [Overlapped()])(graph) == Overlapped()(graph)


def test_of_equals_search_takes_the_simplest() -> None:
    one = Graph((Op("only", (), "compute", (), (Region("x"),)),))
    assert Search()(one) == build(one, {"serial": [0]})
