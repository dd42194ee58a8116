"""The tables of docs/one_bucket.md: what is moved, what follows what, and what other schedules and recipes change.

The invariant: cells are what the graph, the plan or the simulated step says; only headings are written here.
"""

from collections.abc import Iterable

from one_bucket_step import (
    BLOCK,
    BUCKET,
    PLAIN,
    RECIPES,
    boxes,
    graph_of,
    ops_of,
    planned,
    size,
    values,
    walk,
)

from zfunc.core.graph import Graph, Kind, Op, Region, Tier
from zfunc.core.hardware import ROUND
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Event
from zfunc.units import format_seconds

SCHEDULES = ("Serial", "Overlapped", "Interleaved", "CriticalPath")


def tables() -> dict[str, str]:
    """Every table of the page, by name."""
    return {
        "walk": walk_table(),
        "orders": orders_table(),
        "schedules": schedules_table(),
        "recipes": recipes_table(),
        "parts": parts_table(),
    }


def walk_table() -> str:
    """The stations, with what each moves."""
    rows = [
        (code([op.name]), op.kind, work(op), f"{op.nbytes / BLOCK:.2g}" if op.nbytes > 8 else "",
         format_seconds(ROUND.seconds(op)))
        for op in walk(PLAIN)
    ]  # fmt: skip
    return table(("operation", "lane", "work", "bytes a parameter", "alone, on round numbers"), rows)


def orders_table() -> str:
    """Of each station, what it has to follow and because of what; and what sees to that under Overlapped."""
    plan = planned(PLAIN)
    rows: list[tuple[str, ...]] = []
    for op in walk(PLAIN):
        i = PLAIN.position[op.name]
        kept: dict[str, dict[Region, list[str]]] = {"wait": {}, "lane": {}, "others": {}}
        for c in (c for c in PLAIN.conflicts if c.after == i):
            on_lane = plan.place[c.before][0] == plan.place[i][0]
            by = "wait" if c.before in plan.waits[i] else "lane" if on_lane else "others"
            kept[by].setdefault(c.region, []).append(PLAIN.ops[c.before].name)
        cells = ("<br>".join(f"{code(names)} for `{r}`" for r, names in by.items()) for by in kept.values())
        rows.append((code([op.name]), *cells))
    return table(("operation", "waits for", "kept by its lane's order", "implied by other waits"), rows)


def schedules_table() -> str:
    """What each schedule makes of the same operations."""
    rows: list[tuple[str, ...]] = []
    first: dict[str, str] = {}
    for name in SCHEDULES:
        plan = planned(PLAIN, name)
        at, same = events(plan), first.setdefault(plan.digest, name)
        moved = size(sum(op.nbytes for op in ops_of(plan.graph)))
        ends = (format_seconds(at[named(verb).name].end) for verb in ("to_host", "adam", "to_device"))
        told = name if same == name else f"{name}: the plan of {same}"
        rows.append(
            (
                told,
                str(len(plan.lanes)),
                str(plan.num_waits),
                *ends,
                format_seconds(simulate(plan).seconds),
                moved,
            )
        )
    head = (
        "schedule",
        "lanes",
        "waits",
        "gradient on the host",
        "updated",
        "new on the device",
        "step",
        "bytes",
    )
    return table(head, rows)


def recipes_table() -> str:
    """The bucket's operations and the step under four recipes."""
    rows = [
        (name, code(op.verb for op in walk(graph)), format_seconds(simulate(planned(graph)).seconds))
        for name, graph in RECIPES.items()
    ]
    return table(
        ("recipe", "the bucket's operations and the step's, in serial order", "step, Overlapped"), rows
    )


def parts_table() -> str:
    """What one rank moves of the bucket in a step, with more micro-batches and with more ranks."""
    cases = {
        "as above": PLAIN,
        "4 micro-batches": graph_of(micro_batches=4),
        "2 ranks": graph_of(world=2),
        "8 ranks": graph_of(world=8),
    }

    def moved(graph: Graph, kind: Kind) -> str:
        return size(sum(op.nbytes for op in ops_of(graph) if op.kind == kind))

    def kept(graph: Graph, tier: Tier) -> str:
        there = (r for r in boxes(graph) if r.tier == tier and any(v.last is None for v in values(graph, r)))
        return size(sum(r.nbytes for r in there))

    rows = [
        ("operations of the bucket", *(str(len(ops_of(g))) for g in cases.values())),
        ("kept on the device", *(kept(g, "device") for g in cases.values())),
        ("kept on the host", *(kept(g, "host") for g in cases.values())),
        ("over the bus, down", *(moved(g, "d2h") for g in cases.values())),
        ("swept over on the host", *(moved(g, "host") for g in cases.values())),
        ("over the bus, up", *(moved(g, "h2d") for g in cases.values())),
        ("between ranks", *(moved(g, "network") for g in cases.values())),
    ]
    return table((f"of bucket {BUCKET}, for one rank", *cases), rows)


def named(verb: str) -> Op:
    """The operation of the walk with that verb."""
    return next(op for op in walk(PLAIN) if op.verb == verb)


def waits(plan: Plan, op: Op) -> list[str]:
    """The operations on other lanes that `op` waits for."""
    return [plan.graph.ops[n].name for n in plan.waits[plan.graph.position[op.name]]]


def events(plan: Plan) -> dict[str, Event]:
    """What the plan takes on round-number hardware, by operation."""
    return {e.op: e for e in simulate(plan).events}


def work(op: Op) -> str:
    """Bytes moved, or arithmetic."""
    return size(op.nbytes) if op.nbytes else f"{op.flops / 1e12:.2g} TFLOP" if op.flops else ""


def code(names: Iterable[str]) -> str:
    """Names as code spans."""
    return ", ".join(f"`{name}`" for name in names)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table with room around it."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return "\n\n" + "\n".join(lines) + "\n\n"


def in_letters(n: int) -> str:
    """A small number as a word."""
    return ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")[n]
