"""Laws of `zfunc report`: the page holds what the run left, nothing foreign, of any length, however it ended."""

import json
import math
import os
import re
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest
from html_pages import HOSTILE, STEPS, Elements, Row, contrast, row, written
from hypothesis import given, settings
from hypothesis import strategies as st
from table import plan_of

from zfunc.cli.commands import report
from zfunc.cli.main import main
from zfunc.cli.report_page import headline, report_page
from zfunc.cli.train_lines import ENDINGS
from zfunc.core.critical_path import events_of
from zfunc.core.hardware import ROUND
from zfunc.core.simulator import simulate
from zfunc.train.run_history import RunHistory, read_history, read_recorded_step, rows_of
from zfunc.viz.charts import PLACES, placed
from zfunc.viz.chrome_trace import chrome_trace
from zfunc.viz.web_page import web_file


def tables(page: str) -> dict[str, list[list[str]]]:
    """The tables of a page by caption: rows of cells."""
    captions: dict[str, list[list[str]]] = {}
    for caption, body in re.findall(r"<caption>(.*?)</caption>.*?<tbody>(.*?)</tbody>", page, re.DOTALL):
        rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
        captions[caption] = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", r, re.DOTALL) for r in rows]
    return captions


def page_of(folder: Path, rows: list[Row], **more: Any) -> str:
    """The page of a run that left these rows."""
    return report_page(read_history(written(folder, rows, **more)))


LAST = row(9, held_out_bits_per_byte=4.25, saved="step-00000009")


# --- what it holds ---------------------------------------------------------------------------------------


def test_the_command_writes_a_page_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path, [*STEPS, LAST], step=True, ended="steps", peak_bytes={"process": 9, "host": 4})
    assert main(["report", str(run)]) == 0
    line, headline = capsys.readouterr().out.splitlines()
    assert line == f"written: {run / 'report.html'}"
    assert headline.startswith("steps: 9 of 9; ")
    assert headline.endswith("; all steps done")
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert out.read_text() == (run / "report.html").read_text()
    # To a device, in whose folder this user may make no file
    monkeypatch.setattr("os.access", lambda path, _: path == Path(os.devnull))
    assert main(["report", str(run), "--out", os.devnull]) == 0
    assert main(["report", str(run), "--out", str(out)]) == 2
    assert f"--out: got {out}, whose folder cannot be written" in capsys.readouterr().err


def test_the_tables_hold_what_the_curves_show(tmp_path: Path) -> None:
    page = page_of(tmp_path, [*STEPS, LAST], step=True, ended="steps")
    captions = tables(page)
    assert [cells[:2] for cells in captions["Steps"]] == [[str(n), f"{5 / n:.4f}"] for n in range(1, 10)]
    assert captions["Events"] == [
        ["0", "held out: 8.0000 bits per byte"],
        ["9", "held out: 4.2500 bits per byte"],
        ["9", "saved step-00000009, deleted since"],
    ]
    assert ["seed", "7"] in captions["Settings (bold: not the default)"]
    assert ["cpu", "a processor"] in captions["Environment"]
    assert ["device", "1.0 MiB", ""] in captions["Memory against the plan"]
    assert [cells[0] for cells in captions["The step by lane"]] == [
        lane.name for lane in plan_of("zero_offload", "tied", "Overlapped").lanes if lane.ops
    ]
    titles = [title for _, title in Elements(page).all("h2")]
    assert titles[:5] == ["Loss", "Learning rate", "Gradient norm", "Throughput, tokens/s", titles[4]]
    assert ENDINGS["steps"] in page


def test_what_ran_beside_compute_is_told_planned_and_measured(tmp_path: Path) -> None:
    """Planned with each operation as long as measured: so in a step without gaps or clashes both are one."""
    run = written(tmp_path, STEPS, step=True)
    step = read_recorded_step(run)
    page = report_page(read_history(run))
    rows = {name: cells for name, *cells in tables(page)["The step, hidden behind compute"]}
    assert list(rows) == ["copies", "updates and other work of the host"]
    copies = step.timeline.hidden("d2h", "h2d")
    assert copies
    assert rows["copies"][2] == f"{copies:.0%}"
    seconds = [e.seconds for e in events_of(step.plan, step.timeline)]
    ideal = simulate(step.plan, ROUND, seconds)
    (run / "timeline.json").write_text(chrome_trace(ideal))
    rows = tables(report_page(read_history(run)))["The step, hidden behind compute"]
    assert all(planned == measured for _, _, planned, measured in rows)
    assert f"copies hidden: {ideal.hidden('d2h', 'h2d'):.0%}, planned " in headline(read_history(run))


def test_settings_that_are_not_the_default_stand_out(tmp_path: Path) -> None:
    page = page_of(tmp_path, STEPS)
    assert re.findall(r'<tr class="set"><th scope="row">(\w+)', page) == [
        "num_layers",
        "precision",
        "seed",
        "steps",
    ]


def test_skipped_steps_are_marked_and_listed(tmp_path: Path) -> None:
    skipped = [
        row(9, loss=None, grad_norm=None, skipped=True, loss_scale=65536.0),
        row(10, loss_scale=32768.0),
    ]
    page = page_of(tmp_path, [*STEPS, *skipped])
    assert ["9", "skipped, for an overflow at the loss scale 65,536"] in tables(page)["Events"]
    assert "skipped: step 9" in page
    assert "<h2>Loss scale</h2>" in page
    assert ["9", "not a number"] in [cells[:2] for cells in tables(page)["Steps"]]


def test_how_it_ended_is_said(tmp_path: Path) -> None:
    def ending(name: str, **summary: Any) -> tuple[str, str]:
        page = page_of(tmp_path, STEPS, name=name, **summary)
        ((how, words),) = re.findall(r'<p class="ended (\w*)">(.*?)</p>', page)
        return how, words

    assert ending("a", ended="seconds") == ("good", "the time was up")
    assert ending("b", ended="failed", error="OSError: full") == ("bad", "failed: OSError: full")
    how, words = ending("c")
    assert how == ""
    assert re.fullmatch(r"has not ended: it is running, or was killed; its last step was 0:0\d ago", words)
    assert ending("d", ended="interrupt") == ("", "stopped as asked")


@pytest.mark.parametrize("rows", [[], STEPS[:1], STEPS[:2], STEPS[:4]], ids=["0 rows", "0", "1", "3"])
def test_a_run_that_has_hardly_begun_is_a_page(rows: list[Row], tmp_path: Path) -> None:
    page = page_of(tmp_path, rows)
    assert "No step was measured yet" in page
    assert Elements(page).all("figure") == [] if len(rows) < 2 else "<h2>Loss</h2>" in page
    assert ('<circle class="line"' in page) == (len(rows) == 2), "a line of one point is none"


def test_the_axis_of_a_small_share_has_unlike_labels(tmp_path: Path) -> None:
    page = page_of(tmp_path, [row(n, seconds=1.0, host_seconds=0.001 * n) for n in range(1, 9)])
    labels = re.findall(r'text-anchor="end"[^>]*>([^<]*%)<', page)
    assert len({*labels}) == len(labels) > 1


def test_figures_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    rows = [row(n, loss=None if n % 2 else "much", grad_norm=1e400, lr=True) for n in range(1, 5)]
    page = page_of(tmp_path, rows)
    assert "no figures" in page
    assert "nan" not in page.lower().replace("nano", "")
    assert not re.search(r'd="[^"]*(inf|None)', page)


def test_a_step_that_is_not_of_the_plan_is_told_not_shown(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS, step=True)
    (run / "plan.txt").write_text("nothing")
    assert "The measured step cannot be shown" in report_page(read_history(run))


# --- nothing foreign -------------------------------------------------------------------------------------


def test_whatever_the_folder_says_is_text(tmp_path: Path) -> None:
    rows = [*STEPS, row(9, not_saved=HOSTILE), row(10, saved=HOSTILE)]
    run = written(tmp_path, rows, ended=HOSTILE, error=HOSTILE, sample=HOSTILE)
    config = json.loads((run / "config.json").read_text())
    config["settings"][HOSTILE] = config["machine"]["gpu"] = config["resumed_from"] = HOSTILE
    config["data"], config["unit"] = [HOSTILE], HOSTILE
    (run / "config.json").write_text(json.dumps(config))
    elements = Elements(report_page(read_history(run)))
    assert not elements.all("script")
    assert [text for _, text in elements.all("pre")] == [HOSTILE]


def test_text_and_curves_can_be_seen_in_light_and_in_dark() -> None:
    css = web_file("report.css")
    light, dark = (dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", p)) for p in css.split("@media")[:2])
    assert light.keys() == dark.keys()
    for theme in (light, dark):
        for name in ("--ink", "--dim", "--good", "--bad", "--curve", "--dots", "--mark"):
            assert contrast(theme[name], theme["--page"]) >= 4.5
        assert contrast(theme["--curve"], theme["--spread"]) >= 3


# --- any length ------------------------------------------------------------------------------------------

points = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=900).map(
    lambda ys: tuple(enumerate(ys, 1))
)


@given(points)
def test_no_spike_is_lost_and_no_more_is_drawn_than_fits(
    points: tuple[tuple[int, float | None], ...],
) -> None:
    places = placed(points, (1, len(points)))
    assert len(places) <= PLACES
    ys = [y for _, y in points if y is not None]
    shown = [p.values for p in places.values() if p.values]
    assert (min((v[0] for v in shown), default=0), max((v[2] for v in shown), default=0)) == (
        min(ys, default=0),
        max(ys, default=0),
    )
    for p in places.values():
        own = [y for x, y in points if p.first <= x <= p.last and y is not None]
        assert (p.values is None) == (not own)
        assert p.values is None or p.values[1] == pytest.approx(math.fsum(own) / len(own), abs=1e-6)


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_thousand_steps(steps: int, tmp_path: Path) -> None:
    run = written(tmp_path, [row(n, grad_norm=1e6 if n == 17_777 else 1.0) for n in range(1, steps + 1)])
    began = time.perf_counter()
    page = report_page(read_history(run))
    assert time.perf_counter() - began < 30
    assert len(page) < 600_000
    assert "from 1 to 1e+06" in page, "one spike of all is seen"


# --- while it goes on ------------------------------------------------------------------------------------


def test_a_run_is_followed_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path, STEPS[:3])
    pages = list[str]()

    def meanwhile(seconds: float) -> None:
        pages.append((run / "report.html").read_text())
        assert seconds >= report.EVERY
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(2 + len(pages))) + "\n")
        if len(pages) == 2:
            (run / "summary.json").write_text('{"ended": "steps"}')

    monkeypatch.setattr("time.sleep", meanwhile)
    assert main(["report", str(run), "--follow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "steps: 2 of 9",
        "steps: 3 of 9",
        f"written: {run / 'report.html'}",
        "steps: 4 of 9",
    ]
    assert "has not ended" in lines[0]
    assert lines[-1].endswith("; all steps done")
    refresh = '<meta http-equiv="refresh" content="5">'
    assert all(refresh in page for page in pages)
    last = (run / "report.html").read_text()
    assert refresh not in last


def test_ctrl_c_ends_the_following_and_leaves_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    run = written(tmp_path, [row(1, loss=None)], name="a\x1b[2J")
    assert main(["report", str(run), "--follow"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert (run / "report.html").exists()


# --- reading it back -------------------------------------------------------------------------------------


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    run = written(tmp_path, STEPS)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')
    read = read_history(run)
    assert isinstance(read, RunHistory)
    assert (len(read.rows), read.damage) == (len(STEPS), "")


@pytest.mark.parametrize("line", ["nothing", "[1]", '{"step": "1"}', '{"step": 3}', '{"step": true}'])
def test_a_line_that_is_none_is_told(line: str, tmp_path: Path) -> None:
    run = written(tmp_path, STEPS)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n{json.dumps(row(10))}\n")
    read = read_history(run)
    assert len(read.rows) == len(STEPS)
    assert "line 10 is not valid" in read.damage
    assert escape(read.damage) in report_page(read)


@given(st.binary(max_size=80))
def test_any_bytes_are_rows_or_told(text: bytes) -> None:
    rows, lost = rows_of(text)
    assert len(rows) <= text.count(b"\n")
    assert 0 <= lost <= text.count(b"\n")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": 1, "plan": {}, "machine": {}}'])
def test_a_folder_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    run = written(tmp_path, STEPS)
    (run / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json.*expected"):
        read_history(run)


ANY = [None, True, -1, 10**400, "x", [], {}, [1], {"a": 1}, math.nan, "\ud800"]
DAMAGED = ["config.json", "metrics.jsonl", "summary.json", "plan.txt", "timeline.json"]


def changed(data: st.DataObject, value: Any) -> Any:
    """The same JSON, with another value somewhere in it."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 4)):
        copy = value.copy()
        at = data.draw(st.sampled_from(list(copy) if isinstance(copy, dict) else range(len(copy))))
        copy[at] = changed(data, copy[at])
        return copy
    return data.draw(st.sampled_from(ANY))


def damaged(data: st.DataObject, name: str, text: str) -> str:
    """A file with another character, without its end, without a line, or with a value of another type."""
    kinds = ["character", "end", "line"] if name == "plan.txt" else ["character", "end", "value", "value"]
    lines, at = text.splitlines(keepends=True), data.draw(st.integers(0, len(text) - 1))
    n = data.draw(st.integers(0, len(lines) - 1))
    match data.draw(st.sampled_from(kinds)):
        case "character":
            return text[:at] + chr(data.draw(st.integers(1, 500))) + text[at + 1 :]
        case "end":
            return text[:at]
        case "line":
            return "".join(lines[:n] + lines[n + 1 :])
    if name != "metrics.jsonl":
        return json.dumps(changed(data, json.loads(text)))
    return "".join([*lines[:n], json.dumps(changed(data, json.loads(lines[n]))) + "\n", *lines[n + 1 :]])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peak = {"process": 9, "host": 4, "device": 3}
    summary = {"ended": "steps", "peak_bytes": peak, "sample": "x", "steps": 9}
    return written(tmp_path_factory.mktemp("run"), [*STEPS, LAST], step=True, **summary)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_a_page_that_tells_or_an_error_that_names_it(
    name: str, whole_run: Path, data: st.DataObject
) -> None:
    """Whatever is damaged, and however: bytes, lines, values of another type."""
    file = whole_run / name
    whole = file.read_text()
    text = damaged(data, name, whole)
    file.write_text(text)
    try:
        read, refused = read_history(whole_run), ""
        report_page(read).encode()
    except ValueError as error:
        read, refused = None, str(error)
    finally:
        file.write_text(whole)
    if read is None:
        assert f"{file}: " in refused or f"{file}." in refused  # or the place of a value in it
        assert "name the folder of another run" in refused
        assert "invalid JSON" not in refused or "line " in refused
    elif name == "metrics.jsonl" and len(read.rows) < text.count("\n"):
        assert f"{file}: line {len(read.rows) + 1} is not valid" in read.damage
