"""Costs of operations from measured steps, and the rates and latencies that follow from them.

The steps are of a plan with one lane, where operations run alone. An operation is charged with the time until the
next one begins, in which that is issued and memory is freed.

The invariant: the costs of a step's operations add up to the step. So the simulated time of a Serial step on the
machine so described is what such steps took.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from attrs import field, frozen

from zfunc.core.graph import KINDS, Kind, Op
from zfunc.core.hardware import Measured
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline

Work = tuple[Kind, int, int]  # kind, FLOPs, bytes: operations alike in these count as one


@frozen
class MeasuredStep:
    """A measured step: its plan, when each operation ran, and its length in seconds."""

    plan: Plan
    timeline: Timeline
    seconds: float


@frozen
class LatencyBandwidth:
    """Seconds of an operation that moves bytes: `latency`, plus bytes over `rate` (B/s)."""

    latency: float
    rate: float


@frozen
class Costs:
    """The mean seconds of each kind of work, and how many of it a step has."""

    seconds: Mapping[Work, float] = field(converter=dict[Work, float])
    counts: Mapping[Work, int] = field(converter=dict[Work, int])

    @property
    def measured(self) -> tuple[Measured, ...]:
        """The costs for a Hardware, in the order of kinds and sizes."""
        works = sorted(self.seconds, key=lambda work: (KINDS.index(work[0]), *work[1:]))
        return tuple(Measured(*work, _rounded(self.seconds[work])) for work in works)

    def flops(self) -> float | None:
        """FLOP/s of all operations that count FLOPs, together; None if none does."""
        works = [work for work in self.seconds if work[1]]
        spent = sum(self.seconds[work] * self.counts[work] for work in works)
        return sum(work[1] * self.counts[work] for work in works) / spent if works else None

    def line(self, kind: Kind) -> LatencyBandwidth | None:
        """Latency and rate of a kind's operations that move bytes and count no FLOPs; None without any."""
        points = [
            (work[2], s) for work, s in self.seconds.items() if work[0] == kind and work[2] and not work[1]
        ]
        return fit_line(points) if points else None


def middle_half(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The middle half of `steps` by their length: those that were disturbed are left out."""
    ordered = sorted(steps, key=lambda step: step.seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def handoff(steps: Iterable[MeasuredStep]) -> float | None:
    """Seconds from the end of an operation to the start of one on another lane that waits for it alone: the mean of
    the middle half of all in `steps`. None without any.

    >>> from zfunc.core.graph import Graph, Region
    >>> from zfunc.core.plan import build
    >>> from zfunc.core.timeline import Event
    >>> x = Region("x")
    >>> graph = Graph((Op("make", (), "compute", (), (x,)), Op("use", (), "host", (x,))))
    >>> events = Event("gpu", "make", "compute", 0.0, 1.0), Event("cpu", "use", "host", 1.5, 2.0)
    >>> handoff([MeasuredStep(build(graph, {"gpu": [0], "cpu": [1]}), Timeline(events, "measured"), 2.0)])
    0.5
    """
    gaps = sorted(gap for step in steps for gap in _gaps(step))
    inner = gaps[len(gaps) // 4 : len(gaps) - len(gaps) // 4]
    return sum(inner) / len(inner) if inner else None


def _gaps(step: MeasuredStep) -> Iterable[float]:
    ops, events = step.plan.graph.ops, {e.op: e for e in step.timeline.events}
    for lane in step.plan.lanes:
        free = 0.0
        for i in lane.ops:
            e = events[ops[i].name]
            ready = max((events[ops[n].name].end for n in step.plan.waits[i]), default=0.0)
            if ready > free:
                yield max(0.0, e.start - ready)  # clocks of two devices may cross
            free = e.end


def fit_costs(steps: Iterable[MeasuredStep]) -> Costs:
    """The costs of operations in `steps` of a plan with one lane. Raises ValueError for more lanes, or no step.

    >>> from zfunc.core.plan import build
    >>> from zfunc.core.timeline import Event
    >>> from zfunc.core.graph import Graph
    >>> graph = Graph((Op("a", (), "compute", flops=5), Op("b", (), "host", nbytes=7)))
    >>> events = Event("all", "a", "compute", 0.1, 0.5), Event("all", "b", "host", 0.6, 0.9)
    >>> step = MeasuredStep(build(graph, {"all": [0, 1]}), Timeline(events, "measured"), 1.0)
    >>> fit_costs([step]).seconds
    {('compute', 5, 0): 0.6, ('host', 0, 7): 0.4}
    """
    spent: dict[Work, list[float]] = {}
    steps = list(steps)
    for step in steps:
        for op, seconds in _durations(step):
            spent.setdefault((op.kind, op.flops, op.nbytes), []).append(seconds)
    if not spent:
        raise ValueError("got no operation of any step, expected some: measure a step first")
    return Costs(
        {work: sum(times) / len(times) for work, times in spent.items()},
        {work: len(times) // len(steps) for work, times in spent.items()},
    )


def _durations(step: MeasuredStep) -> Iterable[tuple[Op, float]]:
    busy = [lane for lane in step.plan.lanes if lane.ops]
    if len(busy) > 1:
        raise ValueError(
            f"got a plan on the lanes {', '.join(lane.name for lane in busy)}, expected one, where operations run "
            "alone: measure steps under Serial"
        )
    graph, events = step.plan.graph, step.timeline.events
    starts = [0.0, *(e.start for e in events[1:]), step.seconds]
    for e, (start, end) in zip(events, pairwise(starts), strict=True):
        yield graph.ops[graph.position[e.op]], max(end - start, 1e-9)  # clocks of two devices may cross


def fit_line(points: Sequence[tuple[int, float]]) -> LatencyBandwidth:
    """The line through (bytes, seconds) with the least squared relative error, latency and rate not negative.

    >>> fit_line([(1_000, 3e-6), (9_000, 11e-6)])
    LatencyBandwidth(latency=2e-06, rate=1000000000.0)
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - x) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    joint = sum(w * (n - x) * (s - y) for w, (n, s) in zip(weights, points, strict=True))
    slope = joint / spread if spread else 0.0
    if slope <= 0 or y - slope * x < 0:  # one size, or noise: all of it is rate
        slope = sum(w * n * s for w, (n, s) in zip(weights, points, strict=True)) / sum(
            w * n * n for w, (n, _) in zip(weights, points, strict=True)
        )
    return LatencyBandwidth(max(0.0, _rounded(y - slope * x)), _rounded(1 / slope))


def _rounded(value: float) -> float:
    """To 6 digits: the rest is noise."""
    return float(f"{value:.6g}")
