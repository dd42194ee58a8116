"""What a step looks like: as text for a terminal, as SVG for a page, as a trace for Perfetto.

The invariant: a picture shows a `Timeline` and nothing else, so a simulated and a measured step look
the same but for the source named in the heading. Verbs are told apart by order of appearance, never by name.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import floor, log10
from string import ascii_lowercase, digits
from xml.sax.saxutils import escape

from zfunc.plan import Plan
from zfunc.timeline import Event, Timeline

PALETTE = (  # light enough for black letters, told apart on white and on black, neighbours far apart
    *("#9bd5ea", "#6ea8e5", "#f4d35e", "#f29e7a", "#b8b8d1", "#5fbfae", "#d9a5e0", "#e8848c"),
    *("#a7c957", "#f6c177", "#a98ff0", "#c9ada7", "#86b56a", "#4fb0c6", "#d69a55", "#94a3b8"),
)
ARROWS_UP_TO = 200  # operations; with more, the waits hide what they should show

# The size of the SVG's parts, in px.
_MARGIN, _HEAD, _ROW, _BAR, _LETTER = 20.0, 64.0, 46.0, 32.0, 6.6
_STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --dim: #656d76; --line: #d8dee4; --track: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #30363d; --track: #161b22; }
}
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.title { font-size: 16px; font-weight: 600; }
.lane { font-weight: 600; }
.dim { fill: var(--dim); }
.op { font-size: 11px; fill: #10151b; pointer-events: none; }
.page { fill: var(--page); }
.track { fill: var(--track); }
.tick { stroke: var(--line); }
.wait { fill: none; stroke: var(--ink); stroke-opacity: .45; stroke-width: .9; pointer-events: none; }
.tip { fill: var(--ink); fill-opacity: .7; }
"""


def text(timeline: Timeline, width: int = 100) -> str:
    """The lanes as rows of letters, at most `width` columns wide, with a time axis and a legend.

    A cell shows the verb that fills most of it; a capital says that an operation begins there. Raises
    ValueError for a width too small to show anything.

    >>> events = Event("gpu", "fill[0]", "compute", 0.0, 3e-3), Event("cpu", "use[0]", "host", 3e-3, 4e-3)
    >>> print(text(Timeline(events, "simulated"), width=40))
    simulated: 4 ms, 2 operations on 2 lanes
    gpu  75% |Ffffffffffffffffffffff·······|
    cpu  25% |·····················Uuuuuuuu|
              0 ms          2              4
    f fill   u use
    """
    names = max(map(len, timeline.lanes), default=0)
    cells = width - names - len("  75% ||")
    if cells < 16:
        raise ValueError(f"got a width of {width} columns, expected {width - cells + 16} or more: widen it")
    verbs = _verbs(timeline)
    letters = _letters(verbs)
    per_cell = (timeline.seconds or 1.0) / cells
    rows = [f"{lane:<{names}} {timeline.busy(lane):>4.0%} |" for lane in timeline.lanes]
    rows = [
        row + _row(timeline.on(lane), cells, per_cell, letters) + "|"
        for lane, row in zip(timeline.lanes, rows, strict=True)
    ]
    axis = [" "] * (cells + 1)
    for at, word in _ticks(timeline.seconds, cells // 8):
        start = min(round(at / per_cell), len(axis) - len(word))
        axis[start : start + len(word)] = word
    legend = _wrapped([f"{letters[verb]} {verb}" for verb in verbs], width)
    lines = [_summary(timeline), *rows, " " * (names + 7) + "".join(axis), *legend]
    return "\n".join(line.rstrip() for line in lines)


def chrome_trace(timeline: Timeline) -> str:
    """JSON in the Chrome trace event format, for Perfetto or chrome://tracing: a thread a lane."""
    lanes = {lane: n for n, lane in enumerate(timeline.lanes)}
    trace: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"zfunc, {timeline.source}"}}
    ]
    for lane, n in lanes.items():
        trace.append({"ph": "M", "pid": 0, "tid": n, "name": "thread_name", "args": {"name": lane}})
        trace.append({"ph": "M", "pid": 0, "tid": n, "name": "thread_sort_index", "args": {"sort_index": n}})
    for e in timeline.events:
        times = {"ts": round(e.start * 1e6, 3), "dur": round(e.seconds * 1e6, 3)}
        trace.append({"ph": "X", "pid": 0, "tid": lanes[e.lane], "name": e.op, "cat": e.kind, **times})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}, separators=(",", ":"))


def svg(timeline: Timeline, *, plan: Plan | None = None, title: str = "", width: int = 1200) -> str:
    """One SVG file, `width` px wide, for light and dark pages; pointing at a bar tells what it is.

    With the `plan` the bars also tell what they wait for, and a short plan shows it as arrows. Raises
    ValueError for a width below 400.
    """
    if width < 400:
        raise ValueError(f"got a width of {width} px, expected 400 or more: give it room, 1200 fits a page")
    left = _MARGIN + max([78.0, *(_LETTER * 1.15 * len(lane) + 16 for lane in timeline.lanes)])
    scale = (width - _MARGIN - left) / (timeline.seconds or 1.0)
    bottom = _HEAD + _ROW * len(timeline.lanes)
    verbs = _verbs(timeline, plan)
    legend = list(_legend(verbs, width, bottom + 38))
    height = bottom + 38 + 22 * (1 + max((row for row, _ in legend), default=-1)) + 8
    after = _waits(plan) if plan else {}
    short = len(timeline.events) <= ARROWS_UP_TO
    thinnest = 1.0 if short else 0.25  # px; many bars widened to be seen would hide how idle a lane is
    rows = {lane: _HEAD + _ROW * n for n, lane in enumerate(timeline.lanes)}
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
            f'viewBox="0 0 {width} {height:g}" role="img">',
            f"<style>{_STYLE}{''.join(_colours(verbs))}</style>",
            '<defs><marker id="tip" viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="6" markerHeight="6" '
            'orient="auto"><path class="tip" d="M0 .6 6 3 0 5.4z"/></marker></defs>',
            f'<rect class="page" width="{width}" height="{height:g}" rx="8"/>',
            f'<text class="title" x="{_MARGIN:g}" y="30">{escape(title or "One training step")}</text>',
            f'<text class="dim" x="{_MARGIN:g}" y="49">{escape(_summary(timeline))}</text>',
            *_axis(timeline, left, scale, bottom, width),
            *(_lane(timeline, lane, y, left, width) for lane, y in rows.items()),
            *(_arrows(timeline, after, rows, left, scale) if short else ()),
            *(_bar(e, rows[e.lane], left, scale, thinnest, verbs, after) for e in timeline.events),
            *(mark for _, mark in legend),
            "</svg>\n",
        ]
    )


# --- what both pictures are made of ----------------------------------------------------------------------


def _verb(op: str) -> str:
    return op.partition("[")[0]


def _verbs(timeline: Timeline, plan: Plan | None = None) -> dict[str, int]:
    """Verbs numbered by first appearance: in the plan's serial order if there is one, or by start."""
    planned = (op.verb for op in plan.graph) if plan else ()
    started = (_verb(e.op) for e in sorted(timeline.events, key=lambda e: e.start))
    names = dict.fromkeys((*planned, *started))
    return {verb: n for n, verb in enumerate(names)}


def _summary(timeline: Timeline) -> str:
    ops, lanes = len(timeline.events), len(timeline.lanes)
    return (
        f"{timeline.source}: {_seconds(timeline.seconds)}, {ops:,} operation{'s' * (ops != 1)} "
        f"on {lanes} lane{'s' * (lanes != 1)}"
    )


def _unit(seconds: float) -> tuple[float, str]:
    """The unit in which `seconds` is a number of 1 or more, where there is one."""
    return next(((u, name) for u, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "us"))


def _seconds(seconds: float) -> str:
    unit, name = _unit(seconds)
    return f"{seconds / unit:.3g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"


def _ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """At most `most` + 1 round times from 0 to `seconds`, each with its label; the first tells the unit."""
    unit, name = _unit(seconds)
    total = seconds / unit
    if total <= 0:
        return [(0.0, f"0 {name}")]
    power = 10.0 ** floor(log10(total / most))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * most >= total * (1 - 1e-9))
    times = [k * step for k in range(floor(total / step + 1e-9) + 1)]
    return [(t * unit, f"{t:.12g}" if t else f"0 {name}") for t in times]


# --- text ------------------------------------------------------------------------------------------------


def _letters(verbs: Iterable[str]) -> dict[str, str]:
    """A letter for each verb: the first of its own that is free, any free one otherwise."""
    letters: dict[str, str] = {}
    for verb in verbs:
        wanted = [c for c in verb.lower() if c in ascii_lowercase]
        free = (c for c in (*wanted, *ascii_lowercase, *digits) if c not in letters.values())
        letters[verb] = next(free, "#")
    return letters


def _row(events: Iterable[Event], cells: int, per_cell: float, letters: dict[str, str]) -> str:
    filled: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(cells)]
    begins: set[tuple[int, str]] = set()
    for e in events:
        letter = letters[_verb(e.op)]
        first = min(cells - 1, floor(e.start / per_cell + 1e-9))
        begins.add((first, letter))
        for n in range(first, cells):
            if n > first and n * per_cell >= e.end - 1e-9 * per_cell:
                break
            filled[n][letter] += min(e.end, (n + 1) * per_cell) - max(e.start, n * per_cell)
    most = [max(cell, key=lambda c: cell[c]) if cell else "·" for cell in filled]
    return "".join(c.upper() if (n, c) in begins else c for n, c in enumerate(most))


def _wrapped(words: Iterable[str], width: int) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + 3 + len(word) > width:
            yield line
            line = ""
        line += ("   " if line else "") + word
    yield line


# --- SVG -------------------------------------------------------------------------------------------------


def _colours(verbs: dict[str, int]) -> Iterator[str]:
    used = sorted({n % len(PALETTE) for n in verbs.values()})
    return (f".v{n} {{ fill: {PALETTE[n]}; }}\n" for n in used)


def _waits(plan: Plan) -> dict[str, tuple[str, ...]]:
    ops = plan.graph.ops
    return {op.name: tuple(ops[n].name for n in waits) for op, waits in zip(ops, plan.waits, strict=True)}


def _axis(timeline: Timeline, left: float, scale: float, bottom: float, width: int) -> Iterator[str]:
    for at, word in _ticks(timeline.seconds, max(2, int((width - left) / 90))):
        x = left + at * scale
        yield f'<path class="tick" d="M{x:.1f} {_HEAD - 4:g}V{bottom:g}"/>'
        yield f'<text class="dim" text-anchor="middle" x="{x:.1f}" y="{bottom + 15:g}">{word}</text>'


def _lane(timeline: Timeline, lane: str, y: float, left: float, width: int) -> str:
    size = f'width="{width - _MARGIN - left:g}" height="{_BAR:g}"'
    return (
        f'<rect class="track" x="{left:g}" y="{y:g}" {size} rx="3"/>'
        f'<text class="lane" x="{_MARGIN:g}" y="{y + 14:g}">{escape(lane)}</text>'
        f'<text class="dim" x="{_MARGIN:g}" y="{y + 29:g}">{timeline.busy(lane):.0%} busy</text>'
    )


def _bar(
    e: Event,
    y: float,
    left: float,
    scale: float,
    thinnest: float,
    verbs: dict[str, int],
    after: dict[str, tuple[str, ...]],
) -> str:
    x, wide = left + e.start * scale, max(thinnest, e.seconds * scale)
    gap = min(0.8, wide / 5)  # a seam, so that neighbours of one verb can be counted
    told = f"{e.op}\n{e.lane}: {_seconds(e.seconds)}, from {_seconds(e.start)}"
    if waits := after.get(e.op):
        told += "\nafter " + " ".join(waits)
    bar = (
        f'<rect class="v{verbs[_verb(e.op)] % len(PALETTE)}" x="{x:.2f}" y="{y:g}" width="{wide - gap:.2f}" '
        f'height="{_BAR:g}" rx="{min(2.0, wide / 4):.1f}"><title>{escape(told)}</title></rect>'
    )
    names = (e.op, e.op.partition("[")[2].rstrip("]"))  # the colour already tells the verb
    name = next((n for n in names if n and len(n) * _LETTER * 0.92 + 6 <= wide), "")
    if not name:
        return bar
    middle = f'x="{x + (wide - gap) / 2:.1f}" y="{y + _BAR / 2 + 4:g}"'
    return f'{bar}<text class="op" text-anchor="middle" {middle}>{escape(name)}</text>'


def _arrows(
    timeline: Timeline, after: dict[str, tuple[str, ...]], rows: dict[str, float], left: float, scale: float
) -> Iterator[str]:
    """From the end of what was waited for to the start of what waited, edge to edge."""
    events = {e.op: e for e in timeline.events}
    for name, waits in after.items():
        for a, b in ((events[n], events[name]) for n in waits if n in events and name in events):
            down = rows[b.lane] > rows[a.lane]
            x1, x2 = left + a.end * scale - 0.8, left + b.start * scale + 1.2
            y1, y2 = rows[a.lane] + (_BAR if down else 0), rows[b.lane] + (0 if down else _BAR)
            bend = (y2 - y1) / 2
            curve = f"M{x1:.1f} {y1:g}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:g}"
            yield f'<path class="wait" marker-end="url(#tip)" d="{curve}"/>'


def _legend(verbs: dict[str, int], width: int, y: float) -> Iterator[tuple[int, str]]:
    """A swatch and the name of each verb, and the row it is on."""
    row, x = 0, _MARGIN
    for verb, n in verbs.items():
        wide = 18 + 6.0 * len(verb) + 24
        if x + wide > width - _MARGIN and x > _MARGIN:
            row, x = row + 1, _MARGIN
        top = y + 22 * row
        swatch = f'<rect class="v{n % len(PALETTE)}" x="{x:.1f}" y="{top:g}" width="12" height="12" rx="2"/>'
        yield row, f'{swatch}<text x="{x + 18:.1f}" y="{top + 10.5:g}">{escape(verb)}</text>'
        x += wide
