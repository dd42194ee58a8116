"""The tables of a run's page: the step, memory against the plan, figures by step, checkpoints, settings, machine.

A table of steps has at most LISTED rows, however long the run, and its caption says of how many.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import frozen

from zfunc.checkpoint.directory import FOLDER
from zfunc.core.settings import BY_DEVICE, schedule_for
from zfunc.train.history import RecordedStep, Row, RunHistory, finite_number
from zfunc.train.settings import TrainSettings
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.compare import by_lane, by_verb, sums

LISTED = 24  # rows of a table of steps, skipped steps or checkpoints
FIGURES = {  # of a step: heading and format
    "loss": ("loss", ".4f"),
    "lr": ("lr", ".2e"),
    "grad_norm": ("norm", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "seconds": ("seconds", ".3g"),
}


@frozen
class Table:
    """Rows under a caption; the first column is a heading. `prose`: text, not numbers. `bold`: names of rows."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = attrs.field(converter=tuple)
    prose: bool = False
    bold: frozenset[str] = frozenset()


def report_tables(run: RunHistory, step: RecordedStep | None) -> Iterator[Table]:
    """Tables of the measured `step`, if there is one, of memory, of figures by step, and of the settings."""
    if step is not None:
        total = step.timeline.seconds or 1
        for name, by in (("lane", by_lane), ("verb", by_verb)):
            rows = (
                (s.name, f"{s.ops:,}", format_seconds(s.seconds[0]), f"{s.seconds[0] / total:.0%}")
                for s in sums(step.timeline, by)
            )
            yield Table(f"The step by {name}", (name, "operations", "busy", "of the step"), rows)
    yield Table("Memory against the plan", ("", "planned", "measured"), _memory(run))
    heads = ["step", *(head for head, _ in FIGURES.values()), "memory"]
    yield from _by_step("Steps", heads, _figures, run.steps, _spread(run.steps))
    held_out = [row for row in run.rows if run.held_out in row]
    heads = ["step", f"bits per {run.unit}"]
    yield from _by_step("Held out", heads, partial(_figure, run.held_out, ".4f"), held_out, _spread(held_out))
    heads = ["step", "at the loss scale"]
    skipped = partial(_figure, "loss_scale", ",.0f")
    yield from _by_step("Skipped, for an overflow", heads, skipped, run.skipped, run.skipped[:LISTED])
    saves = [row for row in run.rows if "saved" in row or "not_saved" in row]
    checkpoint = partial(_checkpoint, run.path)
    yield from _by_step("Checkpoints", ["after step", ""], checkpoint, saves, saves[-LISTED:], prose=True)
    yield _settings(run)
    machine = {**run.config["machine"], "data": "\n".join(run.config.get("data", ())) or None}
    yield Table("Environment", ("", ""), ((k, _plain(v)) for k, v in machine.items()), prose=True)
    plan = {k: v for k, v in run.config["plan"].items() if k != "planned_bytes"}
    yield Table("Plan", ("", ""), ((k, _plain(v)) for k, v in plan.items()), prose=True)


def _memory(run: RunHistory) -> list[tuple[str, str, str]]:
    peak = run.summary.get("peak_bytes", {})
    rows = [
        (tier, format_bytes(n), format_bytes(peak[tier]) if tier == "device" and tier in peak else "")
        for tier, n in run.planned.items()
    ]
    if "host" in peak:
        planned = format_bytes(run.planned_on_host)
        rows.append(("process, since before training", planned, format_bytes(peak["host"])))
        rows.append(("process, in all", "", format_bytes(peak["process"])))
    return rows


def _by_step(
    caption: str,
    heads: Sequence[str],
    cells: Callable[[Row], tuple[str, ...]],
    rows: Sequence[Row],
    listed: Sequence[Row],
    *,
    prose: bool = False,
) -> Iterator[Table]:
    """A table of the `listed` among `rows`, if there are any."""
    if rows:
        of_all = f" ({len(listed)} of {len(rows):,})" if len(listed) < len(rows) else ""
        lines = ((f"{row['step']:,}", *cells(row)) for row in listed)
        yield Table(caption + of_all, tuple(heads), lines, prose=prose)


def _spread(rows: Sequence[Row]) -> list[Row]:
    """At most LISTED of them, evenly, the first and the last among them."""
    last = len(rows) - 1
    return [rows[n] for n in sorted({round(k * last / (LISTED - 1)) for k in range(LISTED)})] if rows else []


def _figures(row: Row) -> tuple[str, ...]:
    memory = finite_number(row.get("device_bytes")) or finite_number(row.get("host_bytes")) or 0.0
    figures = (figure for name, (_, form) in FIGURES.items() for figure in _figure(name, form, row))
    return (*figures, format_bytes(memory))


def _figure(name: str, form: str, row: Row) -> tuple[str]:
    number = finite_number(row.get(name))
    return ("not a number" if number is None else format(number, form),)


def _checkpoint(run: Path, row: Row) -> tuple[str]:
    if "saved" not in row:
        return (f"none: {row['not_saved']}",)
    name = str(row["saved"])
    if not name.startswith("step-"):
        return (f"the swap space {name}",)
    exists = "/" not in name and (run / FOLDER / name).is_dir()
    return (name if exists else f"{name}, deleted since",)


def _settings(run: RunHistory) -> Table:
    defaults = {f.name: _plain(f.default) for f in attrs.fields(TrainSettings)}
    own = {k: _plain(v) for k, v in run.settings.items()}
    defaults["schedule"] = str(schedule_for(BY_DEVICE, on_cpu=own.get("device") == "cpu"))
    changed = frozenset(k for k, v in own.items() if v != defaults.get(k))
    return Table("Settings (bold: not the default)", ("", ""), own.items(), prose=True, bold=changed)


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def table_html(table: Table) -> str:
    """The table as HTML."""
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.heads) else ""
    kind = ' class="words"' if table.prose else ""
    body = "".join(_row_html(row, bold=row[0] in table.bold) for row in table.rows)
    return f"<div><table{kind}><caption>{escape(table.caption)}</caption>{head}<tbody>{body}</tbody></table></div>"


def _row_html(cells: Sequence[str], *, bold: bool) -> str:
    name, *others = map(escape, cells)
    kind = ' class="set"' if bold else ""
    return f'<tr{kind}><th scope="row">{name}</th>' + "".join(f"<td>{x}</td>" for x in others) + "</tr>"
