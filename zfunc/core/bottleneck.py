"""What bounds a step: the chain of operations that led to its end, each held up by the one before it.

Of a simulated timeline or a measured one. The invariant: what the chain's operations ran and idled adds up to the
step. It is a chain of this plan on this hardware, lane order included; `zfunc.core.simulator.lower_bound` is the
bound that no plan can beat.
"""

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

from zfunc.core.graph import Kind
from zfunc.core.plan import Plan
from zfunc.core.timeline import Event, Timeline

Bound = Kind | Literal["waiting"]  # what bounds a part of a step; "waiting" where nothing on the chain ran


@frozen
class Link:
    """An operation of the chain: it could begin when the link before it ended, idled, and ran.

    `after` says what made it follow that one: the "lane" they share, a "wait", or "" for the first. Where two
    clocks disagree, `ran` leaves out what overlaps; times in seconds.
    """

    event: Event
    after: Literal["", "lane", "wait"]
    idle: float
    ran: float


def events_of(plan: Plan, timeline: Timeline) -> tuple[Event, ...]:
    """The event of each operation, by position in the graph.

    Raises ValueError if the timeline is not one of this plan: every operation once, on its lane.
    """
    found: dict[int, Event] = {}
    for e in timeline.events:
        i = plan.graph.position.get(e.op, -1)
        if i in found or i not in plan.place or plan.lanes[plan.place[i][0]].name != e.lane:
            what = "twice" if i in found else f"on lane {e.lane}"
            raise ValueError(
                f"got a {timeline.source} timeline with {e.op} {what}, expected the operations of the plan, each "
                "once and on its lane: give the timeline of this very plan"
            )
        found[i] = e
    for i, op in enumerate(plan.graph):
        if i not in found:
            raise ValueError(
                f"got a {timeline.source} timeline without {op.name}, expected every operation of the plan: give "
                "the timeline of this very plan"
            )
    return tuple(found[i] for i in range(len(plan.graph)))


def held_up_by(plan: Plan, events: tuple[Event, ...]) -> tuple[int, ...]:
    """For each operation, the last to end of those it has to follow: the one before it on its lane, and those it
    waits for. -1 for an operation that follows none.

    `events` by position in the graph, as `events_of` gives them. Of two that end together, lane order comes first.
    """
    before: list[int] = []
    for i in range(len(plan.graph)):
        lane, position = plan.place[i]
        previous = plan.lanes[lane].ops[position - 1 : position] if position else ()
        before.append(max((*previous, *plan.waits[i]), key=lambda n: events[n].end, default=-1))
    return tuple(before)


def last_of(events: tuple[Event, ...]) -> int:
    """The operation that ended last, -1 if there is none."""
    return max(range(len(events)), key=lambda n: events[n].end, default=-1)


def critical_path_of(plan: Plan, timeline: Timeline) -> tuple[Link, ...]:
    """The chain that led to the end of the step, in the order it ran.

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
        after = "" if n < 0 else "lane" if events[n].lane == e.lane else "wait"
        chain.append(Link(e, after, began - since, until - began))
        until, i = since, n
    return tuple(reversed(chain))


def bound_by(chain: Iterable[Link]) -> dict[Bound, float]:
    """Which share of the step each kind of operation bounds, and which nothing but waiting; the largest first.

    Shares add up to 1. Without a chain, or where it took no time, there are none.
    """
    seconds: dict[Bound, float] = {}
    for link in chain:
        seconds[link.event.kind] = seconds.get(link.event.kind, 0.0) + link.ran
        seconds["waiting"] = seconds.get("waiting", 0.0) + link.idle
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return {what: part / total for what, part in largest if part}


def bounds_in_words(shares: dict[Bound, float]) -> str:
    """Those shares in words.

    >>> bounds_in_words({"compute": 0.75, "waiting": 0.25})
    'compute 75%, waiting 25%'
    """
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()) or "nothing"
