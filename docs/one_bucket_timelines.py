"""One bucket's operations among all others, on lanes over time, as SVG: docs/bucket-lanes.svg and so on.

The invariant: bars are events of a simulated plan and arrows are waits of that plan. What is not this bucket's is
faint.
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen
from one_bucket_pictures import COLOURS, LETTER, MARGIN, svg
from one_bucket_step import owners, walk
from scale_charts import text

from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event, Timeline
from zfunc.units import format_seconds
from zfunc.viz.legend import ticks, verb_of

WIDTH, LEFT, TOP, BAR, STRIP, PANEL = 900.0, 128.0, 84.0, 24.0, 22.0, 40.0
ORDER = ("compute", "network", "d2h", "host", "h2d")
SMALL = 6.1  # px of a small letter
STYLE = """<style>
.track { fill: var(--line); fill-opacity: .35; }
.tick { stroke: var(--line); }
.faint { fill-opacity: .25; }
.lit { stroke: var(--ink); stroke-width: 1.2; }
.lead { stroke: var(--ink); stroke-opacity: .6; }
.known { stroke: var(--ink); stroke-opacity: .7; stroke-dasharray: 2 4; stroke-width: 1.5; }
.clash { fill: #e5484d; fill-opacity: .3; stroke: #e5484d; }
.halo { paint-order: stroke; stroke: var(--page); stroke-width: 3px; stroke-linejoin: round; }
</style>"""


@frozen
class Panel:
    """One plan on its lanes: `lit` are the operations to see and what to call them; empty `lanes` are all.

    Of a `clash` the two operations are there that run at the same time and must not.
    """

    title: str
    plan: Plan
    lit: Mapping[str, str] = field()
    lanes: tuple[str, ...] = ()
    clash: tuple[str, str] | None = None
    hardware: Hardware = ROUND

    @lit.default  # pyright: ignore
    def _walk(self) -> dict[str, str]:
        return {op.name: op.verb for op in walk(self.plan.graph)}

    @property
    def timeline(self) -> Timeline:
        """What is drawn, without the lanes left out, those of the way down and back from the top."""
        made = simulate(self.plan, self.hardware)
        lanes = sorted(self.lanes or made.lanes, key=lambda lane: ORDER.index(lane) if lane in ORDER else -1)
        return Timeline(tuple(e for lane in lanes for e in made.on(lane)), made.source)

    @property
    def height(self) -> float:
        """In px, its title included."""
        return PANEL + len(self.timeline.lanes) * (BAR + STRIP)


@frozen
class Axis:
    """Where a moment of the step is, in px."""

    seconds: float

    def x(self, at: float) -> float:
        """The place of a moment in seconds."""
        return LEFT + at * (WIDTH - MARGIN - LEFT) / self.seconds

    def drawn(self, top: float, bottom: float) -> Iterator[str]:
        """A line and its time at every round moment."""
        for at, word in ticks(self.seconds, 10):
            yield f'<path class="tick" d="M{self.x(at):.1f} {top:g}V{bottom:g}"/>'
            yield text(self.x(at), bottom + 15, word, "dim", "middle")


def lanes(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """Panels one below the other, on one time axis."""
    axis = Axis(max(p.timeline.seconds for p in panels))
    bottom = TOP - 22 + sum(p.height for p in panels)
    parts = [STYLE, *heading(title, subtitle), *axis.drawn(TOP - 14, bottom)]
    y = TOP - 22
    for panel in panels:
        parts += _panel(panel, y, axis)
        y += panel.height
    return svg(WIDTH, bottom + 30, parts)


def heading(title: str, subtitle: str) -> Iterator[str]:
    """What a picture is of, and how to read it."""
    yield text(MARGIN, 30, title, "title")
    yield text(MARGIN, 49, subtitle, "dim")


def _panel(panel: Panel, y: float, axis: Axis) -> Iterator[str]:
    timeline, graph = panel.timeline, panel.plan.graph
    whose = owners(graph)
    events = {e.op: e for e in timeline.events}
    rows = {lane: y + PANEL + n * (BAR + STRIP) for n, lane in enumerate(timeline.lanes)}
    took = "" if panel.lanes else f": {format_seconds(timeline.seconds)}"
    yield text(MARGIN, y + 16, panel.title + took, "name halo")
    for lane, top in rows.items():
        room = f'width="{WIDTH - MARGIN - LEFT:g}" height="{BAR:g}"'
        yield f'<rect class="track" x="{LEFT:g}" y="{top:g}" {room} rx="3"/>'
        yield text(MARGIN, top + 16, lane)
        for e in timeline.on(lane):
            yield _bar(e, top, axis, COLOURS[verb_of(e.op)], whose.get(e.op), lit=e.op in panel.lit)
    yield from _known(panel, y, axis)
    yield from _waits(panel, events, rows, axis)
    yield from _clash(panel, events, rows, axis)
    for lane in rows:
        yield from _labels(panel, lane, rows, axis)


def _bar(e: Event, top: float, axis: Axis, colour: str, bucket: int | None, *, lit: bool) -> str:
    x, wide = axis.x(e.start), axis.x(e.end) - axis.x(e.start)
    wide = max(wide, 3.0) if lit else max(wide - 0.6, 0.4)
    said = f"{e.op}: {format_seconds(e.seconds)}, from {format_seconds(e.start)}"
    bar = (
        f'<rect class="{"lit" if lit else "faint"}" style="fill: {colour}" x="{x:.1f}" y="{top:g}" '
        f'width="{wide:.1f}" height="{BAR:g}" rx="2"><title>{said}</title></rect>'
    )
    if lit or bucket is None or wide < 11:
        return bar
    return bar + text(x + wide / 2, top + 16, str(bucket), "dim small", "middle")


def _known(panel: Panel, y: float, axis: Axis) -> Iterator[str]:
    """When the step's verdict is there, from which on updates are free to begin."""
    by = next((op.name for op in panel.plan.graph if any(r.buffer == "verdict" for r in op.writes)), "")
    if by not in panel.lit:
        return
    x = axis.x(next(e.end for e in simulate(panel.plan, panel.hardware).events if e.op == by))
    yield f'<path class="known" d="M{x:.1f} {y + 22:g}V{y + panel.height - 4:g}"/>'


def _waits(panel: Panel, events: Mapping[str, Event], rows: Mapping[str, float], axis: Axis) -> Iterator[str]:
    """The waits of what is lit, from the end of one operation to the start of the other."""
    ops = panel.plan.graph.ops
    for i, op in enumerate(ops):
        for n in panel.plan.waits[i] if op.name in panel.lit and op.name in events else ():
            if ops[n].name not in events:
                continue
            a, b = events[ops[n].name], events[op.name]
            down = rows[b.lane] > rows[a.lane]
            y1, y2 = rows[a.lane] + BAR * down, rows[b.lane] + BAR * (not down)
            x1, x2, bend = axis.x(a.end), axis.x(b.start) + 1, (y2 - y1) * 0.55
            curve = f"M{x1:.1f} {y1:g}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:g}"
            yield f'<path class="arrow" marker-end="url(#tip)" d="{curve}"/>'


def _clash(panel: Panel, events: Mapping[str, Event], rows: Mapping[str, float], axis: Axis) -> Iterator[str]:
    """From the moment the second writes, what the first still has to read is not what it should read."""
    if panel.clash:
        reads, writes = (events[name] for name in panel.clash)
        x, ys = axis.x(writes.start), sorted((rows[reads.lane], rows[writes.lane]))
        size_ = f'width="{axis.x(reads.end) - x:.1f}" height="{ys[1] - ys[0] + BAR + 6:g}"'
        yield f'<rect class="clash" x="{x:.1f}" y="{ys[0] - 3:g}" {size_} rx="3"/>'


def _labels(panel: Panel, lane: str, rows: Mapping[str, float], axis: Axis) -> Iterator[str]:
    """Inside a bar where there is room, else above it, clear of an arrow from above and of one another."""
    above: list[tuple[float, float, str]] = []  # where words are to stand, what they belong to
    taken = 0.0  # up to where words that make room for an arrow reach
    lanes_of = {e.op: e.lane for e in panel.timeline.events}
    for e in (e for e in panel.timeline.on(lane) if e.op in panel.lit):
        middle, words = (axis.x(e.start) + axis.x(e.end)) / 2, panel.lit[e.op]
        half = SMALL * len(words) / 2
        if axis.x(e.end) - axis.x(e.start) > LETTER * len(words) + 6:
            yield text(middle, rows[lane] + 16, words, "on small", "middle")
            continue
        waited = (lanes_of.get(panel.plan.graph.ops[n].name, lane) for n in _waited(panel.plan, e.op))
        if middle - half < taken or any(rows[there] < rows[lane] for there in waited):
            taken = max(taken, axis.x(e.start)) + 9 + 2 * half
        above.append((taken - half if taken > middle else middle, middle, words))
    places = _apart([(wanted, words) for wanted, _, words in above])
    for centre, (_, middle, words) in zip(places, above, strict=True):
        yield f'<path class="lead" d="M{centre:.1f} {rows[lane] - 6:g}L{middle + 1:.1f} {rows[lane]:g}"/>'
        yield text(centre, rows[lane] - 9, words, "small halo", "middle")


def _waited(plan: Plan, name: str) -> tuple[int, ...]:
    return plan.waits[plan.graph.position[name]]


def _apart(labels: Sequence[tuple[float, str]]) -> list[float]:
    """Centres for words that are to stand over given places, in order: those that overlap stand side by side,
    with their middle over the middle of their places."""
    groups: list[list[tuple[float, float]]] = []  # of places and widths

    def left(group: list[tuple[float, float]]) -> float:
        wide = sum(w for _, w in group)
        middle = sum(x for x, _ in group) / len(group)
        return min(max(middle - wide / 2, LEFT), WIDTH - MARGIN - wide)

    for middle, words in labels:
        groups.append([(middle, SMALL * len(words) + 9)])
        while len(groups) > 1 and left(groups[-2]) + sum(w for _, w in groups[-2]) > left(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    centres: list[float] = []
    for group in groups:
        x = left(group)
        for _, wide in group:
            centres.append(x + wide / 2)
            x += wide
    return centres
