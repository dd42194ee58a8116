"""Stages: runs of segments that a micro-batch passes together on one device, and their passes.

An order of stages lists for each device its passes `(way, micro-batch, stage)`; `of_segments` makes it one of
segments, as `zfunc.core.pipeline` takes it. `RecomputeAhead` changes any order of these.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from attrs import frozen

from zfunc.core.pipeline import B, F, I, Order, R
from zfunc.errors import PlanError, refuse

Passes = Sequence[tuple[str, int, int]]


def cut_in_stages(num_segments: int, count: int, lengths: Sequence[int] = ()) -> list[range]:
    """Divide `num_segments` segments into `count` pipeline stages; returns the range of segments of each.
    Stages have the `lengths` given, or are as equal as possible.

    >>> cut_in_stages(5, 2), cut_in_stages(5, 2, (4, 1))
    ([range(0, 2), range(2, 5)], [range(0, 4), range(4, 5)])
    """
    if count > num_segments:
        got, do = f"{count} stages for {num_segments} segments", "use fewer devices, or fewer stages on each"
        refuse("order", got, f"at most {num_segments}", do, PlanError)
    if lengths and (len(lengths) != count or sum(lengths) != num_segments or min(lengths) < 1):
        expected = f"{count} of 1 or more with {num_segments} in all"
        refuse("order", f"stages of {', '.join(map(str, lengths))} segments", expected, kind=PlanError)
    ends = [sum(lengths[:k]) if lengths else k * num_segments // count for k in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def cuts_by_cost(costs: Sequence[float]) -> Iterator[list[int]]:
    """Yield, for 1 stage, 2 stages and so on, the number of segments of each stage for which the most
    expensive stage costs least (ties: the least sum of squares). `costs` are those of the segments, in any
    unit.

    >>> [*cuts_by_cost([0, 1, 1, 1, 1, 1, 2])][:3]
    [[7], [4, 3], [3, 2, 2]]
    """
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}  # of as many segments
    for k in range(1, len(costs) + 1):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(k, len(costs) + 1):
            ways = ((n, sums[end] - sums[n], x) for n, x in best.items() if n < end)
            longer[end] = min((max(x[0], own), x[1] + own**2, [*x[2], end - n]) for n, own, x in ways)
        best = longer
        yield best[len(costs)][2]


def in_rounds(way: str, d: int, devices: int, stages: int, micro_batches: int) -> Passes:
    """The passes of device `d`, as (`way`, micro-batch, stage), in one direction: `way` is "F" (forward) or
    "B". Each device has `stages` stages, dealt in turn; a round has as many micro-batches as there are
    devices.

    >>> in_rounds("B", 0, 2, 2, 3)
    [('B', 0, 2), ('B', 1, 2), ('B', 0, 0), ('B', 1, 0), ('B', 2, 2), ('B', 2, 0)]
    """
    own = range(d, stages * devices, devices)[:: 1 if way == F else -1]
    rounds = (range(m, min(m + devices, micro_batches)) for m in range(0, micro_batches, devices))
    return [(way, m, k) for together in rounds for k in own for m in together]


def of_segments(order: Iterable[Passes], stages: Sequence[range]) -> list[Passes]:
    """Replace the stages in `order`, each device's passes as (kind, micro-batch, stage), by their segments,
    in the direction of the pass; `stages` has each stage's range of segments."""
    down = [own[::-1] for own in stages]
    return [[(way, m, s) for way, m, k in own for s in (stages if way == F else down)[k]] for own in order]


@frozen
class RecomputeAhead:
    """The order of pipeline passes `order` with a recomputation ("R") of each segment just before its
    backward, which the device can make while it waits for the gradient.

    >>> RecomputeAhead(lambda *_: [[("F", 0, 0), ("B", 0, 0)]])(1, 1, 1)
    [[('F', 0, 0), ('R', 0, 0), ('B', 0, 0)]]
    """

    order: Order

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes with recomputations, as (kind such as "R", micro-batch, segment)."""
        order = self.order(devices, segments, micro_batches)
        return [[y for x in own for y in ((R, *x[1:]), x)[x[0] not in (B, I) :]] for own in order]
