"""What all pictures of a step share: the colours of verbs, headings, and round times for an axis.

A verb has one colour in every picture. The verbs of `zfunc.core.ops` and `zfunc.core.moves` have one each; the
colour of any other verb is computed from its name.
"""

from collections.abc import Sequence
from colorsys import hls_to_rgb
from math import floor, log10
from zlib import crc32

from zfunc.core.display import counted
from zfunc.core.moves import MOVES
from zfunc.core.ops import VERBS
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.units import format_seconds, second_unit

PALETTE = (  # light enough for black letters, distinct on white and on black
    *("#9bd5ea", "#d569de", "#6ea8e5", "#78f054", "#f4d35e", "#ffc76b", "#d8b94a", "#e6ee9c", "#f29e7a"),
    *("#b8b8d1", "#5fbfae", "#d9a5e0"),
    *("#a7c957", "#f6c177", "#f9604e", "#c9ada7", "#86b56a", "#4fb0c6", "#3ce4f0", "#b4849c", "#9c90c0"),
    *("#fccca8", "#5ce6c4", "#f0d2ff", "#fc4ca4", "#d69a55", "#94a3b8", "#3cfc60", "#ffe082", "#a98ff0"),
    *("#80cbc4", "#c378b4", "#8c9bff", "#ffb4c3", "#ff87c3", "#7df297", "#84967b", "#ace840", "#f44cf4"),
    *("#9f963c", "#e8848c", "#c3e1b4", "#4cc440", "#f48840", "#b48778", "#3ca55a", "#ded98c", "#f9f91f"),
    *("#f9a21f", "#c0a878", "#ccd8cc", "#3c90fc", "#d0ff9c", "#ffc0e8", "#9cffe0", "#c8b0ff"),
)
_COLOURS = dict(zip((*VERBS, *MOVES), PALETTE, strict=False))

Timelines = Timeline | Sequence[Timeline]  # several share one axis: simulated and measured, for example


def timeline_tuple(timelines: Timelines) -> tuple[Timeline, ...]:
    """The timelines as a tuple. Raises ValueError for none."""
    result = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    if not result:
        raise ValueError("got no timeline, expected one or more to draw: pass such as simulate(plan)")
    return result


def lanes_of(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """The lanes of all timelines, in order of appearance."""
    return tuple(dict.fromkeys(lane for timeline in timelines for lane in timeline.lanes))


def verb_of(op: str) -> str:
    """The verb in an operation's name.

    >>> verb_of("forward[0,3]")
    'forward'
    """
    return op.partition("[")[0]


def colour_of(verb: str) -> str:
    """The colour of a verb, the same in every picture.

    >>> colour_of("forward"), colour_of("a verb of your own")
    ('#6ea8e5', '#98e2af')
    """
    hue = crc32(verb.encode(errors="replace")) / 2**32
    named = "#" + "".join(f"{round(255 * x):02x}" for x in hls_to_rgb(hue, 0.74, 0.56))
    return _COLOURS.get(verb, named)


def verbs_of(timelines: Sequence[Timeline], plan: Plan | None = None) -> dict[str, int]:
    """Verbs numbered by first appearance: in the plan's serial order if there is one, or by start."""
    planned = (op.verb for op in plan.graph) if plan else ()
    started = (verb_of(e.op) for t in timelines for e in sorted(t.events, key=lambda e: e.start))
    names = dict.fromkeys((*planned, *started))
    return {verb: n for n, verb in enumerate(names)}


def legend_summary(timeline: Timeline) -> str:
    """Source, duration and size of a timeline, as a heading."""
    ops, lanes = counted(len(timeline.events), "operation"), counted(len(timeline.lanes), "lane")
    return f"{timeline.source}: {format_seconds(timeline.seconds)}, {ops} on {lanes}"


def ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """At most `most` + 1 round times from 0 to `seconds`, each with its label; the first has the unit."""
    unit, name = second_unit(seconds)
    times = axis_ticks(0.0, seconds / unit, most) if seconds > 0 else [0.0]
    return [(t * unit, f"{t:.12g}" if t else f"0 {name}") for t in times]


def axis_ticks(low: float, high: float, most: int, unit: float = 1.0) -> list[float]:
    """Round values from `low` to `high`, `most` + 1 at most: multiples of 1, 2 or 5 times a power of ten.

    >>> axis_ticks(0.0, 90.0, 4), axis_ticks(0.0, 90.0, 5)
    ([0.0, 50.0], [0.0, 20.0, 40.0, 60.0, 80.0])
    """
    least = (high - low) / unit / most
    power = 10.0 ** floor(log10(least))
    step = unit * next(power * k for k in (1, 2, 5, 10) if power * k >= least * (1 - 1e-9))
    first = -floor(-low / step + 1e-9)
    return [k * step for k in range(first, floor(high / step + 1e-9) + 1)]
