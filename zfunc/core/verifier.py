"""Is this plan right: every operation there once, no deadlock, every conflicting pair in its serial order.

The invariant: a plan that passes gives the serial result, to the bit, whatever the timing. Only lane order
and waits are believed; how the plan was made does not matter. Linear in the size of the plan.
"""

from collections.abc import Iterator

from zfunc.core.graph import Conflict
from zfunc.core.plan import Plan, PlanError, happens_before, lane_errors, lane_for, plan_excerpt


def verify(plan: Plan) -> Plan:
    """Return `plan` if it is right. Raises PlanError naming operations, region and lanes, the plan marked.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import build
    >>> x = Region("x", lifetime="value")
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> plan = build(graph, {"gpu": [0], "cpu": [1]})
    >>> verify(plan) is plan
    True
    """
    for problem in (*_count(plan), *_defined(plan)):
        raise PlanError(problem)
    for race in races(plan):
        raise PlanError(_describe(plan, race))
    return plan


def races(plan: Plan) -> Iterator[Conflict]:
    """The conflicting pairs whose serial order `plan` does not keep. Raises PlanError on a deadlock.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import Lane
    >>> x = Region("x", lifetime="value")
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> without_waits = Plan(graph, (Lane("gpu", (0,)), Lane("cpu", (1,))), ((), ()))
    >>> [str(race.region) for race in races(without_waits)]
    ['x']
    """
    clocks = happens_before(plan)
    for conflict in plan.graph.conflicts:
        lane, position = plan.place[conflict.before]
        if clocks[conflict.after][lane] < position:
            yield conflict


def _count(plan: Plan) -> Iterator[str]:
    yield from lane_errors(plan)
    there = {op for lane in plan.lanes for op in lane.ops}
    expected = "expected every operation of the graph once. Correct the schedule's lanes"
    for i, op in enumerate(plan.graph):
        if i not in there:
            got = f"{op.name}: got it on the lanes 0 times"
            yield f"{got}, {expected}: {_dropped(plan, i)}:\n{plan_excerpt(plan, [], missing=i)}"
    if len(plan.waits) != len(plan.graph):
        yield f"got waits for {len(plan.waits)} operations, {expected}: there are {len(plan.graph)}"
    for i, waits in enumerate(plan.waits):
        for n in waits:
            if not 0 <= n < len(plan.graph):
                yield f"{plan.graph.ops[i].name} waits for operation number {n}, which does not exist"


def _dropped(plan: Plan, i: int) -> str:
    """Where it belongs, and who would miss what it writes."""
    lane = lane_for(plan, i)
    kind = plan.graph.ops[i].kind
    where = f"put it on lane {lane.name}, with the others of kind {kind}" if lane else f"give {kind} a lane"
    missed = next(
        (c for c in plan.graph.conflicts if c.before == i and c.region in plan.graph.ops[i].writes), None
    )
    if missed is None:
        return where
    after = plan.graph.ops[missed.after].name
    there = next((x.name for x in plan.lanes if missed.after in x.ops), "")
    return f"without it {missed.region} is not written before {after}{f' (lane {there})' if there else ''}; {where}"


def _defined(plan: Plan) -> Iterator[str]:
    """A region that is not kept holds nothing until it is written."""
    written = {r for r in plan.graph.regions if r.kept}
    for i, op in enumerate(plan.graph):
        for r in op.reads:
            if r not in written:
                yield (
                    f"{op.name} reads {r}, which no operation before it writes: expected it to be kept or "
                    f"written first. Correct the recipe:\n{plan_excerpt(plan, [i])}"
                )
        written.update(op.writes)


def _describe(plan: Plan, race: Conflict) -> str:
    before, after = plan.graph.ops[race.before], plan.graph.ops[race.after]
    lanes = [plan.lanes[plan.place[i][0]].name for i in (race.before, race.after)]
    what = "writes" if race.region in before.writes else "reads"
    then = "writes" if race.region in after.writes else "reads"
    return (
        f"race on {race.region}: {before.name} (lane {lanes[0]}) {what} it, {after.name} (lane {lanes[1]}) "
        f"{then} it, and nothing makes the second wait for the first. Let {after.name} come after "
        f"{before.name}, on one lane or through a wait (zfunc.core.plan.build derives it):\n"
        f"{plan_excerpt(plan, [race.before, race.after])}"
    )
