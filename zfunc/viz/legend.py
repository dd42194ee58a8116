"""What all pictures of a step share: verbs numbered and coloured, times in words, round times for an axis.

The invariant: nothing here depends on a verb's name, but on when it appears first.
"""

from collections.abc import Iterator, Sequence
from math import floor, log10

from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.units import format_seconds, second_unit

PALETTE = (  # light enough for black letters, told apart on white and on black, neighbours far apart
    *("#9bd5ea", "#6ea8e5", "#f4d35e", "#f29e7a", "#b8b8d1", "#5fbfae", "#d9a5e0", "#e8848c"),
    *("#a7c957", "#f6c177", "#a98ff0", "#c9ada7", "#86b56a", "#4fb0c6", "#d69a55", "#94a3b8"),
)

Timelines = (
    Timeline | Sequence[Timeline]
)  # one, or several to lay over each other: simulated and measured, say


def several(timelines: Timelines) -> tuple[Timeline, ...]:
    """One timeline or several as several. Raises ValueError for none."""
    made = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    if not made:
        raise ValueError("got no timeline, expected one or more to draw: pass such as simulate(plan)")
    return made


def lanes_of(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """The lanes of all of them, in order of appearance."""
    return tuple(dict.fromkeys(lane for timeline in timelines for lane in timeline.lanes))


def verb_of(op: str) -> str:
    """The verb in an operation's name.

    >>> verb_of("forward[0,3]")
    'forward'
    """
    return op.partition("[")[0]


def verbs_of(timelines: Sequence[Timeline], plan: Plan | None = None) -> dict[str, int]:
    """Verbs numbered by first appearance: in the plan's serial order if there is one, or by start."""
    planned = (op.verb for op in plan.graph) if plan else ()
    started = (verb_of(e.op) for t in timelines for e in sorted(t.events, key=lambda e: e.start))
    names = dict.fromkeys((*planned, *started))
    return {verb: n for n, verb in enumerate(names)}


def legend_summary(timeline: Timeline) -> str:
    """Source, duration and size of a timeline, as a heading."""
    ops, lanes = len(timeline.events), len(timeline.lanes)
    return (
        f"{timeline.source}: {format_seconds(timeline.seconds)}, {ops:,} operation{'s' * (ops != 1)} "
        f"on {lanes} lane{'s' * (lanes != 1)}"
    )


def ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """At most `most` + 1 round times from 0 to `seconds`, each with its label; the first tells the unit."""
    unit, name = second_unit(seconds)
    total = seconds / unit
    if total <= 0:
        return [(0.0, f"0 {name}")]
    step = round_step(total / most)
    times = [k * step for k in range(floor(total / step + 1e-9) + 1)]
    return [(t * unit, f"{t:.12g}" if t else f"0 {name}") for t in times]


def round_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is `least` or more.

    >>> round_step(0.2), round_step(22.5)
    (0.2, 50.0)
    """
    power = 10.0 ** floor(log10(least))
    return next(power * k for k in (1, 2, 5, 10) if power * k >= least * (1 - 1e-9))


def wrapped(words: Sequence[str], width: int) -> Iterator[str]:
    """The words in lines of at most `width` columns, three blanks between two."""
    line = ""
    for word in words:
        if line and len(line) + 3 + len(word) > width:
            yield line
            line = ""
        line += ("   " if line else "") + word
    yield line
