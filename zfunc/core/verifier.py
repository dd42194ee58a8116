"""Checks a plan: every operation once, no deadlock, every conflicting pair in its serial order.

A plan that passes gives the serial result, to the bit, in any timing. The check reads lane order and waits alone,
not how the plan was made, and is linear in the size of the plan.
"""

from collections import Counter
from collections.abc import Iterator

from attrs import evolve

from zfunc.core.graph import Conflict, Graph
from zfunc.core.plan import Plan, check_is_plan, lane_errors, plan_excerpt
from zfunc.core.setting_values import Schedule
from zfunc.errors import PlanError, refuse


def plan_with(schedule: Schedule, graph: Graph) -> Plan:
    """The verified plan of `graph` by a schedule. Raises PlanError for a wrong plan, or no plan."""
    if isinstance(schedule, type) or not callable(schedule):
        do = "pass one, or an object such as zfunc.schedules.Overlapped()"
        refuse("schedule", f"{schedule!r:.200}", "a function Graph -> Plan", do, PlanError)
    plan = schedule(graph)
    check_is_plan(plan, f" from {schedule!r:.200}")
    verify(plan)
    if plan.graph != graph:
        do = "return zfunc.core.plan.build(graph, lanes)"
        refuse("schedule", "a plan of another graph", "one of the graph that was passed to it", do, PlanError)
    # The recipe's graph has lifetimes and roles, which a plan that was parsed from text lacks.
    return plan if plan.graph is graph else evolve(plan, graph=graph)


def verify(plan: Plan) -> Plan:
    """Return `plan` if its result is that of the serial graph in any timing of its lanes. Otherwise raise
    PlanError, which names the operations, region and lanes, and prints the plan.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import build
    >>> x = Region("x", lifetime="value")
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> plan = build(graph, {"gpu": [0], "cpu": [1]})
    >>> verify(plan) is plan
    True
    """
    check_is_plan(plan)
    for problem in (*_count(plan), *_defined(plan)):
        raise PlanError(problem)
    for race in races(plan):
        raise PlanError(_describe(plan, race))
    return plan


def races(plan: Plan) -> Iterator[Conflict]:
    """The conflicting pairs whose serial order `plan` does not keep. Raises PlanError for a deadlock.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import Lane
    >>> x = Region("x", lifetime="value")
    >>> graph = Graph((Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,))))
    >>> without_waits = Plan(graph, (Lane("gpu", (0,)), Lane("cpu", (1,))), ((), ()))
    >>> [str(race.region) for race in races(without_waits)]
    ['x']
    """
    clocks, place = plan.clocks, plan.place
    for conflict in plan.graph.conflicts:
        before, after, _ = conflict
        lane, position = place[before]
        if clocks[after][lane] < position:
            yield conflict


def _count(plan: Plan) -> Iterator[str]:
    yield from lane_errors(plan)
    planned = {op for lane in plan.lanes for op in lane.ops}
    expected = "expected every operation of the graph once. Correct the schedule's lanes"
    for i, op in enumerate(plan.graph):
        if i not in planned:
            got = f"{op.name}: got it on the lanes 0 times"
            yield f"{got}, {expected}: {_dropped(plan, i)}"
    if len(plan.waits) != len(plan.graph):
        yield f"got waits for {len(plan.waits)} operations, {expected}: there are {len(plan.graph)}"
    for i, waits in enumerate(plan.waits):
        for n in waits:
            if not 0 <= n < len(plan.graph):
                yield f"{plan.graph.ops[i].name} waits for operation number {n}, which does not exist"


def _dropped(plan: Plan, i: int) -> str:
    """Text on where operation `i`, which is missing from `plan`, belongs: the plan's lines with an operation
    that needs its result marked."""
    kind = plan.graph.ops[i].kind
    alike = Counter(lane.name for lane in plan.lanes for n in lane.ops if plan.graph.ops[n].kind == kind)
    lane = next((name for name, _ in alike.most_common(1)), None)
    where = f"put it on lane {lane}, with the others of kind {kind}" if lane else f"give {kind} a lane"
    needed = [c for c in plan.graph.conflicts if c.before == i and c.region in plan.graph.ops[i].writes][:1]
    for _, after, region in needed:
        reader = next((f" (lane {x.name})" for x in plan.lanes if after in x.ops), "")
        where = f"without it {region} is not written before {plan.graph.ops[after].name}{reader}; {where}"
    return f"{where}:\n{plan_excerpt(plan, [c.after for c in needed])}"


def _defined(plan: Plan) -> Iterator[str]:
    """Yield an error text for each operation that reads a region before any operation has written it. The
    State and the step's inputs are written beforehand; staging slots are not, as their content does not
    outlast a step."""
    regions = plan.graph.regions
    written = {n for n, r in enumerate(regions) if r.lifetime in ("state", "value")}
    for i, (reads, writes) in enumerate(plan.graph.accesses):
        for n in reads:
            if n not in written:
                name = plan.graph.ops[i].name
                yield (
                    f"{name} reads {regions[n]}, which no operation before it writes: expected it to be written "
                    f"first, or of the lifetime 'state' or 'value'. Correct the recipe:\n{plan_excerpt(plan, [i])}"
                )
        written.update(writes)


def _describe(plan: Plan, race: Conflict) -> str:
    before, after = plan.graph.ops[race.before], plan.graph.ops[race.after]
    lanes = [plan.lanes[plan.place[i][0]].name for i in (race.before, race.after)]
    first, second = ("writes" if race.region in op.writes else "reads" for op in (before, after))
    return (
        f"race on {race.region}: {before.name} (lane {lanes[0]}) {first} it, {after.name} (lane {lanes[1]}) "
        f"{second} it, and nothing makes the second wait for the first. Let {after.name} come after "
        f"{before.name}, on one lane or through a wait (zfunc.core.plan.build derives it):\n"
        f"{plan_excerpt(plan, [race.before, race.after])}"
    )
