"""When each operation of a step ran, simulated or measured."""

from collections.abc import Collection, Iterator
from functools import cached_property

from attrs import field, frozen

from zfunc.core.display import counted
from zfunc.core.graph import KINDS, Kind
from zfunc.core.methods import above, in_notebook
from zfunc.options import one_of
from zfunc.units import format_seconds


@frozen
class Event:
    """One operation on one lane, from `start` to `end`, in seconds since the step began."""

    lane: str
    op: str
    kind: Kind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the operation in seconds."""
        return self.end - self.start


@frozen
class Timeline:
    """The events of one step, ordered by lane and start. `source` is "simulated" or "measured".

    >>> Timeline((Event("gpu", "forward[0,0]", "compute", 0.0, 2.0),), "simulated").busy("gpu")
    1.0
    """

    events: tuple[Event, ...] = field(converter=tuple)
    source: str

    def __repr__(self) -> str:
        on = f"{counted(len(self.events), 'operation')} on {counted(len(self.lanes), 'lane')}"
        return f"Timeline({self.source}, {on}, {format_seconds(self.seconds)})"

    def _repr_html_(self) -> str:
        return in_notebook("timeline", self)

    def text(self, width: int = 100) -> str:
        """A text diagram of the step, `width` columns wide: a row for each lane, a time axis, a legend.

        Raises ValueError for a width that is too small.
        """
        return above("text")(self, width)

    def svg(self, title: str = "", width: int = 1200) -> str:
        """The step as an SVG diagram (text), `width` pixels wide; raises ValueError for a width below 400."""
        return above("svg")(self, title=title, width=width)

    @cached_property
    def seconds(self) -> float:
        """The duration of the step: the last end, in seconds since the step began."""
        return max((e.end for e in self.events), default=0.0)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The names of the lanes, in the order of the plan."""
        return tuple(dict.fromkeys(e.lane for e in self.events))

    def on(self, lane: str) -> Iterator[Event]:
        """The events on the lane `lane`, in order of their start."""
        return (e for e in self.events if e.lane == lane)

    def busy(self, lane: str) -> float:
        """The fraction of the step's duration, 0 to 1, in which `lane` ran an operation."""
        return self.busy_seconds.get(lane, 0.0) / self.seconds if self.seconds else 0.0

    @cached_property
    def busy_seconds(self) -> dict[str, float]:
        """The seconds in which each lane ran an operation."""
        return {lane: sum(e.seconds for e in self.on(lane)) for lane in self.lanes}

    def seconds_of(self, kind: Kind) -> float:
        """The seconds spent on operations of `kind`, summed over the lanes."""
        return sum(e.seconds for e in self._of(kind))

    def _of(self, *kinds: Kind) -> list[Event]:
        """The events of operations of `kinds`. Raises ValueError for an unknown kind."""
        for kind in kinds:
            one_of(KINDS)("kind", kind)
        return [e for e in self.events if e.kind in kinds]

    def hidden(self, *kinds: Kind) -> float | None:
        """The share, 0 to 1, of the time of operations of `kinds` in which compute ran, too; None if none ran.

        >>> events = Event("gpu", "use", "compute", 0.0, 2.0), Event("bus", "move", "d2h", 1.0, 5.0)
        >>> Timeline(events, "measured").hidden("d2h", "h2d")
        0.25
        """
        own, compute = self._of(*kinds), self._of("compute")
        seconds = _covered(own)
        both = seconds + _covered(compute) - _covered([*own, *compute])
        return min(1.0, max(0.0, both / seconds)) if seconds else None


def _covered(events: Collection[Event]) -> float:
    """The seconds in which at least one of `events` ran, an overlap counted once."""
    seconds, until = 0.0, 0.0
    for e in sorted(events, key=lambda e: e.start):
        seconds += max(0.0, e.end - max(e.start, until))
        until = max(until, e.end)
    return seconds
