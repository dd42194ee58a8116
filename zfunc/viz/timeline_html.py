"""A step as one HTML page to look into: zoom, what each operation is and waited for, the critical path.

Data is JSON in an element that does not run. In `web/`, `model.js` reads and computes, `paint.js` paints,
`words.js` writes texts, `page.js` handles input, of this page and of the live one; `timeline.js` opens it.
"""

import json
from collections.abc import Iterable
from html import escape
from math import floor, log10
from typing import Any

from zfunc.core.critical_path import (
    bound_by,
    bounds_in_words,
    critical_path_of,
    events_of,
    held_up_by,
    last_of,
)
from zfunc.core.display import html_table
from zfunc.core.graph import KINDS
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.units import format_seconds
from zfunc.viz.compare import Sum, by_lane, by_verb, sums
from zfunc.viz.legend import (
    Timelines,
    colour_of,
    heading_of,
    lanes_of,
    micro_batches_of,
    timeline_tuple,
    verb_of,
    verbs_of,
)
from zfunc.viz.web_page import web_file, web_page

SCRIPTS = ("model.js", "paint.js", "words.js", "page.js", "timeline.js")  # run as one, in this order
TITLE = "One training step"


def page(timelines: Timelines, *, plan: Plan, title: str = "") -> str:
    """One self-contained HTML file that shows timelines of `plan`, for each lane a row for each timeline.

    Light and dark, for pointer, fingers and keys; 10,000 operations move smoothly, 100,000 open. Times are kept to
    a billionth of the step. Raises ValueError for a timeline that is not of `plan`.

    >>> from zfunc.core.graph import Graph, Op
    >>> from zfunc.core.plan import build
    >>> from zfunc.core.simulator import simulate
    >>> plan = build(Graph((Op("use", (), "compute", nbytes=2),)), {"gpu": [0]})
    >>> page(simulate(plan), plan=plan).splitlines()[0]
    '<!doctype html>'
    """
    shown = timeline_tuple(timelines)
    return web_page(
        "page.html",
        stylesheets=("page.css",),
        scripts=SCRIPTS,
        title=title or TITLE,
        stage=web_file("stage.html"),
        summaries="".join(f"<li>{escape(_summary(t, plan))}</li>" for t in shown),
        tables=_table("lane", shown, _lane_sums(shown)) + _table("verb", shown, _verb_sums(shown, plan)),
        data=page_json(data(shown, plan)),
    )


def data(timelines: Timelines, plan: Plan) -> dict[str, Any]:
    """The values that the HTML page of timelines shows, in JSON's types.

    Operations, verbs, kinds, lanes and regions are numbers wherever they are referred to; times are whole numbers
    of each timeline's `tick`, in seconds.
    """
    ops = plan.graph.ops
    verbs = {verb: n for n, verb in enumerate(dict.fromkeys(op.verb for op in ops))}
    regions = {r: n for n, r in enumerate(plan.graph.regions)}
    shown = timeline_tuple(timelines)
    numbered = {verb_of(op) for op in micro_batches_of(shown)}
    on = {lane.name: lane.ops for lane in plan.lanes}
    return {
        "verbs": list(verbs),
        "colours": list(map(colour_of, verbs)),
        "kinds": KINDS,
        # By their micro-batch, where their name does not fit.
        "numbered": [verb in numbered for verb in verbs],
        "lanes": [{"name": x, "ops": on[x], "thin": thin} for x, thin in lanes_of(shown).items()],
        "regions": list(map(str, regions)),
        "ops": {
            "verb": [verbs[op.verb] for op in ops],
            "index": [op.index for op in ops],
            "kind": [KINDS.index(op.kind) for op in ops],
            "flops": [op.flops for op in ops],
            "nbytes": [op.nbytes for op in ops],
            "reads": [[regions[r] for r in op.reads] for op in ops],
            "writes": [[regions[r] for r in op.writes] for op in ops],
            "waits": plan.waits,
        },
        "timelines": [_times(t, plan) for t in shown],
    }


def _times(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    events = events_of(plan, timeline)
    tick = 10.0 ** (floor(log10(timeline.seconds)) - 9) if timeline.seconds else 1.0
    start, end = ([round(getattr(e, x) / tick) for e in events] for x in ("start", "end"))
    return {
        "source": timeline.source,
        "tick": tick,
        "start": start,
        "took": [b - a for a, b in zip(start, end, strict=True)],
        "after": held_up_by(plan, events),
        "last": last_of(events),
    }


def _summary(timeline: Timeline, plan: Plan) -> str:
    return f"{heading_of(timeline)}; bound by {bounds_in_words(bound_by(critical_path_of(plan, timeline)))}"


def _verb_sums(shown: tuple[Timeline, ...], plan: Plan) -> list[Sum]:
    """The sums of seconds by verb, in the order in which verbs appear in the graph."""
    number = verbs_of(shown, plan)
    return sorted(sums(shown, by_verb), key=lambda row: number[row.name])


def _lane_sums(shown: tuple[Timeline, ...]) -> list[Sum]:
    """The sums of seconds by lane, in the order in which lanes are drawn, from above."""
    lanes = [*lanes_of(shown)]
    return sorted(sums(shown, by_lane), key=lambda row: lanes.index(row.name))


def _table(what: str, shown: tuple[Timeline, ...], rows: Iterable[Sum]) -> str:
    heads = [what, "operations", *(head for t in shown for head in (t.source, "of the step"))]
    ratio = ["ratio"] if len(shown) > 1 else []
    return html_table([*heads, *ratio], (_cells(row, shown) for row in rows))


def _cells(row: Sum, shown: tuple[Timeline, ...]) -> list[str]:
    cells = [row.name, f"{row.ops:,}"]
    for seconds, t in zip(row.seconds, shown, strict=True):
        cells += [format_seconds(seconds), f"{seconds / (t.seconds or 1.0):.0%}"]
    return [*cells, "" if row.ratio is None else f"{row.ratio:.2f}"] if len(shown) > 1 else cells


def page_json(value: Any) -> str:
    """`value` as JSON that cannot end its HTML element: `<` occurs only in strings, and is escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
