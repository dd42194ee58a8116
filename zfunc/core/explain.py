"""Why one plan of a graph is faster than another: their critical paths, and their waits, side by side."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import evolve, frozen

from zfunc.core.critical_path import (
    Bound,
    Link,
    bound_seconds,
    bounds_in_words,
    critical_path_of,
    largest_shares,
)
from zfunc.core.display import counted
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.methods import above
from zfunc.core.plan import Plan
from zfunc.core.simulator import lower_bound, simulate
from zfunc.core.timeline import Timeline
from zfunc.core.verifier import verify
from zfunc.units import format_seconds

NAMED = 4  # groups of operations or waits that a line of the text names


@frozen
class Explanation:
    """A comparison of two plans, a and b, of one graph on one machine; `str` gives its text. Pairs are (of a,
    of b).

    `timelines` are the simulated steps, `paths` their critical paths, `only` the links of operations on one
    of the paths alone. `waits` counts the waits that the other plan lacks, by the verbs of the waiting
    operation and of the awaited one. `least` is the duration in seconds of the longest chain of dependencies,
    `machine` the hardware's name.
    """

    machine: str
    least: float
    timelines: tuple[Timeline, Timeline]
    paths: tuple[tuple[Link, ...], tuple[Link, ...]]
    only: tuple[tuple[Link, ...], tuple[Link, ...]]
    waits: tuple[Mapping[tuple[str, str], int], Mapping[tuple[str, str], int]]

    @property
    def seconds(self) -> tuple[float, float]:
        """The durations in seconds of the simulated steps of plan a and plan b."""
        a, b = self.timelines
        return a.seconds, b.seconds

    @property
    def bounds(self) -> tuple[dict[Bound, float], dict[Bound, float]]:
        """For plan a and plan b, the seconds of the critical path by kind of operation or "waiting"; they add
        up to the step's duration."""
        a, b = map(bound_seconds, self.paths)
        return a, b

    @property
    def same_time(self) -> bool:
        """Whether the simulated steps of both plans take the same time, but for rounding."""
        return math.isclose(*self.seconds, rel_tol=1e-9)

    def text(self, width: int = 100) -> str:
        """A text diagram of both simulated steps, `width` columns wide: the lanes of plan a, then of plan b."""
        return above("text")(self.timelines, width)

    def svg(self, title: str = "", width: int = 1200) -> str:
        """An SVG diagram, as text, of both simulated steps, `width` px wide; ValueError for a width below 400."""
        return above("svg")(self.timelines, title=title or self._first(), width=width)

    def __repr__(self) -> str:
        return f"Explanation({self._first()})"

    def __str__(self) -> str:
        lines = [self._first()]
        for plan, seconds in zip("ab", self.bounds, strict=True):
            lines.append(f"The critical path of {plan} is {bounds_in_words(largest_shares(seconds))}.")
        for plan, other, links in zip("ab", "ba", self.only, strict=True):
            if links:
                lines.append(
                    f"On the critical path of {plan}, hidden beside that of {other}: {_by_verb(links)}."
                )
        for plan, waits in zip("ab", self.waits, strict=True):
            if waits:
                lines.append(f"Waits of {plan} alone: {_by_verbs(waits)}.")
        lines.append(
            f"The longest chain of dependencies takes {format_seconds(self.least)}: no plan is faster."
        )
        return "\n".join(lines)

    def _first(self) -> str:
        a, b = self.seconds
        if self.same_time:
            why = "not the same operations, but as many seconds" if any(self.only) else "the same operations"
            took = format_seconds(a)
            return (
                f"The two plans take the same time on {self.machine}, {took}: their critical paths are {why}."
            )
        faster, less = ("b", 1 - b / a) if b < a else ("a", 1 - a / b)
        return (
            f"On {self.machine}, a takes {format_seconds(a)} and b {format_seconds(b)}: {faster} is faster by "
            f"{format_seconds(abs(a - b))}, {less:.1%}."
        )


def explain(a: Plan, b: Plan, hardware: Hardware = ROUND) -> Explanation:
    """Why one of two plans of a graph is faster on `hardware`: print it to read it, or draw both with `svg`.

    An operation that is not on a plan's critical path runs beside it: its time is hidden.
    Raises PlanError for a plan that `verify` refuses, ValueError for plans of two graphs.

    >>> from zfunc.core.graph import Graph, Op, Region
    >>> from zfunc.core.plan import build
    >>> x = Region("x", lifetime="value")
    >>> make = Op("make", (), "compute", writes=(x,), flops=2 * 10**12)
    >>> use = Op("use", (), "compute", reads=(x,), flops=2 * 10**12)
    >>> graph = Graph((make, Op("copy", (), "d2h", nbytes=10**8), use))
    >>> print(explain(build(graph, {"all": [0, 1, 2]}), build(graph, {"gpu": [0, 2], "bus": [1]})))
    On round numbers, a takes 25 ms and b 20 ms: b is faster by 5.01 ms, 20.0%.
    The critical path of a is compute 80%, d2h 20%.
    The critical path of b is compute 100%.
    On the critical path of a, hidden beside that of b: 1 copy (5.01 ms).
    The longest chain of dependencies takes 20 ms: no plan is faster.
    """
    verify(a)
    verify(b)
    if a.graph != b.graph:
        raise ValueError(
            f"explain: got plans of two graphs ({a!r} and {b!r}), expected two plans of one graph: pass the same "
            "graph to both schedules"
        )
    steps = simulate(a, hardware), simulate(b, hardware)
    paths = critical_path_of(a, steps[0]), critical_path_of(b, steps[1])
    on = [{link.event.op for link in path} for path in paths]
    only = (
        tuple(link for link in paths[0] if link.event.op not in on[1]),
        tuple(link for link in paths[1] if link.event.op not in on[0]),
    )
    own = [{(i, n) for i, before in enumerate(plan.waits) for n in before} for plan in (a, b)]
    waits = _counted(a, own[0] - own[1]), _counted(b, own[1] - own[0])
    named = evolve(steps[0], source="a"), evolve(steps[1], source="b")
    return Explanation(hardware.name, lower_bound(a.graph, hardware), named, paths, only, waits)


def _counted(plan: Plan, waits: Iterable[tuple[int, int]]) -> dict[tuple[str, str], int]:
    ops = plan.graph.ops
    return dict(Counter((ops[i].verb, ops[n].verb) for i, n in sorted(waits)))


def _by_verb(links: Iterable[Link]) -> str:
    """Text that lists the verbs of the operations in `links`, each with its number of operations and their
    total time; the longest time comes first."""
    number, seconds = Counter[str](), Counter[str]()
    for link in links:
        verb = link.event.op.partition("[")[0]
        number[verb] += 1
        seconds[verb] += link.ran  # pyright: ignore
    return _named([f"{number[v]} {v} ({format_seconds(s)})" for v, s in seconds.most_common()])


def _by_verbs(waits: Mapping[tuple[str, str], int]) -> str:
    most = sorted(waits.items(), key=lambda item: -item[1])
    return _named([f"{op} waits for {before}: {counted(n, 'wait')}" for (op, before), n in most])


def _named(parts: list[str]) -> str:
    rest = [f"and {len(parts) - NAMED} more"] if parts[NAMED:] else []
    return ", ".join(parts[:NAMED] + rest)
