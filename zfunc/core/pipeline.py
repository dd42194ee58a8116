"""The passes of micro-batches through segments: on which device each is made, and in what serial order.

An order of several devices is a function `(devices, segments, micro_batches)` that returns for each device its
passes `(way, micro-batch, segment)` in order, "F" for forward and "B" for backward. So it places the segments, too.
Published ones are in `zfunc.schedules`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zfunc.errors import PlanError

Order = Callable[[int, int, int], Sequence[Sequence[tuple[str, int, int]]]]
F, B = "F", "B"


class Pass(NamedTuple):
    """One micro-batch through one segment, forward or backward, on a device."""

    way: str
    m: int
    s: int
    device: int = 0
    ended: bool = False  # its end, where what it made is sent and delivered

    def __str__(self) -> str:
        return f"{self.way}[{self.m},{self.s}]"


def passes_on_one(groups: Sequence[range], num_segments: int, first_trained: int) -> Iterator[Pass]:
    """The beginnings and ends of passes on one device: micro-batches go through the segments in groups.

    A micro-batch passes the last segment both ways at once, because that keeps all of its residuals.
    """
    for x in _of_groups(groups, num_segments, first_trained):
        yield x
        yield x._replace(ended=True)


def _of_groups(groups: Sequence[range], num_segments: int, first_trained: int) -> Iterator[Pass]:
    last = num_segments - 1
    for group in groups:
        yield from (Pass(F, m, s) for s in range(last) for m in group)
        for m in group:
            yield Pass(F, m, last)
            yield Pass(B, m, last)
        yield from (Pass(B, m, s) for s in reversed(range(first_trained, last)) for m in group)


def passes_on_several(
    order: Order,
    devices: int,
    micro_batches: int,
    first_trained: int,
    work: Sequence[Mapping[str, int]],
    hops: Sequence[int],
) -> Iterator[Pass]:
    """The beginnings and ends of the passes of an order, about as they come in time: a pass begins after those that
    it depends on have ended.

    `work` is that of a pass through each segment, by its way, and `hops` that of sending its input to another
    device, in any unit: lanes that all devices share, and those of what a device is sent, have this order.

    Micro-batches pass a segment in ascending order, each way, so that sums do not depend on the order. Raises
    PlanError for an order that has a pass twice or not at all, or in which devices wait for each other.
    """
    num_segments = len(work)
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
    ends: dict[tuple[str, int, int], tuple[int, int]] = {}  # and the device

    def arrives(x: Pass, before: tuple[str, int, int]) -> int:
        """When pass `x` has what one before it made."""
        end, device = ends[before]
        sent = device != x.device and before[2] != x.s
        return end + hops[max(before[2], x.s)] * sent

    found: list[tuple[int, bool, Pass]] = []
    free, left = [0] * devices, [own[::-1] for own in lists]
    while any(left):
        ready = [
            (max(free[own[-1].device], 0, *(arrives(own[-1], x) for x in before)), own[-1])
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
        start, x = min(ready, key=lambda at: (at[0], at[1].device))
        left[x.device].pop()
        free[x.device] = end = start + work[x.s][x.way]
        ends[x[:3]] = end, x.device
        found += [(start, True, x), (end, False, x._replace(ended=True))]
    yield from (x for _, _, x in sorted(found, key=lambda at: at[:2]))


def _before(x: Pass, num_segments: int) -> list[tuple[str, int, int]]:
    """The passes that one follows."""
    before = [(x.way, x.m - 1, x.s)] if x.m else []
    if x.way == F:
        return [*before, *([(F, x.m, x.s - 1)] if x.s else [])]
    above = [(B, x.m, x.s + 1)] if x.s < num_segments - 1 else []
    return [*before, (F, x.m, x.s), *above]
