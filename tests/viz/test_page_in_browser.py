"""The page in a real browser: it opens, paints what ran, follows hands, keys and links, runs nothing foreign."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from browser import after, needs_browser, opened, results, show
from html_pages import HOSTILE, STEPS, WORD, Elements, hostile, large, late, row, written
from table import plan_of

from zfunc.cli.report_page import report_page
from zfunc.core.simulator import simulate
from zfunc.train.run_history import read_history
from zfunc.viz.legend import colour_of
from zfunc.viz.timeline_html import SCRIPTS, data, page

pytestmark = needs_browser
MODEL = (files("zfunc.viz") / "web" / SCRIPTS[0]).read_text()


def span(link: str) -> tuple[float, float]:
    """The times in a link."""
    t0, t1 = re.findall(r"[#&]t=([^,]+),([^&]+)", link)[0]
    return float(t0), float(t1)


def test_a_page_of_10_000_operations_opens_and_paints_fast(tmp_path: Path) -> None:
    plan, timeline = large(10_000)
    shown = opened(page([timeline, late(timeline)], plan=plan), tmp_path)
    assert shown.attribute("data-ready") == "10000"
    # In ms, without a GPU, on a machine that does other things.
    assert float(shown.attribute("data-painted")) < 250
    assert shown.seconds < 30


def test_the_page_of_a_run_is_taken_without_a_complaint(tmp_path: Path) -> None:
    run = written(tmp_path, [*STEPS, row(9)], step=True, ended="steps")
    assert opened(report_page(read_history(run)), tmp_path).dom.count('<svg class="chart"') == 6


def test_hostile_names_do_nothing(tmp_path: Path) -> None:
    plan, timeline = hostile()
    name = plan.graph.ops[1].name
    link = "#op=" + "".join(f"%{b:02X}" for b in name.encode())
    shown = opened(page(timeline, plan=plan, title=HOSTILE), tmp_path, link)
    elements = Elements(shown.dom)
    assert [text for _, text in elements.all("title")] == [HOSTILE]
    assert shown.attribute("data-ready") == "2"
    assert [text.strip() for _, text in elements.all("h2")] == [name]
    assert WORD in [text for _, text in elements.all("code")]


def test_the_policy_stops_a_script_that_is_not_the_pages(tmp_path: Path) -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    foreign = "<script>document.title = 'run'</script></body>"
    shown = show(page(simulate(plan), plan=plan).replace("</body>", foreign), tmp_path)
    assert "<title>One training step</title>" in shown.dom
    assert any("Content Security Policy" in line for line in shown.console)


def test_pointing_and_choosing_tell_of_an_operation(tmp_path: Path) -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = simulate(plan)
    e = next(timeline.on(timeline.lanes[1]))
    result = after(
        page(timeline, plan=plan),
        """
        const model = decode(JSON.parse(el("data").textContent));
        const place = layout(model, el("stage").clientWidth);
        const x = place.gutter + MIDDLE * place.plot, y = place.rows[1].y + 4;
        pointer("pointermove", x, y);
        [result.tip, result.hidden] = [el("tip").innerText, [el("tip").hidden]];
        pointer("pointermove", 2, 2);
        result.hidden.push(el("tip").hidden);
        click(x, y);
        [result.chosen, result.detail] = [chosen(), el("detail").innerText];
        key(".");
        result.next = chosen();
        key(",");
        result.previous = chosen();
        key("b");
        result.cause = chosen();
        key("Escape");
        result.none = chosen();
        """.replace("MIDDLE", repr((e.start + e.end) / 2 / timeline.seconds)),
        tmp_path,
    )
    i = plan.graph.position[e.op]
    op = plan.graph.ops[i]
    assert result["tip"].startswith(e.op)
    assert "simulated: " in result["tip"]
    assert result["hidden"] == [False, True]
    assert result["chosen"] == result["previous"] == e.op
    for part in (op.kind, *map(str, (*op.reads, *op.writes)), "waits for", "on its lane", "awaited by"):
        assert part in result["detail"]
    assert result["next"] == plan.graph.ops[plan.lanes[1].ops[1]].name
    assert result["cause"] == plan.graph.ops[plan.waits[i][0]].name
    assert result["none"] == ""


def test_wheel_drag_fingers_and_keys_move_the_view(tmp_path: Path) -> None:
    plan = plan_of("zero_offload", "tied", "Overlapped")
    timeline = simulate(plan)
    result = after(
        page(timeline, plan=plan),
        """
        const place = layout(decode(JSON.parse(el("data").textContent)), el("stage").clientWidth);
        const y = place.rows[0].y + 4, left = place.gutter, wide = place.plot;
        const seen = async (name) => (await rest(), (result[name] = location.hash));
        wheel(left + wide / 4, y, -500);
        await seen("zoomed");
        pointer("pointerdown", 500, y);
        pointer("pointermove", 500 - wide / 4, y);
        pointer("pointerup", 500 - wide / 4, y);
        await seen("dragged");
        result.chosen = chosen();
        key("0");
        await seen("full");
        key("+");
        await seen("closer");
        key("ArrowRight");
        await seen("right");
        key("Home");
        const [a, b] = [1, 2].map((pointerId) => ({ pointerId, pointerType: "touch" }));
        pointer("pointerdown", 400, y, a);
        pointer("pointerdown", 500, y, b);
        pointer("pointermove", 600, y, b);
        pointer("pointerup", 600, y, b);
        pointer("pointerup", 400, y, a);
        await seen("pinched");
        """,
        tmp_path,
    )
    full = timeline.seconds
    t0, t1 = span(result["zoomed"])
    assert t1 - t0 == pytest.approx(full / 2.718281828)
    assert t0 + (t1 - t0) / 4 == pytest.approx(full / 4)  # what is under the pointer stays where it is
    assert span(result["dragged"]) == pytest.approx((t0 + (t1 - t0) / 4, t1 + (t1 - t0) / 4))
    assert (result["chosen"], result["full"]) == ("", "")
    assert span(result["closer"]) == pytest.approx((full / 6, full * 5 / 6))
    assert span(result["right"]) == pytest.approx((full * 0.8 / 3, full * 2.8 / 3))
    t0, t1 = span(result["pinched"])
    assert t1 - t0 == pytest.approx(full / 2)


def test_search_legend_and_links(tmp_path: Path) -> None:
    plan = plan_of("zero_offload", "tied accumulated", "Overlapped")
    timeline = simulate(plan)
    verbs = [*dict.fromkeys(op.verb for op in plan.graph)]
    link = f"#t=0,{timeline.seconds / 2!r}&find={verbs[-1].upper()}&critical=0&hide={verbs[0]},nothing"
    result = after(
        page([timeline, late(timeline)], plan=plan),
        """
        result.linked = [el("find").value, el("critical").getAttribute("aria-pressed"), el("matches").textContent];
        result.shown = pressed();
        el("later").click();
        result.first = [chosen(), el("matches").textContent];
        el("later").click();
        result.second = [chosen(), el("matches").textContent];
        key("Escape");
        el("find").value = "";
        el("find").dispatchEvent(new Event("input"));
        result.cleared = el("matches").textContent;
        el("legend").children[0].click();
        result.colours = [...el("legend").children].map((chip) => chip.firstChild.style.background);
        result.all = pressed();
        el("legend").children[1].dispatchEvent(new MouseEvent("click", { shiftKey: true }));
        result.alone = pressed();
        key("c", document);
        await rest();
        result.link = location.hash;
        location.hash = "#op=" + encodeURIComponent(result.first[0]);
        await rest();
        result.followed = [chosen(), ...pressed()];
        """,
        tmp_path,
        link,
    )
    hits = sorted((e for e in timeline.events if verbs[-1] in e.op), key=lambda e: e.start)
    many = len(hits)
    others = [True] * (len(verbs) - 1)
    assert many > 1
    assert result["linked"] == [verbs[-1].upper(), "false", f"{many} found"]
    assert result["shown"] == [False, *others]
    assert result["first"] == [hits[0].op, f"1 of {many}"]
    assert result["second"] == [hits[1].op, f"2 of {many}"]
    assert result["cleared"] == ""
    assert result["all"] == [True, *others]
    assert result["alone"] == [n == 1 for n in range(len(verbs))]
    assert "critical" not in result["link"]
    assert f"hide={verbs[0]},{verbs[2]}" in result["link"]
    assert result["followed"] == [hits[0].op, True, *others]
    colours = (bytes.fromhex(colour_of(verb)[1:]) for verb in verbs)
    assert result["colours"] == [f"rgb({', '.join(map(str, rgb))})" for rgb in colours]


def test_what_is_painted_is_what_ran(tmp_path: Path) -> None:
    """However far away, the filled share of a row is its lane's; what is hit is what is there."""
    plan, timeline = large(3000)
    result = results(
        f"const data = {json.dumps(data(late(timeline), plan))};\n{MODEL}"
        """
        const model = decode(data), [timeline] = model.timelines, whole = model.seconds;

        function filled(row, view, width) {
          const scale = width / (view.t1 - view.t0);
          const part = (x0, x1) => Math.max(0, Math.min(x1, width) - Math.max(x0, 0)) / width;
          let painted = 0, exact = 0;
          const bar = (op, x0, x1) => (painted += part(x0, x1));
          const column = (x, verb, share) => (painted += share * part(x, x + 1));
          paintable(row, timeline, view, width, model.ops.verb, bar, column);
          for (const op of row.order)
            exact += part((timeline.from[op] - view.t0) * scale, (timeline.to[op] - view.t0) * scale);
          return [painted, exact];
        }

        function run() {
          const close = within({ t0: whole * 0.4, t1: whole * 0.41 }, whole);
          const rows = timeline.rows.flatMap((row) => [{ t0: 0, t1: whole }, close].flatMap((view) =>
            [37, 1000].map((width) => filled(row, view, width))));
          let hits = 0, edges = 0, mutual = 0;
          for (const row of timeline.rows) for (const op of row.order) {
            hits += at(row, timeline, (timeline.from[op] + timeline.to[op]) / 2, whole * 1e-9) === op;
            edges += before(model, op).length + behind(model, op).length;
            mutual += before(model, op).every((n) => behind(model, n).includes(op));
          }
          return { rows, hits, edges, mutual };
        }
        """,
        tmp_path,
    )
    assert len(result["rows"]) == 5 * 2 * 2
    for painted, exact in result["rows"]:
        assert painted == pytest.approx(exact, abs=0.03)
    assert result["hits"] == result["mutual"] == 3000
    assert result["edges"] == 2 * (plan.num_waits + sum(len(lane.ops) - 1 for lane in plan.lanes))


def test_ticks_and_links(tmp_path: Path) -> None:
    """Ticks of any view are few, apart and inside of it; a link that is none shows all; one that is goes round."""
    result = results(
        MODEL
        + """
        function run() {
          const spans = [...Array(300)].map((_, n) => 10 ** (((n * 37) % 130) / 10 - 10));
          const views = spans.map((span, n) => ({ t0: span * (n % 7), t1: span * (n % 7) + span }));
          const marks = views.map((view) => ticks(view, 10));
          const inside = ({ t0, t1 }, { time }) => time >= t0 * (1 - 1e-9) && time <= t1 * (1 + 1e-9);
          const some = { t0: 4, t1: 6 };
          const state = { view: { t0: 1, t1: 2.5 }, op: "a[1,2] &#%", find: "", critical: false, hide: ["h,1"] };
          return {
            few: marks.every((of) => of.length >= 2 && of.length <= 11),
            apart: marks.every((of) => new Set(of.map(({ label }) => label)).size === of.length),
            inside: views.every((view, n) => marks[n].every((mark) => inside(view, mark))),
            edges: [zoomed(some, 0.01, 5, 10), panned(some, 100, 10), panned(some, -100, 10)],
            closest: zoomed(some, 1e30, 5, 10),
            words: [inWords(0.04214), inWords(0), inWords(12345.6, 6), amount(1.234e9, "B"), amount(999, "B")],
            links: ["#t=1,2&op=update%5B3%5D&find=a%26b&hide=x,y", "", "#t=nan,3&op=%E0%A4", "#t=5,400"].map(
              (link) => fromHash(link, 10)),
            round: [fromHash(toHash(state, 10), 10), state],
          };
        }
        """,
        tmp_path,
    )
    full = {"t0": 0, "t1": 10}
    plain = {"op": "", "find": "", "critical": True, "hide": []}
    assert (result["few"], result["apart"], result["inside"]) == (True, True, True)
    assert result["edges"] == [full, {"t0": 8, "t1": 10}, {"t0": 0, "t1": 2}]
    assert result["closest"]["t1"] - result["closest"]["t0"] == pytest.approx(1e-7, rel=1e-3)
    assert result["words"] == ["42.1 ms", "0 s", "12,345.6 s", "1.23 GB", "999 B"]
    assert result["links"] == [
        {"view": {"t0": 1, "t1": 2}, "op": "update[3]", "find": "a&b", "critical": True, "hide": ["x", "y"]},
        {"view": full, **plain},
        {"view": full, **plain, "op": "%E0%A4"},
        {"view": full, **plain},
    ]
    assert result["round"][0] == result["round"][1]
