"""The tables of a run's page: the step, memory against the plan, figures by step, checkpoints, settings, machine.

A table of steps has at most LISTED rows, however long the run, and its caption says of how many.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import frozen

from zfunc.checkpoint.directory import FOLDER
from zfunc.train.history import RecordedStep, Row, RunHistory, finite_number
from zfunc.train.settings import TrainSettings
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.compare import by_lane, by_verb, sums

LISTED = 24  # rows of a table of steps, skipped steps or checkpoints


@frozen
class Table:
    """Rows under a caption; the first column is a heading. `words`: of text, not of numbers. `bold`: rows."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = attrs.field(converter=tuple)
    words: bool = False
    bold: frozenset[str] = frozenset()


def report_tables(run: RunHistory, step: RecordedStep | None) -> Iterator[Table]:
    """Tables of the measured `step`, if there is one, of memory, of figures by step, and of the settings."""
    if step is not None:
        for what, by in (("lane", by_lane), ("verb", by_verb)):
            rows = [
                (
                    s.name,
                    f"{s.ops:,}",
                    format_seconds(s.seconds[0]),
                    f"{s.seconds[0] / (step.timeline.seconds or 1):.0%}",
                )
                for s in sums(step.timeline, by)
            ]
            yield Table(f"The step by {what}", (what, "operations", "busy", "of the step"), rows)
    yield Table("Memory against the plan", ("", "planned", "measured"), _peaks(run))
    some = _spread(run.steps)
    if some:
        heads = ("step", "loss", "lr", "norm", "tokens/s", "seconds", "memory")
        yield Table("Steps" + _of(some, run.steps), heads, map(_step, some))
    held_out = [row for row in run.rows if run.held_out in row]
    some = _spread(held_out)
    if some:
        rows = ((f"{row['step']:,}", _format(row[run.held_out], ".4f")) for row in some)
        yield Table("Held out" + _of(some, held_out), ("step", run.held_out.replace("_", " ")[9:]), rows)
    skipped = run.skipped
    if skipped:
        some = skipped[:LISTED]
        rows = ((f"{row['step']:,}", _format(row.get("loss_scale"), ",.0f")) for row in some)
        yield Table("Skipped, for an overflow" + _of(some, skipped), ("step", "at the loss scale"), rows)
    yield from _checkpoints(run)
    yield _settings(run)
    machine = {**run.config["machine"], "data": "\n".join(run.config.get("data", ())) or None}
    yield Table("Environment", ("", ""), ((k, _plain(v)) for k, v in machine.items()), words=True)
    plan = {k: v for k, v in run.config["plan"].items() if k != "planned_bytes"}
    yield Table("Plan", ("", ""), ((k, _plain(v)) for k, v in plan.items()), words=True)


def _peaks(run: RunHistory) -> list[tuple[str, str, str]]:
    planned, peak = run.planned, run.summary.get("peak_bytes", {})
    rows = [
        (tier, format_bytes(n), format_bytes(peak[tier]) if tier == "device" and tier in peak else "")
        for tier, n in planned.items()
    ]
    if "host" in peak:
        rows.append(
            ("process, since before training", format_bytes(run.planned_on_host), format_bytes(peak["host"]))
        )
        rows.append(("process, in all", "", format_bytes(peak["process"])))
    return rows


def _step(row: Row) -> tuple[str, ...]:
    memory = finite_number(row.get("device_bytes")) or finite_number(row.get("host_bytes")) or 0.0
    figures = (
        ("loss", ".4f"),
        ("lr", ".2e"),
        ("grad_norm", ".3f"),
        ("tokens_per_second", ",.0f"),
        ("seconds", ".3g"),
    )
    return f"{row['step']:,}", *(_format(row.get(name), form) for name, form in figures), format_bytes(memory)


def _checkpoints(run: RunHistory) -> Iterator[Table]:
    rows = [row for row in run.rows if "saved" in row or "not_saved" in row]
    if rows:
        yield Table(
            "Checkpoints" + _of(rows[-LISTED:], rows),
            ("after step", ""),
            ((f"{row['step']:,}", _saved(row, run.path)) for row in rows[-LISTED:]),
            words=True,
        )


def _saved(row: Row, run: Path) -> str:
    if "saved" not in row:
        return f"none: {row['not_saved']}"
    name = str(row["saved"])
    there = "/" not in name and (run / FOLDER / name).is_dir()
    return name if there else f"{name}, deleted since"


def _settings(run: RunHistory) -> Table:
    defaults = {f.name: f.default for f in attrs.fields(TrainSettings)}
    own = {k: _plain(v) for k, v in run.settings.items()}
    changed = {k for k, v in own.items() if k not in defaults or v != _plain(defaults[k])}
    return Table(
        "Settings (bold: not the default)", ("", ""), own.items(), words=True, bold=frozenset(changed)
    )


def _spread(rows: Sequence[Row]) -> list[Row]:
    """At most LISTED of them, evenly, the first and the last among them."""
    last = len(rows) - 1
    return [rows[n] for n in sorted({round(k * last / (LISTED - 1)) for k in range(LISTED)})] if rows else []


def _of(some: Sequence[Row], rows: Sequence[Row]) -> str:
    return f" ({len(some)} of {len(rows):,})" if len(some) < len(rows) else ""


def _format(value: object, form: str) -> str:
    known = finite_number(value)
    return "not a number" if known is None else format(known, form)


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def markup(table: Table) -> str:
    """The table as HTML."""
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.heads) else ""
    kind = ' class="words"' if table.words else ""
    body = "".join(_row(row, bold=row[0] in table.bold) for row in table.rows)
    return f"<div><table{kind}><caption>{escape(table.caption)}</caption>{head}<tbody>{body}</tbody></table></div>"


def _row(cells: Iterable[str], *, bold: bool) -> str:
    name, *others = map(escape, cells)
    kind = ' class="set"' if bold else ""
    return f'<tr{kind}><th scope="row">{name}</th>' + "".join(f"<td>{x}</td>" for x in others) + "</tr>"
