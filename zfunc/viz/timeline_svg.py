"""A step as an SVG file, for light and dark pages: a row of bars for each lane, under one time axis.

Simulated and measured steps look alike but for the source in the heading. Of several timelines the rows of a lane
stand together. Lanes that only copy are thin.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from attrs import frozen

from zfunc.core.plan import Plan
from zfunc.core.timeline import Event, Timeline
from zfunc.units import format_seconds
from zfunc.values import of_type, whole
from zfunc.viz.legend import (
    Timelines,
    colour_of,
    heading_of,
    lanes_of,
    micro_batches_of,
    ticks,
    timeline_tuple,
    verb_of,
    verbs_of,
)

ARROWS_UP_TO = 200  # operations; with more, arrows hide the bars

# The size of the SVG's parts, in px.
_MARGIN, _HEAD, _LINE, _BETWEEN, _PAIRED, _BAR, _THIN, _LETTER = 20.0, 64.0, 17.0, 14.0, 5.0, 32.0, 15.0, 6.6
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


@frozen
class _Frame:
    """The geometry of an SVG timeline in px: rows by lane and timeline number, and the time axis."""

    rows: dict[tuple[str, int], float]
    high: dict[str, float]  # the bars of a lane
    left: float
    right: float
    head: float
    bottom: float
    scale: float  # px a second

    def x(self, seconds: float) -> float:
        return self.left + seconds * self.scale


def svg(timelines: Timelines, *, plan: Plan | None = None, title: str = "", width: int = 1200) -> str:
    """The timelines as one SVG file, `width` px wide; every bar has a tooltip.

    With the `plan`, tooltips list what an operation waits for, and a short plan of one timeline has arrows.
    Raises ValueError for a width below 400.

    >>> svg(Timeline((Event("gpu", "use[0]", "compute", 0.0, 3e-3),), "simulated"), width=400)[:16]
    '<svg xmlns="http'
    """
    of_type("title", title, str, "a text: pass one")
    if whole("width", width) < 400:
        raise ValueError(f"got a width of {width} px, expected 400 or more: give it room, 1200 fits a page")
    shown = timeline_tuple(timelines)
    frame = _frame(shown, width)
    verbs = verbs_of(shown, plan)
    legend = list(_legend(verbs, width, frame.bottom + 38))
    height = frame.bottom + 38 + 22 * (1 + max((row for row, _ in legend), default=-1)) + 8
    after = _waits(plan) if plan else {}
    numbers = micro_batches_of(shown)
    short = sum(len(t.events) for t in shown) <= ARROWS_UP_TO
    thinnest = 1.0 if short else 0.25  # px; many widened bars would hide idle time
    size = f'width="{width}" height="{height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height:g}" role="img">',
            f"<style>{_STYLE}{''.join(_colours(verbs))}</style>",
            '<defs><marker id="tip" viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="6" markerHeight="6" '
            'orient="auto"><path class="tip" d="M0 .6 6 3 0 5.4z"/></marker></defs>',
            f'<rect class="page" {size} rx="8"/>',
            f'<text class="title" x="{_MARGIN:g}" y="30">{escape(title or "One training step")}</text>',
            *(
                f'<text class="dim" x="{_MARGIN:g}" y="{49 + _LINE * n:g}">{escape(heading_of(t))}</text>'
                for n, t in enumerate(shown)
            ),
            *_axis(max(t.seconds for t in shown), frame),
            *(_lane(shown, lane, n, y, frame) for (lane, n), y in frame.rows.items()),
            *(_arrows(shown[0], after, frame) if short and len(shown) == 1 else ()),
            *(
                _bar(e, n, frame, thinnest, verbs, after, numbers.get(e.op))
                for n, t in enumerate(shown)
                for e in t.events
            ),
            *(mark for _, mark in legend),
            "</svg>\n",
        ]
    )


def _frame(shown: tuple[Timeline, ...], width: int) -> _Frame:
    rows: dict[tuple[str, int], float] = {}
    head = y = _HEAD + _LINE * (len(shown) - 1)
    high = {lane: _THIN if thin else _BAR for lane, thin in lanes_of(shown).items()}
    for lane, bar in high.items():
        own = [n for n, t in enumerate(shown) if lane in t.lanes]
        rows |= {(lane, n): y + (bar + _PAIRED) * k for k, n in enumerate(own)}
        y += (bar + _PAIRED) * len(own) - _PAIRED + _BETWEEN
    sources = [f"{t.source} 100% busy" for t in shown] if len(shown) > 1 else []
    beside = 1 + max(map(len, sources), default=4)  # the name of a thin lane and its share are on one line
    labels = (*(1.15 * len(x) + beside * (bar == _THIN) for x, bar in high.items()), *map(len, sources))
    left = _MARGIN + max([78.0, *(_LETTER * letters + 16 for letters in labels)])
    right = width - _MARGIN
    return _Frame(rows, high, left, right, head, y, (right - left) / (max(t.seconds for t in shown) or 1.0))


def _colours(verbs: dict[str, int]) -> Iterator[str]:
    return (f".v{n} {{ fill: {colour_of(verb)}; }}\n" for verb, n in verbs.items())


def _waits(plan: Plan) -> dict[str, tuple[str, ...]]:
    ops = plan.graph.ops
    return {op.name: tuple(ops[n].name for n in waits) for op, waits in zip(ops, plan.waits, strict=True)}


def _axis(seconds: float, frame: _Frame) -> Iterator[str]:
    for at, label in ticks(seconds, max(2, int((frame.right + _MARGIN - frame.left) / 90))):
        x = frame.x(at)
        yield f'<path class="tick" d="M{x:.1f} {frame.head - 4:g}V{frame.bottom:g}"/>'
        yield f'<text class="dim" text-anchor="middle" x="{x:.1f}" y="{frame.bottom + 15:g}">{label}</text>'


def _lane(shown: tuple[Timeline, ...], lane: str, n: int, y: float, frame: _Frame) -> str:
    bar, several = frame.high[lane], len(shown) > 1
    track = f'width="{frame.right - frame.left:g}" height="{bar:g}"'
    name = (
        f'<text class="lane" x="{_MARGIN:g}" y="{y + (12 if bar == _THIN else 14):g}">{escape(lane)}</text>'
        if n == next(k for k, t in enumerate(shown) if lane in t.lanes)
        else ""
    )
    share = f"{escape(shown[n].source)} " * several + f"{shown[n].busy(lane):.0%}" + " busy" * (bar != _THIN)
    place = f'x="{_MARGIN:g}" y="{y + 29:g}"'
    if bar == _THIN:
        place = f'text-anchor="end" x="{frame.left - 16:g}" y="{y + 12:g}"'
    return (
        f'<rect class="track" x="{frame.left:g}" y="{y:g}" {track} rx="3"/>{name}'
        f'<text class="dim" {place}>{share}</text>'
    )


def _bar(
    e: Event,
    n: int,
    frame: _Frame,
    thinnest: float,
    verbs: dict[str, int],
    after: dict[str, tuple[str, ...]],
    number: str | None,
) -> str:
    high = frame.high[e.lane]
    x, y, wide = frame.x(e.start), frame.rows[e.lane, n], max(thinnest, e.seconds * frame.scale)
    gap = min(0.8, wide / 5)  # a seam, so that neighbours of one verb can be counted
    tooltip = f"{e.op}\n{e.lane}: {format_seconds(e.seconds)}, from {format_seconds(e.start)}"
    if waits := after.get(e.op):
        tooltip += "\nafter " + " ".join(waits)
    bar = (
        f'<rect class="v{verbs[verb_of(e.op)]}" x="{x:.2f}" y="{y:g}" width="{wide - gap:.2f}" '
        f'height="{high:g}" rx="{min(2.0, wide / 4):.1f}"><title>{escape(tooltip)}</title></rect>'
    )
    names = (e.op, number or e.op.partition("[")[2].rstrip("]"))  # the colour shows the verb
    space = 3 if number else 6  # boxes of a pipeline are many
    name = next((n for n in names if n and len(n) * _LETTER * 0.92 + space <= wide), "")
    if not name:
        return bar
    middle = f'x="{x + (wide - gap) / 2:.1f}" y="{y + high / 2 + 4:g}"'
    return f'{bar}<text class="op" text-anchor="middle" {middle}>{escape(name)}</text>'


def _arrows(timeline: Timeline, after: dict[str, tuple[str, ...]], frame: _Frame) -> Iterator[str]:
    """SVG arrows to the start of each operation from the end of each one in `after`, which it waits for."""
    events = {e.op: e for e in timeline.events}
    for name, waits in after.items():
        for a, b in ((events[n], events[name]) for n in waits if n in events and name in events):
            upper, lower = frame.rows[a.lane, 0], frame.rows[b.lane, 0]
            x1, x2 = frame.x(a.end) - 0.8, frame.x(b.start) + 1.2
            down = lower > upper
            y1, y2 = upper + frame.high[a.lane] * down, lower + frame.high[b.lane] * (not down)
            bend = (y2 - y1) / 2
            curve = f"M{x1:.1f} {y1:g}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:g}"
            yield f'<path class="wait" marker-end="url(#tip)" d="{curve}"/>'


def _legend(verbs: dict[str, int], width: int, y: float) -> Iterator[tuple[int, str]]:
    """An SVG timeline's legend, from `y` px down: for each verb its row, and SVG of a swatch and the name."""
    row, x = 0, _MARGIN
    for verb, n in verbs.items():
        wide = 18 + 6.0 * len(verb) + 24
        if x + wide > width - _MARGIN and x > _MARGIN:
            row, x = row + 1, _MARGIN
        top = y + 22 * row
        swatch = f'<rect class="v{n}" x="{x:.1f}" y="{top:g}" width="12" height="12" rx="2"/>'
        yield row, f'{swatch}<text x="{x + 18:.1f}" y="{top + 10.5:g}">{escape(verb)}</text>'
        x += wide
