"""The graded laws of lab 1."""

import importlib.util
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from course.law import Broken, Student, every, law, pairs_of, sets_of
from course.small_plans import (
    Op,
    Plan,
    core_plan,
    described,
    example,
    is_serial,
    name_of,
    orders,
    picture,
    random_lanes,
    random_ops,
    random_plan,
    smaller,
    swapped_conflicts,
)
from zfunc.core.plan import build
from zfunc.core.verifier import races as races_of

TITLE = "operations, conflicts, waits"
NOT_IMPORTED = ("zfunc",)
CASES = 150  # random plans of a law


def step() -> Any:
    """The module step.py in this folder, loaded."""
    spec = importlib.util.spec_from_file_location("step", Path(__file__).parent / "step.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder(dict[str, float]):
    """A memory, value by region, that notes which regions are read and which are written."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.written = set[str](), set[str]()

    def __getitem__(self, region: str) -> float:
        self.read.add(region)
        return 1.0

    def __setitem__(self, region: str, value: float) -> None:
        self.written.add(region)


@law(points=15)
def declared(student: Student, random: Random) -> None:
    """what you declare is what the operations of step.py touch"""
    got: Any = student.declare()
    if not isinstance(got, dict):
        raise Broken(f"declare: got {got!r:.200}, expected a dict of function names to (reads, writes)")
    for operation in step().STEP:
        name = operation.__name__
        if name not in got:
            raise Broken(f"declare: got nothing of {name}, expected each function of step.py")
        try:
            reads, writes = map(set, got[name])
        except (TypeError, ValueError):
            raise Broken(f"declare: got {got[name]!r:.200} for {name}, expected a pair of sets") from None
        operation(memory := Recorder())
        for what, said, true in (("reads", reads, memory.read), ("writes", writes, memory.written)):
            if said - true:
                raise Broken(
                    f"{name} {what} no {', '.join(sorted(map(str, said - true)))}, but you declare it"
                )
            if true - said:
                raise Broken(
                    f"{name} {what} {', '.join(sorted(true - said))}, and you do not declare it: no wait would "
                    "protect it"
                )


@law(points=15)
def conflicting(student: Student, random: Random) -> None:
    """your conflicts are the pairs of which one finds other contents if they change places"""

    def check(plan: Plan) -> None:
        ops = plan.ops
        got = ordered("conflicts", pairs_of("conflicts", student.conflicts(ops), len(ops)))
        for i, j in combinations(range(len(ops)), 2):
            conflict = not is_serial((ops[i], ops[j]), (1, 0))
            if ((i, j) in got) != conflict:
                why = (
                    "one of them writes what the other touches" if conflict else "neither finds anything else"
                )
                raise Broken(
                    f"conflicts: got {sorted(got)}, expected it {'with' if conflict else 'without'} ({i}, {j}): "
                    f"in the other order {why}\n{described(plan, lanes=False)}"
                )

    every((random_plan(random) for _ in range(CASES)), check, smaller)


@law(points=15)
def enough(student: Student, random: Random) -> None:
    """with your waits, every order that can happen gives the serial result"""

    def check(given: Plan) -> None:
        plan = planned(student, given)
        for order in orders(plan):
            if not is_serial(plan.ops, order):
                names = ", ".join(name_of(plan.ops[i]) for i in order)
                overtaken = next(i for i in range(len(order)) if order[i] != i)
                raise Broken(
                    f"waits: with these waits the operations can run in the order {names}, and then one of them "
                    f"finds other contents than in serial order\n{described(plan)}",
                    picture(plan, "An order that your waits allow", late=overtaken),
                )
        if not any(orders(plan)):
            raise Broken(f"waits: with these waits no operation can go on, a deadlock\n{described(plan)}")

    every((with_lanes(random) for _ in range(CASES)), check, smaller)


@law(points=15)
def needed(student: Student, random: Random) -> None:
    """you make no operation wait for one that it does not conflict with, or that is on its lane"""

    def check(given: Plan) -> None:
        plan = planned(student, given)
        lane_of = {i: name for name, lane in plan.lanes.items() for i in lane}
        for j, some in enumerate(plan.waits):
            for i in sorted(some):
                a, b = name_of(plan.ops[i]), name_of(plan.ops[j])
                why = "but they do not conflict, so they could run side by side"
                if lane_of[i] == lane_of[j]:
                    why = "which is on its own lane: the order of the lane is enough"
                elif not is_serial((plan.ops[min(i, j)], plan.ops[max(i, j)]), (1, 0)):
                    continue
                drawn = picture(plan, "A wait that nothing asks for")
                raise Broken(f"waits: {b} waits for {a}, {why}\n{described(plan)}", drawn)

    every((with_lanes(random) for _ in range(CASES)), check, smaller)


@law(points=25)
def racing(student: Student, random: Random) -> None:
    """your races are the conflicting pairs that some order swaps"""

    def check(plan: Plan) -> None:
        got, true = found_races(student, plan), swapped_conflicts(plan)
        for i, j in sorted(true - got):
            a, b = name_of(plan.ops[i]), name_of(plan.ops[j])
            raise Broken(
                f"races: got {sorted(got)}, expected it with ({i}, {j}): {b} can run before {a} has ended, as "
                f"drawn\n{described(plan)}",
                picture(plan, f"{b} does not wait for {a}", late=i),
            )
        for i, j in sorted(got - true):
            raise Broken(
                f"races: got {sorted(got)}, expected it without ({i}, {j}): they do not conflict, or the order of "
                f"a lane and waits, also by way of other operations, keep {name_of(plan.ops[j])} after "
                f"{name_of(plan.ops[i])}\n{described(plan)}",
                picture(plan, "No race here", late=i),
            )

    every((random_plan(random) for _ in range(CASES)), check, smaller)


@law(points=15)
def fifty_plans(student: Student, random: Random) -> None:
    """of 50 plans of a training step, half without one wait, you find the race of each broken one"""
    broken = random.sample(range(50), 25)
    for n in range(50):
        plan = overlapped(example(random.randint(3, 5)))
        which = f"plan {n + 1} of 50, of {len(plan.ops)} operations,"
        if n not in broken:
            if got := found_races(student, plan):
                raise Broken(
                    f"races: got {len(got)} races, such as {min(got)}, expected none: {which} has every wait",
                    picture(plan, "A step without a race"),
                )
            continue
        i, j = random.choice([(i, j) for j, some in enumerate(plan.waits) for i in some])
        plan = plan._replace(waits=[some - {i} if k == j else some for k, some in enumerate(plan.waits)])
        got = found_races(student, plan)
        if (i, j) not in got:
            a, b = name_of(plan.ops[i]), name_of(plan.ops[j])
            raise Broken(
                f"races: got {some_of(got)}, expected them with ({i}, {j}): {which} lacks the wait of {b} for {a}",
                picture(plan, f"{b} does not wait for {a}", late=i),
            )
        check_found(plan, got, which)


def found_races(student: Student, plan: Plan) -> set[tuple[int, int]]:
    """The pairs that the student's function `races` returns for a copy of `plan`."""
    own = plan._replace(
        lanes={name: [*x] for name, x in plan.lanes.items()}, waits=[{*x} for x in plan.waits]
    )
    return ordered("races", pairs_of("races", student.races(own), len(plan.ops)))


def ordered(name: str, pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Check and return pairs that the student's function `name` found. Raises Broken for one with i >= j."""
    for i, j in sorted(pairs):
        if i >= j:
            raise Broken(f"{name}: got the pair ({i}, {j}), expected pairs (i, j) with i < j")
    return pairs


def some_of(pairs: set[tuple[int, int]]) -> str:
    """Text of the first three of `pairs`, and how many more there are."""
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return ", ".join(map(str, sorted(pairs)[:3])) + more if pairs else "none"


def check_found(plan: Plan, got: set[tuple[int, int]], which: str) -> None:
    """Raise Broken if the races `got` include a pair that is no race of `plan`, or lack one of zfunc's."""
    own = core_plan(plan)
    true = {(i, j) for i, j, _ in races_of(own)}
    for i, j in sorted(got):
        lane, place = own.place[i]
        a, b = name_of(plan.ops[i]), name_of(plan.ops[j])
        if is_serial((plan.ops[i], plan.ops[j]), (1, 0)):
            why = f"{a} and {b} do not conflict"
        elif own.clocks[j][lane] >= place:
            why = f"lanes and waits, also by way of other operations, keep {b} after {a}"
        else:
            continue
        raise Broken(f"races: got ({i}, {j}), expected it not to be there: in {which} {why}")
    if true - got:
        raise Broken(f"races: got {some_of(got)}, expected them with {min(true - got)}: {which} lacks a wait")


def overlapped(ops: tuple[Op, ...]) -> Plan:
    """The plan of `ops` with a lane for each kind of operation and the fewest waits."""
    lanes = {op.kind: [i for i, x in enumerate(ops) if x.kind == op.kind] for op in ops}
    built = build(core_plan(Plan(ops, lanes, [set()] * len(ops))).graph, lanes)
    return Plan(ops, lanes, [{*some} for some in built.waits])


def with_lanes(random: Random) -> Plan:
    """A random plan of a few operations on lanes, without waits."""
    ops = random_ops(random)
    return Plan(ops, random_lanes(random, len(ops)), [set[int]()] * len(ops))


def planned(student: Student, given: Plan) -> Plan:
    """The plan `given` with the waits that the student's function `waits` returns for it."""
    lanes = {name: [*lane] for name, lane in given.lanes.items()}
    return given._replace(waits=sets_of("waits", student.waits(given.ops, lanes), len(given.ops)))
