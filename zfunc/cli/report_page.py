"""A run as one HTML page: curves, memory against the plan, the measured step, settings, machine, checkpoints.

One file that needs nothing else and runs no script; whatever a file of the run contains is shown as text. What the
curves show is in tables too. The page of 100,000 steps is as small as that of a thousand.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import log
from statistics import fmean, median
from typing import Any, cast

import attrs
import psutil

from zfunc.checkpoint.directory import FOLDER
from zfunc.cli.train_lines import ENDINGS
from zfunc.core.bottleneck import bound_by, bounds_in_words, critical_path_of
from zfunc.core.settings import BY_DEVICE, schedule_for
from zfunc.core.timeline import Timeline
from zfunc.train.history import (
    METRICS,
    TRACE,
    Row,
    RunHistory,
    finite_number,
    numbers,
    read_recorded_step,
)
from zfunc.train.settings import TrainSettings
from zfunc.units import format_bytes, format_clock, format_seconds
from zfunc.viz.charts import Chart, Curve, chart_figure
from zfunc.viz.compare import by_lane, by_verb, sums
from zfunc.viz.legend import legend_summary
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_page

MOST_DRAWN = 3000  # operations of a picture that is worth its bytes; timeline.html shows more
LAST = 50  # steps that the loss is the mean of, as in the summary of a run
LISTED = 24  # rows of a table of steps, skipped steps or checkpoints
FIGURES = {  # of a step in a table: heading and format
    "loss": ("loss", ".4f"),
    "lr": ("lr", ".2e"),
    "grad_norm": ("norm", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "seconds": ("seconds", ".3g"),
}


def report_page(run: RunHistory, refresh: float | None = None) -> str:
    """The page. Light and dark, readable without a script; a browser loads it anew after `refresh` seconds."""
    picture, step = _measured_step(run)
    how, ended = _ending(run)
    sample, prompt = run.summary.get("sample"), run.summary.get("prompt", "")
    span = (run.rows[0]["step"], run.rows[-1]["step"]) if run.rows else (0, 0)
    page = web_page(
        "report.html",
        style="report.css",
        refresh=refresh,
        styles=re.findall(r"<style>(.*?)</style>", picture, re.DOTALL),
        title=f"Run {run.path.resolve().name}",
        what=escape(_subtitle(run)),
        how=how,
        ended=escape(ended),
        figures="".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in _figures(run)),
        charts="".join(chart_figure(chart, span) for chart in _charts(run, span)),
        step=picture,
        tables="".join(_tables(run, step)),
        sample=f"<h2>A sample</h2><pre>{escape(f'{prompt}{sample}')}</pre>" if sample else "",
    )
    return page.encode(errors="replace").decode()  # JSON may have half a surrogate pair


def headline(run: RunHistory) -> str:
    """The run in a line for a terminal."""
    return "; ".join([*(f"{name}: {value}" for name, value in _figures(run)), _ending(run)[1]])


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
        if run.rows:
            seconds = max(0.0, time.time() - (run.path / METRICS).stat().st_mtime)
            ending += f"; its last step was {format_clock(seconds)} ago"
    else:
        ending = ENDINGS.get(how, f"ended: {how}")
        ending += f": {run.summary['error']}" if "error" in run.summary else ""
    if run.damage or "error" in run.summary:
        return "bad", "\n".join([ending, *([run.damage] if run.damage else [])])
    return "good" if how in ("steps", "seconds") else "", ending


def _figures(run: RunHistory) -> Iterator[tuple[str, str]]:
    steps, held_out = run.steps, numbers(run.of(run.held_out))
    total = finite_number(run.settings.get("steps"))
    yield "steps", f"{steps[-1]['step'] if steps else 0:,}" + (f" of {total:,.0f}" if total else "")
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
    loss = Curve("loss", "line", run.of("loss"))
    yield Chart("Loss", (loss, *dots), _four_digits, marks=skipped, mark_name="skipped")
    yield Chart("Learning rate", (Curve("lr", "line", run.of("lr")),), _four_digits, from_zero=True)
    norms, clip = run.of("grad_norm"), finite_number(run.settings.get("clip")) or 0.0
    close = 0 < clip <= 2 * max(numbers(norms), default=0.0)
    limit = [_limit("clipped to", clip, span)] if close else []
    yield Chart("Gradient norm", (Curve("norm", "line", norms), *limit), _four_digits, from_zero=True)
    speed = Curve("tokens/s", "line", run.of("tokens_per_second"))
    yield Chart("Throughput, tokens/s", (speed,), lambda v: f"{v:,.0f}", from_zero=True)
    share = Curve("share", "line", tuple((row["step"], _host_share(row)) for row in run.steps))
    yield Chart("Share of the step in host operations", (share,), lambda v: f"{v:.0%}", 0.01, True)
    device, host = (tuple((x, y or None) for x, y in run.of(name)) for name in ("device_bytes", "host_bytes"))
    if numbers(device):
        limit = _limit("planned, at most", float(run.planned.get("device", 0)), span)
        yield _in_bytes("Device memory", Curve("allocated", "line", device), limit)
    curves, peak = [Curve("resident", "line", host)], run.summary.get("peak_bytes", {})
    if {"process", "host"} <= peak.keys():
        planned = peak["process"] - peak["host"] + run.planned_on_host
        curves.append(_limit("before training, and what is planned", float(planned), span))
    yield _in_bytes("Memory of the process", *curves)
    scales = run.of("loss_scale")
    if any(y != 1 for y in numbers(scales)):
        curve = Curve("scale", "line", scales)
        yield Chart("Loss scale", (curve,), lambda v: f"{v:,.0f}", 1.0, True, skipped, "skipped")


def _in_bytes(title: str, *curves: Curve) -> Chart:
    highest = max((y for c in curves for y in numbers(c.points)), default=1.0)
    unit = next((float(u) for u in (1 << 30, 1 << 20, 1 << 10) if highest >= u), 1.0)
    return Chart(title, curves, format_bytes, unit, from_zero=True)


def _limit(name: str, value: float, span: tuple[int, int]) -> Curve:
    return Curve(name, "limit", tuple(dict.fromkeys(span, value).items()))


def _host_share(row: Row) -> float | None:
    seconds, host = finite_number(row.get("seconds")), finite_number(row.get("host_seconds"))
    return None if not seconds or host is None else host / seconds


def _four_digits(value: float) -> str:
    return f"{value:.4g}"


# --- the measured step -----------------------------------------------------------------------------------


def _measured_step(run: RunHistory) -> tuple[str, Timeline | None]:
    """The section with its picture, or with why there is none to show; and the step."""
    text, picture, timeline = "No step was measured yet: the tenth is, or the last of fewer.", "", None
    try:
        step = read_recorded_step(run.path) if (run.path / TRACE).exists() else None
    except ValueError as error:
        step, text = None, f"The measured step cannot be shown: {error}"
    if step is not None:
        timeline, bound = step.timeline, bounds_in_words(bound_by(critical_path_of(step.plan, step.timeline)))
        text = f"{legend_summary(timeline)}; bound by {bound}. timeline.html in the run folder has all of it."
        if len(step.plan.graph) <= MOST_DRAWN:
            picture = svg(timeline, plan=step.plan, title="One measured step")
    return f'<section class="step"><h2>The step</h2><p>{escape(text)}</p>{picture}</section>', timeline


# --- tables ----------------------------------------------------------------------------------------------

Cells = tuple[str, ...]


def _tables(run: RunHistory, step: Timeline | None) -> Iterator[str]:
    """The load of this machine while the run goes on, the measured step, figures by step, settings, machine."""
    if not run.summary:
        yield _table("This machine, as the page was written", (), machine_load(), prose=True)
    if step is not None:
        for name, by in (("lane", by_lane), ("verb", by_verb)):
            rows = (
                (
                    s.name,
                    f"{s.ops:,}",
                    format_seconds(s.seconds[0]),
                    f"{s.seconds[0] / (step.seconds or 1):.0%}",
                )
                for s in sums(step, by)
            )
            yield _table(f"The step by {name}", (name, "operations", "busy", "of the step"), rows)
    yield _table("Memory against the plan", ("", "planned", "measured"), _memory_rows(run))
    heads = ("step", *(head for head, _ in FIGURES.values()), "memory")
    yield _listed("Steps", heads, [_figures_of(row) for row in run.steps])
    yield _listed("Events", ("step", ""), [*_events(run)], prose=True)
    settings = {k: _plain(v) for k, v in run.settings.items()}
    defaults = {name: _plain(value) for name, value in attrs.asdict(TrainSettings()).items()}
    defaults["schedule"] = str(schedule_for(BY_DEVICE, on_cpu=settings.get("device") == "cpu"))
    bold = frozenset(k for k, v in settings.items() if v != defaults.get(k))
    yield _table("Settings (bold: not the default)", (), settings.items(), prose=True, bold=bold)
    machine = {**run.config["machine"], "data": "\n".join(run.config.get("data", ())) or None}
    plan = {k: v for k, v in run.config["plan"].items() if k != "planned_bytes"}
    for caption, values in (("Environment", machine), ("Plan", plan)):
        yield _table(caption, (), ((k, _plain(v)) for k, v in values.items()), prose=True)


def _memory_rows(run: RunHistory) -> Iterator[Cells]:
    peak = run.summary.get("peak_bytes", {})
    for tier, n in run.planned.items():
        measured = tier == "device" and tier in peak
        yield tier, format_bytes(n), format_bytes(peak[tier]) if measured else ""
    if {"process", "host"} <= peak.keys():
        yield "process, since before training", format_bytes(run.planned_on_host), format_bytes(peak["host"])
        yield "process, in all", "", format_bytes(peak["process"])


def _figures_of(row: Row) -> Cells:
    """The figures of a step."""
    memory = finite_number(row.get("device_bytes")) or finite_number(row.get("host_bytes")) or 0.0
    figures = (_figure(row, name, form) for name, (_, form) in FIGURES.items())
    return (f"{row['step']:,}", *figures, format_bytes(memory))


def _figure(row: Row, name: str, form: str) -> str:
    number = finite_number(row.get(name))
    return "not a number" if number is None else format(number, form)


def _events(run: RunHistory) -> Iterator[Cells]:
    """Evaluations, steps that an overflow skipped, and checkpoints."""
    for row in run.rows:
        step = f"{row['step']:,}"
        if run.held_out in row:
            yield step, f"held out: {_figure(row, run.held_out, '.4f')} bits per {run.unit}"
        if row.get("skipped") is True:
            yield step, f"skipped, for an overflow at the loss scale {_figure(row, 'loss_scale', ',.0f')}"
        if "saved" in row:
            name = str(row["saved"])
            there = "/" not in name and (run.path / FOLDER / name).is_dir()
            swap = not name.startswith("step-")
            yield (
                step,
                f"saved {'the swap space ' * swap}{name}{', deleted since' * (not swap and not there)}",
            )
        elif "not_saved" in row:
            yield step, f"not saved: {row['not_saved']}"


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _listed(caption: str, heads: Cells, rows: Sequence[Cells], *, prose: bool = False) -> str:
    """A table of `rows`, if there are any: of many LISTED, evenly, the first and the last among them."""
    listed = sorted({round(k * (len(rows) - 1) / (LISTED - 1)) for k in range(LISTED)}) if rows else []
    of_all = f" ({len(listed)} of {len(rows):,})" if len(listed) < len(rows) else ""
    return _table(caption + of_all, heads, [rows[n] for n in listed], prose=prose) if rows else ""


def _table(
    caption: str,
    heads: Cells,
    rows: Iterable[Cells],
    *,
    prose: bool = False,
    bold: frozenset[str] = frozenset(),
) -> str:
    """Rows under a caption; the first column is a heading. `prose`: text, not numbers. `bold`: names of rows."""
    strong, words = ' class="set"', ' class="words"'
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        f'<tr{strong * (name in bold)}><th scope="row">{escape(name)}</th>'
        f"{''.join(f'<td>{escape(text)}</td>' for text in cells)}</tr>"
        for name, *cells in rows
    )
    return (
        f"<div><table{words * prose}><caption>{escape(caption)}</caption>"
        f"{f'<thead><tr>{head}</tr></thead>' * bool(head)}<tbody>{body}</tbody></table></div>"
    )


# --- the machine -----------------------------------------------------------------------------------------


def machine_load() -> Iterator[tuple[str, str]]:
    """Cores, host memory, and every GPU that NVIDIA's driver lists, as names and values."""
    cpus, memory = psutil.Process().cpu_affinity(), psutil.virtual_memory()
    shares = psutil.cpu_percent(0.3, percpu=True)
    yield "cores", f"{sum(shares[cpu] for cpu in cpus) / 100:.1f} of {len(cpus)} busy"
    yield "memory", f"{format_bytes(memory.total - memory.available)} of {format_bytes(memory.total)} in use"
    try:
        import pynvml
    except ImportError:
        yield "GPU", "unknown: pip install 'zfunc[gpu]'"
        return
    try:
        pynvml.nvmlInit()
        for n in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(n)
            busy, memory = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu, pynvml.nvmlDeviceGetMemoryInfo(gpu)
            in_use = f"{format_bytes(memory.used)} of {format_bytes(memory.total)} in use"
            yield f"GPU {n}", f"{pynvml.nvmlDeviceGetName(gpu)}: {busy} % busy, {in_use}"
    except pynvml.NVMLError_LibraryNotFound:  # no driver of NVIDIA
        return
    except pynvml.NVMLError as error:
        yield "GPU", f"unknown: {error}"
