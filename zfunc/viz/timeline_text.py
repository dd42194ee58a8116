"""A step as text for a terminal: a row of letters for each lane, under one time axis.

Simulated and measured steps look alike but for the source in the heading. Of several timelines the rows of a lane
stand together.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import floor
from string import ascii_lowercase, digits

from zfunc.core.timeline import Event
from zfunc.values import whole
from zfunc.viz.legend import (
    Timelines,
    heading_of,
    lanes_of,
    micro_batches_of,
    ticks,
    timeline_tuple,
    verb_of,
    verbs_of,
)


def text(timelines: Timelines, width: int = 100) -> str:
    """The timelines' lanes as rows of letters, at most `width` columns wide, with a time axis and a legend.

    A cell shows the verb that fills most of the cell, as a capital where an operation begins; after a pipeline
    pass's letter comes the micro-batch. Raises ValueError for a width that is too small.

    >>> from zfunc.core.timeline import Timeline
    >>> events = Event("gpu", "fill[0]", "compute", 0.0, 3e-3), Event("cpu", "use[0]", "host", 3e-3, 4e-3)
    >>> print(text(Timeline(events, "simulated"), width=40))
    simulated: 4 ms, 2 operations on 2 lanes
    gpu  75% |Ffffffffffffffffffffff·······|
    cpu  25% |·····················Uuuuuuuu|
              0 ms          2              4
    f fill   u use
    """
    shown = timeline_tuple(timelines)
    rows = [
        (f"{lane} {t.source}" if len(shown) > 1 else lane, lane, t)
        for lane in lanes_of(shown)
        for t in shown
        if lane in t.lanes
    ]
    names = max((len(name) for name, _, _ in rows), default=0)
    cells = whole("width", width) - names - len("  75% ||")
    if cells < 16:
        raise ValueError(f"got a width of {width} columns, expected {width - cells + 16} or more: widen it")
    verbs = verbs_of(shown)
    letters, numbers = _letters(verbs), micro_batches_of(shown)
    seconds = max(t.seconds for t in shown)
    per_cell = (seconds or 1.0) / cells
    axis = [" "] * (cells + 1)
    for seconds_at, label in ticks(seconds, cells // 8):
        start = min(round(seconds_at / per_cell), len(axis) - len(label))
        axis[start : start + len(label)] = label
    lines = [
        *map(heading_of, shown),
        *(
            f"{name:<{names}} {t.busy(lane):>4.0%} |{_row(t.on(lane), cells, per_cell, letters, numbers)}|"
            for name, lane, t in rows
        ),
        " " * (names + 7) + "".join(axis),
        *_wrapped([f"{letters[verb]} {verb}" for verb in verbs], width),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _letters(verbs: Iterable[str]) -> dict[str, str]:
    """A letter for each verb: the first free letter of the verb itself, else any free letter."""
    letters: dict[str, str] = {}
    for verb in verbs:
        wanted = [c for c in verb.lower() if c in ascii_lowercase]
        free = (c for c in (*wanted, *ascii_lowercase, *digits) if c not in letters.values())
        letters[verb] = next(free, "#")
    return letters


def _row(
    events: Iterable[Event], cells: int, per_cell: float, letters: dict[str, str], numbers: dict[str, str]
) -> str:
    filled: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(cells)]
    begins: set[tuple[int, str]] = set()
    numbered: list[tuple[int, str]] = []
    for e in events:
        letter = letters[verb_of(e.op)]
        first = min(cells - 1, floor(e.start / per_cell + 1e-9))
        begins.add((first, letter))
        for n in range(first, cells):
            if n > first and n * per_cell >= e.end - 1e-9 * per_cell:
                break
            filled[n][letter] += min(e.end, (n + 1) * per_cell) - max(e.start, n * per_cell)
        number = numbers.get(e.op, "")
        if number and (first + 1 + len(number)) * per_cell <= e.end + 1e-9 * per_cell:
            numbered.append((first + 1, number))
    most = [max(cell, key=lambda c: cell[c]) if cell else "·" for cell in filled]
    row = [c.upper() if (n, c) in begins else c for n, c in enumerate(most)]
    for n, number in numbered:
        row[n : n + len(number)] = number
    return "".join(row)


def _wrapped(words: Sequence[str], width: int) -> Iterator[str]:
    """The words joined by three blanks, in lines of at most `width` columns."""
    line = ""
    for word in words:
        if line and len(line) + 3 + len(word) > width:
            yield line
            line = ""
        line += ("   " if line else "") + word
    yield line
