"""The passes of micro-batches through segments: on which device each is made, and in what serial order.

An order of several devices is a function `(devices, segments, micro_batches)` that returns for each device its
passes `(way, micro-batch, segment)` in order, "F" for forward and "B" for backward. So it places the segments, too.
Published ones are in `zfunc.schedules`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from zfunc.errors import PlanError

Order = Callable[[int, int, int], Sequence[Sequence[tuple[str, int, int]]]]
F, B = "F", "B"
SECONDS = {F: 1, B: 2}  # about what passes take, in proportion


class Pass(NamedTuple):
    """One micro-batch through one segment, forward or backward, on a device."""

    way: str
    m: int
    s: int
    device: int = 0

    def __str__(self) -> str:
        return f"{self.way}[{self.m},{self.s}]"


def passes_on_one(groups: Sequence[range], num_segments: int, first_trained: int) -> Iterator[Pass]:
    """The passes on one device: micro-batches go through the segments in groups.

    A micro-batch passes the last segment both ways at once, because that keeps all of its residuals.
    """
    last = num_segments - 1
    for group in groups:
        yield from (Pass(F, m, s) for s in range(last) for m in group)
        for m in group:
            yield Pass(F, m, last)
            yield Pass(B, m, last)
        yield from (Pass(B, m, s) for s in reversed(range(first_trained, last)) for m in group)


def passes_on_several(
    order: Order, devices: int, num_segments: int, micro_batches: int, first_trained: int
) -> Iterator[Pass]:
    """The passes of an order, in about the order in which they begin: each after those that it depends on.

    Micro-batches pass a segment in ascending order, each way, so that sums do not depend on the order. Raises
    PlanError for an order that has a pass twice or not at all, or in which devices wait for each other.
    """
    lists = [
        [Pass(way, m, s, d) for way, m, s in own if way != B or s >= first_trained]
        for d, own in enumerate(order(devices, num_segments, micro_batches))
    ]
    if len(lists) != devices:
        raise PlanError(f"order: got passes for {len(lists)} devices, expected {devices}: a list for each")
    trained = range(first_trained, num_segments)
    expected = [(F, m, s) for s in range(num_segments) for m in range(micro_batches)]
    expected += [(B, m, s) for s in trained for m in range(micro_batches)]
    times = Counter(x[:3] for own in lists for x in own)
    for x in (*expected, *(times.keys() - {*expected})):
        if (wanted := int(x in expected)) != times[x]:
            raise PlanError(
                f"order: got {Pass(*x)} {times[x]} times, expected it {'once' if wanted else 'not at all'}: there "
                f"are {num_segments} segments and {micro_batches} micro-batches"
            )
    ends: dict[tuple[str, int, int], float] = {}
    free, left = [0.0] * devices, [own[::-1] for own in lists]
    while any(left):
        ready = [
            (max(free[own[-1].device], *(ends[x] for x in before), 0.0), own[-1])
            for own in left
            if own and ends.keys() >= {*(before := _before(own[-1], num_segments))}
        ]
        if not ready:
            stuck = [
                (own[-1], next(x for x in _before(own[-1], num_segments) if x not in ends))
                for own in left
                if own
            ]
            why = "; ".join(
                f"device {x.device} has {x} next, which follows {Pass(*before)}" for x, before in stuck
            )
            raise PlanError(
                f"order: got devices that wait for each other or for themselves ({why}), expected an order in "
                "which each pass comes after those that it depends on, and micro-batches ascend"
            )
        start, x = min(ready, key=lambda found: (found[0], found[1].device))
        yield x
        left[x.device].pop()
        ends[x[:3]] = free[x.device] = start + SECONDS[x.way]


def _before(x: Pass, num_segments: int) -> list[tuple[str, int, int]]:
    """The passes that one follows."""
    before = [(x.way, x.m - 1, x.s)] if x.m else []
    if x.way == F:
        return [*before, *([(F, x.m, x.s - 1)] if x.s else [])]
    above = [(B, x.m, x.s + 1)] if x.s < num_segments - 1 else []
    return [*before, (F, x.m, x.s), *above]
