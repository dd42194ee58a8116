"""Laws of the comparison of two plans: it adds up, is the same from both sides, and names what was hidden."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table import Scattered, graphs, hardware

import zfunc
from zfunc.cli.main import main
from zfunc.core.graph import Graph
from zfunc.core.hardware import Hardware
from zfunc.core.simulator import simulate

SERIAL, OVERLAPPED = zfunc.schedules.Serial(), zfunc.schedules.Overlapped()


@given(graphs(), st.integers(0, 1000), st.integers(1, 5), hardware())
def test_it_adds_up_and_is_the_same_from_both_sides(
    graph: Graph, seed: int, lanes: int, on: Hardware
) -> None:
    a, b = plans = Scattered(seed, lanes)(graph), OVERLAPPED(graph)
    there, back = zfunc.explain(a, b, on), zfunc.explain(b, a, on)
    assert there.seconds == tuple(simulate(plan, on).seconds for plan in plans) == back.seconds[::-1]
    for seconds, bounds in zip(there.seconds, there.bounds, strict=True):
        assert sum(bounds.values()) == pytest.approx(seconds, rel=1e-9)
    for pair in ("paths", "only", "waits", "bounds"):
        assert getattr(there, pair) == getattr(back, pair)[::-1]
    assert there.same_time == back.same_time
    assert sum(there.waits[0].values()) - sum(there.waits[1].values()) == a.num_waits - b.num_waits
    assert len(str(there).splitlines()) <= 10


@given(graphs(), st.integers(0, 1000), hardware())
def test_a_plan_and_itself_take_the_same_time(graph: Graph, seed: int, on: Hardware) -> None:
    plan = Scattered(seed, 3)(graph)
    same = zfunc.explain(plan, plan, on)
    assert same.only == ((), ())
    assert same.waits == ({}, {})
    first = str(same).splitlines()[0]
    assert first.startswith("The two plans take the same time")
    assert first.endswith("their critical paths are the same operations.")


def test_it_names_what_the_faster_plan_hides() -> None:
    graph = zfunc.step_graph(segments=5, parameters=50_000_000, tokens=8192, clip_norm=1.0)
    text = str(zfunc.explain(SERIAL(graph), OVERLAPPED(graph)))
    assert "b is faster by 45.1 ms, 22.0%" in text
    assert (
        "On the critical path of a, hidden beside that of b: 5 to_host (25.1 ms), 4 to_device (20 ms)" in text
    )
    assert "update waits for to_device: 3 waits" in text


def test_plans_of_two_graphs_are_refused() -> None:
    a, b = (OVERLAPPED(zfunc.step_graph(segments=n)) for n in (2, 3))
    with pytest.raises(
        ValueError, match="explain: got plans of two graphs .* expected two plans of one graph"
    ):
        zfunc.explain(a, b)


def test_both_are_in_one_picture() -> None:
    graph = zfunc.step_graph(segments=2, clip_norm=1.0)
    told = zfunc.explain(SERIAL(graph), OVERLAPPED(graph))
    assert [line.partition(":")[0] for line in told.text().splitlines()[:2]] == ["a", "b"]
    picture = told.svg()
    assert picture.startswith("<svg")
    assert str(told).splitlines()[0] in picture
    assert picture.count("<title>") == 2 * len(graph)
    assert picture.count('class="lane"') == 5
    assert len(repr(told)) < 200


def test_the_command_draws_two_schedules_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["draw", "--num-layers", "2", "--schedule", "Overlapped", "--compare", "Serial"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert out.startswith("a is Serial, b is Overlapped\nOn round numbers")
    assert "b is faster by" in out
    assert "\nSerial: " in out
    assert "\nOverlapped: " in out
