"""Hardware as a value: every figure checked at birth, an operation's time from its work, room on each tier."""

import math
from typing import Any

import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from zfunc.core.graph import KINDS, Op
from zfunc.core.hardware import ROUND, Hardware, Measured

UNIT = Hardware("unit", flops=10.0, rates={**ROUND.rates, "compute": 5.0, "host": 2.0}, latency=1.0)


def compute(flops: int, nbytes: int = 0) -> Op:
    return Op("work", (), "compute", flops=flops, nbytes=nbytes)


# ---- an operation's time ---------------------------------------------------------------------------


def test_work_takes_latency_and_arithmetic_and_bytes() -> None:
    assert UNIT.seconds(compute(20, 15)) == 1 + 2 + 3


def test_attention_has_a_rate_of_its_own() -> None:
    work = evolve(compute(20, 15), attention_flops=10)
    assert UNIT.seconds(work) == UNIT.seconds(compute(20, 15))
    assert evolve(UNIT, attention=5.0).seconds(work) == 1 + 1 + 2 + 3
    timed = evolve(UNIT, attention=5.0, measured=[Measured("compute", 20, 0, 9.0, attention_flops=10)])
    assert timed.seconds(evolve(compute(10), attention_flops=10)) == pytest.approx(9.0 * 2 / 3)


def test_a_kind_can_have_a_latency_of_its_own() -> None:
    on = evolve(UNIT, latencies={"host": 7.0})
    assert on.seconds(Op("sweep", (), "host", nbytes=4)) == 7 + 2
    assert on.seconds(compute(20)) == 1 + 2


def test_an_operation_takes_no_less_than_its_launches() -> None:
    on, op = evolve(UNIT, launch=0.5), compute(20, 15)
    assert [on.seconds(evolve(op, launches=n)) for n in (0, 12, 14)] == [6, 6, 7]
    assert UNIT.seconds(evolve(op, launches=14)) == 6  # a machine whose launches are not known
    known = evolve(on, measured=[Measured("compute", 20, 15, 0.25), Measured("compute", 200, 0, 2.5)])
    assert known.seconds(evolve(op, launches=14)) == 0.25
    assert known.seconds(compute(100)) < known.seconds(evolve(compute(100), launches=14)) == 7


def test_a_measured_time_is_used() -> None:
    on = evolve(UNIT, measured=[Measured("compute", 20, 15, 0.25), Measured("host", 0, 4, 0.5)])
    assert on.seconds(compute(20, 15)) == 0.25
    assert on.seconds(Op("sweep", (), "host", nbytes=4)) == 0.5
    assert on.seconds(Op("sweep", (), "host", nbytes=8)) == 1 + 4  # bytes are not interpolated
    assert on.seconds(compute(0, 15)) == 1 + 3


def test_arithmetic_between_two_measurements_is_in_proportion() -> None:
    on = evolve(UNIT, measured=[Measured("compute", 10**4, 0, 8.0), Measured("compute", 100, 0, 2.0)])
    assert on.seconds(compute(1000)) == pytest.approx(4.0)  # both on a log scale
    assert on.seconds(compute(10)) == pytest.approx(0.2)  # beyond the ends at the rate of the last
    assert on.seconds(compute(10**5)) == pytest.approx(80.0)


@given(
    st.dictionaries(st.integers(1, 10**15), st.floats(1e-6, 1e3), min_size=1, max_size=5),
    st.integers(1, 10**16),
)
def test_measured_time_lies_between_its_neighbours(points: dict[int, float], flops: int) -> None:
    on = evolve(UNIT, measured=[Measured("compute", work, 0, seconds) for work, seconds in points.items()])
    below = [points[max(f)] for f in [[work for work in points if work <= flops]] if f]
    above = [points[min(f)] for f in [[work for work in points if work >= flops]] if f]
    seconds = on.seconds(compute(flops))
    if below and above:
        assert min(below + above) * (1 - 1e-9) <= seconds <= max(below + above) * (1 + 1e-9)
    else:
        assert 0 < seconds < math.inf


# ---- room ------------------------------------------------------------------------------------------


def test_pinned_memory_is_host_memory() -> None:
    on = evolve(UNIT, memory={"host": 100, "device": 10})
    assert on.lacking({"host": 60, "pinned": 40, "device": 10, "disk": 10**15}) == {}
    assert on.lacking({"host": 60, "pinned": 45, "device": 12}) == {"device": 2, "host": 5}


def test_on_a_unified_machine_the_device_is_in_the_host() -> None:
    on = evolve(UNIT, memory={"host": 100}, unified=True)
    assert on.lacking({"host": 60, "pinned": 20, "device": 20}) == {}
    assert on.lacking({"host": 60, "pinned": 20, "device": 30}) == {"host": 10}


def test_unknown_memory_has_no_limit() -> None:
    assert ROUND.lacking(dict.fromkeys(["device", "pinned", "host", "disk"], 10**18)) == {}


# ---- figures that are wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["flops", *KINDS])
def test_a_rate_is_a_positive_number(name: str, rate: float) -> None:
    flops, rates = (rate, ROUND.rates) if name == "flops" else (1.0, {**ROUND.rates, name: rate})
    with pytest.raises(ValueError, match=f"mine: got a {name} rate of {rate}, expected a positive number"):
        Hardware("mine", flops=flops, rates=rates)


def test_a_missing_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a write rate of 0\.0"):
        Hardware("mine", flops=1.0, rates={k: 1.0 for k in KINDS if k != "write"})


WRONG = {
    "latency": ({"latency": -1}, r"got a latency of -1, expected seconds, 0 or more"),
    "hand-off": ({"handoff": math.inf}, r"got a latency of inf, expected seconds, 0 or more"),
    "latency of a kind": ({"latencies": {"host": math.nan}}, "got a latency of nan, expected seconds"),
    "launch": ({"launch": -1.0}, r"got a latency of -1\.0, expected seconds, 0 or more"),
    "issue": ({"issue": {"host": -1}}, r"got an issue of -1, expected seconds, 0 or more"),
    "collective": ({"collectives": [(0.0, 0.0)]}, r"a collective rate of 0\.0, expected a positive number"),
    "latency of a collective": ({"collectives": [(-1.0, 1.0)]}, r"got a latency of -1\.0, expected seconds"),
    "kind of a latency": ({"latencies": {"hots": 1.0}}, r"'hots' in latencies, .*did you mean 'host'"),
    "kind of a rate": (
        {"rates": {**ROUND.rates, "gpu": 1.0}},
        r"'gpu' in rates, expected only compute, netw",
    ),
    "no bytes": ({"memory": {"host": 0}}, r"0 bytes on the tier host, expected more than 0"),
    "pinned": ({"memory": {"pinned": 5}}, r"'pinned' in memory, expected only device, host, disk"),
    "no share": (
        {"shared": {"cores": {"host": 0.0}}},
        r"a share of 0\.0 of 'cores' for host, expected above 0",
    ),
    "more than all": ({"shared": {"cores": {"host": 1.5}}}, r"a share of 1\.5 of 'cores'"),
    "not a share": ({"shared": {"cores": {"host": math.nan}}}, r"a share of nan of 'cores'"),
    "kind of a share": ({"shared": {"cores": {"cpu": 0.5}}}, r"'cpu' in shared 'cores', expected only"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_figure_is_refused(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        evolve(ROUND, **change)


@pytest.mark.parametrize("wrong", [5, "x", (5,), {"disk": "8"}])
@pytest.mark.parametrize(
    "name", [f.name for f in fields(Hardware) if f.name not in ("name", "unified", "grouped")]
)
def test_what_is_no_number_is_refused_by_the_name_of_its_figure(name: str, wrong: Any) -> None:
    if wrong == 5 and name in ("flops", "attention", "latency", "handoff", "launch"):
        assert getattr(evolve(ROUND, **{name: wrong}), name) == wrong
        return
    with pytest.raises(TypeError, match=rf"{name}.*: got .*, expected .*: pass "):
        evolve(ROUND, **{name: wrong})


@pytest.mark.parametrize("given", [("compute", -1, 0, 1.0), ("host", 0, -1, 1.0), ("host", 0, 0, 0.0)])
def test_a_measurement_is_of_some_work_and_takes_time(given: tuple[str, int, int, float]) -> None:
    with pytest.raises(ValueError, match=r"got Measured\(.*, expected FLOPs and bytes of 0 or more"):
        Measured(*given)


def test_hardware_is_a_value() -> None:
    again = evolve(ROUND)
    assert (again, hash(again)) == (ROUND, hash(ROUND))
    assert evolve(ROUND, rates={**ROUND.rates, "host": 1.0}) != ROUND
    assert len({ROUND, again, UNIT}) == 2
