"""Write the pictures of README.md, docs/recipes.md, pipelines.md and one_bucket.md: `python docs/make_pictures.py`.

All of them are simulated on hardware in round numbers. Timelines are drawn by `zfunc.viz`; the pictures of one
operation show where a bucket's bytes are while it runs.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import one_bucket as step
from attrs import evolve, frozen
from one_bucket import BLOCK, BUCKET, PLAIN

from zfunc import schedules
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.core.recipes import zero_offload
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import simulate
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.core.step_graph import step_graph
from zfunc.core.timeline import Event, Timeline
from zfunc.units import format_seconds
from zfunc.viz.legend import colour_of
from zfunc.viz.timeline_svg import svg

FOLDER = Path(__file__).parent
BAR = re.compile(r'(<rect class="v\d+")([^>]*><title>)([^<\n]+)(.*?</rect>)(<text class="op")?', re.DOTALL)

PASSES = {"forward": 1, "recompute": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}  # ms

# --- timelines -------------------------------------------------------------------------------------------


def schedule_pictures() -> Iterator[tuple[str, str]]:
    """One step of four blocks of a transformer on two ranks, under three schedules."""
    graph = step_graph(segments=4, parameters=12 * 2048**2, tokens=4096, world=2)
    for schedule in (schedules.Serial(), schedules.Overlapped(), schedules.Interleaved()):
        name, plan = type(schedule).__name__, schedule(graph)
        title = f"{name}: one ZeRO-Offload step of four segments on two ranks"
        yield f"{name.lower()}.svg", svg(simulate(plan), plan=plan, title=title)


def pipeline_pictures() -> Iterator[tuple[str, str]]:
    """Eight micro-batches through eight equal segments on four devices, in each published order, and in one that
    recomputes: passes alone, and copies take no time."""
    width = 1024
    layout = make_layout([[Parameter(f"block{s}.weight", (width,))] for s in range(8)], bucket_size=width)
    cost = SegmentCost(PassCost(10**9), PassCost(2 * 10**9), input_bytes=1)
    places = {"params_on": "host", "activations_on": "host"}
    hardware = evolve(ROUND, handoff=0.0, shared={})
    for name, recompute in [*((x, "min-cut") for x in schedules.ORDERS), ("RoundPipe", "all")]:
        order = schedules.ORDERS[name]
        settings = StepSettings(devices=4, micro_batches=8, clip_norm=1.0, recompute=recompute, **places)
        spec = StepSpec(layout, (cost,) * 8, settings, order=order())
        graph = Graph(tuple(zero_offload(spec)))
        seconds = [1e-3 * PASSES.get(op.verb, 0) for op in graph]
        events = simulate(schedules.Overlapped()(graph), hardware, seconds).events
        passes = Timeline(tuple(x for x in events if x.end > x.start), "simulated")
        busy = sum(x.end - x.start for x in passes.events) / (4 * passes.seconds)
        name += "-recomputed" if recompute == "all" else ""
        title = f"{name}: {format_seconds(passes.seconds)}, of which devices idle {1 - busy:.1%}"
        yield f"pipeline-{name}.svg", svg(passes, title=title)


def bucket_timelines() -> Iterator[tuple[str, str]]:
    """The step of docs/one_bucket.md, with the bucket's operations and waits lit."""
    for name in ("Serial", "Overlapped"):
        title = f"{name}: bucket {BUCKET} in one step"
        yield f"bucket-{name.lower()}.svg", lit(step.planned(PLAIN, name), title)
    for name, graph in step.RECIPES.items():
        if name != "clipping":
            yield f"bucket-{name.replace(' ', '-')}.svg", lit(step.planned(graph), name.capitalize())
    for name in ("Overlapped", "Interleaved"):
        title = f"{name}, one rank of two, no clipping"
        yield f"bucket-ranks-{name.lower()}.svg", lit(step.planned(step.TWO_RANKS, name), title)
    bad, writes, reads = step.broken(step.planned(PLAIN))
    title = f"Without the wait: {writes} begins while {reads} still reads {reads.reads[0]}"
    yield "bucket-race.svg", lit(bad, title, step.SLOW_BUS, {writes.name, reads.name})
    yield "bucket-streamed.svg", lit(step.planned(step.STREAMED), "Parameters on the host, two micro-batches")
    title = f"Where the bytes of bucket {BUCKET} are, and how long"
    yield "bucket-bytes.svg", svg(lifetimes(PLAIN), title=title, width=900)
    title += ", with parameters on the host"
    yield "bucket-streamed-bytes.svg", svg(lifetimes(step.STREAMED), title=title, width=900)


def lit(plan: Plan, title: str, hardware: Hardware = ROUND, names: set[str] | None = None) -> str:
    """A plan's timeline; all but `names`, or if None the bucket's operations, is faint and without arrows.

    A millisecond is as wide in all of them.
    """
    names = {op.name for op in step.walk(plan.graph)} if names is None else names
    waits = tuple(w if op.name in names else () for op, w in zip(plan.graph, plan.waits, strict=True))

    def fainter(bar: re.Match[str]) -> str:
        if bar[3] in names:
            return bar[0]
        text = '<text class="dim"' if bar[5] else ""
        return f'{bar[1]} fill-opacity=".25"{bar[2]}{bar[3]}{bar[4]}{text}'

    timeline = simulate(plan, hardware)
    width = 130 + round(4200 * timeline.seconds)
    return BAR.sub(fainter, svg(timeline, plan=evolve(plan, waits=waits), title=title, width=width))


def lifetimes(graph: Graph) -> Timeline:
    """A lane for each region of the bucket, and a bar while it holds what is still needed, named by its writer."""
    timeline = simulate(step.planned(graph))
    at, names = {e.op: e for e in timeline.events}, [op.name for op in graph]
    bars: list[Event] = []
    for region in step.boxes(graph):
        held = [*step.values(graph, region)]
        writer = next(op.verb for op in reversed(graph.ops) if region in op.writes)
        starts = [0.0 if born is None else at[names[born]].start for born, _ in held]
        for (born, last), start, after in zip(held, starts, [*starts[1:], timeline.seconds], strict=True):
            end = timeline.seconds if last is None else at[names[last]].end
            name = f"{writer}[the step before]" if born is None else names[born]
            bars.append(Event(str(region), name, "host", start, min(end, after)))
    return Timeline(tuple(bars), timeline.source)


# --- where the bytes are ----------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {  # settings of a step, by what is said of it
    "everything on the card": {"state_on": "device"},
    "gradients and Adam on the host": {},
    "parameters and activations too": {"params_on": "host", "activations_on": "host"},
    "Adam's state on a drive": {
        "params_on": "host",
        "activations_on": "host",
        "state_on": "disk",
        "swap": ("x",),
    },
}
CARD, LABEL, ROW, GIB = 24e9 / 2**30, 232.0, 38.0, 3.5  # GiB of the card; px of labels, of a row, of a GiB


def planned_bytes(settings: dict[str, Any]) -> dict[str, float]:
    """GiB by tier of a step of a GPT of 32 layers of 4,096 (6.9 billion parameters) with 4 rows of 2,048 tokens."""
    width, vocabulary, rows = 4096, 50257, 4 * 2048
    table, block = Parameter("table", (vocabulary, width)), (12, width, width)
    segments = [[table], *([Parameter(f"block{n}", block)] for n in range(32)), [evolve(table, name="head")]]
    chosen = StepSettings(clip_norm=1.0, **settings)
    layout = make_layout(segments, bucket_size=table.numel, within_segments=chosen.streams)
    every, none = frozenset(range(len(layout.buckets))), frozenset[int]()
    cost = SegmentCost(PassCost(1), PassCost(2), input_bytes=2 * width * rows)
    spec = StepSpec(layout, (cost,) * len(segments), chosen)
    spec = evolve(
        spec,
        resident=every if chosen.state_on == "device" else none,
        paged=every if chosen.state_on == "disk" else none,
    )
    peaks = peak_memory(schedules.Overlapped()(Graph(tuple(zero_offload(spec)))))
    return {tier: (peak.kept + peak.transient) / 2**30 for tier, peak in peaks.items()}


def bytes_picture() -> str:
    """Where the bytes of a step are, a row for each of `PLACES`, and the card as a line."""
    width, bottom = LABEL + 110 * GIB + 190, 84 + ROW * len(PLACES)
    size_ = f'width="{width:g}" height="{bottom + 26:g}"'
    line = LABEL + CARD * GIB
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size_} viewBox="0 0 {width:g} {bottom + 26:g}" role="img">',
        f'{STYLE}<rect class="page" {size_} rx="8"/>',
        _text(MARGIN, 28, "One step of a GPT of 6.9 billion parameters, 8,192 tokens, in GiB", "title"),
        _text(LABEL, 58, "on the card", "name"),
        *(
            _text(width - right, 58, name, "name", "end")
            for right, name in ((100, "host"), (MARGIN, "drive"))
        ),
    ]
    for n, (label, settings) in enumerate(PLACES.items()):
        gib, y = planned_bytes(settings), 70 + ROW * n
        host, fits = gib["pinned"] + gib["host"], gib["device"] < CARD
        colour = colour_of("forward") if fits else "var(--dim)"
        parts += [
            _text(MARGIN, y + 16, label),
            f'<rect x="{LABEL}" y="{y:g}" width="{gib["device"] * GIB:.1f}" height="22" rx="3" fill="{colour}"/>',
            _text(
                max(LABEL + gib["device"] * GIB, 0 if not fits else line) + 8,
                y + 16,
                f"{gib['device']:.1f}",
                "name",
            ),
            _text(width - 100, y + 16, f"{host:.0f}", "", "end"),
            _text(width - MARGIN, y + 16, f"{gib['disk']:.0f}", "", "end"),
        ]
    parts += [
        f'<path class="arrow" d="M{line:.1f} 64V{bottom - 8:g}" stroke-dasharray="5 4"/>',
        _text(line, bottom + 8, "a card of 24 GB", "dim small", "middle"),
    ]
    return "\n".join([*parts, "</svg>\n"])


# --- one operation ---------------------------------------------------------------------------------------

COLUMNS = {"device": "device", "pinned": "host, pinned", "host": "host"}
MARGIN, COLUMN, GUTTER, HEAD, GAP = 18.0, 180.0, 162.0, 92.0, 8.0
HUNDRED, LEAST, LETTER = 35.0, 19.0, 6.7  # px: a box of 2 bytes a parameter, the lowest box, a letter
STYLE = """<style>
svg { --page: #ffffff; --ink: #1f2328; --dim: #656d76; --line: #d8dee4; }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #30363d; } }
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.page { fill: var(--page); }
.title { font-size: 15px; font-weight: 600; }
.dim { fill: var(--dim); }
text.on { fill: #10151b; }
text.small { font-size: 11px; }
text.name { font-weight: 600; }
.column { fill: var(--line); fill-opacity: .35; }
.empty { fill: none; stroke: var(--dim); stroke-opacity: .55; stroke-dasharray: 4 4; }
.held { fill-opacity: .38; }
.read { stroke: var(--ink); stroke-opacity: .55; stroke-width: 1; }
.written { stroke: var(--ink); stroke-width: 2.5; }
.arrow { fill: none; stroke: var(--ink); stroke-opacity: .75; stroke-width: 1.3; }
.tip { fill: var(--ink); fill-opacity: .85; }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
orient="auto-start-reverse"><path class="tip" d="M0 .8 8 4 0 7.2z"/></marker></defs>"""


@frozen
class Box:
    """A region's place in the picture, in px."""

    region: Region
    x: float
    y: float
    height: float

    @property
    def middle(self) -> float:
        """Its centre line."""
        return self.y + self.height / 2


def placed() -> list[Box]:
    """A column for each tier; a box is as high as its region is large."""
    result: list[Box] = []
    for n, tier in enumerate(COLUMNS):
        y = HEAD
        for r in (r for r in step.boxes(PLAIN) if r.tier == tier):
            height = max(LEAST, HUNDRED * r.nbytes / (2 * BLOCK))
            result.append(Box(r, MARGIN + n * (COLUMN + GUTTER), y, height))
            y += height + GAP
    return result


def operation_picture(op: Op | None) -> str:
    """The regions of the bucket that one operation reads and writes, or for None the bucket before the step."""
    boxes = placed()
    bottom = max(b.y + b.height for b in boxes) + 12
    width, height = 2 * MARGIN + 3 * COLUMN + 2 * GUTTER, bottom + 58
    size_ = f'width="{width:g}" height="{height:g}"'
    title = op.name if op else f"Bucket {BUCKET} between two steps"
    note = _besides(op) if op else "filled: holds what is still needed; dashed: room"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size_} viewBox="0 0 {width:g} {height:g}" role="img">',
        f'{STYLE}<rect class="page" {size_} rx="8"/>',
        _text(MARGIN, 30, title, "title"),
        _text(MARGIN, 49, _subtitle(op) if op else "", "dim"),
    ]
    for n, tier in enumerate(COLUMNS):
        parts += _column(tier, MARGIN + n * (COLUMN + GUTTER), bottom, op)
    for box in boxes:
        parts += _box(box, op)
    parts += _operation(op, boxes) if op else ()
    return "\n".join([*parts, _text(MARGIN, bottom + 40, note, "dim small"), "</svg>\n"])


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _subtitle(op: Op) -> str:
    """Where an operation runs, how long alone, and what it waits for."""
    plan = step.planned(PLAIN)
    waits = [PLAIN.ops[n].name for n in plan.waits[PLAIN.position[op.name]]]
    after = f"waits for {', '.join(waits)}" if waits else "waits for no other lane"
    return f"{op.kind} lane, {format_seconds(ROUND.seconds(op))} alone; {after}"


def _column(tier: str, x: float, bottom: float, op: Op | None) -> Iterator[str]:
    regions = [r for r in step.boxes(PLAIN) if r.tier == tier]
    written = op.writes if op else ()
    used = sum(r.nbytes for r in regions if r in written or step.is_held(PLAIN, r, op))
    room = f'width="{COLUMN + 16:g}" height="{bottom - HEAD + 34:g}"'
    yield f'<rect class="column" x="{x - 8:g}" y="{HEAD - 26:g}" {room} rx="6"/>'
    yield _text(x, HEAD - 9, COLUMNS[tier], "name")
    yield _text(x + COLUMN, HEAD - 9, f"in use {step.size(used)}", "dim small", "end")


def _box(box: Box, op: Op | None) -> Iterator[str]:
    r, now = box.region, PLAIN.position[op.name] if op else 0
    writers = [other for other in PLAIN if r in other.writes]
    before = [other for other in writers if PLAIN.position[other.name] < now] or writers
    kind, by, tone = "empty", None, "dim"
    if op and r in op.writes:
        kind, by, tone = "written", op, "on"
    elif op and r in op.reads:
        kind, by, tone = "read", before[-1], "on"
    elif step.is_held(PLAIN, r, op):
        kind, by, tone = "held", before[-1], ""
    fill = f' style="fill: {colour_of(by.verb)}"' if by else ""
    place = f'x="{box.x:g}" y="{box.y:.1f}" width="{COLUMN:g}" height="{box.height:.1f}"'
    yield f'<rect class="{kind}" {place} rx="4"{fill}><title>{r}: {r.nbytes:,} bytes, {kind}</title></rect>'
    tall = box.height >= 34 and step.WORDS[r.buffer]
    y = box.middle - 3 if tall else box.middle + 4
    yield _text(box.x + 8, y, str(r), f"{tone} name")
    yield _text(box.x + COLUMN - 8, y, step.size(r.nbytes), tone, "end")
    if tall:
        yield _text(box.x + 8, y + 15, step.WORDS[r.buffer], f"{tone} small")


def _operation(op: Op, boxes: list[Box]) -> Iterator[str]:
    """The operation between the columns, and an arrow for every box that it reads or writes."""
    touched = [b for b in boxes if b.region in op.regions]
    x = MARGIN + COLUMN + GUTTER / 2 + (COLUMN + GUTTER) * (op.kind == "host")
    sides = {-1: [b for b in touched if b.x < x], 1: [b for b in touched if b.x > x]}
    half = max(18.0, *(8.0 * len(side) for side in sides.values()))
    y = max(HEAD + half, sum(b.middle for b in touched) / len(touched))
    wide = max(LETTER * max(len(op.verb), len(step.work(op))) + 22, 64)
    for sign, side in sides.items():
        for k, box in enumerate(side):
            port, x2 = y + (k - (len(side) - 1) / 2) * 15, x + sign * (wide / 2 + 1)
            x1 = box.x + (COLUMN + 2 if sign < 0 else -2)
            bend = (x2 - x1) * 0.55
            into = ' marker-end="url(#tip)"' if box.region in op.reads else ""
            out = ' marker-start="url(#tip)"' if box.region in op.writes else ""
            curve = f"{x1 + bend:.1f} {box.middle:.1f} {x2 - bend:.1f} {port:.1f} {x2:.1f} {port:.1f}"
            yield f'<path class="arrow" d="M{x1:.1f} {box.middle:.1f}C{curve}"{into}{out}/>'
    room = f'width="{wide:.1f}" height="{2 * half:g}"'
    yield f'<rect x="{x - wide / 2:.1f}" y="{y - half:.1f}" {room} rx="9" style="fill: {colour_of(op.verb)}"/>'
    yield _text(x, y + (-2 if step.work(op) else 4), op.verb, "on name", "middle")
    yield _text(x, y + 13, step.work(op), "on small", "middle")


def _besides(op: Op) -> str:
    """The regions of an operation that are not in the picture."""
    shown = step.boxes(PLAIN)
    besides = {"also reads": op.reads, "also writes": op.writes}
    others = {what: [str(r) for r in regions if r not in shown] for what, regions in besides.items()}
    return "; ".join(f"{what} {', '.join(names)}" for what, names in others.items() if names)


def pictures() -> Iterator[tuple[str, str]]:
    """Every picture, by file name."""
    yield "bytes.svg", bytes_picture()
    yield from schedule_pictures()
    yield from pipeline_pictures()
    yield from bucket_timelines()
    yield "bucket-rest.svg", operation_picture(None)
    yield from ((f"bucket-{op.verb}.svg", operation_picture(op)) for op in step.walk(PLAIN))


if __name__ == "__main__":
    for name, picture in pictures():
        (FOLDER / name).write_text(picture)
