"""The graded laws of lab 4: a plan is right, fits, and beats the time of the plan before."""

from pathlib import Path
from random import Random
from typing import Any

from attrs import evolve

from course.lab import load
from course.law import Broken, Kept, Law, Picture, Student, law
from zfunc import PlanError, explain
from zfunc.core.hardware import Hardware
from zfunc.core.plan import Plan, check_is_plan
from zfunc.core.verifier import verify
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.timeline_svg import svg
from zfunc.viz.timeline_text import text

TITLE = "schedule puzzles"
NOT_IMPORTED = ("zfunc.schedules",)
PUZZLES: Any = load(Path(__file__).parent / "puzzles.py", "course_puzzles")
MACHINES = 5  # that are not shown
POINTS = {1: 10, 2: 15, 3: 15, 4: 20, 5: 20, 6: 20}


def other_machine(random: Random) -> Hardware:
    """A machine like that of puzzles.py: each of its rates is up to an eighth higher or a tenth lower."""
    shown: Hardware = PUZZLES.MACHINE
    rates = {kind: rate * random.uniform(0.9, 1.12) for kind, rate in shown.rates.items()}
    return evolve(
        shown, name="a machine not shown", flops=shown.flops * random.uniform(0.9, 1.12), rates=rates
    )


def judged(number: int, got: Any, random: Random) -> Kept:
    """A picture and the time of a right plan of puzzle `number`. Raises Broken if wrong, too large or
    slow."""
    puzzle = PUZZLES.puzzles()[number]
    plan = right_plan(number, got)
    drawn = before_and_after(number, plan)
    need = plan.peak_bytes()["device"]
    if puzzle.limit is not None and need > puzzle.limit:
        raise Broken(
            f"puzzle_{number}: got a plan that may need {format_bytes(need)} of the device at once, expected "
            f"{format_bytes(puzzle.limit)} at most: a fetch has to wait until there is room, in any timing",
            drawn,
        )
    for _ in range(MACHINES):
        machine = other_machine(random)
        ratio = plan.simulate(machine).seconds / puzzle.before.simulate(machine).seconds
        if ratio > puzzle.ratio:
            raise Broken(
                f"puzzle_{number}: got a plan that takes {ratio:.3f} of the time of the plan before, on a machine "
                f"not shown, expected {puzzle.ratio} at most. On the machine of puzzles.py, where a is the plan "
                f"before and b yours:\n{explain(puzzle.before, plan, PUZZLES.MACHINE)}",
                drawn,
            )
    return Kept(drawn, plan.simulate(PUZZLES.MACHINE).seconds)


def right_plan(number: int, got: Any) -> Plan:
    """What function puzzle_`number` returned, as a verified Plan of the puzzle's graph. Raises Broken if
    none."""
    try:
        check_is_plan(got)
        verify(got)
    except PlanError as error:
        first, _, rest = str(error).partition("\n")
        raise Broken(f"puzzle_{number}: {first}\n{rest}".rstrip()) from None
    if got.graph != PUZZLES.puzzles()[number].graph:
        raise Broken(f"puzzle_{number}: got a plan of another graph, expected one of the graph that it takes")
    return got


def before_and_after(number: int, plan: Plan) -> Picture:
    """A picture of the puzzle's first plan above a student's plan, simulated on the machine of puzzles.py."""
    puzzle = PUZZLES.puzzles()[number]
    steps = [(puzzle.before.simulate(PUZZLES.MACHINE), "before"), (plan.simulate(PUZZLES.MACHINE), "yours")]
    timelines = tuple(evolve(timeline, source=source) for timeline, source in steps)
    need = format_bytes(plan.peak_bytes()["device"])
    took = " and ".join(f"{format_seconds(x.seconds)} ({x.source})" for x in timelines)
    title = f"Puzzle {number}, {puzzle.title}: {took}; {need} of the device"
    return Picture(text(timelines, width=100), svg(timelines, title=title, width=1000))


def beats(number: int) -> Law:
    """Make the law of puzzle `number`: the student's plan is right and fast enough."""
    puzzle = PUZZLES.puzzles()[number]
    room = "" if puzzle.limit is None else f", in {format_bytes(puzzle.limit)}"

    def check(student: Student, random: Random) -> Kept:
        return judged(number, getattr(student, f"puzzle_{number}")(puzzle.graph), random)

    check.__name__ = f"puzzle_{number}"
    check.__doc__ = f"{puzzle.title}: at most {puzzle.ratio} of the time before{room}"
    return law(POINTS[number])(check)


puzzle_1, puzzle_2, puzzle_3 = beats(1), beats(2), beats(3)
puzzle_4, puzzle_5, puzzle_6 = beats(4), beats(5), beats(6)
