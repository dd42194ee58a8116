"""A run as one HTML page: curves, memory against the plan, the measured step, settings, machine, checkpoints.

One file that needs nothing else and runs no script; whatever a file of the run contains is shown as text. What the
curves show is in tables too. The page of 100,000 steps is as small as that of a thousand.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import fmean, median
from typing import Any, cast

import attrs

from zfunc.checkpoint.directory import FOLDER
from zfunc.core.critical_path import bound_by, bounds_in_words, critical_path_of, events_of
from zfunc.core.display import html_table
from zfunc.core.graph import Kind
from zfunc.core.hardware import ROUND
from zfunc.core.setting_values import BY_DEVICE, schedule_for
from zfunc.core.simulator import simulate
from zfunc.train.events import COMPLETE, ENDINGS
from zfunc.train.run_files import METRICS, TRACE
from zfunc.train.run_history import RecordedStep, Row, RunHistory, finite_number, read_recorded_step
from zfunc.train.settings import TrainSettings
from zfunc.units import format_bytes, format_clock, format_seconds
from zfunc.viz.charts import Chart, Curve, chart_figure
from zfunc.viz.compare import by_lane, by_verb, sums
from zfunc.viz.legend import heading_of
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_page

MOST_DRAWN = 3000  # operations of a picture that is worth its bytes; timeline.html shows more
LISTED = 24  # rows of a table of steps or events
FIGURES = {  # of a step in a table: heading and format
    "loss": ("loss", ".4f"),
    "lr": ("lr", ".2e"),
    "grad_norm": ("norm", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "seconds": ("seconds", ".3g"),
}
CHARTS: dict[str, tuple[str, str, Callable[[float], str]]] = {  # by title: name of the curve, figure, format
    "Loss": ("loss", "loss", "{:.4g}".format),
    "Learning rate": ("lr", "lr", "{:.4g}".format),
    "Gradient norm": ("norm", "grad_norm", "{:.4g}".format),
    "Throughput, tokens/s": ("tokens/s", "tokens_per_second", "{:,.0f}".format),
    "Share of the step in host operations": ("share", "host_share", lambda x: f"{100 * x:.3g}%"),
    "Device memory": ("allocated", "device_bytes", format_bytes),
    "Memory of the process": ("resident", "host_bytes", format_bytes),
    "Loss scale": ("scale", "loss_scale", "{:,.0f}".format),
}
HIDDEN: dict[str, tuple[Kind, ...]] = {  # what should run beside compute: kinds of operations
    "copies": ("d2h", "h2d"),
    "updates and other work of the host": ("host",),
    "drives": ("read", "write"),
    "network": ("network",),
}

Cells = tuple[str, ...]


def report_page(run: RunHistory, refresh: float | None = None) -> str:
    """The HTML page of a run, light and dark, readable without a script; reloaded after `refresh` seconds."""
    recorded, problem = _recorded_step(run)
    picture = _step_section(recorded, problem)
    how, ended = _ending(run)
    sample, prompt = run.summary.get("sample"), run.summary.get("prompt", "")
    span = (run.rows[0]["step"], run.rows[-1]["step"]) if run.rows else (0, 0)
    page = web_page(
        "report.html",
        stylesheets=("report.css",),
        refresh=refresh,
        styles=re.findall(r"<style>(.*?)</style>", picture, re.DOTALL),
        title=f"Run {run.path.resolve().name}",
        what=escape(_subtitle(run)),
        how=how,
        ended=escape(ended),
        figures="".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in _figures(run)),
        charts="".join(chart_figure(chart, span) for chart in _charts(run)),
        step=picture,
        tables="".join(f"<div>{table}</div>" for table in _tables(run, recorded) if table),
        sample=f"<h2>A sample</h2><pre>{escape(f'{prompt}{sample}')}</pre>" if sample else "",
    )
    return page.encode(errors="replace").decode()  # JSON may have half a surrogate pair


def headline(run: RunHistory) -> str:
    """One line for a terminal: a run's figures; the shares of copies, host work and the like that ran beside
    compute; and how the run ended."""
    recorded, _ = _recorded_step(run)
    hidden = (
        (f"{name.partition(' ')[0]} hidden", f"{measured}, planned {planned}")
        for name, _, planned, measured in (_hidden_rows(recorded) if recorded is not None else ())
    )
    return "; ".join([*(f"{name}: {value}" for name, value in (*_figures(run), *hidden)), _ending(run)[1]])


# --- the summary -----------------------------------------------------------------------------------------


def _subtitle(run: RunHistory) -> str:
    s, machine, resumed = run.settings, run.config["machine"], run.config.get("resumed_from")
    device = machine.get("gpu") or f"{machine.get('cores')} cores of {machine.get('cpu')}"
    what = f"{run.model}, {s.get('precision')}, schedule {s.get('schedule')}, on {device}"
    return f"{what}; resumed from {resumed}" if resumed else what


def _ending(run: RunHistory) -> tuple[str, str]:
    """How the run ended: "good", "bad" or "" (a colour of the page), and a sentence."""
    how, error = run.summary.get("ended", ""), run.summary.get("error")
    if run.summary:
        ending = ENDINGS.get(how, f"ended: {how}") + (f": {error}" if error else "")
    else:
        ending = "has not ended: it is running, or was killed"
        if run.rows:
            seconds = max(0.0, time.time() - (run.path / METRICS).stat().st_mtime)
            ending += f"; its last step was {format_clock(seconds)} ago"
    if run.damage or error:
        return "bad", f"{ending}\n{run.damage}".rstrip()
    return "good" if how in COMPLETE else "", ending


def _figures(run: RunHistory) -> Iterator[tuple[str, str]]:
    steps, held_out = run.steps, run.numbers(run.held_out)
    total = finite_number(run.settings.get("steps"))
    yield "steps", f"{steps[-1]['step'] if steps else 0:,}" + (f" of {total:,.0f}" if total else "")
    if losses := run.last_losses:
        yield f"loss, mean of the last {len(losses)}", f"{fmean(losses):.4f}"
    if held_out:
        yield f"held out,{run.held_out_unit.words}".rstrip(","), f"{held_out[-1]:.4f}"
        yield "held out, best", f"{min(held_out):.4f}"
    if best := run.best:
        yield "best checkpoint", f"{best.saved}, {best.held_out:.4f}"
    if steps:
        yield "tokens/s, median", f"{median(run.numbers('tokens_per_second') or [0.0]):,.0f}"
        yield "a step, median", format_seconds(median(run.numbers("seconds") or [0.0]))
        yield "skipped", f"{len(run.skipped):,}"


# --- curves ----------------------------------------------------------------------------------------------


def _charts(run: RunHistory) -> Iterator[Chart]:
    """The charts of a run's steps: loss, speed and the like; a figure without values gets no chart."""
    steps = [{**row, "host_share": _host_share(row)} for row in run.steps]
    skipped = tuple(row["step"] for row in run.skipped)
    for title, (name, figure, text) in (CHARTS if steps else {}).items():
        points = tuple((row["step"], finite_number(row.get(figure))) for row in steps)
        # Where it is always that, it says nothing.
        usual = {"device_bytes": {0}, "loss_scale": {1}}.get(figure)
        idle = usual is not None and {y for _, y in points} <= {*usual, None}
        curves = [] if idle else [Curve(name, "line", points)]
        if figure == "loss" and (held_out := run.of(run.held_out)):
            points = tuple((x, None if y is None else y * run.held_out_unit.nats) for x, y in held_out)
            curves.append(Curve("held out, in the unit of the loss", "dots", points))
        marks = skipped if figure in ("loss", "loss_scale") else ()
        if curves:
            yield Chart(title, tuple(curves), text, figure != "loss", marks, "skipped" * bool(marks))


def _host_share(row: Row) -> float | None:
    seconds, host = finite_number(row.get("seconds")), finite_number(row.get("host_seconds"))
    return None if not seconds or host is None else host / seconds


# --- the measured step -----------------------------------------------------------------------------------


def _recorded_step(run: RunHistory) -> tuple[RecordedStep | None, str]:
    """The measured step of a run, or a sentence why there is none to show."""
    try:
        step = read_recorded_step(run.path) if (run.path / TRACE).exists() else None
    except ValueError as error:
        return None, f"The measured step cannot be shown: {error}"
    return step, "No step was measured yet: the tenth is, or the last of fewer."


def _step_section(step: RecordedStep | None, text: str) -> str:
    """The page's section with the picture of the measured step, or with the sentence why there is none."""
    picture = ""
    if step is not None:
        timeline, bound = step.timeline, bounds_in_words(bound_by(critical_path_of(step.plan, step.timeline)))
        text = f"{heading_of(timeline)}; bound by {bound}. timeline.html in the run folder has all of it."
        if len(step.plan.graph) <= MOST_DRAWN:
            picture = svg(timeline, plan=step.plan, title=f"One measured step{step.stage}")
    return f'<section class="step"><h2>The step</h2><p>{escape(text)}</p>{picture}</section>'


def _hidden_rows(step: RecordedStep) -> Iterator[Cells]:
    """Table rows of copies and the work of host, drives and network: name, time, and the share that compute hid, as
    planned (measured operations simulated without time lost between lanes) and as measured."""
    seconds = [e.seconds for e in events_of(step.plan, step.timeline)]
    planned = simulate(step.plan, attrs.evolve(ROUND, shared={}), seconds)
    for name, kinds in HIDDEN.items():
        if taken := sum(map(step.timeline.seconds_of, kinds)):
            shares = (t.hidden(*kinds) or 0.0 for t in (planned, step.timeline))
            yield name, format_seconds(taken), *(f"{share:.0%}" for share in shares)


# --- tables ----------------------------------------------------------------------------------------------


def _tables(run: RunHistory, recorded: RecordedStep | None) -> Iterator[str]:
    """Yield the HTML tables of `run`: the `recorded` step, memory, figures by step, events, settings, machine."""
    step = recorded.timeline if recorded is not None else None
    if recorded is not None:
        heads = ("", "in all", "planned", "measured")
        yield html_table(heads, _hidden_rows(recorded), "The step, hidden behind compute")
    for name, by in (("lane", by_lane), ("verb", by_verb)) if step is not None else ():
        rows = ((s, s.seconds[0] / (step.seconds or 1)) for s in sums(step, by))
        cells = ((s.name, f"{s.ops:,}", format_seconds(s.seconds[0]), f"{share:.0%}") for s, share in rows)
        yield html_table((name, "operations", "busy", "of the step"), cells, f"The step by {name}")
    yield html_table(("", "planned", "measured"), _memory_rows(run), "Memory against the plan")
    heads = ("step", *(head for head, _ in FIGURES.values()), "memory")
    yield _listed(heads, [_figures_of(row) for row in run.steps], "Steps")
    yield _listed(("step", ""), [*_events(run)], "Events", "words")
    settings = {k: _plain(v) for k, v in run.settings.items()}
    defaults = {name: _plain(value) for name, value in attrs.asdict(TrainSettings()).items()}
    defaults["schedule"] = str(schedule_for(BY_DEVICE, on_cpu=settings.get("device") == "cpu"))
    changed = {k for k, v in settings.items() if v != defaults.get(k)}
    yield html_table((), settings.items(), "Settings (bold: not the default)", "words", changed)
    plan = {f"plan: {k}": v for k, v in run.config["plan"].items() if k != "planned_bytes"}
    environment = {**run.config["machine"], "data": "\n".join(run.config.get("data", ())) or None, **plan}
    yield html_table((), ((k, _plain(v)) for k, v in environment.items()), "Environment", "words")


def _memory_rows(run: RunHistory) -> Iterator[Cells]:
    peak = run.summary.get("peak_bytes", {})
    for tier, n in run.planned.items():
        yield tier, format_bytes(n), format_bytes(peak[tier]) if tier == "device" and tier in peak else ""
    if {"process", "host"} <= peak.keys():
        yield "process, since before training", format_bytes(run.planned_on_host), format_bytes(peak["host"])
        yield "process, in all", "", format_bytes(peak["process"])


def _figures_of(row: Row) -> Cells:
    """The cells of a step's row in the table of steps: the step's number, its figures, and memory."""
    memory = finite_number(row.get("device_bytes")) or finite_number(row.get("host_bytes")) or 0.0
    figures = (_figure(row, name, form) for name, (_, form) in FIGURES.items())
    return (f"{row['step']:,}", *figures, format_bytes(memory))


def _figure(row: Row, name: str, form: str) -> str:
    number = finite_number(row.get(name))
    return "not a number" if number is None else format(number, form)


def _events(run: RunHistory) -> Iterator[Cells]:
    """Rows of the page's table of events: evaluations, steps that an overflow skipped, and checkpoints."""
    for row in run.rows:
        step = f"{row['step']:,}"
        if run.held_out in row:
            yield step, f"held out: {_figure(row, run.held_out, '.4f')}{run.held_out_unit.words}"
        if row.get("skipped") is True:
            yield step, f"skipped, for an overflow at the loss scale {_figure(row, 'loss_scale', ',.0f')}"
        if "saved" in row:
            name = str(row["saved"])
            swap = not name.startswith("step-")
            gone = not swap and ("/" in name or not (run.path / FOLDER / name).is_dir())
            yield step, f"saved {'the swap space ' * swap}{name}{', deleted since' * gone}"
        elif "not_saved" in row:
            yield step, f"not saved: {row['not_saved']}"


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    several = isinstance(value, list | tuple)  # in a file a tuple is a list
    return ", ".join(map(str, cast("list[Any]", value))) or "none" if several else str(value)


def _listed(heads: Cells, rows: Sequence[Cells], caption: str, kind: str = "") -> str:
    """An HTML table of class `kind` with at most 24 of `rows`, at even distances; "" if `rows` is empty."""
    listed = sorted({round(k * (len(rows) - 1) / (LISTED - 1)) for k in range(LISTED)}) if rows else []
    of_all = f" ({len(listed)} of {len(rows):,})" if len(listed) < len(rows) else ""
    return html_table(heads, [rows[n] for n in listed], caption + of_all, kind) if rows else ""
