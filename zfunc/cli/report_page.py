"""A run as one HTML page: curves, memory against the plan, the measured step, settings, machine, checkpoints.

One file that needs nothing else and runs no script; whatever a file of the run contains is shown as text. What the
curves show is in tables too. The page of 100,000 steps is as small as that of a thousand.
"""

import re
from collections.abc import Iterator
from html import escape
from math import log
from statistics import fmean, median

from zfunc.cli.report_tables import report_tables, table_html
from zfunc.cli.train_lines import ENDINGS
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
from zfunc.viz.charts import SMOOTH, Chart, Curve, Points, chart_figure, smoothed
from zfunc.viz.legend import legend_summary
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_page

MOST_DRAWN = 3000  # operations of a picture that is worth its bytes; timeline.html shows more
LAST = 50  # steps that the loss is the mean of, as in the summary of a run


def report_page(run: RunHistory) -> str:
    """The page. Light and dark, readable without a script."""
    step, missing = _measured_step(run)
    picture = _step_section(step, missing)
    how, ended = _ending(run)
    span = (run.rows[0]["step"], run.rows[-1]["step"]) if run.rows else (0, 0)
    return web_page(
        "report.html",
        style="report.css",
        styles=re.findall(r"<style>(.*?)</style>", picture, re.DOTALL),
        title=f"Run {run.path.resolve().name}",
        what=escape(_subtitle(run)),
        how=how,
        ended=escape(ended),
        figures="".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in _figures(run)),
        charts="".join(chart_figure(chart, span) for chart in _charts(run, span)),
        step=picture,
        tables="".join(map(table_html, report_tables(run, step))),
        sample=_sample(run),
    )


# --- the summary -----------------------------------------------------------------------------------------


def _subtitle(run: RunHistory) -> str:
    s, machine = run.settings, run.config["machine"]
    device = machine.get("gpu") or f"{machine.get('cores')} cores of {machine.get('cpu')}"
    resumed = run.config.get("resumed_from")
    return (
        f"{run.model}, {s.get('precision')}, schedule {s.get('schedule')}, on {device}"
        f"{f'; resumed from {resumed}' if resumed else ''}"
    )


def _ending(run: RunHistory) -> tuple[str, str]:
    """How the run ended: "good", "bad" or "", and a sentence."""
    how = run.summary.get("ended", "")
    if not run.summary:
        ending = "has not ended: it is running, or was killed"
    else:
        ending = ENDINGS.get(how, f"ended: {how}")
        ending += f": {run.summary['error']}" if "error" in run.summary else ""
    if run.damage or "error" in run.summary:
        return "bad", "\n".join([ending, *([run.damage] if run.damage else [])])
    return "good" if how in ("steps", "seconds") else "", ending


def _figures(run: RunHistory) -> Iterator[tuple[str, str]]:
    steps, held_out = run.steps, numbers(run.of(run.held_out))
    total = steps[-1].get("total") if steps else run.settings.get("steps")
    yield "steps", f"{steps[-1]['step'] if steps else 0:,}" + (f" of {total:,}" if total else "")
    losses = numbers(run.of("loss"))[-LAST:]
    if losses:
        yield f"loss, mean of the last {len(losses)}", f"{fmean(losses):.4f}"
    if held_out:
        yield f"held out, bits per {run.unit}", f"{held_out[-1]:.4f}"
        yield "held out, best", f"{min(held_out):.4f}"
    if steps:
        yield "tokens/s, median", f"{median(numbers(run.of('tokens_per_second')) or [0.0]):,.0f}"
        yield "a step, median", format_seconds(median(numbers(run.of("seconds")) or [0.0]))
        yield "skipped", f"{len(run.skipped):,}"


# --- curves ----------------------------------------------------------------------------------------------


def _charts(run: RunHistory, span: tuple[int, int]) -> Iterator[Chart]:
    if not run.steps:
        return
    held_out = tuple((x, None if y is None else y * log(2)) for x, y in run.of(run.held_out))
    skipped = tuple(row["step"] for row in run.skipped)
    dots = [Curve("held out, in the unit of the loss", "dots", held_out)] if held_out else []
    loss = (*_noisy("loss", run.of("loss")), *dots)
    yield Chart("Loss", loss, _four_digits, marks=skipped, mark_name="skipped")
    yield Chart("Learning rate", (Curve("lr", "line", run.of("lr")),), _four_digits, from_zero=True)
    norms, clip = run.of("grad_norm"), finite_number(run.settings.get("clip"))
    close = clip is not None and 0 < clip <= 2 * max(numbers(norms), default=0.0)
    limit = [_limit("clipped to", clip or 0.0, span)] if close else []
    yield Chart("Gradient norm", (*_noisy("norm", norms), *limit), _four_digits, from_zero=True)
    speed = _noisy("tokens/s", run.of("tokens_per_second"))
    yield Chart("Throughput, tokens/s", speed, lambda v: f"{v:,.0f}", from_zero=True)
    share = _noisy("share", tuple((row["step"], _host_share(row)) for row in run.steps))
    yield Chart("Share of the step in host operations", share, lambda v: f"{v:.0%}", 0.01, True)
    yield from _memory(run, span)
    scales = run.of("loss_scale")
    if any(y != 1 for y in numbers(scales)):
        curve = Curve("scale", "line", scales)
        yield Chart("Loss scale", (curve,), lambda v: f"{v:,.0f}", 1.0, True, skipped, "skipped")


def _memory(run: RunHistory, span: tuple[int, int]) -> Iterator[Chart]:
    device, host = (tuple((x, y or None) for x, y in run.of(name)) for name in ("device_bytes", "host_bytes"))
    if numbers(device):
        limit = _limit("planned, at most", float(run.planned.get("device", 0)), span)
        yield _in_bytes("Device memory", Curve("allocated", "line", device), limit)
    curves = [Curve("resident", "line", host)]
    peak = run.summary.get("peak_bytes", {})
    if {"process", "host"} <= peak.keys():
        planned = peak["process"] - peak["host"] + run.planned_on_host
        curves.append(_limit("before training, and what is planned", float(planned), span))
    yield _in_bytes("Memory of the process", *curves)


def _in_bytes(title: str, *curves: Curve) -> Chart:
    highest = max((y for c in curves for y in numbers(c.points)), default=1.0)
    unit = next((float(u) for u in (1 << 30, 1 << 20, 1 << 10) if highest >= u), 1.0)
    return Chart(title, curves, format_bytes, unit, from_zero=True)


def _noisy(name: str, points: Points) -> tuple[Curve, ...]:
    """A figure as it is, and smoothed if it has enough points."""
    if len(points) < 2 * SMOOTH:
        return (Curve(name, "line", points),)
    return Curve(name, "spread", points), Curve(f"{name}, smoothed", "line", smoothed(points))


def _limit(name: str, value: float, span: tuple[int, int]) -> Curve:
    return Curve(name, "limit", tuple(dict.fromkeys(span, value).items()))


def _host_share(row: Row) -> float | None:
    seconds, host = finite_number(row.get("seconds")), finite_number(row.get("host_seconds"))
    return None if not seconds or host is None else host / seconds


def _four_digits(value: float) -> str:
    return f"{value:.4g}"


# --- the measured step -----------------------------------------------------------------------------------


def _measured_step(run: RunHistory) -> tuple[RecordedStep | None, str]:
    """The step, or why there is none to show."""
    if not (run.path / TRACE).exists():
        return None, "No step was measured yet: the tenth is, or the last of fewer."
    try:
        return read_recorded_step(run.path), ""
    except ValueError as error:
        return None, f"The measured step cannot be shown: {error}"


def _step_section(step: RecordedStep | None, missing: str) -> str:
    text, picture = missing, ""
    if step is not None:
        bound = bounds_in_words(bound_by(critical_path_of(step.plan, step.timeline)))
        text = f"{legend_summary(step.timeline)}; bound by {bound}. timeline.html in the run folder has all of it."
        if len(step.plan.graph) <= MOST_DRAWN:
            picture = svg(step.timeline, plan=step.plan, title="One measured step")
    return f'<section class="step"><h2>The step</h2><p>{escape(text)}</p>{picture}</section>'


def _sample(run: RunHistory) -> str:
    sample = run.summary.get("sample")
    prompt = run.summary.get("prompt", "")
    return f"<h2>A sample</h2><pre>{escape(f'{prompt}{sample}')}</pre>" if sample else ""
