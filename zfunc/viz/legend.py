"""What all pictures of a step share: the colours of verbs, headings, and round times for an axis.

A verb has one colour in every picture. The verbs of `zfunc.core.ops` and `zfunc.core.moves` have theirs in
`colours.toml`; that of any other verb is computed from its name.
"""

import re
import tomllib
from collections.abc import Sequence
from colorsys import hls_to_rgb
from importlib.resources import files
from itertools import chain
from math import floor, inf, log10
from zlib import crc32

from zfunc.core.display import counted
from zfunc.core.graph import OF_DEVICE, Kind
from zfunc.core.pipeline import WAYS
from zfunc.core.plan import Plan
from zfunc.core.timeline import Timeline
from zfunc.units import format_seconds, second_unit

# The colours of verbs, by the kind of these.
PALETTE: dict[str, dict[str, str]] = tomllib.loads((files("zfunc.viz") / "colours.toml").read_text())
_COLOURS = {verb: colour for kind in PALETTE.values() for verb, colour in kind.items()}
_FROM_ABOVE: tuple[Kind, ...] = ("h2d", "compute", "d2h", "network", "host", "read", "write")

Timelines = Timeline | Sequence[Timeline]  # several share one axis: simulated and measured, for example


def timeline_tuple(timelines: Timelines) -> tuple[Timeline, ...]:
    """The timelines as a tuple. Raises ValueError if there is no timeline."""
    result = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    if not result:
        raise ValueError("got no timeline, expected one or more to draw: pass such as simulate(plan)")
    return result


def lanes_of(timelines: Sequence[Timeline]) -> dict[str, bool]:
    """The lanes of all timelines from the top, and whether a lane only copies between host and device (drawn thin).

    Lanes of a device are together; lanes that devices of a rank share come below: network, host cores, drives.
    Ranks share no lane.

    >>> from zfunc.core.timeline import Event
    >>> events = (Event(x, x, x.partition(":")[0], 0.0, 1.0) for x in ("host", "d2h", "h2d:1", "h2d"))
    >>> lanes_of([Timeline(events, "simulated")])
    {'h2d': True, 'd2h': True, 'h2d:1': True, 'host': False}
    """
    kinds: dict[str, set[Kind]] = {}
    for e in (e for timeline in timelines for e in timeline.events):
        kinds.setdefault(e.lane, set()).add(e.kind)
    of_ranks = any("@" in lane for lane in kinds)

    def place(lane: str) -> tuple[float, int]:
        first = min(map(_FROM_ABOVE.index, kinds[lane]))
        number = re.search(r"[:@](\d+)$", lane)
        shared = not of_ranks and _FROM_ABOVE[first] not in OF_DEVICE
        return inf if shared else int(number[1]) if number else 0, first

    return {lane: kinds[lane] <= {"h2d", "d2h"} for lane in sorted(kinds, key=place)}


def micro_batches_of(timelines: Sequence[Timeline]) -> dict[str, str]:
    """The micro-batch of each pass of a pipeline, by operation; empty where one lane makes all passes of a step.

    >>> from zfunc.core.timeline import Event
    >>> events = (Event(f"gpu:{n}", f"forward[3,{n}]", "compute", n, n + 1.0) for n in (0, 1))
    >>> micro_batches_of([Timeline(events, "simulated")])
    {'forward[3,0]': '3', 'forward[3,1]': '3'}
    >>> micro_batches_of([Timeline((event,), "simulated") for event in events])
    {}
    """
    steps = [[e for e in timeline.events if verb_of(e.op) in WAYS] for timeline in timelines]
    several = any(len({e.lane for e in passes}) > 1 for passes in steps)
    return {e.op: re.sub(r"\D.*", "", e.op.partition("[")[2]) for e in chain(*steps) if several}


def verb_of(op: str) -> str:
    """The verb in an operation's name.

    >>> verb_of("forward[0,3]")
    'forward'
    """
    return op.partition("[")[0]


def colour_of(verb: str) -> str:
    """The colour of a verb, the same in every picture.

    >>> colour_of("forward"), colour_of("a verb of your own")
    ('#3ba9d5', '#98e2af')
    """
    hue = crc32(verb.encode(errors="replace")) / 2**32
    named = "#" + "".join(f"{round(255 * x):02x}" for x in hls_to_rgb(hue, 0.74, 0.56))
    return _COLOURS.get(verb, named)


def verbs_of(timelines: Sequence[Timeline], plan: Plan | None = None) -> dict[str, int]:
    """Verbs numbered by first appearance: in the plan's serial order if there is a plan, else by start time."""
    planned = (op.verb for op in plan.graph) if plan else ()
    started = (verb_of(e.op) for t in timelines for e in sorted(t.events, key=lambda e: e.start))
    names = dict.fromkeys((*planned, *started))
    return {verb: n for n, verb in enumerate(names)}


def heading_of(timeline: Timeline) -> str:
    """A heading with the source, duration and numbers of operations and lanes of a timeline."""
    ops, lanes = counted(len(timeline.events), "operation"), counted(len(timeline.lanes), "lane")
    return f"{timeline.source}: {format_seconds(timeline.seconds)}, {ops} on {lanes}"


def ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """At most `most` + 1 round times from 0 to `seconds`, each with its label; the first has the unit."""
    unit, name = second_unit(seconds)
    times = axis_ticks(0.0, seconds / unit, most) if seconds > 0 else [0.0]
    return [(t * unit, f"{t:.12g}" if t else f"0 {name}") for t in times]


def axis_ticks(low: float, high: float, most: int, unit: float = 1.0) -> list[float]:
    """Round values from `low` to `high`, `most` + 1 at most: multiples of 1, 2 or 5 times 10^n times `unit`.

    >>> axis_ticks(0.0, 90.0, 4), axis_ticks(0.0, 90.0, 5)
    ([0.0, 50.0], [0.0, 20.0, 40.0, 60.0, 80.0])
    """
    least = (high - low) / unit / most
    power = 10.0 ** floor(log10(least))
    step = unit * next(power * k for k in (1, 2, 5, 10) if power * k >= least * (1 - 1e-9))
    first = -floor(-low / step + 1e-9)
    return [k * step for k in range(first, floor(high / step + 1e-9) + 1)]
