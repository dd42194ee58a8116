"""Where one bucket's bytes are over time, as SVG: docs/bucket-bytes.svg.

The invariant: a bar lasts from the start of the operation that writes a region to the end of the last one that
reads what it wrote, as `one_bucket_step.values` has it and the simulated step times it.
"""

from collections.abc import Iterator, Mapping

from one_bucket_pictures import COLOURS, COLUMNS, MARGIN, svg
from one_bucket_step import BUCKET, Value, boxes, owners, planned, size, values
from one_bucket_timelines import BAR, LEFT, SMALL, STYLE, TOP, WIDTH, Axis, heading
from scale_charts import text

from zfunc.core.graph import Graph, Region
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event
from zfunc.viz.legend import verb_of


def lifetimes(title: str, subtitle: str, graph: Graph, schedule: str) -> str:
    """Each region the bucket is ever in, and from when to when it holds something that is still needed."""
    timeline = simulate(planned(graph, schedule))
    axis, at = Axis(timeline.seconds), {e.op: e for e in timeline.events}
    rows: list[str] = []
    y = TOP
    for tier, words in COLUMNS.items():
        rows.append(text(MARGIN, y + 2, words, "name"))
        y += 10
        for region in (r for r in boxes(graph) if r.tier == tier):
            rows += _row(graph, region, at, y, axis)
            y += BAR + 5
        y += 20
    parts = [STYLE, *heading(title, subtitle), *axis.drawn(TOP - 12, y - 14), *rows]
    return svg(WIDTH, y + 16, parts)


def _row(graph: Graph, region: Region, at: Mapping[str, Event], y: float, axis: Axis) -> Iterator[str]:
    whose = owners(graph)
    room = f'width="{WIDTH - MARGIN - LEFT:g}" height="{BAR:g}"'
    yield text(MARGIN, y + 11, str(region), "small")
    yield text(MARGIN, y + 23, size(region.nbytes), "dim small")
    yield f'<rect class="track" x="{LEFT:g}" y="{y:g}" {room} rx="3"/>'
    made = list(values(graph, region))
    names = [graph.ops[v.born].name if v.born is not None else "" for v in made]
    starts = [at[name].start if name else 0.0 for name in names]
    ends = [at[graph.ops[v.last].name].end if v.last is not None else axis.seconds for v in made]
    ends = [min(end, after) for end, after in zip(ends, [*starts[1:], axis.seconds], strict=True)]
    writer = next((op.verb for op in reversed(graph.ops) if region in op.writes), "")
    for value, name, start, end in zip(made, names, starts, ends, strict=True):
        ours = whose.get(name, BUCKET) == BUCKET
        x, wide = axis.x(start), max(axis.x(end) - axis.x(start), 3.0)
        colour = COLOURS[verb_of(name) or writer]
        yield (
            f'<rect class="{"lit" if ours else "faint"}" style="fill: {colour}" x="{x:.1f}" y="{y:g}" '
            f'width="{wide:.1f}" height="{BAR:g}" rx="2"/>'
        )
        words = next(
            (w for w in _said(name, value, whose.get(name, BUCKET)) if wide > SMALL * len(w) + 8), ""
        )
        yield text(x + wide / 2, y + 16, words, "on small" if ours else "dim small", "middle")


def _said(name: str, value: Value, bucket: int) -> tuple[str, ...]:
    """What a bar says, the longest first."""
    if bucket != BUCKET:
        return f"bucket {bucket}", str(bucket)
    if not name:
        return "from the step before", "before"
    return (f"{verb_of(name)}, for the next step",) * (value.last is None) + (verb_of(name),)
