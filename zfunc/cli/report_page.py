"""A run as one HTML page: curves, memory against the plan, the measured step, settings, machine, checkpoints.

One file that needs nothing else and runs no script; whatever a file of the run contains, it is only text here. What
the curves show is in tables too. Curves are reduced as they are drawn, so the page of 100,000 steps is as small as
that of a thousand.
"""

import re
from collections.abc import Iterator
from html import escape
from math import log
from statistics import fmean, median
from string import Template

from zfunc.cli.charts import SMOOTH, Chart, Curve, Points, chart_svg, smoothed
from zfunc.cli.report_tables import markup, report_tables
from zfunc.core.bottleneck import bound_by, bounds_in_words, critical_path_of
from zfunc.train.history import (
    TRACE,
    RecordedStep,
    Row,
    RunHistory,
    finite_number,
    numbers,
    read_recorded_step,
)
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.draw import svg as drawn
from zfunc.viz.legend import legend_summary
from zfunc.viz.timeline_html import allowed, part

DRAWN_UP_TO = 3000  # operations; the picture of more is not worth its bytes: timeline.html shows them
LAST = 50  # steps that the loss is the mean of, as in the summary of a run
ENDED = {
    "steps": "all steps done",
    "seconds": "the time was up",
    "interrupt": "stopped as asked",
    "terminated": "terminated",
    "failed": "failed",
    "stopped at once": "stopped at once, in the middle of a step",
}


def report_page(run: RunHistory) -> str:
    """The page. Light and dark, readable without a script."""
    step, missing = _measured(run)
    style, picture = part("report.css"), _picture(step, missing)
    styles = [style, *re.findall(r"<style>(.*?)</style>", picture, re.DOTALL)]
    how, ended = _ending(run)
    return Template(part("report.html")).substitute(
        title=escape(f"Run {run.path.resolve().name}"),
        policy=f"default-src 'none'; style-src {' '.join(map(allowed, styles))}",
        style=style,
        what=escape(_what(run)),
        how=how,
        ended=escape(ended),
        figures="".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in _figures(run)),
        charts="".join(_figure(chart, run) for chart in _charts(run)),
        step=picture,
        tables="".join(map(markup, report_tables(run, step))),
        sample=_sample(run),
    )


# --- in words --------------------------------------------------------------------------------------------


def _what(run: RunHistory) -> str:
    s, machine = run.settings, run.config["machine"]
    where = machine.get("gpu") or f"{machine.get('cores')} cores of {machine.get('cpu')}"
    resumed = run.config.get("resumed_from")
    return (
        f"{run.model}, {s.get('precision')}, schedule {s.get('schedule')}, on {where}"
        f"{f'; resumed from {resumed}' if resumed else ''}"
    )


def _ending(run: RunHistory) -> tuple[str, str]:
    """Whether that is "good", "bad" or neither, and the words."""
    how = run.summary.get("ended", "")
    if not run.summary:
        ending = "has not ended: it is running, or was killed"
    else:
        ending = ENDED.get(how, f"ended: {how}")
        ending += f": {run.summary['error']}" if "error" in run.summary else ""
    lines = [ending, *([run.lost] if run.lost else [])]
    good = how in ("steps", "seconds") and not run.lost
    bad = bool(run.lost) or "error" in run.summary
    return "good" if good else "bad" if bad else "", "\n".join(lines)


def _figures(run: RunHistory) -> Iterator[tuple[str, str]]:
    steps, held_out = run.steps, numbers(run.of(run.held_out))
    total = steps[-1].get("total") if steps else run.settings.get("steps")
    yield "steps", f"{steps[-1]['step'] if steps else 0:,}" + (f" of {total:,}" if total else "")
    losses = numbers(run.of("loss"))[-LAST:]
    if losses:
        yield f"loss, mean of the last {len(losses)}", f"{fmean(losses):.4f}"
    if held_out:
        unit = run.held_out.rpartition("_")[2]
        yield f"held out, bits per {unit}", f"{held_out[-1]:.4f}"
        yield "held out, best", f"{min(held_out):.4f}"
    if steps:
        yield "tokens/s, median", f"{median(numbers(run.of('tokens_per_second')) or [0.0]):,.0f}"
        yield "a step, median", format_seconds(median(numbers(run.of("seconds")) or [0.0]))
        yield "skipped", f"{len(run.skipped):,}"


# --- curves ----------------------------------------------------------------------------------------------


def _charts(run: RunHistory) -> Iterator[Chart]:
    if not run.steps:
        return
    held_out = tuple((x, None if y is None else y * log(2)) for x, y in run.of(run.held_out))
    skipped = tuple(row["step"] for row in run.skipped)
    dots = [Curve("held out, in the unit of the loss", "dots", held_out)] if held_out else []
    yield Chart("Loss", (*_raw("loss", run.of("loss")), *dots), _short, marks=skipped, marked="skipped")
    yield Chart("Learning rate", (Curve("lr", "line", run.of("lr")),), _short, from_zero=True)
    norms, clip = run.of("grad_norm"), finite_number(run.settings.get("clip"))
    limit = _limit("clipped to", clip, run) if clip and clip <= 2 * max(numbers(norms), default=0.0) else ()
    yield Chart("Gradient norm", (*_raw("norm", norms), *limit), _short, from_zero=True)
    speed = _raw("tokens/s", run.of("tokens_per_second"))
    yield Chart("Throughput, tokens/s", speed, lambda v: f"{v:,.0f}", from_zero=True)
    share = tuple((row["step"], _share(row)) for row in run.steps)
    yield Chart(
        "Share of the step in host operations", _raw("share", share), lambda v: f"{v:.0%}", 0.01, True
    )
    yield from _memory(run)
    scales = run.of("loss_scale")
    if any(y != 1 for y in numbers(scales)):
        curves = (Curve("scale", "line", scales),)
        yield Chart("Loss scale", curves, lambda v: f"{v:,.0f}", 1.0, True, skipped, "skipped")


def _memory(run: RunHistory) -> Iterator[Chart]:
    device, host = (tuple((x, y or None) for x, y in run.of(name)) for name in ("device_bytes", "host_bytes"))
    planned = run.planned
    if numbers(device):
        limit = _limit("planned, at most", float(planned.get("device", 0)), run)
        yield _in_bytes("Device memory", (Curve("allocated", "line", device), *limit))
    peak = run.summary.get("peak_bytes", {})
    limit = ()
    if {"process", "host"} <= peak.keys():
        before = peak["process"] - peak["host"]
        limit = _limit("before training, and what is planned", float(before + run.planned_on_host), run)
    yield _in_bytes("Memory of the process", (Curve("resident", "line", host), *limit))


def _in_bytes(title: str, curves: tuple[Curve, ...]) -> Chart:
    highest = max((y for c in curves for y in numbers(c.points)), default=1.0)
    unit = next((float(u) for u in (1 << 30, 1 << 20, 1 << 10) if highest >= u), 1.0)
    return Chart(title, curves, format_bytes, unit, from_zero=True)


def _raw(name: str, points: Points) -> tuple[Curve, ...]:
    """A noisy figure: as it is, and smoothed where there are enough of it."""
    if len(points) < 2 * SMOOTH:
        return (Curve(name, "line", points),)
    return Curve(name, "spread", points), Curve(f"{name}, smoothed", "line", smoothed(points))


def _limit(name: str, value: float, run: RunHistory) -> tuple[Curve, ...]:
    first, last = _span(run)
    ends = dict.fromkeys((first, last), value)
    return (Curve(name, "limit", tuple(ends.items())),)


def _span(run: RunHistory) -> tuple[int, int]:
    return run.rows[0]["step"], run.rows[-1]["step"]


def _share(row: Row) -> float | None:
    took, host = finite_number(row.get("seconds")), finite_number(row.get("host_seconds"))
    return None if not took or host is None else host / took


def _short(value: float) -> str:
    return f"{value:.4g}"


def _figure(chart: Chart, run: RunHistory) -> str:
    keys = [(c.form, f"{c.name}") for c in chart.curves]
    keys += [("mark", chart.marked)] if chart.marks else []
    legend = "".join(f'<span class="key {form}">{escape(name)}</span>' for form, name in keys)
    head = f"<figcaption><h2>{escape(chart.title)}</h2>{legend}</figcaption>"
    return f"<figure>{head}{chart_svg(chart, _span(run))}</figure>"


# --- the measured step -----------------------------------------------------------------------------------


def _measured(run: RunHistory) -> tuple[RecordedStep | None, str]:
    """The step, or why there is none to show."""
    if not (run.path / TRACE).exists():
        return None, "No step was measured yet: the tenth is, or the last of fewer."
    try:
        return read_recorded_step(run.path), ""
    except ValueError as error:
        return None, f"The measured step cannot be shown: {error}"


def _picture(step: RecordedStep | None, missing: str) -> str:
    if step is None:
        return f'<section class="step"><h2>The step</h2><p>{escape(missing)}</p></section>'
    bound = bounds_in_words(bound_by(critical_path_of(step.plan, step.timeline)))
    caption = (
        f"{legend_summary(step.timeline)}; bound by {bound}. timeline.html in the run folder has all of it."
    )
    ops = len(step.plan.graph)
    picture = drawn(step.timeline, plan=step.plan, title="One measured step") if ops <= DRAWN_UP_TO else ""
    return f'<section class="step"><h2>The step</h2><p>{escape(caption)}</p>{picture}</section>'


def _sample(run: RunHistory) -> str:
    sample = run.summary.get("sample")
    return f"<h2>A sample</h2><pre>{escape(str(sample))}</pre>" if sample else ""
