"""Laws of the pictures: every operation is in them once, in its place; a verb has one colour in all of them. Traces
read back as they were written, sums add up, rubbish is refused."""

import json
import math
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from attrs import evolve
from html_pages import late
from hypothesis import assume, given
from hypothesis import strategies as st
from table import chain, plan_of, plans, spec
from zfunc.schedules import Overlapped

from zfunc.core.graph import KINDS, Graph, Op
from zfunc.core.moves import MOVES
from zfunc.core.ops import VERBS
from zfunc.core.plan import Plan, build
from zfunc.core.recipes import zero_offload
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event, Timeline
from zfunc.viz.chrome_trace import chrome_trace, read_chrome_trace
from zfunc.viz.compare import by_lane, by_verb, sums, table
from zfunc.viz.legend import colour_of, lanes_of
from zfunc.viz.timeline_html import data
from zfunc.viz.timeline_svg import ARROWS_UP_TO, svg
from zfunc.viz.timeline_text import text

SVG = "{http://www.w3.org/2000/svg}"
EMPTY = Timeline((), "measured")


def fills(picture: str) -> dict[str, str]:
    """The colour of each class of bars."""
    return dict(re.findall(r"\.(v\d+) { fill: (#[0-9a-f]{6}); }", picture))


def bars(picture: str) -> list[ElementTree.Element]:
    return [
        r for r in ElementTree.fromstring(picture).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None
    ]


def tip(bar: ElementTree.Element) -> list[str]:
    return (bar.findtext(f"{SVG}title") or "").splitlines()


# --- SVG -------------------------------------------------------------------------------------------------


@given(plans())
def test_svg_has_a_bar_for_every_operation_in_its_row_and_place(plan: Plan) -> None:
    timeline = simulate(plan)
    drawn = {tip(bar)[0]: bar for bar in bars(svg(timeline, plan=plan))}
    assert len(bars(svg(timeline))) == len(drawn) == len(plan.graph)
    if not drawn:  # nothing to do is a step too
        return
    left = min(float(bar.get("x", "")) for bar in drawn.values())
    right = max(float(bar.get("x", "")) + float(bar.get("width", "")) for bar in drawn.values())
    scale = (right - left) / timeline.seconds
    rows = {lane: {drawn[e.op].get("y") for e in timeline.on(lane)} for lane in timeline.lanes}
    assert all(len(ys) == 1 for ys in rows.values())
    assert len(set.union(*rows.values())) == len(rows)
    for e in timeline.events:
        assert float(drawn[e.op].get("x", "")) == pytest.approx(left + e.start * scale, abs=1.5)
        assert float(drawn[e.op].get("width", "")) == pytest.approx(max(1.0, e.seconds * scale), abs=1.5)


def test_svg_is_self_contained_and_says_when_and_after_what_in_tooltips_and_arrows() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    picture = svg(simulate(plan), plan=plan)
    assert "<script" not in picture
    assert re.findall(r"https?://[^\"]+", picture) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in picture
    assert (picture.count('class="wait"'), svg(simulate(plan)).count('class="wait"')) == (plan.num_waits, 0)
    tips = {tip(bar)[0]: tip(bar)[1:] for bar in bars(picture)}
    for i, op in enumerate(plan.graph):
        after = [f"after {' '.join(plan.graph.ops[n].name for n in plan.waits[i])}"] if plan.waits[i] else []
        assert tips[op.name][1:] == after
        assert tips[op.name][0].startswith(f"{op.kind}: 10 us, from ")


def test_svg_of_a_long_plan_stays_usable() -> None:
    long = spec(chain(*[(8, 8)] * 250), bucket_size=64, micro_batches=5)
    plan = Overlapped()(Graph(tuple(zero_offload(long))))
    assert len(plan.graph) > 10_000 > ARROWS_UP_TO
    picture = svg(simulate(plan), plan=plan)
    assert len(bars(picture)) == len(plan.graph)
    assert 'class="wait"' not in picture
    assert 'class="op"' not in picture
    assert len(picture) < 3_000_000


BUILT_IN = [*VERBS, *MOVES]
DRAWN = st.lists(st.sampled_from(BUILT_IN) | st.text("abc_\u00e9<&", min_size=1), min_size=1, unique=True)


@given(DRAWN)
def test_a_verb_has_one_colour_in_every_picture(verbs: list[str]) -> None:
    """In a bar and in the legend of an SVG, with a plan and without, and in the page, whatever else is drawn."""
    plan = build(
        Graph(tuple(Op(v, (n,), "host", nbytes=2) for n, v in enumerate(verbs))), {"one": range(len(verbs))}
    )
    timeline = simulate(plan)
    for picture in (svg(timeline), svg(timeline, plan=plan)):
        root, colours = ElementTree.fromstring(picture), fills(picture)
        swatches = [r for r in root.iter(f"{SVG}rect") if r.get("width") == "12"]
        names = [t.text for t in root.iter(f"{SVG}text") if t.get("class") is None]
        assert {name: colours[s.get("class", "")] for name, s in zip(names, swatches, strict=True)} == {
            verb: colour_of(verb) for verb in verbs
        }
        for bar in bars(picture):
            assert colours[bar.get("class", "")] == colour_of(tip(bar)[0].rpartition("[")[0])
    shown = data(timeline, plan)
    assert dict(zip(shown["verbs"], shown["colours"], strict=True)) == {v: colour_of(v) for v in verbs}


def test_more_verbs_than_letters_can_be_drawn() -> None:
    events = [Event("one", f"verb{n}", "compute", n, n + 1.0) for n in range(60)]
    timeline = Timeline(events, "measured")
    picture = svg(timeline)
    coloured = {r.get("class", "") for r in ElementTree.fromstring(picture).iter(f"{SVG}rect")}
    assert coloured == {*fills(picture), "page", "track"}
    assert len(bars(picture)) == 60
    assert "verb59" in text(timeline)


def test_svg_escapes_what_it_is_given() -> None:
    timeline = Timeline((Event("a<&>'\"b", "f<&>'\"[0]", "compute", 0.0, 1.0),), "<measured>")
    picture = svg(timeline, title="<&>")
    assert tip(bars(picture)[0])[0] == "f<&>'\"[0]"
    texts = {t.text for t in ElementTree.fromstring(picture).iter(f"{SVG}text")}
    assert {"<&>", "a<&>'\"b", "f<&>'\"[0]", "f<&>'\"", "<measured>: 1 s, 1 operation on 1 lane"} <= texts


def test_names_are_written_where_they_fit_and_the_index_where_it_does() -> None:
    ends = [0.0, 0.8, 0.83, 0.831, 1.0]
    events = [Event("x", f"operation[{n}]", "host", a, b) for n, (a, b) in enumerate(pairwise(ends))]
    root = ElementTree.fromstring(svg(Timeline(events, "simulated"), width=800))
    assert [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "op"] == [
        "operation[0]",
        "1",
        "operation[3]",
    ]


# --- text ------------------------------------------------------------------------------------------------


@given(plans())
def test_text_fits_and_names_every_lane_and_verb(plan: Plan) -> None:
    for width in (40, 100, 200):
        picture = text(simulate(plan), width=width)
        head, *rest = picture.splitlines()
        assert max(map(len, rest)) <= width
        assert head.startswith("simulated: ")
        assert [line.split()[0] for line in rest if line.endswith("|")] == [*lanes_of([simulate(plan)])]
        legend = picture.partition(" 0 ")[2].partition("\n")[2]
        assert {op.verb for op in plan.graph} <= set(legend.split())


def test_text_is_as_written_down() -> None:
    events = (
        Event("gpu", "fill[0]", "compute", 0.0, 2e-3),
        Event("gpu", "fill[1]", "compute", 2e-3, 4e-3),
        Event("cpu", "find[0]", "host", 3e-3, 4e-3),
    )
    assert text(Timeline(events, "measured"), width=43).splitlines() == [
        "measured: 4 ms, 3 operations on 2 lanes",
        "gpu 100% |FfffffffffffffffFfffffffffffffff|",
        "cpu  25% |························Iiiiiiii|",
        "          0 ms    1       2       3       4",
        "f fill   i find",
    ]


# --- all three -------------------------------------------------------------------------------------------

LANES = {  # as an order of passes makes them, and from above
    "devices": (
        ["compute:1", "h2d", "host", "compute", "d2h:1", "read", "network", "h2d:1", "d2h", "write"],
        ["h2d", "compute", "d2h", "h2d:1", "compute:1", "d2h:1", "network", "host", "read", "write"],
    ),
    "ranks": (
        ["host@1", "compute@10", "compute", "host", "network@1", "h2d@1", "network"],
        ["compute", "network", "host", "h2d@1", "network@1", "host@1", "compute@10"],
    ),
    "of one's own": (["fast", "slow:1", "slow"], ["fast", "slow", "slow:1"]),
}


@pytest.mark.parametrize("what", LANES)
def test_lanes_of_a_device_stand_together_and_copies_are_thin(what: str) -> None:
    given, expected = LANES[what]
    kinds = {lane: lane.partition("@")[0].partition(":")[0] for lane in given}
    ops = tuple(
        Op("use", (n,), kind if kind in KINDS else "compute") for n, kind in enumerate(kinds.values())
    )
    plan = build(Graph(ops), {lane: [n] for n, lane in enumerate(given)})
    timeline = simulate(plan)
    picture = svg(timeline)
    root = ElementTree.fromstring(picture)
    assert [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "lane"] == expected
    assert [line.split()[0] for line in text(timeline).splitlines() if line.endswith("|")] == expected
    shown = data(timeline, plan)["lanes"]
    assert [lane["name"] for lane in shown] == expected
    copies = {lane for lane in given if kinds[lane] in ("h2d", "d2h")}
    high = {ops[int(tip(b)[0][4:-1])].index[0]: float(b.get("height", "")) for b in bars(picture)}
    assert {given[n] for n, px in high.items() if px == min(high.values()) < max(high.values())} == copies
    assert {lane["name"] for lane in shown if lane["thin"]} == copies


def test_passes_of_a_pipeline_carry_their_micro_batch() -> None:
    """In boxes that have no room for their name; on one device a narrow box has its index, or nothing."""
    passes = [(n, m, s) for n, (m, s) in enumerate([(0, 2), (11, 2), (12, 3)])]
    events = [Event(f"compute:{s}", f"forward[{m},{s}]", "compute", n, n + 0.9) for n, m, s in passes]
    events.append(Event("host", "update[3,4]", "host", 0.0, 6.0))
    pipeline, one = (Timeline(events[first:], "simulated") for first in (0, 2))
    plan = build(
        Graph((*(Op("forward", (m, s), "compute") for _, m, s in passes), Op("update", (3, 4), "host"))),
        {e.lane: [n for n, x in enumerate(events) if x.lane == e.lane] for e in events},
    )
    assert data(pipeline, plan)["numbered"] == [True, False]
    for timeline, boxes, row in (
        (pipeline, ["0", "11", "12", "update[3,4]"], "compute:2  30% |F0ffffffF11fffff·"),
        (one, ["12,3", "update[3,4]"], "compute:3  15% |················Ffffffff·"),
    ):
        root = ElementTree.fromstring(svg(timeline, width=400))
        assert [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "op"] == boxes
        assert row in text(timeline, width=66)


@pytest.mark.parametrize("draw", [text, svg, chrome_trace])
def test_simulated_or_measured_makes_no_difference_but_for_the_word(draw) -> None:
    simulated = simulate(plan_of("zero_offload", "tied", "Overlapped"))
    measured = draw(evolve(simulated, source="measured"))
    assert measured.count("measured") == 1
    assert measured.replace("measured", "simulated") == draw(simulated)


def test_nothing_and_what_takes_no_time_can_be_drawn() -> None:
    assert text(EMPTY).startswith("measured: 0 us, 0 operations on 0 lanes")
    assert bars(svg(EMPTY)) == []
    assert [e["ph"] for e in json.loads(chrome_trace(EMPTY))["traceEvents"]] == ["M"]
    instant = Timeline((Event("x", "f", "host", 0.0, 0.0), Event("x", "g", "host", 0.0, 0.0)), "measured")
    assert len(bars(svg(instant))) == 2
    assert "|" in text(instant)


def test_a_width_that_is_too_small_is_refused_with_one_that_is_not() -> None:
    with pytest.raises(ValueError, match=r"got a width of 399 px, expected 400 or more: give it room"):
        svg(EMPTY, width=399)
    timeline = simulate(plan_of("zero_offload", "tied", "Overlapped"))
    with pytest.raises(
        ValueError, match=r"got a width of 5 columns, expected (\d+) or more: widen it"
    ) as error:
        text(timeline, width=5)
    (enough,) = re.findall(r"expected (\d+)", str(error.value))
    assert text(timeline, width=int(enough))
    for draw in (text, svg):
        with pytest.raises(ValueError, match="width: got 'x', expected a whole number: pass an int"):
            draw(timeline, width="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected"):
        text(timeline, width=int(enough) - 1)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(2.5, "2.5 s"), (1e-3, "1 ms"), (0.0421, "42.1 ms"), (7e-6, "7 us"), (12345.0, "12,345 s")],
)
def test_times_are_said_in_a_unit_that_suits_them(seconds: float, words: str) -> None:
    timeline = Timeline((Event("x", "f", "host", 0.0, seconds),), "simulated")
    for draw in (text, svg):
        assert f"simulated: {words}, 1 operation on 1 lane" in draw(timeline)


@given(plans())
def test_ticks_are_round_and_few(plan: Plan) -> None:
    timeline = simulate(plan)
    assume(timeline.seconds)
    root = ElementTree.fromstring(svg(timeline))
    xs = [float(t.get("d", "M").split()[0][1:]) for t in root.iter(f"{SVG}path") if t.get("class") == "tick"]
    labels = [t.text or "" for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
    second = labels[labels.index(next(x for x in labels if x.startswith("0 "))) + 1]
    assert re.fullmatch(r"0*\.?0*[125]0*", second), labels  # 1, 2 or 5 times a power of ten
    steps = {round(b - a) for a, b in pairwise(xs)}
    assert len(xs) >= 2
    assert max(steps) - min(steps) <= 1
    assert min(steps) > 40


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
        [lane, source] for lane in lanes_of([timeline]) for source in ("simulated", "measured")
    ]
    ends = [max(i for i, c in enumerate(row.partition("|")[2]) if c.isalpha()) for row in rows]
    assert max(ends[0::2]) == pytest.approx(max(ends[1::2]) / 2, abs=1)
    assert max(map(len, rows)) <= 120


def test_svg_of_two_stacks_the_rows_of_a_lane_under_one_axis() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = simulate(plan)
    picture = svg([timeline, doubled(timeline)], plan=plan)
    both = bars(picture)
    assert len(both) == 2 * len(plan.graph)
    once, again = both[: len(plan.graph)], both[len(plan.graph) :]
    ys = [sorted({float(b.get("y", "")) for b in of}) for of in (once, again)]
    assert all(0 < b - a < 40 for a, b in zip(*ys, strict=True))
    assert sorted([*ys[0], *ys[1]]) == [y for pair in zip(*ys, strict=True) for y in pair]
    left = min(float(b.get("x", "")) for b in both)
    for a, b in zip(once, again, strict=True):
        assert float(b.get("x", "")) - left == pytest.approx(2 * (float(a.get("x", "")) - left), abs=0.03)
    assert "measured" in picture
    assert "simulated" in picture
