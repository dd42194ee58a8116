"""Laws of the page: it holds the whole step and nothing foreign, however hostile the names, and stays usable."""

import re
import time
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from html_pages import HOSTILE, STEPS, WORD, Elements, contrast, hostile, large, late, shown_data, written
from hypothesis import given
from hypothesis import strategies as st
from table import plan_of, plans

from zfunc.cli.report_page import report_page
from zfunc.core.critical_path import critical_path_of
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event, Timeline
from zfunc.train.run_history import read_history
from zfunc.viz.legend import PALETTE, colour_of, lanes_of
from zfunc.viz.live import live_page
from zfunc.viz.timeline_html import data, page


def read_back(data: dict[str, Any], n: int) -> list[Event]:
    """The events of a timeline, from the data of a page."""
    times, ops = data["timelines"][n], data["ops"]
    events: list[Event] = []
    for lane in data["lanes"]:
        for i in lane["ops"]:
            index = ",".join(map(str, ops["index"][i]))
            name = data["verbs"][ops["verb"][i]] + (f"[{index}]" if index else "")
            start, end = (
                x * times["tick"] for x in (times["start"][i], times["start"][i] + times["took"][i])
            )
            events.append(Event(lane["name"], name, data["kinds"][ops["kind"][i]], start, end))
    return events


def check(plan: Plan, timelines: list[Timeline]) -> None:
    data = shown_data(page(timelines, plan=plan))
    for n, timeline in enumerate(timelines):
        events = read_back(data, n)
        ran = sorted(timeline.events, key=lambda e: [*lanes_of([timeline])].index(e.lane))
        assert [(e.lane, e.op, e.kind) for e in events] == [(e.lane, e.op, e.kind) for e in ran]
        for a, b in zip(events, ran, strict=True):
            assert (a.start, a.end) == pytest.approx((b.start, b.end), rel=0, abs=timeline.seconds * 1e-9)
        assert data["timelines"][n]["source"] == timeline.source
        op, chain = data["timelines"][n]["last"], list[str]()
        while op >= 0:
            chain.append(plan.graph.ops[op].name)
            op = data["timelines"][n]["after"][op]
        assert chain[::-1] == [link.event.op for link in critical_path_of(plan, timeline)]
    for i, op in enumerate(plan.graph):
        assert [data["regions"][r] for r in data["ops"]["reads"][i]] == [*map(str, op.reads)]
        assert [data["regions"][r] for r in data["ops"]["writes"][i]] == [*map(str, op.writes)]
        assert (data["ops"]["nbytes"][i], data["ops"]["flops"][i]) == (op.nbytes, op.flops)
        assert data["ops"]["waits"][i] == [*plan.waits[i]]


@given(plans(), st.booleans())
def test_the_page_holds_the_step(plan: Plan, measured: bool) -> None:
    """Simulated, and as it was measured beside that; of any plan."""
    timeline = simulate(plan)
    check(plan, [timeline, late(timeline)][: 1 + measured])


def step_page(_folder: Path) -> str:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    return page(simulate(plan), plan=plan)


def live(_folder: Path) -> str:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    return live_page({("a",): plan}, ROUND, questions=["which"])


def run_page(folder: Path) -> str:
    return report_page(read_history(written(folder, STEPS, step=True, ended="steps", sample="text")))


@pytest.mark.parametrize("make", [step_page, live, run_page])
def test_a_page_needs_nothing_else_and_runs_its_own_script_and_styles_alone(
    make: Callable[[Path], str], tmp_path: Path
) -> None:
    html = make(tmp_path)
    elements = Elements(html)
    foreign = re.findall(r"//[\w.-]+\.\w+|url\((?!#)|@import|\bimport\b|\bfetch\(|XMLHttpRequest", html)
    assert {*foreign} <= {"//www.w3.org"}, "the name of what SVG is"
    for tag, of in elements.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "a")
        assert not {"src", "href", "style"} & of.keys()
        assert not [name for name in of if name.startswith("on")]
    (policy,) = (of["content"] for of, _ in elements.all("meta") if "http-equiv" in of)
    scripts = [text for of, text in elements.all("script") if not of]
    styles = [text for _, text in elements.all("style")]
    assert (len(scripts), len(styles)) == ((0, 2) if make is run_page else (1, 1))
    assert make is not run_page or not elements.all("script")
    script, *style = (
        "".join(f" 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in of)
        for of in (scripts, styles)
    )
    assert policy == f"default-src 'none'{f'; script-src{script}' * bool(script)}; style-src{style[0]}"


def test_hostile_names_are_text() -> None:
    plan, timeline = hostile()
    html = page(timeline, plan=plan, title=HOSTILE)
    elements = Elements(html)
    assert [of for of, _ in elements.all("script")] == [{"type": "application/json", "id": "data"}, {}]
    assert [text for _, text in elements.all("title")] == [HOSTILE]
    assert [text for _, text in elements.all("h1")] == [HOSTILE]
    assert [e.op for e in read_back(shown_data(html), 0)] == [e.op for e in timeline.events]
    assert shown_data(html)["timelines"][0]["source"] == HOSTILE
    assert shown_data(html)["regions"] == [WORD]


def test_the_numbers_are_there_without_a_script() -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = simulate(plan)
    elements = Elements(page([timeline, late(timeline)], plan=plan))
    rows = [text for of, text in elements.all("th") if of.get("scope") == "row"]
    verbs = dict.fromkeys(op.verb for op in plan.graph)
    lanes = [*lanes_of([timeline])]
    assert rows == [*lanes, *verbs]
    cells = [text for _, text in elements.all("td")]
    assert len(cells) == 6 * len(rows)
    shares = [float(text.rstrip("%")) / 100 for text in cells[2 : 6 * len(lanes) : 6]]
    assert shares == pytest.approx([timeline.busy(lane) for lane in lanes], abs=0.006)
    items = [text for _, text in elements.all("li")]
    assert [text.partition(":")[0] for text in items] == ["simulated", "measured"]
    assert all("bound by" in text for text in items)


def test_what_is_not_of_the_plan_is_refused() -> None:
    plan, other = (plan_of("zero_offload", name, "Overlapped") for name in ("tied", "frozen"))
    with pytest.raises(ValueError, match="expected .* of the plan"):
        page(simulate(other), plan=plan)
    with pytest.raises(ValueError, match="got no timeline, expected one or more"):
        page([], plan=plan)


def test_a_step_of_nothing_is_a_page() -> None:
    plan = Plan(Graph(()), (), ())
    data = shown_data(page(Timeline((), "measured"), plan=plan))
    assert (data["lanes"], data["ops"]["verb"]) == ([], [])
    assert data["timelines"][0]["last"] == -1


# --- large ones ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ops", "bytes_an_op"), [(10_000, 160), pytest.param(100_000, 160, marks=pytest.mark.slow)]
)
def test_large_pages_are_made_in_time_and_not_larger_than_they_must_be(
    num_ops: int, bytes_an_op: int
) -> None:
    plan, timeline = large(num_ops)
    began = time.process_time()  # a busy machine is not what is measured
    html = page([timeline, late(timeline)], plan=plan)
    assert time.process_time() - began < 20 * num_ops / 100_000 + 2
    assert len(html) < 60_000 + bytes_an_op * num_ops
    assert len(read_back(data(timeline, plan), 0)) == num_ops


# --- colours ---------------------------------------------------------------------------------------------


def test_text_can_be_read_in_light_and_in_dark() -> None:
    css = (files("zfunc.viz") / "web" / "page.css").read_text()
    light, dark = (dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", part)) for part in css.split("@media")[:2])
    assert light.keys() - dark.keys() == {"--on-bar"}
    for theme in (light, light | dark):
        for text in ("--ink", "--dim"):
            assert min(contrast(theme[text], theme[on]) for on in ("--page", "--panel")) >= 5.5
        built_in = (verb for kind in PALETTE.values() for verb in kind)
        colours = [*map(colour_of, (*built_in, *(f"verb{n}" for n in range(100))))]
        assert min(contrast(theme["--on-bar"], colour) for colour in colours) >= 5.5
        for mark in ("--critical", "--focus"):
            assert contrast(theme[mark], theme["--page"]) >= 4.5
