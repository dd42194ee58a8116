"""The critical path of a step: the chain of operations that led to its end, and which kind of work bounds it.

The times that the operations of the chain ran and idled add up to the step. It includes lane order, so it belongs
to one plan on one machine; `zfunc.core.simulator.lower_bound` is the bound that no plan can beat.
"""

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

from zfunc.core.graph import Kind
from zfunc.core.plan import Plan
from zfunc.core.timeline import Event, Timeline

# What bounds a part of a step; "waiting" where no operation of the chain ran.
Bound = Kind | Literal["waiting"]


@frozen
class Link:
    """One operation of a critical path, with times in seconds. `ran`: from its start to its end; `idle`:
    between the end of the link before and this start. Where clocks of two lanes disagree, times that overlap
    count once.

    `after`: why the operation follows the link before: same "lane", a "wait", same "thread"; "" for the
    first.
    """

    event: Event
    after: Literal["", "lane", "wait", "thread"]
    idle: float
    ran: float


def events_of(plan: Plan, timeline: Timeline) -> tuple[Event, ...]:
    """The event of each operation of `plan` in `timeline`, by the operation's position in the graph.

    Raises ValueError unless the timeline has every operation of the plan once, on its lane.
    """
    events: dict[int, Event] = {}
    problems: list[str] = []
    for e in timeline.events:
        i = plan.graph.position.get(e.op, -1)
        if i in events or i not in plan.place or plan.lanes[plan.place[i][0]].name != e.lane:
            problems.append(f"with {e.op} twice" if i in events else f"with {e.op} on lane {e.lane}")
        events[i] = e
    problems += [f"without {op.name}" for i, op in enumerate(plan.graph) if i not in events]
    if problems:
        raise ValueError(
            f"got a {timeline.source} timeline {problems[0]}, expected every operation of the plan once and on its "
            "lane: pass the timeline of this plan"
        )
    return tuple(events[i] for i in range(len(plan.graph)))


def held_up_by(plan: Plan, events: tuple[Event, ...]) -> tuple[int, ...]:
    """For each operation of `plan`, the position of the last to end among the operations that it had to
    follow; -1 if there were none. `events` are those of `events_of`.

    An operation follows the operation before it on its lane, those that it waits for, and those that its
    thread had waited for. If two end together, the operation on the same lane counts.
    """
    before: list[int] = []
    behind = plan.behind()
    for i in range(len(plan.graph)):
        lane, position = plan.place[i]
        previous = plan.lanes[lane].ops[position - 1 : position] if position else ()
        reasons = *previous, *plan.waits[i], *behind.get(i, ())
        before.append(max(reasons, key=lambda n: events[n].end, default=-1))
    return tuple(before)


def last_of(events: tuple[Event, ...]) -> int:
    """The position of the operation that ended last in a step; -1 if there is no operation."""
    return max(range(len(events)), key=lambda n: events[n].end, default=-1)


def critical_path_of(plan: Plan, timeline: Timeline) -> tuple[Link, ...]:
    """The chain of operations that led to the end of the step, in the order in which they ran.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import build
    >>> from zfunc.core.simulator import simulate
    >>> x = Region("x")
    >>> ops = Op("make", (), "compute", writes=(x,)), Op("use", (), "host", reads=(x,)), Op("rest", (), "compute")
    >>> plan = build(Graph(ops), {"gpu": [0, 2], "cpu": [1]})
    >>> [(link.event.op, link.after) for link in critical_path_of(plan, simulate(plan))]
    [('make', ''), ('use', 'wait')]
    """
    events = events_of(plan, timeline)
    before = held_up_by(plan, events)
    chain: list[Link] = []
    until, i = timeline.seconds, last_of(events)
    while i >= 0:
        e, n = events[i], before[i]
        since = min(until, events[n].end) if n >= 0 else 0.0
        began = min(until, max(since, e.start))
        after = "lane" if events[n].lane == e.lane else "wait" if n in plan.waits[i] else "thread"
        chain.append(Link(e, after if n >= 0 else "", began - since, until - began))
        until, i = since, n
    return tuple(reversed(chain))


def bound_seconds(chain: Iterable[Link]) -> dict[Bound, float]:
    """Seconds of the critical path `chain` by kind of operation; "waiting" has the seconds in which no
    operation of the chain runs."""
    seconds: dict[Bound, float] = {}
    for link in chain:
        seconds[link.event.kind] = seconds.get(link.event.kind, 0.0) + link.ran
        seconds["waiting"] = seconds.get("waiting", 0.0) + link.idle
    return seconds


def bound_by(chain: Iterable[Link]) -> dict[Bound, float]:
    """Shares of the step that kinds of operations, or "waiting", take in the critical path `chain`, largest first.

    Shares add up to 1; there are none for a chain that took no time.
    """
    return largest_shares(bound_seconds(chain))


def largest_shares(seconds: dict[Bound, float]) -> dict[Bound, float]:
    """Shares (0 to 1) of the sum of `seconds`, by kind of operation or "waiting"; largest first, without zeros."""
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return {bound: part / total for bound, part in largest if part}


def bounds_in_words(shares: dict[Bound, float]) -> str:
    """Text of the shares of a step by kind of operation, as `bound_by` returns them.

    >>> bounds_in_words({"compute": 0.75, "waiting": 0.25})
    'compute 75%, waiting 25%'
    """
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()) or "nothing"
