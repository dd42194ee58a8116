"""The graded laws of lab 2."""

from random import Random
from time import process_time
from typing import Any

from course.law import Broken, Student, every, law, sets_of
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
    smaller,
)
from zfunc import PlanError
from zfunc.core import plan as core
from zfunc.core.verifier import verify

TITLE = "build a plan"
NOT_IMPORTED = ("zfunc",)
CASES = 150  # random lanes of a law
MANY, SECONDS = 1_000, 2.0  # operations that `build` has to plan, and how long it may take


@law(points=25)
def safe(student: Student, random: Random) -> None:
    """every order that a plan of yours allows gives the serial result"""

    def check(given: Plan) -> None:
        plan = built(student, given)
        for order in orders(plan):
            if not is_serial(plan.ops, order):
                names = ", ".join(name_of(plan.ops[i]) for i in order)
                overtaken = next(i for i in range(len(order)) if order[i] != i)
                raise Broken(
                    f"build: with these waits the operations can run in the order {names}, and then one of them "
                    f"finds other contents than in serial order\n{described(plan)}",
                    picture(plan, "An order that your plan allows", late=overtaken),
                )
        if not any(orders(plan)):
            raise Broken(
                f"build: this plan never ends, as operations wait for one another\n{described(plan)}"
            )

    every((on_lanes(random) for _ in range(CASES)), check, smaller)


@law(points=15)
def fewest(student: Student, random: Random) -> None:
    """without any one of your waits, an operation could run too early"""

    def check(given: Plan) -> None:
        plan = built(student, given)
        for j, i in [(j, i) for j, some in enumerate(plan.waits) for i in sorted(some)]:
            less = plan._replace(waits=[some - {i} if k == j else some for k, some in enumerate(plan.waits)])
            if all(is_serial(plan.ops, order) for order in orders(less)):
                a, b = name_of(plan.ops[i]), name_of(plan.ops[j])
                raise Broken(
                    f"build: {b} waits for {a}, and comes after it without that wait, too: by the order of a lane, "
                    f"by other waits, or because they do not conflict\n{described(plan)}",
                    picture(plan, f"{b} need not wait for {a}"),
                )

    every((on_lanes(random) for _ in range(CASES)), check, smaller)


@law(points=20)
def deadlocks(student: Student, random: Random) -> None:
    """lanes in an order that cannot end raise ValueError, and no others do"""

    def check(given: Plan) -> None:
        ends = any(orders(given._replace(waits=all_waits(given))))
        lanes = {name: [*lane] for name, lane in given.lanes.items()}
        if student.raises(ValueError, "build", given.ops, lanes) == ends:
            got, expected = ("ValueError", "a plan") if ends else ("a plan", "ValueError, a deadlock")
            waiting = [
                f"{j} has to follow {i}" for j, some in enumerate(all_waits(given)) for i in sorted(some)
            ]
            raise Broken(
                f"build: got {got} for these lanes, expected {expected}\n{described(given, waits=False)}\n"
                f"{', '.join(waiting) or 'no conflicts'}"
            )

    every((shuffled(random) for _ in range(CASES)), check, smaller)


@law(points=15)
def on_the_example(student: Student, random: Random) -> None:
    """your plans of the step of example 00 have no race and no wait too many, on any lanes"""
    for n in range(12):
        ops = example(random.randint(2, 5))
        groups = random.randint(1, 4)
        on = {op.kind: random.randrange(groups) for op in ops} if n % 2 else {}
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            lanes.setdefault(f"lane{on.get(op.kind, 0) if on else random.randrange(groups)}", []).append(i)
        plan = built(student, Plan(ops, lanes, [set()] * len(ops)))
        check_with_verify(plan, "build")


@law(points=15)
def overlapping(student: Student, random: Random) -> None:
    """`overlapped` has a lane for each kind of operation, in serial order, and is as fast as zfunc's"""
    for segments in (2, 3, 5):
        ops = example(segments)
        plan = plan_of("overlapped", student.overlapped(ops), ops)
        kinds = {op.kind: [i for i, x in enumerate(ops) if x.kind == op.kind] for op in ops}
        if plan.lanes != kinds:
            raise Broken(
                f"overlapped: got the lanes {plan.lanes!r:.300}, expected one for each kind, in serial order: "
                f"{kinds!r:.300}"
            )
        check_with_verify(plan, "overlapped")


@law(points=10)
def quick(student: Student, random: Random) -> None:
    """`build` plans a step of 1,000 operations in 2 seconds"""
    ops = example(MANY // 10)[:MANY]
    lanes = {op.kind: [i for i, x in enumerate(ops) if x.kind == op.kind] for op in ops}
    began = process_time()
    plan = plan_of("build", student.build(ops, lanes), ops)
    if (seconds := process_time() - began) > SECONDS:
        raise Broken(
            f"build: took {seconds:.1f} s for {len(ops)} operations, expected {SECONDS:g} at most: go through the "
            "operations once, and keep for each which ones have surely ended"
        )
    check_with_verify(plan, "build")


# --- plans -----------------------------------------------------------------------------------------------


def on_lanes(random: Random) -> Plan:
    """A random plan of a few operations on lanes, in serial order on each, without waits."""
    ops = random_ops(random)
    return Plan(ops, random_lanes(random, len(ops)), [set[int]()] * len(ops))


def shuffled(random: Random) -> Plan:
    """A random plan of a few operations on lanes, in any order on each, without waits."""
    plan = on_lanes(random)
    for lane in plan.lanes.values():
        random.shuffle(lane)
    return plan


def all_waits(plan: Plan) -> list[set[int]]:
    """For each operation, the set of all earlier operations that it conflicts with."""
    ops = plan.ops
    return [{i for i in range(j) if not is_serial((ops[i], ops[j]), (1, 0))} for j in range(len(ops))]


def built(student: Student, given: Plan) -> Plan:
    """The plan that the student's `build` returns for the operations and lanes of `given`."""
    lanes = {name: [*lane] for name, lane in given.lanes.items()}
    plan = plan_of("build", student.build(given.ops, lanes), given.ops)
    if plan.lanes != given.lanes:
        raise Broken(f"build: got a plan with the lanes {plan.lanes!r:.300}, expected {given.lanes!r:.300}")
    return plan


def plan_of(name: str, got: Any, ops: tuple[Op, ...]) -> Plan:
    """What the student's function `name` returned, as a checked Plan of all `ops`. Raises Broken if not
    one."""
    try:
        lanes = {str(lane): [*some] for lane, some in got.lanes.items()}
        waits = got.waits
    except (AttributeError, TypeError):
        raise Broken(f"{name}: got {got!r:.200}, expected a Plan of operations, lanes and waits") from None
    on = [i for lane in lanes.values() for i in lane]
    if sorted(on, key=str) != sorted(range(len(ops)), key=str):
        raise Broken(
            f"{name}: got the lanes {lanes!r:.300}, expected each of {len(ops)} operations on one of them"
        )
    return Plan(ops, lanes, sets_of(name, waits, len(ops)))


def check_with_verify(plan: Plan, name: str) -> None:
    """Raise Broken for a plan that zfunc's `verify` refuses, or that has more waits than zfunc's."""
    own = core_plan(plan)
    try:
        verify(own)
    except PlanError as error:
        raise Broken(f"{name}: {str(error).splitlines()[0]}", picture(plan, "A plan with a race")) from None
    least = core.build(own.graph, plan.lanes)
    if own.num_waits > least.num_waits:
        more = [(j, i) for j, some in enumerate(own.waits) for i in some if i not in least.waits[j]]
        j, i = more[0]
        raise Broken(
            f"{name}: got {own.num_waits} waits, expected {least.num_waits}: without that of {own.graph.ops[j]} "
            f"for {own.graph.ops[i]}, others keep the order, too",
            picture(plan, "A plan with waits that others imply"),
        )
