"""The step that docs/one_bucket.md walks through: blocks of 50 million parameters, each a segment and a bucket.

The invariant: nothing is said of an operation or a region but what the graph says. Which operations are a bucket's,
what a region holds and until when it is needed follow from what operations read and write.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from attrs import evolve, frozen

from zfunc import schedules
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.hardware import ROUND
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.ops import SegmentCost, StepSpec
from zfunc.core.plan import Plan
from zfunc.core.recipes import delayed, zero_offload
from zfunc.core.verifier import verify

BLOCKS, BUCKET = 5, 2  # the page follows the one in the middle
WIDTH, HIDDEN = 2_000, 8_500
BLOCK = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN  # parameters
TOKENS = 8_192  # of a micro-batch
SLOW_BUS = evolve(
    ROUND, name="copies at a fifth of the speed", rates={**ROUND.rates, "d2h": ROUND.rates["d2h"] / 5}
)

# What the page shows of a bucket, in the order of the columns, and what a box says of it.
WORDS = {
    "params": "parameters, 16 bits",
    "grads": "gradients, as tensors",
    "grad_slot": "gradient, flat",
    "squares": "",
    "host_slot": "gradient, on its way",
    "host_grad": "gradient, waits",
    "host_squares": "",
    "param_slot": "new parameters",
    "param_copy": "new parameters",
    "master": "master weights, fp32",
    "exp_avg": "first moment, fp32",
    "exp_avg_sq": "second moment, fp32",
    "grad_sum": "sum of gradients, fp32",
    "norm": "",
    "verdict": "",
}
SLOTS = ("grad_slot", "host_slot", "param_slot")  # their index is a slot's; buckets take turns


def make_job(world: int = 1, **settings: Any) -> StepSpec:
    """The job of one rank: a transformer's blocks without norms and biases, each recomputed in backward."""
    shapes = {
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
    }
    blocks = [[Parameter(f"block{n}.{name}", shape) for name, shape in shapes.items()] for n in range(BLOCKS)]
    forward = 2 * BLOCK * TOKENS
    cost = SegmentCost(forward, input_bytes=2 * WIDTH * TOKENS, backward_flops=3 * forward)
    job = StepSpec(
        make_layout(blocks, bucket_size=BLOCK, world=world), (cost,) * BLOCKS, (True,) * BLOCKS, world=world
    )
    return evolve(job, **{"barrier": True, **settings})


def graph_of(world: int = 1, **settings: Any) -> Graph:
    """The plain recipe's operations, with clipping unless `barrier` says otherwise."""
    return Graph(tuple(zero_offload(make_job(world, **settings))))


def planned(graph: Graph, schedule: str = "Overlapped") -> Plan:
    """The graph under a schedule of that name, verified."""
    return verify(getattr(schedules, schedule)()(graph))


PLAIN = graph_of()
RECIPES = {
    "clipping": PLAIN,
    "no clipping": graph_of(barrier=False),
    "speculative": graph_of(shadows=3),
    "delayed": Graph(tuple(delayed(make_job(pending=True)))),
}
TWO_RANKS = graph_of(world=2, barrier=False)
GRAPHS = (*RECIPES.values(), TWO_RANKS, graph_of(micro_batches=4))


def of_bucket(region: Region) -> int | None:
    """Whose alone a region is: none's if it is a slot, or the whole step's, or another thing than a bucket's."""
    if region.buffer == "grads":
        return region.index[1]  # a block is a segment and a bucket, of one number
    if region.buffer in WORDS and region.buffer not in SLOTS and region.index:
        return region.index[0]
    return None


@cache
def owners(graph: Graph) -> dict[str, int]:
    """Whose each operation is, by name: it touches what is a bucket's own, or finds a bucket's bytes in a slot.

    Operations without an index are the whole step's, and not here.
    """
    found: dict[str, int] = {}
    in_slot: dict[Region, int] = {}
    for op in graph:
        own = {of_bucket(r) for r in op.regions} - {None} or {in_slot[r] for r in op.reads if r in in_slot}
        for bucket in own if op.index else ():
            if bucket is not None:
                found[op.name] = bucket
                in_slot |= {r: bucket for r in op.writes if r.buffer in SLOTS}
    return found


def ops_of(graph: Graph, bucket: int = BUCKET) -> tuple[Op, ...]:
    """The bucket's operations, in serial order."""
    return tuple(op for op in graph if owners(graph).get(op.name) == bucket)


def walk(graph: Graph, bucket: int = BUCKET) -> tuple[Op, ...]:
    """The bucket's operations and the whole step's, in serial order: the stations of the page."""
    own = ops_of(graph, bucket)
    return tuple(op for op in graph if not op.index or op in own)


def boxes(graph: Graph, bucket: int = BUCKET) -> tuple[Region, ...]:
    """Every region the bucket is ever in, slots and the step's norm and verdict included, in the order of WORDS."""
    found = dict.fromkeys(r for op in ops_of(graph, bucket) for r in op.regions if r.buffer in WORDS)
    found |= dict.fromkeys(r for r in graph.regions if not r.index and r.buffer in WORDS)
    return tuple(sorted(found, key=lambda r: list(WORDS).index(r.buffer)))


@frozen
class Value:
    """What a region holds, from the operation that writes it to the last one that reads it, by position.

    `born` is None for what the step found there, `last` None for what it leaves to the next step.
    """

    born: int | None
    last: int | None

    def is_held(self, i: int) -> bool:
        """Whether it is there, and needed, when operation `i` begins; `i` may be the last to need it."""
        return (self.born is None or self.born < i) and (self.last is None or i <= self.last)


def values(graph: Graph, region: Region) -> Iterator[Value]:
    """What a region holds in a step among others like it. What nobody reads any more is not held, but room."""
    readers = [i for i, op in enumerate(graph) if region in op.reads]
    writers = [i for i, op in enumerate(graph) if region in op.writes]
    carried = region.kept and bool(readers) and (not writers or readers[0] <= writers[0])
    for born, following in zip([None, *writers], [*writers, None], strict=True):
        last = [i for i in readers if (born is None or i > born) and (following is None or i <= following)]
        if following is None and carried:
            yield Value(born, None)
        elif last or born is not None:
            yield Value(born, last[-1] if last else born)


def writer_before(graph: Graph, region: Region, i: int) -> Op | None:
    """Who wrote what a region holds when operation `i` begins; of an earlier step if nobody did in this one."""
    writers = [op for op in graph if region in op.writes]
    return next(
        (op for op in reversed(writers) if graph.position[op.name] < i), writers[-1] if writers else None
    )


def broken(plan: Plan) -> tuple[Plan, Op, Op]:
    """`plan` without the wait that keeps the bucket's slot from being written too early; who would have waited
    for whom: the next to write the slot, and the last to read the bucket's gradient there."""
    graph = plan.graph
    slot = next(r for op in ops_of(graph) for r in op.writes if r.buffer == "grad_slot")
    ours = next(v for v in values(graph, slot) if v.born is not None and graph.ops[v.born] in ops_of(graph))
    after = next(
        i for i, op in enumerate(graph) if slot in op.writes and ours.last is not None and i > ours.last
    )
    waits = list(plan.waits)
    waits[after] = tuple(n for n in waits[after] if n != ours.last)
    return evolve(plan, waits=tuple(waits)), graph.ops[after], graph.ops[ours.last or 0]


def size(nbytes: float) -> str:
    """Bytes in powers of 1000, to four figures.

    >>> size(8), size(12_500_096), size(1.4e9)
    ('8 B', '12.5 MB', '1.4 GB')
    """
    unit, name = next(
        u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if nbytes >= u[0] or u[0] == 1
    )
    return f"{nbytes / unit:.4g} {name}"
