"""Orders of a pipeline for lab 8: what each pass waits for, when it runs, what is kept, and a picture.

An order lists for each device its passes `(way, micro-batch, stage)`: "F" forward, "B" backward, or its halves "I",
the gradient of the input, and "W", that of the weights. Stage s is on device s.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from course.drawing import Cell, Row, table
from course.law import Broken, Picture
from zfunc.core.timeline import Event, Timeline
from zfunc.viz.timeline_svg import svg
from zfunc.viz.timeline_text import text

Pass = tuple[str, int, int]
Order = Sequence[Sequence[Pass]]
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
VERBS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def name_of(x: Pass) -> str:
    """A pass as text.

    >>> name_of(("F", 2, 1))
    'F[2,1]'
    """
    return f"{x[0]}[{x[1]},{x[2]}]"


def order_of(name: str, got: Any, devices: int) -> list[list[Pass]]:
    """What the student's function `name` returned, as an order of passes. Raises Broken if it is none."""
    expected = (
        f"a list for each of {devices} devices, of its passes (way, micro-batch, stage), such as ('F', 0, 1)"
    )
    try:
        order = [[(way, m, s) for way, m, s in own] for own in got]
    except (TypeError, ValueError):
        raise Broken(f"{name}: got {got!r:.200}, expected {expected}") from None
    if len(order) != devices:
        raise Broken(f"{name}: got {len(order)} lists, expected {expected}")
    for d, own in enumerate(order):
        for x in own:
            if not (isinstance(x[0], str) and type(x[1]) is int and type(x[2]) is int):
                raise Broken(f"{name}: got the pass {x!r}, expected {expected}")
            if x[2] != d:
                raise Broken(
                    f"{name}: got {name_of(x)} on device {d}, expected it on device {x[2]}, where its stage is"
                )
    return order


def before(x: Pass, order: Order) -> Iterator[Pass]:
    """Yield the passes in `order` whose results pass `x` needs."""
    way, m, s = x
    needs = {"F": [("F", m, s - 1)], "W": [("I", m, s)]}
    found = needs.get(way, [("F", m, s), ("B", m, s + 1), ("I", m, s + 1)])
    return (y for y in found if 0 <= y[2] < len(order) and y in order[y[2]])


def waits_for(order: Order) -> dict[Pass, set[Pass]]:
    """For each pass, the passes it waits for: whose results it needs, and the one before on its device."""
    found = {x: {*before(x, order)} for own in order for x in own}
    for own in order:
        for x, y in pairwise(own):
            found[y].add(x)
    return found


def times(order: Order, seconds: Mapping[str, float] = SECONDS) -> dict[Pass, tuple[float, float]]:
    """When each pass begins and ends, as early as can be; passes that wait for each other are left out."""
    waits, found = waits_for(order), dict[Pass, tuple[float, float]]()
    left = [[*own] for own in order]
    moved = True
    while moved:
        moved = False
        for own in left:
            while own and waits[own[0]] <= found.keys():
                begin = max((found[y][1] for y in waits[own[0]]), default=0.0)
                found[own[0]] = begin, begin + seconds[own[0][0]]
                del own[0]
                moved = True
    return found


def is_cycle(order: Order, cycle: Sequence[Pass]) -> bool:
    """Whether each pass of `cycle` waits for the next one, and the last for the first."""
    waits = waits_for(order)
    return bool(cycle) and all(
        y in waits.get(x, ()) for x, y in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    )


def a_cycle(order: Order) -> list[Pass]:
    """A cycle of passes, each waiting for the next and the last for the first; [] if all passes can run."""
    waits, can = waits_for(order), times(order).keys()
    stuck = [x for x in waits if x not in can]
    path = stuck[:1]
    while path:
        following = next(y for y in sorted(waits[path[-1]]) if y not in can)
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return []


def kept(own: Sequence[Pass]) -> int:
    """The most micro-batches whose activations a device holds at once: from forward until backward or W."""
    now, most = 0, 0
    for way, _, _ in own:
        now += {"F": 1, "I": 0}.get(way, -1)
        most = max(most, now)
    return most


def idle(order: Order) -> float:
    """Share (0 to 1) of the devices' time, until the last pass ends, in which they are idle."""
    found = times(order)
    end = max(x[1] for x in found.values())
    return 1 - sum(b - a for a, b in found.values()) / (end * len(order))


def check_whole(name: str, order: Order, micro_batches: int, ways: str) -> None:
    """Raise Broken unless each pass is in `order` once, micro-batches ascend, and no pass waits for
    itself."""
    expected = [(way, m, s) for s in range(len(order)) for m in range(micro_batches) for way in ways]
    count = Counter(x for own in order for x in own)
    for x in (*expected, *count):
        wanted = int(x in expected)
        if count[x] != wanted:
            raise Broken(
                f"{name}: got {name_of(x)} {count[x]} times, expected it {'once' if wanted else 'not at all'}: "
                f"there are {len(order)} devices and {micro_batches} micro-batches, and passes {', '.join(ways)}",
                picture_of_lists("The order", order, [x]),
            )
    for own in order:
        for way in ways:
            numbers = [m for w, m, _ in own if w == way]
            if (wrong := next((m for m, n in pairwise(numbers) if n < m), None)) is not None:
                x = way, wrong, own[0][2]
                raise Broken(
                    f"{name}: got {name_of(x)} before one of a lower micro-batch, expected ascending ones: a sum "
                    "of gradients depends on its order",
                    picture_of_lists("The order", order, [x]),
                )
    if cycle := a_cycle(order):
        said = ", which waits for ".join(map(name_of, [*cycle, cycle[0]]))
        raise Broken(f"{name}: got a deadlock: {said}", picture_of_lists("A deadlock", order, cycle))


def picture_of_lists(title: str, order: Order, marked: Sequence[Pass]) -> Picture:
    """A picture of the passes of each device in order, those in `marked` highlighted."""
    longest = max(map(len, order), default=0)
    rows: list[Row] = []
    for d, own in enumerate(order):
        cells = [
            Cell(f"{way}{m}" + "*" * (x in marked), "wrong" if x in marked else "")
            for x in own
            for way, m, _ in [x]
        ]
        rows.append([f"device {d}", *cells, *[""] * (longest - len(own))])
    return table(f"{title}; * marks {', '.join(map(name_of, marked))}", ["", *[""] * longest], rows, gap=1)


def picture(title: str, order: Order, seconds: Mapping[str, float] = SECONDS) -> Picture:
    """A picture of when each pass runs, with a lane for each device."""
    passes = sorted(times(order, seconds).items(), key=lambda x: (x[0][2], x[1]))

    def timeline(verbs: Mapping[str, str]) -> Timeline:
        events = (
            Event(f"device {x[2]}", f"{verbs[x[0]]}[{x[1]},{x[2]}]", "compute", *ends) for x, ends in passes
        )
        return Timeline(tuple(events), "simulated")

    # In text a pass has the first letter of its verb; a picture has a colour for each verb of zfunc.
    letters = VERBS | {"I": "input_backward", "W": "weight_backward"}
    return Picture(text(timeline(letters), width=100), svg(timeline(VERBS), title=title, width=1000))
