"""Predicted beside measured: a trace reads back as it was written, sums add up, rubbish is refused."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from attrs import evolve
from html_pages import Elements, late, shown_data
from hypothesis import given
from hypothesis import strategies as st
from small_trainings import TEXT, train
from table import plan_of, plans
from zfunc.schedules import CriticalPath, Serial, make_schedule

from zfunc.cli.main import main
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event, Timeline
from zfunc.planner.profile import load_profile
from zfunc.train.run_folder import read_recorded_step
from zfunc.viz.chrome_trace import chrome_trace, read_chrome_trace
from zfunc.viz.compare import by_lane, by_verb, sums, table
from zfunc.viz.timeline_svg import svg
from zfunc.viz.timeline_text import text

# --- traces ----------------------------------------------------------------------------------------------


def check_read(timeline: Timeline) -> None:
    read = read_chrome_trace(chrome_trace(timeline))
    assert read.source == timeline.source
    assert [(e.lane, e.op, e.kind) for e in read.events] == [(e.lane, e.op, e.kind) for e in timeline.events]
    for a, b in zip(read.events, timeline.events, strict=True):
        assert (a.start, a.end) == pytest.approx((b.start, b.end), rel=1e-12, abs=1.1e-9)
    assert chrome_trace(read) == chrome_trace(timeline)


def test_a_trace_has_microseconds_on_the_thread_of_a_lane() -> None:
    events = Event("gpu", "a[0]", "compute", 0.0, 1e-3), Event("cpu", "b[0]", "host", 2.5e-3, 4e-3)
    entries = json.loads(chrome_trace(Timeline(events, "measured")))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    drawn = [(lanes[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X"]
    assert drawn == [("gpu", "a[0]", "compute", 0, 1000), ("cpu", "b[0]", "host", 2500, 1500)]


@given(plans())
def test_a_trace_reads_back_to_the_nanosecond(plan: Plan) -> None:
    check_read(simulate(plan))
    check_read(late(simulate(plan)))


def entry(**given: object) -> dict[str, object]:
    return {"ph": "X", "pid": 0, "tid": 0, "name": "use[0]", "cat": "compute", "ts": 0, "dur": 1, **given}


PROCESS = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "zfunc, measured"}}
LANE = {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "gpu"}}
SOUND = [PROCESS, LANE, entry()]
RUBBISH: dict[str, Any] = {
    "no JSON": "{",
    "deep JSON": "[" * 100_000,
    "a number": "3",
    "nothing": [],
    "no source": [LANE, entry()],
    "another program's": [{**PROCESS, "args": {"name": "chrome"}}, LANE, entry()],
    "two processes": [PROCESS, PROCESS, LANE, entry()],
    "an unknown lane": [PROCESS, LANE, entry(tid=1)],
    "two lanes of a name": [PROCESS, LANE, {**LANE, "tid": 1}],
    "a lane without a name": [PROCESS, {**LANE, "args": {}}],
    "another form": [PROCESS, LANE, entry(ph="B")],
    "a source that is a number": [{**PROCESS, "args": {"name": 3}}, LANE, entry()],
    "a list": [PROCESS, LANE, []],
    "no start": [PROCESS, LANE, {k: v for k, v in entry().items() if k != "ts"}],
    "an operation twice": [*SOUND, entry()],
    **{
        f"{name} {x!s:.9}": [PROCESS, LANE, entry(**{name: x})]
        for name, values in {
            "ts": (10**400, "0", -1),
            "dur": (math.nan, math.inf, True),
            "cat": ("gpu",),
            "tid": ([],),
            "name": (3,),
        }.items()
        for x in values
    },
    "an end beyond numbers": [PROCESS, LANE, entry(ts=1e308, dur=1e308)],
}


@pytest.mark.parametrize("what", RUBBISH)
def test_a_trace_that_is_none_is_refused(what: str) -> None:
    entries = RUBBISH[what]
    given = entries if isinstance(entries, str) else json.dumps({"traceEvents": entries})
    with pytest.raises(ValueError, match="^got .* in a trace, expected .*: give a timeline.json") as error:
        read_chrome_trace(given)
    assert len(str(error.value)) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_anything_else_in_a_trace_is_refused_or_read(data: st.DataObject) -> None:
    """One value of a sound trace replaced by any other: a timeline, or a ValueError, and nothing else."""
    entries = json.loads(json.dumps(SOUND))
    at = data.draw(st.sampled_from(entries))
    at[data.draw(st.sampled_from([*at]))] = data.draw(JSON)
    refused = ""
    try:
        read = read_chrome_trace(json.dumps({"traceEvents": entries}))
    except ValueError as error:
        refused = str(error)
    else:
        assert read.seconds < math.inf
    assert not refused or refused.startswith("got ")


def test_what_the_rubbish_is_made_from_is_sound() -> None:
    events = (Event("gpu", "use[0]", "compute", 0.0, 1e-6),)
    assert read_chrome_trace(json.dumps({"traceEvents": SOUND})) == Timeline(events, "measured")


def doubled(timeline: Timeline) -> Timeline:
    """Measured, and everything takes twice as long."""
    return Timeline([evolve(e, start=2 * e.start, end=2 * e.end) for e in timeline.events], "measured")


def test_two_timelines_are_two_processes_and_are_not_read_as_one() -> None:
    timeline = simulate(plan_of("zero_offload", "tied", "Overlapped"))
    trace = chrome_trace([timeline, late(timeline)])
    entries = json.loads(trace)["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert named == {0: "zfunc, simulated", 1: "zfunc, measured"}
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in entries) == len(timeline.events)
    with pytest.raises(ValueError, match="expected those of one step"):
        read_chrome_trace(trace)


# --- sums and pictures of two ----------------------------------------------------------------------------


@given(plans())
def test_sums_add_up_to_all_that_ran(plan: Plan) -> None:
    both = simulate(plan), late(simulate(plan))
    for by in (by_lane, by_verb):
        rows = sums(both, by)
        assert sum(row.ops for row in rows) == len(plan.graph)
        for n, timeline in enumerate(both):
            total = sum(e.seconds for e in timeline.events)
            assert sum(row.seconds[n] for row in rows) == pytest.approx(total)
    for row in sums(both, by_lane):
        assert row.seconds[0] == pytest.approx(both[0].busy(row.name) * both[0].seconds)


def test_a_table_one_can_read() -> None:
    plan = plan_of("zero_offload", "one segment", "Serial")
    simulated = simulate(plan)
    lines = table(simulated, doubled(simulated), plan).splitlines()
    heads = [line.split() for line in lines if "ratio" in line]
    assert heads == [["ops", "simulated", "measured", "ratio"]] * 3
    rows = [line.split() for line in lines if re.search(r"\d+\.\d\d$", line)]
    assert [row[0] for row in rows] == ["the", *simulated.lanes, *dict.fromkeys(op.verb for op in plan.graph)]
    assert {row[-1] for row in rows} == {"2.00"}
    assert lines[-2].startswith("simulated bound by ")
    assert lines[-1].startswith("measured bound by ")


def test_text_of_two_has_a_row_for_each_lane_of_each_under_one_axis() -> None:
    timeline = simulate(plan_of("zero_offload", "tied", "Overlapped"))
    lines = text([timeline, doubled(timeline)], width=120).splitlines()
    rows = [line for line in lines if line.endswith("|")]
    assert [row.split()[:2] for row in rows] == [
        [lane, source] for lane in timeline.lanes for source in ("simulated", "measured")
    ]
    ends = [max(i for i, c in enumerate(row.partition("|")[2]) if c.isalpha()) for row in rows]
    assert max(ends[0::2]) == pytest.approx(max(ends[1::2]) / 2, abs=1)
    assert max(map(len, rows)) <= 120


def test_svg_of_two_stacks_the_rows_of_a_lane_under_one_axis() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = simulate(plan)
    picture = svg([timeline, doubled(timeline)], plan=plan)
    name = "{http://www.w3.org/2000/svg}"
    bars = [
        r for r in ElementTree.fromstring(picture).iter(f"{name}rect") if r.find(f"{name}title") is not None
    ]
    assert len(bars) == 2 * len(plan.graph)
    once, again = bars[: len(plan.graph)], bars[len(plan.graph) :]
    ys = [dict.fromkeys(float(b.get("y", "")) for b in of) for of in (once, again)]
    assert all(0 < b - a < 40 for a, b in zip(*ys, strict=True))
    assert sorted([*ys[0], *ys[1]]) == [y for pair in zip(*ys, strict=True) for y in pair]
    left = min(float(b.get("x", "")) for b in bars)
    for a, b in zip(once, again, strict=True):
        assert float(b.get("x", "")) - left == pytest.approx(2 * (float(a.get("x", "")) - left), abs=0.03)
    assert "measured" in picture
    assert "simulated" in picture


# --- a run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that measured a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        Path("data.txt").write_text(TEXT)
        assert train("--steps", 11, "--save-every", 0, "--schedule", "Serial", "--out", "run") == 0
        return Path("run").absolute()


def test_a_run_leaves_the_plan_it_measured_and_a_page(run: Path) -> None:
    read = read_recorded_step(run)
    assert read.plan.digest == json.loads((run / "config.json").read_text())["plan"]["digest"]
    assert read.timeline.source == "measured"
    assert (read.schedule, read.precision, read.world) == ("Serial", "fp32", 1)
    shown = shown_data((run / "timeline.html").read_text())
    assert [t["source"] for t in shown["timelines"]] == ["measured"]
    assert len(shown["ops"]["verb"]) == len(read.plan.graph)


def test_compare_writes_a_page_of_both_and_prints_the_sums(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "--compare", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "TFLOP/s" in out
    assert out.count("ratio") == 3
    assert f"written: {run / 'compare.html'}" in out
    read = read_recorded_step(run)
    page = (run / "compare.html").read_text()
    assert [t["source"] for t in shown_data(page)["timelines"]] == ["simulated", "measured"]
    ((_, title),) = Elements(page).all("title")
    assert str(run) in title
    assert "Serial in fp32" in title
    for op in read.plan.graph:
        assert re.search(rf"^{op.verb} ", out, re.M)


@pytest.mark.parametrize(
    ("flags", "file", "starts"),
    [
        ("", "compare.html", "<!doctype html>"),
        ("--out x.svg", "x.svg", "<svg"),
        ("--out x.json", "x.json", "{"),
        ("--out x.html", "x.html", "<!doctype html>"),
        ("--out x.txt --hardware h100", "x.txt", "A step of"),
    ],
)
def test_compare_writes_what_is_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, file: str, starts: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "--compare", str(run), *flags.split()]) == 0
    page = ((tmp_path if "--out" in flags else run) / file).read_text()
    assert page.startswith(starts)
    assert "measured" in page
    assert "simulated" in page
    if file == "x.txt":
        assert re.search(r"^\w+ measured +\d+% \|", page, re.M)
        assert "H100" in page


def test_compare_needs_no_torch(run: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy')))\n"
    code += "from zfunc.cli.main import main; main()"
    asked = ["draw", "--compare", str(run), "--out", str(tmp_path / "x.html")]
    done = subprocess.run(
        [sys.executable, "-c", code, *asked], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.html").exists()
    assert done.stderr == ""


def test_draw_gives_a_schedule_the_hardware_it_asks_for() -> None:
    on = load_profile("h100").hardware("bf16")
    assert make_schedule("CriticalPath", on) == CriticalPath(on) != CriticalPath()
    assert make_schedule("Serial", on) == Serial()


BROKEN: dict[str, tuple[str, Callable[[str], str], str]] = {
    "plan cut short": ("plan.txt", lambda t: t[: len(t) // 2], "plan.txt"),
    "plan of nothing": ("plan.txt", lambda t: "", "plan.txt: got '' as the first line"),
    "trace cut short": ("timeline.json", lambda t: t[: len(t) // 2], "timeline.json: got '"),
    "trace of another plan": ("timeline.json", lambda t: t.replace('"decide"', '"decode"'), "with decode"),
    "no schedule": ("config.json", lambda t: t.replace('"schedule"', '"timetable"'), "KeyError('schedule')"),
    "no ranks": (
        "config.json",
        lambda t: t.replace('"ranks": 1', '"ranks": 0'),
        "config.json: 'world' must be >= 1: 0",
    ),
    "settings that are a list": ("config.json", lambda t: "[]", "config.json: got [], expected an object"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_that_is_not_complete_is_refused(run: Path, tmp_path: Path, capsys: Any, what: str) -> None:
    name, change, reason = BROKEN[what]
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("compare.*"))
    (copy / name).write_text(change((copy / name).read_text()))
    assert main(["draw", "--compare", str(copy)]) == 2
    err = capsys.readouterr().err
    assert str(copy) in err
    assert reason in err
    assert "expected" in err
    assert not (copy / "compare.html").exists()
