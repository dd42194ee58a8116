"""Operations and plans of labs 1 and 2: small random ones, every order in which they can run, and their picture.

An operation and a plan are those of examples/00_zfunc_in_200_lines.py, so what a student writes works there, too.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from attrs import evolve

from course.law import Picture, without_one
from zfunc import PlanError
from zfunc.core import graph as core
from zfunc.core.graph import KINDS
from zfunc.core.hardware import ROUND
from zfunc.core.plan import Lane
from zfunc.core.plan import Plan as CorePlan
from zfunc.core.simulator import simulate
from zfunc.viz.timeline_svg import svg

EXAMPLE = Path(__file__).parents[1] / "examples" / "00_zfunc_in_200_lines.py"
LETTERS = "abcdefgh"  # names of the operations of small plans
APART = evolve(ROUND, handoff=0.0, shared={})  # lanes that share nothing


class Op(NamedTuple):
    """An operation: its name, the resource it uses (as "gpu"), and the regions that it reads and writes."""

    verb: str
    index: tuple[int, ...]
    kind: Any
    reads: frozenset[Any]
    writes: frozenset[Any]


class Plan(NamedTuple):
    """Operations; the numbers of each lane's operations; each one's waits for operations of other lanes."""

    ops: tuple[Op, ...]
    lanes: dict[str, list[int]]
    waits: list[set[int]]


@cache
def example(segments: int) -> tuple[Op, ...]:
    """The operations of a step of example 00 with so many segments, by its `zero_offload`, in serial
    order."""
    names = {"MICRO_BATCHES", "zero_offload"}
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))

    def wanted(node: ast.stmt) -> bool:
        targets = [
            x for target in getattr(node, "targets", ()) for x in ast.walk(target) if isinstance(x, ast.Name)
        ]
        return getattr(node, "name", "") in names or any(x.id in names for x in targets)

    found: dict[str, Any] = {"Op": Op}
    body = [node for node in tree.body if wanted(node)]
    exec(
        compile(ast.Module(body, type_ignores=[]), str(EXAMPLE), "exec"), found
    )  # it imports torch for the rest
    ops = found["zero_offload"](segments)
    return tuple(op._replace(reads=frozenset(op.reads), writes=frozenset(op.writes)) for op in ops)


# --- random plans ----------------------------------------------------------------------------------------


def random_ops(random: Random, most: int = 5) -> tuple[Op, ...]:
    """Two to `most` operations named a, b, ... on up to three regions x, y, z."""
    regions = "xyz"[: random.randint(1, 3)]

    def some(chance: float) -> frozenset[str]:
        return frozenset(r for r in regions if random.random() < chance)

    number = random.randint(2, most)
    return tuple(Op(LETTERS[n], (), "compute", some(0.4), some(0.35)) for n in range(number))


def random_lanes(random: Random, num_ops: int) -> dict[str, list[int]]:
    """Random lanes: `num_ops` operations on up to three lanes, each in serial order."""
    names = ("left", "middle", "right")[: random.randint(2, 3)]
    on = [random.choice(names) for _ in range(num_ops)]
    return {name: [i for i in range(num_ops) if on[i] == name] for name in names if name in on}


def random_waits(random: Random, num_ops: int, lanes: dict[str, list[int]]) -> list[set[int]]:
    """Waits for earlier operations of other lanes: few, some or most of all there could be."""
    lane_of = {i: name for name, lane in lanes.items() for i in lane}
    chance = random.choice((0.2, 0.5, 0.8))
    return [
        {i for i in range(j) if lane_of[i] != lane_of[j] and random.random() < chance} for j in range(num_ops)
    ]


def random_plan(random: Random, most: int = 5) -> Plan:
    """A plan of a few operations that may have races."""
    ops = random_ops(random, most)
    lanes = random_lanes(random, len(ops))
    return Plan(ops, lanes, random_waits(random, len(ops), lanes))


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yield the plan without an operation, without a wait, or without a region that an operation touches."""
    for n in range(len(plan.ops)) if len(plan.ops) > 1 else ():
        number = {i: k for k, i in enumerate(x for x in range(len(plan.ops)) if x != n)}
        lanes = {name: [number[i] for i in lane if i != n] for name, lane in plan.lanes.items()}
        waits = [{number[i] for i in some if i != n} for j, some in enumerate(plan.waits) if j != n]
        ops = (op._replace(verb=LETTERS[k]) for k, op in enumerate(plan.ops[:n] + plan.ops[n + 1 :]))
        yield Plan(tuple(ops), {name: lane for name, lane in lanes.items() if lane}, waits)
    for j, some in enumerate(plan.waits):
        for i in sorted(some):
            yield plan._replace(waits=[x - {i} if k == j else x for k, x in enumerate(plan.waits)])
    for j, op in enumerate(plan.ops):
        for field in ("reads", "writes"):
            for fewer in without_one(tuple(sorted(getattr(op, field), key=str))):
                op_ = op._replace(**{field: frozenset(fewer)})
                yield plan._replace(ops=(*plan.ops[:j], op_, *plan.ops[j + 1 :]))


# --- every order -----------------------------------------------------------------------------------------


def orders(plan: Plan, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every order in which the operations of a plan can run; none for a deadlock."""
    if len(done) == len(plan.ops):
        yield done
    for lane in plan.lanes.values():
        following = next((i for i in lane if i not in done), None)
        if following is not None and plan.waits[following] <= {*done}:
            yield from orders(plan, (*done, following))


def run(ops: tuple[Op, ...], order: Iterable[int]) -> dict[int, Any]:
    """Run `ops` in `order`; by operation and region, the writer of what it finds there, and what the writer
    had read."""
    memory: dict[Any, Any] = {}
    found: dict[int, Any] = {}
    for i in order:
        op = ops[i]
        found[i] = {r: memory.get(r) for r in op.reads | op.writes}
        content = i, *sorted((str(r), str(found[i][r])) for r in op.reads)
        memory |= dict.fromkeys(op.writes, content)
    return found


def is_serial(ops: tuple[Op, ...], order: Iterable[int]) -> bool:
    """Whether every operation finds in its regions, in `order`, what it finds in serial order."""
    return run(ops, order) == run(ops, range(len(ops)))


def swapped_conflicts(plan: Plan) -> set[tuple[int, int]]:
    """The conflicting pairs (i, j), i < j, of which some order that the plan allows runs j first."""
    found = set[tuple[int, int]]()
    for order in orders(plan):
        at = {i: n for n, i in enumerate(order)}
        found |= {(i, j) for i, j in combinations(range(len(plan.ops)), 2) if at[j] < at[i]}
    return {(i, j) for i, j in found if not is_serial((plan.ops[i], plan.ops[j]), (1, 0))}


# --- text and pictures -----------------------------------------------------------------------------------


def name_of(op: Op) -> str:
    """The operation's name as zfunc prints it, such as `to_host[1,0]`."""
    return core.label(op.verb, op.index)


def described(plan: Plan, *, lanes: bool = True, waits: bool = True) -> str:
    """Text of a plan: its operations with what they read and write; its lanes; its waits."""
    names = [name_of(op) for op in plan.ops]
    width = max(map(len, names))
    lines = [
        f"{i:>4}  {name:<{width}}  reads {_some(op.reads):<8} writes {_some(op.writes)}".rstrip()
        for i, (name, op) in enumerate(zip(names, plan.ops, strict=True))
    ]
    if lanes:
        lines += [f"lane {name}: {' '.join(map(str, lane))}" for name, lane in plan.lanes.items()]
    if lanes and waits:
        told = [f"{j} waits for {i}" for j, some in enumerate(plan.waits) for i in sorted(some)]
        lines.append(", ".join(told) or "no waits")
    return "\n".join(lines)


def _some(regions: Iterable[Any]) -> str:
    return " ".join(sorted(x if isinstance(x, str) else core.label(x[0], x[1:]) for x in regions)) or "-"


def core_plan(plan: Plan) -> CorePlan:
    """The plan as a Plan of zfunc, for `verify`, `simulate` and pictures."""
    region = {
        x: core.Region(
            x if isinstance(x, str) else x[0], () if isinstance(x, str) else x[1:], lifetime="value"
        )
        for op in plan.ops
        for x in op.reads | op.writes
    }

    def regions(some: Iterable[Any]) -> tuple[core.Region, ...]:
        return tuple(region[x] for x in sorted(some, key=str))

    ops = tuple(core.Op(op.verb, op.index, op.kind, regions(op.reads), regions(op.writes)) for op in plan.ops)
    lanes = tuple(Lane(name, tuple(lane)) for name, lane in plan.lanes.items())
    return CorePlan(core.Graph(ops), lanes, tuple(tuple(sorted(some)) for some in plan.waits))


def picture(plan: Plan, title: str, late: int | None = None) -> Picture | None:
    """The plan on a timeline of round seconds; operation `late` takes longer, so that others overtake it.

    None for a plan that deadlocks: it has no timeline.
    """
    kind_of = {
        i: KINDS[n] for n, lane in enumerate(plan.lanes.values()) for i in lane
    }  # lanes run side by side
    own = core_plan(plan._replace(ops=[op._replace(kind=kind_of[i]) for i, op in enumerate(plan.ops)]))
    seconds = [4.0 if i == late else 1.0 for i in range(len(plan.ops))]
    try:
        timeline = simulate(own, APART, alone=seconds)
    except PlanError:
        return None
    return Picture(timeline.text(width=72), svg(timeline, plan=own, title=title, width=700))
