"""The law of the live page: its simulator, its memory and its verifier say what Python's do, in a real browser."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve, frozen
from browser import after, needs_browser, opened, results
from html_pages import HOSTILE, Elements, hostile, large
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from table import RECIPES, SCHEDULES, SPECS, hardware, plan_of, plans

from zfunc.core.critical_path import events_of, held_up_by, last_of
from zfunc.core.graph import KINDS
from zfunc.core.hardware import ROUND, Hardware, Measured
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.core.verifier import races
from zfunc.viz.live import live_data, live_page
from zfunc.viz.web_page import web_file

SIMULATOR = "".join(map(web_file, ("simulate.js", "verify.js")))
RUN = """
function told({ data, factors, compute, removed }) {
  const whole = planOf(data, 0), hardware = scaled(data.hardware, factors, compute);
  const { start, end } = simulate(whole, hardware), places = data.places;
  const over = bytesOverTime(whole, places, start, end).map(({ times, bytes }) => Math.max(...bytes));
  const broken = planOf(data, 0, new Set(removed));
  const without = simulate(broken, hardware);
  return { start: [...start], end: [...end], ...heldUp(whole, end), most: mostBytes(whole, places), over,
    none: races(whole), races: races(broken), without: [...without.end], freed: mostBytes(broken, places) };
}
const run = () => CASES.map(told);
"""


@frozen
class Case:
    """A plan on a machine whose rates are changed, and a wait to remove: of which operation, for which."""

    plan: Plan
    hardware: Hardware
    factors: Sequence[float]
    compute: float
    wait: tuple[int, int] | None

    @property
    def scaled(self) -> Hardware:
        h = self.hardware
        rates = {kind: h.rates[kind] * by for kind, by in zip(KINDS, self.factors, strict=True)}
        return evolve(h, flops=h.flops * self.compute, attention=h.attention * self.compute, rates=rates)

    @property
    def broken(self) -> Plan:
        """The plan without the wait."""
        kept = [tuple(n for n in own if (i, n) != self.wait) for i, own in enumerate(self.plan.waits)]
        return evolve(self.plan, waits=kept)

    @property
    def data(self) -> dict[str, Any]:
        removed = [f"{self.wait[0]},{self.wait[1]}"] if self.wait else []
        data = live_data({("it",): self.plan}, self.hardware, ["which"])
        return {"data": data, "factors": self.factors, "compute": self.compute, "removed": removed}


machines = st.builds(
    evolve,
    hardware(),
    attention=st.one_of(st.just(0.0), st.floats(1e-3, 1e15)),
    latencies=st.dictionaries(st.sampled_from(KINDS), st.floats(0, 1e3)),
    collectives=st.lists(st.tuples(st.floats(0, 1e3), st.floats(1e-3, 1e15)), max_size=2),
)


ON_RANKS = [name for name, of in SPECS.items() if of.settings.pp > 1]
in_table = st.builds(plan_of, *map(st.sampled_from, ([*RECIPES], [*SPECS, *8 * ON_RANKS], [*SCHEDULES])))


def neighbours(on: Hardware, count: int) -> Hardware:
    return evolve(on, neighbours={name: count for name in list(on.shared)[:1] if count})


def cases(number: int) -> list[Case]:
    """Random plans on random machines."""
    found: list[Case] = []
    factor = st.floats(1 / 16, 16)

    @settings(max_examples=number, phases=[Phase.generate], database=None)
    @given(
        st.one_of(plans(), in_table),
        st.builds(neighbours, machines, st.integers(0, 2)),
        st.tuples(*[factor] * len(KINDS)),
        factor,
    )
    def draw(plan: Plan, on: Hardware, factors: Sequence[float], compute: float) -> None:
        waits = [(i, n) for i, own in enumerate(plan.waits) for n in own]
        wait = Random(len(found)).choice(waits) if waits else None
        found.append(Case(plan, on, factors, compute, wait))

    draw()
    return found


def check(cases: Sequence[Case], folder: Path, exactly: bool = True) -> None:
    """Times, the critical path, bytes and verdicts of the page are Python's: to the bit, or to the last digits."""
    shown = results(f"{SIMULATOR}\nconst CASES = {json.dumps([c.data for c in cases])};\n{RUN}", folder)
    rel = 0 if exactly else 1e-12
    for case, page in zip(cases, shown, strict=True):
        plan, broken = case.plan, case.broken
        timeline = simulate(plan, case.scaled)
        events = events_of(plan, timeline)
        assert [*map(float, page["start"])] == pytest.approx([e.start for e in events], rel=rel, abs=0)
        assert [*map(float, page["end"])] == pytest.approx([e.end for e in events], rel=rel, abs=0)
        if exactly:
            assert (page["after"], page["last"]) == ([*held_up_by(plan, events)], last_of(events))
        names = case.data["data"]["places"]
        for most, of in ((page["most"], plan), (page["freed"], broken)):
            assert dict(zip(names, most, strict=True)) == {x: p.nbytes for x, p in peak_memory(of).items()}
        assert all(over <= most for over, most in zip(page["over"], page["most"], strict=True))
        assert page["none"] == []
        regions = plan.graph.regions
        assert [(a, b, regions[r]) for a, b, r in page["races"]] == [*races(broken)]
        assert bool(page["races"]) == bool(case.wait)
        ends = [e.end for e in events_of(broken, simulate(broken, case.scaled))]
        assert [*map(float, page["without"])] == pytest.approx(ends, rel=rel, abs=0)


@needs_browser
@pytest.mark.hypothesis
@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_page_simulates_and_verifies_as_python_does(number: int, tmp_path: Path) -> None:
    drawn = cases(number)
    assert len(drawn) >= number * 0.9
    check(drawn, tmp_path)


@needs_browser
def test_sums_are_rounded_once_and_a_thousand_operations_take_no_frame(tmp_path: Path) -> None:
    """Half way between two numbers, what is left of a sum decides. A frame is 16 ms; of 30 runs the fastest counts,
    as the machine does other things."""
    random = Random(0)
    sums = [
        [random.choice((1, -1)) * random.random() * 2.0 ** random.randint(-60, 60) for _ in range(9)]
        for _ in range(300)
    ]
    sums += [[1.0, 2**-53, x] for x in (2**-110, -(2**-110), 5e-324, -5e-324)] + [[]]
    plan, _ = large(1000)
    data = live_data({("a",): plan}, ROUND, ["which"])
    script = f"""const data = {json.dumps(data)}, plan = planOf(data, 0);
        function took() {{
          const took = [];
          for (let n = 0; n < 30; n++) {{
            const began = performance.now();
            const {{ start, end }} = simulate(plan, scaled(data.hardware, data.kinds.map(() => 1 + n / 30), 1));
            heldUp(plan, end), bytesOverTime(plan, data.places, start, end);
            took.push(performance.now() - began);
          }}
          return Math.min(...took);
        }}"""
    shown, fastest = results(
        f"{SIMULATOR}\n{script}\nconst run = () => [{json.dumps(sums)}.map(exactSum), took()];", tmp_path
    )
    assert [*map(float, shown)] == [*map(math.fsum, sums)]
    assert 0 < fastest < 16


@needs_browser
def test_measured_operations_keep_their_pace(tmp_path: Path) -> None:
    """Their seconds are a ratio to what rates say, so they may differ in the last digit."""
    plan = plan_of("zero_offload", "tied", "Overlapped")
    ops = {(op.kind, op.flops, op.nbytes): op for op in plan.graph if op.flops}
    measured = [Measured(*of, seconds=1e-3 * (n + 1)) for n, of in enumerate([*ops][:3])]
    on = evolve(ROUND, measured=measured)
    check([Case(plan, on, [1.0] * len(KINDS), 1.0, None)], tmp_path, exactly=False)


# --- the page ---------------------------------------------------------------------------------------------


@cache
def two_plans() -> dict[tuple[str, ...], Plan]:
    return {(x,): plan_of("zero_offload", "tied", x) for x in ("Overlapped", "Serial")}


def shown_seconds(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


@needs_browser
def test_sliders_and_choices_simulate_again(tmp_path: Path) -> None:
    plans = two_plans()
    found = after(
        live_page(plans, ROUND, questions=["Schedule"]),
        """
        const time = () => el("time").textContent;
        result.came = time();
        [el("host").value, el("flops").value] = [-2, 1];
        for (const id of ["host", "flops"]) el(id).dispatchEvent(new Event("input"));
        await rest();
        result.moved = time();
        const select = el("choices").querySelector("select");
        select.value = "Serial";
        select.dispatchEvent(new Event("change"));
        await rest();
        result.serial = time();
        el("all").open = true;
        await rest();
        result.table = [...el("plans").rows].slice(1).map((row) => row.cells[1].textContent);
        el("back").click();
        await rest();
        result.back = time();
        """,
        tmp_path,
    )
    slow = evolve(ROUND, flops=2 * ROUND.flops, rates={**ROUND.rates, "host": ROUND.rates["host"] / 4})
    for text, plan, on in (
        ("came", "Overlapped", ROUND),
        ("moved", "Overlapped", slow),
        ("serial", "Serial", slow),
        ("back", "Serial", ROUND),
    ):
        seconds = simulate(plans[(plan,)], on).seconds
        assert shown_seconds(found[text]) == pytest.approx(seconds, rel=5e-3), text
    assert "than the" in found["moved"]
    assert "than the" not in found["came"] + found["back"]
    assert found["table"] == ["Overlapped", "Serial"]


@needs_browser
def test_a_wait_is_removed_by_key_and_click_and_the_race_is_named(tmp_path: Path) -> None:
    plan = two_plans()[("Overlapped",)]
    waits = next((i, own) for i, own in enumerate(plan.waits) if own)
    op, (awaited, *_) = plan.graph.ops[waits[0]].name, waits[1]
    found = after(
        live_page(two_plans(), ROUND, questions=["Schedule"]),
        """
        const race = () => [el("race").hidden, el("race").textContent];
        el("find").value = OP;
        el("find").dispatchEvent(new Event("input"));
        el("later").click();
        result.chosen = [chosen(), el("detail").textContent];
        result.none = race();
        key("Delete");
        await rest();
        result.deleted = race();
        key("Insert");
        await rest();
        result.back = race();
        el("detail").querySelector("button.remove").click();
        await rest();
        result.clicked = race();
        el("race").querySelector("button").click();
        await rest();
        result.again = race();
        key("ArrowRight");
        result.right = chosen();
        key("ArrowLeft");
        result.left = chosen();
        key("Enter");
        result.focus = document.activeElement.id;
        const tab = new KeyboardEvent("keydown", { key: "Tab", bubbles: true, cancelable: true });
        result.goes = el("detail").dispatchEvent(tab);
        el("detail").querySelector("button.remove").focus();
        document.activeElement.click();
        await rest();
        result.stays = document.activeElement.id;
        key("Escape", el("detail"));
        result.picture = document.activeElement.id;
        """.replace("OP", json.dumps(op)),
        tmp_path,
    )
    assert found["chosen"][0] == found["left"] == op
    assert f"Remove the wait for {plan.graph.ops[awaited].name}" in found["chosen"][1]
    broken = Case(plan, ROUND, [1.0] * len(KINDS), 1.0, (waits[0], awaited)).broken
    for before, late, region in races(broken):
        for part in (before, late):
            assert plan.graph.ops[part].name in found["deleted"][1]
        assert str(region) in found["deleted"][1]
    assert [found[x][0] for x in ("none", "deleted", "back", "clicked", "again")] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert found["clicked"] == found["deleted"]
    assert found["right"] == plan.graph.ops[lane_after(plan, waits[0])].name
    assert (found["focus"], found["goes"], found["stays"], found["picture"]) == (
        "detail",
        True,
        "detail",
        "picture",
    )


@needs_browser
def test_a_click_on_the_arrow_of_a_wait_removes_it_and_another_puts_it_back(tmp_path: Path) -> None:
    """The arrow is found as a hand finds it, by what is said where the mouse is. Then the same with keys alone."""
    plan = two_plans()[("Overlapped",)]
    op, awaited = next((i, own[0]) for i, own in enumerate(plan.waits) if own)
    names = [plan.graph.ops[i].name for i in (op, awaited)]
    found = after(
        live_page(two_plans(), ROUND, questions=["Schedule"]),
        """
        const race = () => [el("race").hidden, el("race").textContent];
        const tip = () => (el("tip").hidden ? "" : el("tip").textContent);
        function search() {
          for (let y = 4; y < rect.height; y += 4) {
            for (let x = 4; x < rect.width; x += 4) {
              pointer("pointermove", x, y);
              if (tip().startsWith(WORDS)) return [x, y];
            }
          }
        }
        result.there = search();
        result.tip = tip();
        result.cursor = picture.style.cursor;
        click(...result.there);
        await rest();
        result.removed = [...race(), chosen()];
        const again = search();
        result.again = tip();
        click(...again);
        await rest();
        result.back = race();
        pointer("pointermove", 2, 2);
        result.nowhere = [tip(), picture.style.cursor];
        const button = el("wait");
        result.tabs = [button.tabIndex, picture.nextElementSibling.id];
        button.focus();
        await rest();
        const all = new Set();
        while (!button.textContent.startsWith(WORDS) && !all.has(button.textContent)) {
          all.add(button.textContent);
          key("ArrowRight", button);
          await rest();
        }
        result.held = button.textContent;
        button.click(); // as Enter and the space bar do
        await rest();
        result.byKey = [...race(), button.textContent, document.activeElement.id];
        button.click();
        await rest();
        result.end = race();
        key("Escape", button);
        result.picture = document.activeElement.id;
        """.replace("WORDS", json.dumps(f"{names[0]} waits for {names[1]}.")),
        tmp_path,
    )
    assert "Click to remove the wait" in found["tip"]
    assert "Click to put the wait back" in found["again"]
    assert found["cursor"] == "pointer"
    broken = Case(plan, ROUND, [1.0] * len(KINDS), 1.0, (op, awaited)).broken
    assert [found[x][0] for x in ("removed", "back", "byKey", "end")] == [False, True, False, True]
    assert found["removed"][2] == ""
    for before, late, region in races(broken):
        for word in (plan.graph.ops[before].name, plan.graph.ops[late].name, str(region)):
            assert word in found["removed"][1]
    assert found["byKey"][1] == found["removed"][1]
    assert "Enter to remove the wait" in found["held"]
    assert "Enter to put the wait back" in found["byKey"][2]
    assert (found["byKey"][3], found["picture"]) == ("wait", "picture")
    assert (found["nowhere"], found["tabs"]) == (["", ""], [0, "wait"])


def lane_after(plan: Plan, op: int) -> int:
    """The operation behind it on its lane; itself, if it is the last."""
    lane, position = plan.place[op]
    return plan.lanes[lane].ops[position : position + 2][-1]


@needs_browser
def test_hostile_names_do_nothing(tmp_path: Path) -> None:
    plan, _ = hostile()
    html = live_page({(HOSTILE,): plan, ("other",): plan}, ROUND, questions=[HOSTILE], title=HOSTILE)
    shown = opened(html, tmp_path)
    assert [text for _, text in Elements(shown.dom).all("title")] == [HOSTILE]
    assert shown.attribute("data-ready") == "2"
