"""When operations ran: one type for what was simulated and what was measured."""

from collections.abc import Iterator
from functools import cached_property

from attrs import field, frozen

from zfunc.core.graph import Kind


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
        """How long it took."""
        return self.end - self.start


@frozen
class Timeline:
    """The events of one step, ordered by lane and start. `source` is "simulated" or "measured".

    >>> Timeline((Event("gpu", "forward[0,0]", "compute", 0.0, 2.0),), "simulated").busy("gpu")
    1.0
    """

    events: tuple[Event, ...] = field(converter=tuple)
    source: str

    @cached_property
    def seconds(self) -> float:
        """From the first start, counted as 0, to the last end."""
        return max((e.end for e in self.events), default=0.0)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes, in the order of the plan."""
        return tuple(dict.fromkeys(e.lane for e in self.events))

    def on(self, lane: str) -> Iterator[Event]:
        """The events of one lane."""
        return (e for e in self.events if e.lane == lane)

    def busy(self, lane: str) -> float:
        """The share of the step, 0 to 1, in which `lane` was running something."""
        return sum(e.seconds for e in self.on(lane)) / self.seconds if self.seconds else 0.0

    def seconds_of(self, kind: Kind) -> float:
        """Time spent on operations of `kind`, over all lanes."""
        return sum(e.seconds for e in self.events if e.kind == kind)
