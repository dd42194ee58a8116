"""The step, live: one HTML page that simulates plans by itself, while the figures of the machine change.

Python writes what plans are made of: operations with their work, regions, lanes, waits. In `web/`, `simulate.js` is
`zfunc.core.simulator` and `zfunc.core.memory_model`, `verify.js` is `zfunc.core.verifier`; `live.js` is the page.
The invariant: times, bytes and races are those that Python finds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from zfunc.core.graph import HOST_CODE, KINDS, TIERS, Graph, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import persistent_bytes
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.viz.legend import colour_of, lanes_of, micro_batches_of, verb_of
from zfunc.viz.timeline_html import page_json
from zfunc.viz.web_page import web_file, web_page

TITLE = "One training step, live"

SCRIPTS = ("simulate.js", "verify.js", "model.js", "paint.js", "words.js", "page.js", "live.js")
Answers = tuple[str, ...]  # of a plan, to the questions that tell plans apart


def live_page(
    plans: Mapping[Answers, Plan], hardware: Hardware, *, questions: Sequence[str], title: str = ""
) -> str:
    """One self-contained HTML file with `plans`, by their answers to `questions`, simulated on `hardware` at first.

    The page opens with the first plan. Sliders change rates; a click removes a wait, and the page names the
    data races that this allows.

    >>> from zfunc.core.graph import Op
    >>> from zfunc.core.hardware import ROUND
    >>> from zfunc.core.plan import build
    >>> plan = build(Graph((Op("use", (), "compute", nbytes=2),)), {"gpu": [0]})
    >>> live_page({("mine",): plan}, ROUND, questions=["schedule"]).splitlines()[0]
    '<!doctype html>'
    """
    return web_page(
        "live.html",
        stylesheets=("page.css", "live.css"),
        scripts=SCRIPTS,
        title=title or TITLE,
        stage=web_file("stage.html"),
        number=f"{len(plans)}",
        data=page_json(live_data(plans, hardware, questions)),
    )


def live_data(plans: Mapping[Answers, Plan], hardware: Hardware, questions: Sequence[str]) -> dict[str, Any]:
    """The values that the page of `live_page` simulates and shows, in JSON's types.

    Verbs, kinds, tiers, lanes, regions and operations are given once and referred to by index, and so is a
    graph that several plans share.
    """
    graphs = {id(plan.graph): plan.graph for plan in plans.values()}
    verbs = [*dict.fromkeys(op.verb for graph in graphs.values() for op in graph)]
    places: list[Tier] = [
        *dict.fromkeys((*TIERS, *(r.place for graph in graphs.values() for r in graph.regions)))
    ]
    return {
        "kinds": KINDS,
        "unwatched": [KINDS.index(kind) for kind in HOST_CODE],
        "verbs": verbs,
        "colours": [*map(colour_of, verbs)],
        "places": places,
        "hardware": _hardware(hardware),
        "graphs": [_graph(graph, hardware, verbs, places) for graph in graphs.values()],
        "questions": questions,
        "plans": [
            {"answers": answers, "graph": [*graphs].index(id(plan.graph)), **_plan(plan, verbs)}
            for answers, plan in plans.items()
        ],
    }


def _hardware(h: Hardware) -> dict[str, Any]:
    shared = ((h.neighbours.get(name, 0), shares) for name, shares in h.shared.items())
    return {
        "name": h.name,
        "kinds": KINDS,
        "flops": h.flops,
        "attention": h.attention or h.flops,
        "rates": [h.rates[kind] for kind in KINDS],
        "latencies": [h.latencies.get(kind, h.latency) for kind in KINDS],
        "issue": [h.issue.get(kind, 0.0) for kind in KINDS],
        "locked": bool(h.issue),
        "launch": h.launch,
        "handoff": h.handoff,
        "unified": h.unified,
        "memory": h.memory,
        "collectives": h.collectives,
        "shared": [{"neighbours": n, "shares": [of.get(kind, 0.0) for kind in KINDS]} for n, of in shared],
    }


def _graph(graph: Graph, hardware: Hardware, verbs: list[str], places: Sequence[Tier]) -> dict[str, Any]:
    ops, regions, kept = graph.ops, graph.regions, persistent_bytes(graph)
    bare = evolve(hardware, measured=())
    # What was measured of an operation, over what the rates say of it: it holds at other rates, too.
    pace = [hardware.seconds(op) / (bare.seconds(op) or 1.0) for op in ops if hardware.measured]
    return {
        "ofRanks": any(r.of_rank for r in regions),
        "kept": [kept.get(place, 0) for place in places],
        "regions": {
            "name": [*map(str, regions)],
            "nbytes": [r.nbytes for r in regions],
            "place": [places.index(r.place) for r in regions],
            "kept": [int(r.kept) for r in regions],
        },
        "ops": {
            "verb": [verbs.index(op.verb) for op in ops],
            "index": [op.index for op in ops],
            "kind": [KINDS.index(op.kind) for op in ops],
            "device": [op.device for op in ops],
            "flops": [op.flops for op in ops],
            "products": [op.flops - op.attention_flops for op in ops],
            "attention": [op.attention_flops for op in ops],
            "nbytes": [op.nbytes for op in ops],
            "launches": [op.launches for op in ops],
            "copied": [op.copied_bytes for op in ops],
            "workspace": [op.workspace for op in ops],
            "reads": [reads for reads, _ in graph.accesses],
            "writes": [writes for _, writes in graph.accesses],
            **({"pace": pace} if pace else {}),
        },
    }


def _plan(plan: Plan, verbs: list[str]) -> dict[str, Any]:
    drawn = [simulate(plan)]
    shown, lanes = lanes_of(drawn), [lane.name for lane in plan.lanes]
    return {
        "lanes": [{"name": lane.name, "thread": lane.thread, "ops": lane.ops} for lane in plan.lanes],
        "rows": [{"lane": lanes.index(name), "thin": thin} for name, thin in shown.items()],
        "numbered": [*{verbs.index(verb_of(op)) for op in micro_batches_of(drawn)}],
        "waits": plan.waits,
    }
