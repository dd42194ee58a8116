"""Is this plan right: every operation there once, no deadlock, every conflicting pair in its serial order.

The invariant: a plan that passes gives the serial result, to the bit, whatever the timing. Only lane order
and waits are believed; how the plan was made does not matter. Linear in the size of the plan.
"""

from collections import Counter
from collections.abc import Iterator

from zfunc.graph import Conflict
from zfunc.plan import Plan, PlanError, happens_before, marked


def verify(plan: Plan) -> Plan:
    """Return `plan` if it is right. Raises PlanError naming operations, region and lanes, the plan marked."""
    for problem in (*_count(plan), *_defined(plan)):
        raise PlanError(problem)
    for race in races(plan):
        raise PlanError(_describe(plan, race))
    return plan


def races(plan: Plan) -> Iterator[Conflict]:
    """The conflicting pairs whose serial order `plan` does not keep. Raises PlanError on a deadlock."""
    clocks = happens_before(plan)
    for conflict in plan.graph.conflicts:
        lane, position = plan.place[conflict.before]
        if clocks[conflict.after][lane] < position:
            yield conflict


def _count(plan: Plan) -> Iterator[str]:
    times = Counter(op for lane in plan.lanes for op in lane.ops)
    expected = "expected every operation of the graph once. Correct the schedule's lanes"
    for i, op in enumerate(plan.graph):
        if times[i] != 1:
            yield f"{op.name}: got it on the lanes {times[i]} times, {expected}:\n{marked(plan, [i])}"
    for i in times.keys() - range(len(plan.graph)):
        yield f"got operation number {i} on a lane, {expected}: there are {len(plan.graph)}"
    if len(plan.waits) != len(plan.graph):
        yield f"got waits for {len(plan.waits)} operations, {expected}: there are {len(plan.graph)}"
    for i, waits in enumerate(plan.waits):
        for n in waits:
            if not 0 <= n < len(plan.graph):
                yield f"{plan.graph.ops[i].name} waits for operation number {n}, which does not exist"


def _defined(plan: Plan) -> Iterator[str]:
    """A region that is not kept holds nothing until it is written."""
    written = {r for r in plan.graph.regions if r.kept}
    for i, op in enumerate(plan.graph):
        for r in op.reads:
            if r not in written:
                yield (
                    f"{op.name} reads {r}, which no operation before it writes: expected it to be kept or "
                    f"written first. Correct the recipe:\n{marked(plan, [i])}"
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
        f"{before.name}, on one lane or through a wait (zfunc.plan.build derives it):\n"
        f"{marked(plan, [race.before, race.after])}"
    )
