"""Where a bucket's bytes are while one operation runs, as SVG: docs/bucket-pack.svg and so on.

The invariant: what is filled, lit and joined by arrows is what `one_bucket_step` finds in the graph. A box is as
high as its region is large, but for those of a few bytes. An arrow is an entry of the operation's reads or writes.
"""

from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from attrs import frozen
from one_bucket_step import BLOCK, BUCKET, GRAPHS, WORDS, boxes, size, values, walk, writer_before
from scale_charts import STYLE, text

from zfunc.core.graph import Graph, Op, Region, Tier
from zfunc.viz.legend import PALETTE, colour_of

COLUMNS: dict[Tier, str] = {"device": "device", "pinned": "host, pinned", "host": "host"}
MARGIN, COLUMN, GUTTER, HEAD, GAP = 18.0, 180.0, 162.0, 92.0, 8.0
HUNDRED, LEAST = 35.0, 19.0  # px: a box of 2 bytes a parameter, and the lowest there is
LETTER = 6.7
COLOURS = {op.verb: colour_of(op.verb) for graph in GRAPHS for op in graph}
MORE = """<style>
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
orient="auto-start-reverse"><path class="tip" d="M0 .8 8 4 0 7.2z"/></marker></defs>
"""


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


def placed(graph: Graph) -> list[Box]:
    """A column for each tier, boxes from the top in the order of WORDS."""
    made: list[Box] = []
    for n, tier in enumerate(COLUMNS):
        y = HEAD
        for r in boxes(graph):
            if r.tier == tier:
                height = max(LEAST, HUNDRED * r.nbytes / (2 * BLOCK))
                made.append(Box(r, MARGIN + n * (COLUMN + GUTTER), y, height))
                y += height + GAP
    return made


def frame(graph: Graph, op: Op | None, title: str, subtitle: str) -> str:
    """The picture of one operation, or of the bucket at rest before the step."""
    made = placed(graph)
    bottom = max(b.y + b.height for b in made) + 12
    width = 2 * MARGIN + 3 * COLUMN + 2 * GUTTER
    parts = [
        *_head(title, subtitle, COLOURS[op.verb] if op else ""),
        *_columns(graph, op, bottom),
        *(part for box in made for part in _box(graph, box, op)),
        *(_operation(op, made) if op else ()),
        *_foot(graph, op, bottom + 28),
    ]
    return svg(width, bottom + (36 if op and all(r in boxes(graph) for r in op.regions) else 58), parts)


def svg(width: float, height: float, parts: Iterable[str]) -> str:
    """A whole picture for light and dark pages."""
    size_ = f'width="{width:g}" height="{height:g}"'
    page = f'<rect class="page" {size_} rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size_} viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, STYLE + MORE + page, *parts, "</svg>\n"])


def held(graph: Graph, region: Region, op: Op | None) -> bool:
    """Whether a region holds something that is still needed when `op`, or the step, begins."""
    i = graph.position[op.name] if op else 0
    return any(v.is_held(i) for v in values(graph, region))


def _head(title: str, subtitle: str, colour: str) -> Iterator[str]:
    indent = 22 if colour else 0
    if colour:
        yield f'<rect x="{MARGIN:g}" y="17" width="14" height="14" rx="3" fill="{colour}"/>'
    yield text(MARGIN + indent, 30, escape(title), "title")
    yield text(MARGIN + indent, 49, escape(subtitle), "dim")


def _columns(graph: Graph, op: Op | None, bottom: float) -> Iterator[str]:
    for n, (tier, words) in enumerate(COLUMNS.items()):
        x = MARGIN + n * (COLUMN + GUTTER)
        there = [
            r for r in boxes(graph) if r.tier == tier and (held(graph, r, op) or (op and r in op.writes))
        ]
        room = f'width="{COLUMN + 16:g}" height="{bottom - HEAD + 34:g}"'
        yield f'<rect class="column" x="{x - 8:g}" y="{HEAD - 26:g}" {room} rx="6"/>'
        yield text(x, HEAD - 9, words, "name")
        yield text(x + COLUMN, HEAD - 9, f"in use {size(sum(r.nbytes for r in there))}", "dim small", "end")


def _box(graph: Graph, box: Box, op: Op | None) -> Iterator[str]:
    r, written = box.region, op is not None and box.region in op.writes
    read = op is not None and r in op.reads
    by = op if written else writer_before(graph, r, graph.position[op.name] if op else 0)
    there = held(graph, r, op)
    kind = "written" if written else "read" if read else "held" if there else "empty"
    fill = f' style="fill: {COLOURS[by.verb]}"' if by and kind != "empty" else ""
    place = f'x="{box.x:g}" y="{box.y:.1f}" width="{COLUMN:g}" height="{box.height:.1f}"'
    yield f'<rect class="{kind}" {place} rx="4"{fill}><title>{r}: {r.nbytes:,} bytes, {kind}</title></rect>'
    tone = {"written": "on", "read": "on", "held": "", "empty": "dim"}[kind]
    tall = box.height >= 34 and WORDS[r.buffer]
    y = box.middle - 3 if tall else box.middle + 4
    yield text(box.x + 8, y, str(r), f"{tone} name")
    yield text(box.x + COLUMN - 8, y, size(r.nbytes), tone, "end")
    if tall:
        yield text(box.x + 8, y + 15, WORDS[r.buffer], f"{tone} small")


def _operation(op: Op, made: Sequence[Box]) -> Iterator[str]:
    """The operation between the columns, and an arrow for everything it reads or writes there."""
    touched = [b for b in made if b.region in op.regions]
    x = MARGIN + COLUMN + GUTTER / 2 + (COLUMN + GUTTER) * (op.kind == "host")
    sides = {-1: [b for b in touched if b.x < x], 1: [b for b in touched if b.x > x]}
    half = max(18.0, *(8.0 * len(side) for side in sides.values()))
    y = max(HEAD + half, sum(b.middle for b in touched) / len(touched))
    said = [op.verb, _work(op)]
    wide = max(LETTER * max(map(len, said)) + 22, 64)
    for sign, side in sides.items():
        for k, box in enumerate(side):
            port = y + (k - (len(side) - 1) / 2) * 15
            edge = box.x + (COLUMN + 2 if sign < 0 else -2)
            yield _arrow((edge, box.middle), (x + sign * (wide / 2 + 1), port), op, box.region)
    room = f'width="{wide:.1f}" height="{2 * half:g}"'
    yield f'<rect x="{x - wide / 2:.1f}" y="{y - half:.1f}" {room} rx="9" style="fill: {COLOURS[op.verb]}"/>'
    yield text(x, y + (-2 if said[1] else 4), said[0], "on name", "middle")
    yield text(x, y + 13, said[1], "on small", "middle")


def _arrow(box: tuple[float, float], node: tuple[float, float], op: Op, region: Region) -> str:
    """From the box to the operation that reads it, from the operation to the box it writes, or both."""
    (x1, y1), (x2, y2) = box, node
    bend = (x2 - x1) * 0.55
    into = ' marker-end="url(#tip)"' if region in op.reads else ""
    out = ' marker-start="url(#tip)"' if region in op.writes else ""
    curve = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    return f'<path class="arrow" d="{curve}"{into}{out}/>'


def _work(op: Op) -> str:
    """Its bytes, or its arithmetic."""
    if op.nbytes:
        return size(op.nbytes)
    return f"{op.flops / 1e12:.2g} TFLOP" if op.flops else ""


def _foot(graph: Graph, op: Op | None, y: float) -> Iterator[str]:
    """What is touched besides, or before the step what the signs mean."""
    if op is None:
        x = MARGIN
        for kind, words in (("held", "holds what is still needed"), ("empty", "nothing of this bucket")):
            colour = f' style="fill: {PALETTE[0]}"' if kind == "held" else ""
            yield f'<rect class="{kind}" x="{x:g}" y="{y + 2:g}" width="22" height="12" rx="3"{colour}/>'
            yield text(x + 30, y + 12, words, "dim")
            x += 46 + LETTER * len(words) + 10
        return
    shown = boxes(graph)
    besides = {
        "also reads": [r for r in op.reads if r not in shown],
        "also writes": [r for r in op.writes if r not in shown],
    }
    words = "; ".join(f"{what} {', '.join(map(str, of))}" for what, of in besides.items() if of)
    yield text(MARGIN, y + 12, words, "dim small")


def frames(graph: Graph, subtitles: dict[str, str]) -> dict[str, str]:
    """A picture for each station of the walk, by file name, and one of the bucket at rest."""
    made = {"bucket-rest.svg": frame(graph, None, f"Bucket {BUCKET} between two steps", subtitles[""])}
    for op in walk(graph):
        made[f"bucket-{op.verb}.svg"] = frame(graph, op, op.name, subtitles[op.name])
    return made
