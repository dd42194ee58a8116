"""The graded laws of lab 8."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from course.law import Broken, Kept, Student, every, law
from course.pipelines import (
    Order,
    Pass,
    a_cycle,
    before,
    check_whole,
    idle,
    is_cycle,
    kept,
    name_of,
    order_of,
    picture,
    picture_of_lists,
    times,
)

TITLE = "pipelines"
NOT_IMPORTED = ("zfunc", "course.pipelines")
CASES = 60  # random orders of a law
LIMIT = 0.12  # of the time of four devices, that they may idle
SIZES = [(n, m) for n in range(1, 6) for m in range(1, 9)]  # devices and micro-batches, the fewest first

BROKEN: Order = (  # the order of the text
    (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("F", 2, 0), ("B", 1, 0), ("B", 2, 0)),
    (("F", 0, 1), ("F", 1, 1), ("F", 2, 1), ("B", 0, 1), ("B", 1, 1), ("B", 2, 1)),
    (("F", 0, 2), ("B", 0, 2), ("F", 1, 2), ("B", 1, 2), ("F", 2, 2), ("B", 2, 2)),
)


def random_order(random: Random, *, swaps: int) -> list[list[Pass]]:
    """A random order in which all passes can run, then with `swaps` pairs of passes swapped."""
    devices, micro_batches = random.randint(1, 4), random.randint(1, 4)
    halves = random.random() < 0.5
    order = [
        [(way, m, s) for m in range(micro_batches) for way in ("FIW" if halves else "FB")]
        for s in range(devices)
    ]
    left = {x for own in order for x in own}
    made: list[list[Pass]] = [[] for _ in order]
    while left:
        ready = [x for x in sorted(left) if not {*before(x, order)} & left]
        x = random.choice(ready)
        made[x[2]].append(x)
        left.remove(x)
    for _ in range(swaps):
        own = random.choice(made)
        a, b = random.randrange(len(own)), random.randrange(len(own))
        own[a], own[b] = own[b], own[a]
    return made


def smaller(order: Order) -> Iterator[Order]:
    """Yield the order without its last device, without a micro-batch, or with unsplit backward passes."""
    if len(order) > 1:
        yield order[:-1]
    numbers = {m for own in order for _, m, _ in own}
    for m in sorted(numbers, reverse=True) if len(numbers) > 1 else ():
        yield [[x for x in own if x[1] != m] for own in order]


def told(order: Order) -> str:
    """Text of an order, a line for each device."""
    return "\n".join(f"device {d}: {' '.join(map(name_of, own))}" for d, own in enumerate(order))


def named(passes: Sequence[Pass]) -> str:
    """Text of `passes`, their names with blanks."""
    return " ".join(map(name_of, passes)) or "none"


def copy_of(order: Order) -> list[list[Pass]]:
    """A copy of the order as lists, for a student's function to change."""
    return [[*own] for own in order]


@law(points=20)
def simulated(student: Student, random: Random) -> None:
    """your times of the passes of random orders are the earliest that waits allow"""

    def check(order: Order) -> None:
        seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 0.5}
        got: Any = student.times(copy_of(order), dict(seconds))
        if not isinstance(got, dict):
            raise Broken(f"times: got {got!r:.200}, expected a dict of (begin, end) by pass")
        spans: dict[Any, Any] = {**got}
        for x, expected in sorted(times(order, seconds).items(), key=lambda item: item[1]):
            found: Any = spans.get(x)
            try:
                begin, end = map(float, found)
                right = abs(begin - expected[0]) + abs(end - expected[1]) < 1e-6
            except (TypeError, ValueError):
                right = False
            if not right:
                raise Broken(
                    f"times: got {found} for {name_of(x)}, expected {expected}\nseconds {seconds}\n{told(order)}",
                    picture("When passes can run", order, seconds),
                )

    every((random_order(random, swaps=0) for _ in range(CASES)), check, smaller)


@law(points=20)
def cycles(student: Student, random: Random) -> None:
    """of the order of the text and of random ones you find a cycle, or that there is none"""

    def check(order: Order) -> None:
        got: Any = student.cycle(copy_of(order))
        try:
            found = [(way, m, s) for way, m, s in got]
        except (TypeError, ValueError):
            raise Broken(
                f"cycle: got {got!r:.200}, expected a list of passes (way, micro-batch, stage)"
            ) from None
        true = a_cycle(order)
        if true and not is_cycle(order, found):
            raise Broken(
                f"cycle: got {named(found)}, expected passes of which each waits for the next, and the last for "
                f"the first, such as {named(true)}\n{told(order)}",
                picture_of_lists("A deadlock", order, true),
            )
        if found and not true:
            raise Broken(
                f"cycle: got {named(found)}, expected none: all passes can run\n{told(order)}",
                picture("No deadlock", order),
            )

    cases = [random_order(random, swaps=random.choice((0, 1, 1, 2))) for _ in range(CASES)]
    every([BROKEN, *cases], check, smaller)


def over_sizes(student: Student, name: str, check: Callable[[Order, int, int], None]) -> None:
    """Call `check(order, devices, micro_batches)` on orders by the student's function `name`, small first."""
    for n, m in SIZES:
        check(order_of(name, getattr(student, name)(n, m), n), n, m)


@law(points=10)
def one_f_one_b_whole(student: Student, random: Random) -> None:
    """1F1B has each pass once and no deadlock, and takes no longer than it should"""

    def check(order: Order, n: int, m: int) -> None:
        check_whole("one_f_one_b", order, m, "FB")
        end = max(b for _, b in times(order).values())
        if end > 3 * (m + n - 1):
            raise Broken(
                f"one_f_one_b({n}, {m}): got an order that takes {end:g}, expected {3 * (m + n - 1)}: that of "
                "n + m - 1 forwards and backwards",
                picture("Your 1F1B", order),
            )

    over_sizes(student, "one_f_one_b", check)


@law(points=10)
def one_f_one_b_memory(student: Student, random: Random) -> None:
    """in 1F1B, device d keeps the activations of at most n - d micro-batches"""

    def check(order: Order, n: int, m: int) -> None:
        for d, own in enumerate(order):
            if kept(own) > n - d:
                raise Broken(
                    f"one_f_one_b({n}, {m}): got device {d}, which keeps {kept(own)} micro-batches, expected "
                    f"{n - d} at most",
                    picture("Your 1F1B", order),
                )

    over_sizes(student, "one_f_one_b", check)


@law(points=10)
def split_whole(student: Student, random: Random) -> None:
    """your split order has each F, I and W once, and no deadlock"""
    over_sizes(student, "split", lambda order, _, m: check_whole("split", order, m, "FIW"))


@law(points=10)
def split_memory(student: Student, random: Random) -> None:
    """in it, no device keeps more micro-batches than there are devices, as the first one of 1F1B"""

    def check(order: Order, n: int, m: int) -> None:
        for d, own in enumerate(order):
            if kept(own) > n:
                raise Broken(
                    f"split({n}, {m}): got device {d}, which keeps {kept(own)} micro-batches, expected {n} at "
                    "most: what W needs is kept until W",
                    picture("Your split order", order),
                )

    over_sizes(student, "split", check)


@law(points=20)
def idle_less(student: Student, random: Random) -> Kept:
    """in it, four devices idle for less than 12 %, with 8 micro-batches and with more"""
    shown = None
    for m in (8, *random.sample(range(9, 20), 3)):
        order = order_of("split", student.split(4, m), 4)
        check_whole("split", order, m, "FIW")
        share = idle(order)
        title = f"Your split order: four devices idle for {share:.1%}"
        if share >= LIMIT:
            raise Broken(
                f"split(4, {m}): got devices that idle for {share:.1%}, expected less than {LIMIT:.0%}",
                picture(title, order),
            )
        shown = shown or Kept(picture(title, order), round(share, 6), "idle share")
    assert shown
    return shown
