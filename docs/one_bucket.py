"""Print the tables of docs/one_bucket.md, and the figures its text states: `python docs/one_bucket.py`.

What a region holds and until when it is needed follow from what operations read and write. `make_pictures.py` draws
the same step.
"""

import textwrap
from collections.abc import Iterator
from typing import Any

from attrs import evolve
from markdown_table import code, table

from zfunc import schedules
from zfunc.core.graph import Graph, Kind, Op, Region, Tier
from zfunc.core.hardware import ROUND
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.plan import Plan, PlanError
from zfunc.core.recipes import deferred, zero_offload
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import simulate
from zfunc.core.spec import PassCost, SegmentCost, StepSpec
from zfunc.core.timeline import Event
from zfunc.core.verifier import verify
from zfunc.units import format_seconds

BLOCKS, BUCKET = 5, 2  # the page follows the bucket in the middle
WIDTH, HIDDEN, TOKENS = 2_000, 8_500, 8_192
BLOCK = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN  # parameters
SLOW_BUS = evolve(ROUND, name="slow copies", rates={**ROUND.rates, "d2h": ROUND.rates["d2h"] / 5})
SCHEDULES = ("Serial", "Overlapped", "Interleaved", "CriticalPath")
WORDS = {  # the regions that the page shows of a bucket, in the order of the columns of a picture
    "params": "parameters, 16 bits",
    "weight_slot": "parameters, fetched",
    "grads": "gradients, as tensors",
    "grad_slot": "gradient, flat",
    "sum_slot": "sum of gradients, fp32",
    "squares": "",
    "master_high": "parameters, 16 bits",
    "host_slot": "gradient, on its way",
    "host_grad": "gradient, waits",
    "host_squares": "",
    "param_slot": "new parameters",
    "param_copy": "new parameters",
    "master": "master weights, fp32",
    "master_low": "the rest of the master",
    "exp_avg": "first moment, fp32",
    "exp_avg_sq": "second moment, fp32",
    "grad_sum": "sum of gradients, fp32",
    "norm": "",
    "decision": "",
}


def make_step(world: int = 1, tokens: int = TOKENS, state_format: str = "fp32", **settings: Any) -> StepSpec:
    """Blocks of a transformer without norms and biases, each a segment and a bucket, recomputed in backward."""
    shapes = {
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
    }
    blocks = [
        [Parameter(f"block{n}.{name}", x, state_format=state_format) for name, x in shapes.items()]
        for n in range(BLOCKS)
    ]
    forward = 2 * BLOCK * tokens
    cost = SegmentCost(PassCost(forward), PassCost(3 * forward), input_bytes=2 * WIDTH * tokens)
    layout = make_layout(blocks, bucket_size=BLOCK, world=world)
    settings = {"clip_norm": 1.0, **settings}
    return StepSpec(layout, (cost,) * BLOCKS, StepSettings(**settings), world=world)


def graph_of(world: int = 1, tokens: int = TOKENS, **settings: Any) -> Graph:
    """The plain recipe's operations, with clipping unless `clip_norm` says otherwise."""
    return Graph(tuple(zero_offload(make_step(world, tokens, **settings))))


def planned(graph: Graph, schedule: str = "Overlapped") -> Plan:
    """The graph under a schedule of that name, verified."""
    return verify(getattr(schedules, schedule)()(graph))


PLAIN = graph_of()
RECIPES = {
    "clipping": PLAIN,
    "no clipping": graph_of(clip_norm=None),
    "deferred": Graph(tuple(deferred(make_step(defer=True)))),
}
TWO_RANKS = graph_of(world=2, clip_norm=None)
HALVES = {"tokens": TOKENS // 2, "micro_batches": 2}
ON_HOST = HALVES | {"params_on": "host", "state_format": "fp32-split"}
STREAMED = graph_of(order=2, **ON_HOST)


# --- the bucket ------------------------------------------------------------------------------------------


def ops_of(graph: Graph) -> tuple[Op, ...]:
    """The bucket's operations, in serial order: those whose index has it in the second place, or alone."""
    return tuple(op for op in graph if op.index and op.verb != "load" and op.index[:2][-1] == BUCKET)


def walk(graph: Graph) -> tuple[Op, ...]:
    """The bucket's operations and the whole step's, in serial order: the sections of the page."""
    return tuple(op for op in graph if not op.index or op in ops_of(graph))


def boxes(graph: Graph) -> tuple[Region, ...]:
    """Every region the bucket is ever in, and the step's norm and decision, in the order of WORDS."""
    regions = dict.fromkeys(r for op in ops_of(graph) for r in op.regions if r.buffer in WORDS)
    regions |= dict.fromkeys(r for r in graph.regions if not r.index and r.buffer in WORDS)
    return tuple(sorted(regions, key=lambda r: list(WORDS).index(r.buffer)))


def values(graph: Graph, region: Region) -> Iterator[tuple[int | None, int | None]]:
    """What a region holds: the positions of the operation that writes a value and of the last one that reads it.

    The first is None for what the step before left there, the last for what is left to the next step.
    """
    readers = [i for i, op in enumerate(graph) if region in op.reads]
    writers = [i for i, op in enumerate(graph) if region in op.writes]
    carried = region.kept and bool(readers) and (not writers or readers[0] <= writers[0])
    for born, following in zip([None, *writers], [*writers, None], strict=True):
        last = [i for i in readers if (born is None or i > born) and (following is None or i <= following)]
        if following is None and carried:
            yield born, None
        elif last or born is not None:
            yield born, last[-1] if last else born


def is_held(graph: Graph, region: Region, op: Op | None) -> bool:
    """Whether a region holds something that is still needed when `op`, or the step, begins."""
    i = graph.position[op.name] if op else 0
    return any((b is None or b < i) and (last is None or i <= last) for b, last in values(graph, region))


def broken(plan: Plan) -> tuple[Plan, Op, Op]:
    """`plan` without the wait that keeps the bucket's gradient slot from being written too early; then the next
    operation that writes the slot, and the last one that reads the bucket's gradient there.
    """
    graph = plan.graph
    slot = next(r for op in ops_of(graph) for r in op.writes if r.buffer == "grad_slot")
    last = max(i for i, op in enumerate(graph) if slot in op.reads and op in ops_of(graph))
    after = next(i for i, op in enumerate(graph) if slot in op.writes and i > last)
    waits = [*plan.waits]
    waits[after] = tuple(n for n in waits[after] if n != last)
    return evolve(plan, waits=tuple(waits)), graph.ops[after], graph.ops[last]


# --- tables ----------------------------------------------------------------------------------------------


def size(nbytes: float) -> str:
    """Bytes in powers of 1000, to four figures.

    >>> size(8), size(12_500_096), size(1.4e9)
    ('8 B', '12.5 MB', '1.4 GB')
    """
    units = (1e9, "GB"), (1e6, "MB"), (1e3, "kB")
    unit, name = next((u for u in units if nbytes >= u[0]), (1, "B"))
    return f"{nbytes / unit:.4g} {name}"


def work(op: Op) -> str:
    """The bytes it moves, or its arithmetic."""
    return size(op.nbytes) if op.nbytes else f"{op.flops / 1e12:.2g} TFLOP" if op.flops else ""


def events(plan: Plan) -> dict[str, Event]:
    """When operations run on round-number hardware, by name."""
    return {e.op: e for e in simulate(plan).events}


def walk_table() -> str:
    """Each operation, and what it moves."""
    rows = (
        (
            code([op.name]),
            op.kind,
            work(op),
            f"{op.nbytes / BLOCK:.2g}" if op.nbytes > 8 else "",
            format_seconds(ROUND.seconds(op)),
        )
        for op in walk(PLAIN)
    )
    return table(("operation", "lane", "work", "bytes a parameter", "alone, on round numbers"), rows)


def streamed_table() -> str:
    """Each operation of the bucket with its parameters on the host: what it reads and writes of it, and moves."""
    shown = boxes(STREAMED)

    def touched(regions: tuple[Region, ...]) -> str:
        return code(str(r) for r in regions if r in shown and r.index)

    rows = (
        (code([op.name]), op.kind, touched(op.reads), touched(op.writes), work(op)) for op in ops_of(STREAMED)
    )
    return table(("operation", "lane", "reads", "writes", "work"), rows)


def orders_table() -> str:
    """What each operation has to follow, because of which region, and what keeps that order under Overlapped."""
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
    """The same operations under each schedule."""
    rows: list[tuple[str, ...]] = []
    first: dict[str, str] = {}
    moved = size(sum(op.nbytes for op in ops_of(PLAIN)))
    for name in SCHEDULES:
        plan = planned(PLAIN, name)
        at, same = events(plan), first.setdefault(plan.digest, name)
        label = name if same == name else f"{name}: the plan of {same}"
        ends = [at[op].end for op in ("to_host[0,2,0]", "update[2]", "to_device[2]")]
        times = map(format_seconds, [*ends, simulate(plan).seconds])
        rows.append((label, str(len(plan.lanes)), str(plan.num_waits), *times, moved))
    ends = ("gradient on the host", "updated", "new on the device")
    return table(("schedule", "lanes", "waits", *ends, "step", "bytes"), rows)


def recipes_table() -> str:
    """The bucket's operations and the step under each recipe."""
    rows = (
        (name, code(op.verb for op in walk(graph)), format_seconds(simulate(planned(graph)).seconds))
        for name, graph in RECIPES.items()
    )
    return table(
        ("recipe", "the bucket's operations and the step's, in serial order", "step, Overlapped"), rows
    )


def parts_table() -> str:
    """What one rank moves of the bucket in a step, with more micro-batches and with more ranks."""
    cases = {"as above": PLAIN, "4 micro-batches": graph_of(micro_batches=4)}
    cases |= {f"{n} ranks": graph_of(world=n) for n in (2, 8)}

    def moved(graph: Graph, kind: Kind) -> str:
        return size(sum(op.nbytes for op in ops_of(graph) if op.kind == kind))

    def kept(graph: Graph, tier: Tier) -> str:
        regions = (r for r in boxes(graph) if r.tier == tier)
        return size(sum(r.nbytes for r in regions if any(last is None for _, last in values(graph, r))))

    columns = (
        (
            str(len(ops_of(graph))),
            kept(graph, "device"),
            kept(graph, "host"),
            *(moved(graph, kind) for kind in ("d2h", "host", "h2d", "network")),
        )
        for graph in cases.values()
    )
    names = ("operations of the bucket", "kept on the device", "kept on the host", "over the bus, down")
    names += ("swept over on the host", "over the bus, up", "between ranks")
    return table((f"of bucket {BUCKET}, for one rank", *cases), zip(names, *columns, strict=True))


def places_table() -> str:
    """Parameters on the device and on the host, micro-batches one by one and together."""
    cases = {
        "device, horizontal": graph_of(**HALVES),
        "host, horizontal": graph_of(order=1, **ON_HOST),
        "host, vertical": STREAMED,
    }
    rows: list[tuple[str, ...]] = []
    for name, graph in cases.items():
        own = sum(r.nbytes for r in graph.regions if r.buffer in ("params", "weight_slot", "sum_slot"))
        ways = ("fetch", "to_device"), ("to_host",)
        moved = (size(sum(op.nbytes for op in graph if op.verb in verbs)) for verbs in ways)
        fetches = sum(op.verb == "fetch" for op in graph)
        rows.append((name, size(own), str(fetches), *moved, format_seconds(simulate(planned(graph)).seconds)))
    heads = "parameters and sums on the device", "fetches", "over the bus, up", "down", "step, Overlapped"
    return table(("two micro-batches, parameters on the", *heads), rows)


def tables() -> Iterator[str]:
    """The tables of the page, in its order."""
    yield from (walk_table(), orders_table(), schedules_table(), recipes_table(), parts_table())
    yield from (streamed_table(), places_table())


def refusal() -> str:
    """What `verify` says of the plan with a race, without the plan that follows."""
    try:
        verify(broken(planned(PLAIN))[0])
    except PlanError as error:
        return "\n".join(textwrap.wrap(str(error).partition(":\n")[0], 110))
    raise AssertionError("expected verify to refuse the plan")


def figures() -> Iterator[str]:
    """What the text states beside the tables."""
    at = events(planned(PLAIN))
    state = sum(r.nbytes for r in boxes(PLAIN) if r.buffer in ("master", "exp_avg", "exp_avg_sq"))
    params = next(r.nbytes for r in boxes(PLAIN) if r.buffer == "params")
    yield f"bytes a parameter: state {state // BLOCK}, on the device {params // BLOCK}"
    yield f"bytes: state {size(state)}, parameters {size(params)}"
    yield f"rates: {ROUND.flops / 1e12:g} TFLOP/s, " + ", ".join(
        f"{kind} {ROUND.rates[kind] / 1e9:,g} GB/s" for kind in ("compute", "host", "d2h")
    )
    yield f"squares on the host: {format_seconds(params / ROUND.rates['host'])}"
    yield f"the gradient waits: {format_seconds(at['update[2]'].start - at['to_host[0,2,0]'].end)}"
    last = max(e.end for e in at.values() if e.kind == "compute")
    idle = at["global_norm"].start, at["to_device[0]"].end - last
    yield f"idle: host {format_seconds(idle[0])}, device {format_seconds(idle[1])}"
    bad, writes, reads = broken(planned(PLAIN))
    in_time, late = events(bad), {e.op: e for e in simulate(bad, SLOW_BUS).events}
    margin, left = (t[writes.name].start - t[reads.name].end for t in (in_time, late))
    yield f"race of {writes} and {reads}: margin {format_seconds(margin)}"
    yield f"at {SLOW_BUS.rates['d2h'] / 1e9:g} GB/s: {-100 * left / late[reads.name].seconds:.0f} % is lost"
    slot = next(r.nbytes for r in STREAMED.regions if r.buffer == "weight_slot")
    passes = [ROUND.seconds(op) for op in ops_of(STREAMED) if op.verb == "forward"]
    yield f"a weight slot {size(slot)}, fetched in {format_seconds(slot / ROUND.rates['h2d'])}"
    yield f"forward of {len(passes)} micro-batches {format_seconds(sum(passes))}"
    for name in ("Overlapped", "Interleaved"):
        yield f"two ranks, {name}: {format_seconds(simulate(planned(TWO_RANKS, name)).seconds)}"


if __name__ == "__main__":
    print(*tables(), refusal(), *figures(), sep="\n\n")
