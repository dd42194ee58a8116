"""A predicted step beside the measured one: sums of both, by lane and by verb. Nothing is scaled to fit."""

from collections.abc import Callable, Sequence

from attrs import frozen

from zfunc.core.critical_path import bound_by, bounds_in_words, critical_path_of
from zfunc.core.plan import Plan
from zfunc.core.timeline import Event, Timeline
from zfunc.units import format_seconds
from zfunc.viz.legend import Timelines, timeline_tuple, verb_of


@frozen
class Sum:
    """The operations of a lane or a verb: their number, and their `seconds` in each timeline."""

    name: str
    ops: int
    seconds: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """The last (measured) timeline's seconds over the first's (predicted); None where the first's are 0."""
        return self.seconds[-1] / self.seconds[0] if self.seconds[0] else None


def sums(timelines: Timelines, by: Callable[[Event], str]) -> tuple[Sum, ...]:
    """The seconds of each group of operations, grouped by the name `by(event)`, in order of appearance.

    >>> events = Event("gpu", "use[0]", "compute", 0.0, 1.0), Event("gpu", "use[1]", "compute", 2.0, 5.0)
    >>> sums(Timeline(events, "simulated"), by_lane)
    (Sum(name='gpu', ops=2, seconds=(4.0,)),)
    """
    shown = timeline_tuple(timelines)
    ops: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    for n, t in enumerate(shown):
        for e in t.events:
            name = by(e)
            ops[name] = ops.get(name, 0) + (n == 0)
            seconds.setdefault(name, [0.0] * len(shown))[n] += e.seconds
    return tuple(Sum(name, ops[name], tuple(seconds[name])) for name in ops)


def by_lane(event: Event) -> str:
    """The name of the lane that an event ran on."""
    return event.lane


def by_verb(event: Event) -> str:
    """The verb of the operation of `event`, such as "forward"."""
    return verb_of(event.op)


def table(simulated: Timeline, measured: Timeline, plan: Plan) -> str:
    """Text tables of predicted and measured seconds of the step, by lane and by name of operation, with bounds."""
    both = simulated, measured
    total = Sum("the step", len(plan.graph), tuple(t.seconds for t in both))
    heads = ("", "ops", *(t.source for t in both), "ratio")
    blocks = [
        _rows((heads, *map(_cells, rows))) for rows in ([total], sums(both, by_lane), sums(both, by_verb))
    ]
    bounds = [f"{t.source} bound by {bounds_in_words(bound_by(critical_path_of(plan, t)))}" for t in both]
    return "\n\n".join([*blocks, "\n".join(bounds)])


def _cells(row: Sum) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, f"{row.ops:,}", *map(format_seconds, row.seconds), ratio


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    name, *others = widths
    lines = (
        f"{row[0]:<{name}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], others, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
