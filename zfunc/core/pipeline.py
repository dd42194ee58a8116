"""The passes of micro-batches through segments: on which device each is made, and in what serial order.

An order of several devices is a function `(devices, segments, micro_batches)` that returns for each device its
passes `(way, micro-batch, segment)` in order, "F" for forward and "B" for backward. So it places the segments, too.
A backward may be split: "I" makes the gradient of the input, which the segment below waits for, and "W" later those
of the weights (zero bubble, 2401.10241). "R" recomputes what backward needs of forward before its gradient arrives
(RoundPipe). Published orders are in `zfunc.schedules`.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from itertools import chain
from operator import index
from typing import Any, NamedTuple

from attrs import frozen

from zfunc.errors import PlanError, refuse

Order = Callable[[int, int, int], Sequence[Sequence[tuple[str, int, int]]]]
F, B, I, W, R = "F", "B", "I", "W", "R"  # noqa: E741


class PassKind(NamedTuple):
    """A kind of pass of a micro-batch through a segment: its verb; what it reads (`takes`) and writes
    (`makes`), as words that stand for regions; `work`, its time in forwards if its cost is unknown."""

    verb: str
    takes: str
    makes: str
    work: int


PASSES = {
    F: PassKind("forward", "weights input targets buffers", "output residuals room changed keys", 1),
    R: PassKind("recompute", "weights left", "recomputed", 1),
    B: PassKind("backward", "weights kept above", "below grads reused keys", 3),
    I: PassKind("backward_input", "weights kept above", "below pending reused keys", 2),
    W: PassKind("backward_weight", "pending", "grads", 1),
}
"""The kinds of passes, by the letter that an order has for each."""
WAYS = {kind.verb: way for way, kind in PASSES.items()}


class Pass(NamedTuple):
    """The pass of micro-batch `m` through segment `s` on a device, of the kind with letter `way`: "F"
    forward, "B" backward, "I" or "W" a half of backward, "R" recomputation. `ended` marks the end of the pass
    in lists that have both ends."""

    way: str
    m: int
    s: int
    device: int = 0
    ended: bool = False  # its end, where what it made is sent and delivered

    def __str__(self) -> str:
        return f"{self.way}[{self.m},{self.s}]"


@frozen
class InGroups:
    """The order of passes on one device: micro-batches pass each segment in groups of `size`.

    After forward of the last segment, its backward follows at once, because that segment keeps all residuals.
    """

    size: int

    def __call__(self, _devices: int, segments: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
        """A list of one list: the device's passes in order, as (kind "F" or "B", micro-batch, segment)."""
        made, last = list[tuple[str, int, int]](), segments - 1
        for first in range(0, micro_batches, self.size):
            group = range(first, min(first + self.size, micro_batches))
            made += [(F, m, s) for s in range(last) for m in group]
            made += [(way, m, last) for m in group for way in (F, B)]
            made += [(B, m, s) for s in reversed(range(last)) for m in group]
        return [made]


def passes_listed(
    order: Order,
    devices: int,
    micro_batches: int,
    trained: Sequence[int],
    num_segments: int,
    repeated: Collection[int] = (),
) -> list[list[Pass]]:
    """For each device, the passes that `order` lists for it, without those that the step does not need, such
    as gradients below the first trained segment.

    `trained` are the segments with trained parameters. `repeated` are those that may recompute forward in a
    separate pass; for any other segment a listed "R" is dropped. Raises PlanError if a needed pass is missing
    or listed twice.
    """
    try:
        signature(order).bind(devices, num_segments, micro_batches)
    except TypeError as error:
        got = f"{str(order)[:80]}, which cannot be called with three numbers ({error})"
        expected = "a function (devices, segments, micro_batches) -> passes of each device"
        refuse("order", got, expected, "write one so, or pass a name such as 'OneFOneB'", PlanError)
    given = order(devices, num_segments, micro_batches)
    try:
        listed = [[(way, index(m), index(s)) for way, m, s in own] for own in given]
    except (TypeError, ValueError):
        expected = "a list for each device of its passes (way, micro-batch, segment)"
        do = "return such as [[('F', 0, 0), ('B', 0, 0)], [('F', 0, 1), ('B', 0, 1)]]"
        refuse("order", f"{str(given)[:80]}", expected, do, PlanError)
    pairs = dict.fromkeys((m, s) for s in range(num_segments) for m in range(micro_batches))
    made_as = cache(partial(_made_as, trained=trained, repeated={*repeated}))
    lists = [
        [Pass(made, m, s, d) for way, m, s in own if (made := made_as(way, s) if (m, s) in pairs else way)]
        for d, own in enumerate(listed)
    ]
    if len(lists) != devices:
        refuse("order", f"passes for {len(lists)} devices", str(devices), "a list for each", PlanError)
    times = Counter(x[:3] for own in lists for x in own)
    split = {(m, s) for way, m, s in times if way in (I, W)}
    backward = [(way, *x) for x in pairs if x[1] >= trained[0] for way in ((I, W) if x in split else B)]
    ahead = {s for way, _, s in times if way == R}
    first = [(way, *x) for x in pairs for way in ((F, R) if x[1] in ahead else F)]
    expected = dict.fromkeys([*first, *backward])
    if times.keys() == expected.keys() and {*times.values()} <= {1}:  # nearly always
        return lists
    for x in (*expected, *(times.keys() - expected.keys())):
        if (wanted := int(x in expected)) != times[x]:
            got = f"{Pass(*x)} {times[x]} times"
            do = f"there are {num_segments} segments and {micro_batches} micro-batches"
            refuse("order", got, f"it {'once' if wanted else 'not at all'}", do, PlanError)
    return lists


def passes_in(
    lists: Sequence[Sequence[Pass]],
    trained: Sequence[int],
    work: Sequence[Mapping[str, int]],
    hops: Sequence[int],
    tied: Sequence[Collection[int]] = (),
) -> list[tuple[int, bool, Pass]]:
    """Merge the devices' `lists` of passes into one serial order: the begin and the end of each pass, as
    (time, whether it begins, pass), by estimated time. A device makes its passes in turn; each begins after
    those it depends on have ended.

    `work[s][way]` is the time of a pass of kind `way` through segment `s`, and `hops[s]` that of sending the
    segment's input to another device, both in any unit.

    So that gradient sums have the same bits under any timing, micro-batches pass each segment in ascending
    order, and each device makes a micro-batch's gradients from the last segment down; so do, for the last
    micro-batch, all devices together for each group of `tied` segments. `trained` lists the segments with
    trained parameters. Raises PlanError if devices wait for each other.
    """
    weights, expected = {*trained}, {x[:3] for own in lists for x in own}
    split = {(m, s) for way, m, s in expected if way in (I, W)}
    last = max(m for _, m, _ in expected)

    def added_up(x: Pass) -> list[int]:
        """The indices in `tied` of the groups of segments that contain pass `x`'s segment, if it is of the
        last micro-batch, after which a group's gradient sums are added."""
        return [n for n, group in enumerate(tied) if x.m == last and x.s in group]

    # What makes gradients on a device, and those of tied segments on all of them, from the lowest segment up.
    groups = defaultdict[Any, list[Pass]](list[Pass])
    for x in sorted(chain(*lists), key=lambda x: x.s):
        for group in ((x.m, x.device), *added_up(x)) if x.way in (B, W) else ():
            groups[group].append(x)

    def higher(x: Pass) -> Iterator[tuple[str, int, int]]:
        """Yield the passes of higher segments that have to come before pass `x`, because gradients are added
        from the last segment down."""
        for group in ((x.m, x.device), *added_up(x)) if x.way in (B, W) and x.s in weights else ():
            own = groups[group]
            for y in own[bisect_right(own, x.s, key=lambda y: y.s) :]:
                yield y[:3]
                if y.s in weights and isinstance(group, tuple):
                    break

    before = {x[:3]: [y for y in (*_before(x, split), *higher(x)) if y in expected] for x in chain(*lists)}
    ends: dict[tuple[str, int, int], tuple[int, int]] = {}  # and the device

    def begins(x: Pass, free: int) -> int:
        """The time at which pass `x` can begin: when its device is `free` and the outputs of all passes that
        `x` depends on have arrived there."""
        for y in before[x[:3]]:
            end, device = ends[y]
            if device != x.device and y[2] != x.s:
                end += hops[max(y[2], x.s)]
            if end > free:
                free = end
        return free

    found: list[tuple[int, bool, Pass]] = []
    free, left = [0] * len(lists), [[*reversed(own)] for own in lists]
    ready: dict[int, tuple[int, int, Pass]] = {}  # the next of a device: when it starts
    awaited = dict[int, tuple[str, int, int]]()  # by device, a pass that its next one waits for
    while any(left):
        for d, own in enumerate(left):
            if not own or d in ready or (d in awaited and awaited[d] not in ends):
                continue
            awaited.pop(d, None)
            for y in before[own[-1][:3]]:
                if y not in ends:
                    awaited[d] = y
                    break
            else:
                ready[d] = begins(own[-1], free[d]), d, own[-1]
        if not ready:
            stuck = [(own[-1], awaited[d]) for d, own in enumerate(left) if own]
            why = "; ".join(f"device {x.device} has {x} next, which follows {Pass(*y)}" for x, y in stuck)
            got = f"devices that wait for each other or for themselves ({why})"
            expected = (
                "an order in which each pass comes after those that it depends on, and micro-batches ascend"
            )
            refuse("order", got, expected, kind=PlanError)
        start, d, x = min(ready.values())
        del ready[d], left[d][-1]
        free[d] = end = start + work[x.s][x.way]
        ends[x[:3]] = end, d
        found += [(start, True, x), (end, False, Pass(*x[:4], ended=True))]
    return sorted(found, key=lambda at: at[:2])


def _made_as(way: str, s: int, trained: Sequence[int], repeated: Collection[int]) -> str:
    """The kind of pass that the step makes where an order lists kind `way` for segment `s`, "" for none. No
    gradients are made below the first trained segment, none of an input at that segment, none of weights at a
    frozen segment; "R" (recomputation) needs a segment in `repeated`."""
    if way == R:
        return R if s >= trained[0] and s in repeated else ""
    if s in trained[1:]:
        return way
    made: dict[str, str] = {B: "", I: "", W: ""}
    if s >= trained[0]:
        made = {I: "", W: B} if s == trained[0] else {I: B, W: ""}
    return made.get(way, way)


def _before(x: Pass, split: Collection[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """The passes after which pass `x` may begin, as (kind, micro-batch, segment); some may not exist. `split`
    has the pairs (micro-batch, segment) whose backward is divided into passes "I" and "W"."""
    way, m, s, *_ = x
    if way == F:
        return [(F, m - 1, s), (F, m, s - 1)]
    if way == R:
        return [(F, m, s)]
    earlier = (W if (m - 1, s) in split else B), m - 1, s
    if way == W:
        return [earlier, (I, m, s)]
    if way == I and earlier[0] == W:
        earlier = I, m - 1, s
    return [earlier, (F, m, s), (R, m, s), ((I if (m, s + 1) in split else B), m, s + 1)]
