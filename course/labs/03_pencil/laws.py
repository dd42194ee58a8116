"""The graded laws of lab 3."""

from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any, NamedTuple

from zfunc.schedules import Overlapped

from course.law import Broken, Picture, Student, every, law, number_of
from zfunc import step_graph
from zfunc.core.graph import KINDS, Kind
from zfunc.core.hardware import Hardware
from zfunc.core.memory_model import peak_breakdown
from zfunc.core.plan import Plan
from zfunc.units import format_bytes, format_seconds
from zfunc.viz.timeline_svg import svg

TITLE = "with a pencil"
NOT_IMPORTED = ("zfunc",)
CLOSE = 0.15  # the share by which an answer may be off
VARIATIONS = 12  # random jobs of a law, beside the three


class Job(NamedTuple):
    """A step of a model with equal layers: the arguments of lab 3, explained in adapters.py."""

    layers: int
    width: int
    tokens: int
    clipping: bool
    state: str

    @property
    def parameters(self) -> int:
        """The number of parameters of one layer."""
        return 12 * self.width**2


class Machine(NamedTuple):
    """A machine's FLOP/s, and bytes per second of each transfer; adapters.py explains the fields."""

    flops: float = 100e12
    memory: float = 1e12
    d2h: float = 20e9
    h2d: float = 20e9
    host: float = 50e9
    read: float = 5e9
    write: float = 2.5e9


JOBS = {
    "A": Job(24, 2048, 16_384, True, "host"),
    "B": Job(32, 4096, 1_024, False, "host"),
    "C": Job(40, 5120, 8_192, True, "disk"),
}


@law(points=20)
def device_memory(student: Student, random: Random) -> None:
    """the bytes on the device, of the three jobs and of others like them, are within 15 %"""

    def check(case: tuple[Job, Machine]) -> None:
        job, _ = case
        true = plan_of(job).peak_bytes()["device"]
        compare("device_bytes", student.device_bytes(job), true, case, format_bytes, ("device",))

    every(cases(random), check, smaller)


@law(points=20)
def host_memory(student: Student, random: Random) -> None:
    """the bytes in host memory, of the three jobs and of others like them, are within 15 %"""

    def check(case: tuple[Job, Machine]) -> None:
        job, _ = case
        peak = plan_of(job).peak_bytes()
        true = peak["host"] + peak["pinned"]
        compare("host_bytes", student.host_bytes(job), true, case, format_bytes, ("host", "pinned"))

    every(cases(random), check, smaller)


@law(points=15)
def traffic(student: Student, random: Random) -> None:
    """the bytes that move over the bus and to and from the drive are within 15 %"""

    def check(case: tuple[Job, Machine]) -> None:
        job, _ = case
        got: Any = student.moved_bytes(job)
        kinds: tuple[Kind, ...] = ("d2h", "h2d", "read", "write")
        if not isinstance(got, dict) or {*got} != {*kinds}:
            raise Broken(f"moved_bytes: got {got!r:.200}, expected a dict with the keys {', '.join(kinds)}")
        for kind in kinds:
            true = sum(op.nbytes for op in plan_of(job).graph if op.kind == kind)
            compare(f"moved_bytes, {kind}", got[kind], true, case, format_bytes)

    every(cases(random), check, smaller)


@law(points=10)
def seconds_with_clipping(student: Student, random: Random) -> None:
    """the seconds of a step that clips, of job A and of others like it, are within 15 %"""
    every(cases(random, "A"), check_seconds(student), smaller)


@law(points=15)
def seconds_without_clipping(student: Student, random: Random) -> None:
    """the seconds of a step without clipping, of job B and of others like it, are within 15 %"""
    every(cases(random, "B"), check_seconds(student), smaller)


@law(points=20)
def seconds_with_a_drive(student: Student, random: Random) -> None:
    """the seconds of a step with its state on a drive, of job C and of others like it, are within 15 %"""
    every(cases(random, "C"), check_seconds(student), smaller)


# --- jobs ------------------------------------------------------------------------------------------------


def cases(random: Random, names: str = "ABC") -> Iterator[tuple[Job, Machine]]:
    """Yield the jobs `names` on the machine of the text, then random similar jobs on similar machines."""
    yield from ((JOBS[name], Machine()) for name in names)
    for _ in range(VARIATIONS):
        job = JOBS[random.choice(names)]
        yield (
            job._replace(
                layers=random.randint(16, 48),
                width=128 * random.randint(8, 40),
                tokens=1024 * 2 ** random.randint(0, 4),
            ),
            Machine(*(rate * random.choice((0.5, 1, 2)) for rate in Machine())),
        )


def smaller(case: tuple[Job, Machine]) -> Iterator[tuple[Job, Machine]]:
    """Yield smaller cases: the machine of the text, fewer layers, narrower layers, or fewer tokens."""
    job, machine = case
    if machine != Machine():
        yield job, Machine()
    if job.layers > 16:
        yield job._replace(layers=16), machine
    if job.width > 1024:
        yield job._replace(width=1024), machine
    if job.tokens > 1024:
        yield job._replace(tokens=job.tokens // 2), machine


@cache
def plan_of(job: Job) -> Plan:
    """zfunc's plan of a step of `job`: a lane for each kind of operation, in serial order."""
    clip = 1.0 if job.clipping else None
    graph = step_graph(job.layers, job.parameters, job.tokens, clip_norm=clip, state_on=job.state)
    return Overlapped()(graph)


def hardware(machine: Machine) -> Hardware:
    """`machine` as the Hardware that zfunc's simulator takes."""
    own = machine._asdict()
    rates: dict[Kind, float] = {kind: own.get(kind, machine.memory) for kind in KINDS}
    return Hardware("the lab's machine", own["flops"], rates, shared={"disk": {"read": 1.0, "write": 1.0}})


def check_seconds(student: Student) -> Callable[[tuple[Job, Machine]], None]:
    """A check of a case (job, machine) that raises Broken if the student's `seconds` is over 15 % off."""

    def check(case: tuple[Job, Machine]) -> None:
        job, machine = case
        true = plan_of(job).simulate(hardware(machine)).seconds
        compare("seconds", student.seconds(job, machine), true, case, format_seconds)

    return check


def compare(
    name: str,
    got: Any,
    true: float,
    case: tuple[Job, Machine],
    in_words: Callable[[float], str],
    tiers: tuple[str, ...] = (),
) -> None:
    """Raise Broken, with a picture, if the student's number `got` is more than 15 % off the number `true`."""
    number = number_of(name, got)
    if abs(number - true) <= CLOSE * true:
        return
    job, machine = case
    off = f"{number / true - 1:+.0%}" if true else "more than nothing"
    which = next((f"job {name}" for name, known in JOBS.items() if known == job), "a job like them")
    changed = {field: rate for field, rate in machine._asdict().items() if rate != Machine()._asdict()[field]}
    on = "the machine of the text" + "".join(f", {field} {rate:g}" for field, rate in changed.items())
    raise Broken(
        f"{name}: got {in_words(number)}, expected {in_words(true)} within 15 %: {off}, for {which}\n"
        f"{job}\non {on}",
        memory_picture(job, tiers) if tiers else step_picture(case),
    )


def step_picture(case: tuple[Job, Machine]) -> Picture:
    """A picture of the step of a job, simulated on its machine."""
    job, machine = case
    plan = plan_of(job)
    timeline = plan.simulate(hardware(machine))
    return Picture(timeline.text(90), svg(timeline, plan=plan, title=f"{job.layers} layers of {job.width}"))


def memory_picture(job: Job, tiers: tuple[str, ...]) -> Picture:
    """A picture of a job's step on the machine of the text; its text lists peak contents of memory
    `tiers`."""
    found = [(buffer, size) for tier in tiers for buffer, size in peak_breakdown(plan_of(job))[tier].items()]
    most = max(size for _, size in found)
    rows = [
        f"{buffer:<14} {format_bytes(size):>10}  {'#' * round(40 * size / most)}"
        for buffer, size in sorted(found, key=lambda item: -item[1])
        if size > most / 200
    ]
    return Picture("\n".join(rows), step_picture((job, Machine())).svg)
