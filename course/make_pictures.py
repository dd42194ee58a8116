"""Write the pictures of the labs' texts: `python -m course.make_pictures`, a part of `make pictures`."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from course import pipelines
from course.drawing import Cell, table
from course.forgetful import Drive
from course.lab import LABS, load
from course.law import Student
from course.small_plans import APART, Op, Plan, core_plan, example
from zfunc.core.plan import build
from zfunc.core.simulator import simulate
from zfunc.viz.timeline_svg import svg

SECONDS = {"update": 2.0}  # other operations take 1


def lab_1() -> str:
    """The SVG of lab 1: the step of step.py on its lanes, with the fewest waits."""
    laws = load(LABS / "01_operations" / "laws.py", "course_lab_1")
    step = laws.step()
    ops: list[Op] = []
    kinds = {i: lane for lane, some in step.LANES.items() for i in some}
    for n, operation in enumerate(step.STEP):
        verb, _, layer = operation.__name__.rpartition("_")
        operation(memory := laws.Recorder())
        ops.append(Op(verb, (int(layer),), kinds[n], frozenset(memory.read), frozenset(memory.written)))
    graph = core_plan(Plan(tuple(ops), step.LANES, [set[int]()] * len(ops))).graph
    plan = build(graph, step.LANES)
    seconds = [SECONDS.get(op.verb, 1.0) for op in graph]
    title = "The ten operations of step.py on four lanes; an arrow is a wait"
    return svg(simulate(plan, APART, alone=seconds), plan=plan, title=title, width=900)


def lab_2() -> str:
    """The SVG of lab 2: the step of example 00 with three segments, overlapped."""
    ops = example(3)
    lanes = {op.kind: [i for i, x in enumerate(ops) if x.kind == op.kind] for op in ops}
    plan = build(core_plan(Plan(ops, lanes, [set[int]()] * len(ops))).graph, lanes)
    timeline = simulate(plan, APART, alone=[SECONDS.get(op.verb, 1.0) for op in plan.graph])
    title = "A step of example 00, a lane for each kind; arrows are the waits it needs"
    return svg(timeline, plan=plan, title=title, width=900)


def lab_3() -> str:
    """The SVG of lab 3: the step of job A, with eight of its layers."""
    laws = load(LABS / "03_pencil" / "laws.py", "course_lab_3")
    plan = laws.plan_of(laws.JOBS["A"]._replace(layers=8))
    title = "Job A with 8 of its 24 layers, on the machine of the text"
    return svg(simulate(plan, laws.hardware(laws.Machine())), plan=plan, title=title, width=900)


def lab_4() -> str:
    """The SVG of lab 4: puzzle 3, the plan to beat and one with three weights at a time."""
    laws = load(LABS / "04_schedules" / "laws.py", "course_lab_4")
    passes = load(LABS / "04_schedules" / "solutions" / "passes.py", "passes")
    puzzle = laws.PUZZLES.puzzles()[3]
    return laws.before_and_after(3, passes.puzzle_3(puzzle.graph)).svg


def lab_5() -> str:
    """The SVG of lab 5: one weight after one step, by the rule and by known mistakes."""
    laws = load(LABS / "05_adamw" / "laws.py", "course_lab_5")
    run, i = laws.random_run(Random(148), 1), 27  # there all differ
    rules = [("the rule", laws.rule), *((name.partition(":")[0], by) for name, by in laws.MISTAKES.items())]
    rules = [x for x in rules if x[1] not in (laws.uncorrected, laws.eps_inside_unscaled)]
    after = [laws.reference(run, by)[0] for _, by in rules]
    assert len({x[i] for x in after}) == len(rules)
    rows: list[list[Cell | str]] = []
    for (name, _), x in zip(rules, after, strict=True):
        bits = f"{x[i].view('uint32'):032b}"
        rows.append(
            [name, Cell(f"{bits[0]} {bits[1:9]} {bits[9:]}", "wrong" if rows else "right"), f"{x[i]:.9g}"]
        )
    title = "One weight after one step, by the rule and by five that are nearly the rule"
    return table(title, ["", "sign, exponent, mantissa", "value"], rows).svg


def lab_6() -> str:
    """The SVG of lab 6: eight second moments of a page, smallest first, in plain int8 and by logarithm."""
    folder = LABS / "06_format"
    page = load(folder / "laws.py", "course_lab_6").random_page(Random(0))[1]
    ways = [load(folder / "solutions" / f"{x}.py", f"solution_6_{x}") for x in ("wrong_linear", "passes")]
    linear, log = (way.decode(way.encode(page, False), False) for way in ways)
    rows: list[list[Cell | str]] = []
    for i in page.argsort(kind="stable")[31::64]:
        wrong = "wrong" if abs(linear[i] / page[i] - 1) > 0.25 else "kept"
        cells = Cell(f"{linear[i]:.3g}", wrong), Cell(f"{log[i]:.3g}", "right")
        rows.append([f"{i}", f"{page[i]:.3g}", *cells])
    title = "Eight second moments of a page, from the smallest on"
    return table(title, ["element", "moment", "plain int8", "8 bits, logarithm"], rows).svg


def lab_7() -> str:
    """The SVG of lab 7: a file renamed into place before its bytes are lasting, and a cut that loses them."""
    laws = load(LABS / "07_commit" / "laws.py", "course_lab_7")
    path = LABS / "07_commit" / "solutions" / "wrong_rename_unsynced.py"
    student = Student(load(path, "wrong"), path)
    drive = Drive()
    laws.committed(student, drive, [{"weights": b"A"}])
    drive = laws.quiet(drive)
    laws.committed(student, drive, [{"weights": b"B"}])
    moment = drive.past[3]
    cut = laws.Cut(drive, moment, [x for x in moment.pending if not x.data])
    return laws.picture(cut).svg


def lab_8() -> str:
    """The SVG of lab 8: 1F1B with eight micro-batches on four devices."""
    order = load(LABS / "08_pipelines" / "solutions" / "passes.py", "solution_8").one_f_one_b(4, 8)
    return pipelines.picture(f"1F1B: four devices idle for {pipelines.idle(order):.1%}", order).svg


def pictures() -> Iterator[tuple[Path, str]]:
    """Yield the path and the SVG text of each picture."""
    yield LABS / "01_operations" / "step.svg", lab_1()
    yield LABS / "02_build" / "overlapped.svg", lab_2()
    yield LABS / "03_pencil" / "job_a.svg", lab_3()
    yield LABS / "04_schedules" / "puzzle_3.svg", lab_4()
    yield LABS / "05_adamw" / "rounding.svg", lab_5()
    yield LABS / "06_format" / "format.svg", lab_6()
    yield LABS / "07_commit" / "cut.svg", lab_7()
    yield LABS / "08_pipelines" / "one_f_one_b.svg", lab_8()


if __name__ == "__main__":
    for path, text in pictures():
        path.write_text(text, encoding="utf-8")
        print(path)
