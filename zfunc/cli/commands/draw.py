"""`zfunc draw`: pictures of a step under one schedule or all; or, with --compare, of two, or of a run's.

A step that was not run is planned from shapes and simulated: no parameter is allocated and no GPU is needed. Beside
it another schedule's plan is explained. Of a run, the plan that ran is simulated beside the measured step, on the
hardware of the flags. With --live the page has several plans of the job, and simulates them itself.
"""

import shutil
import sys
from functools import partial
from itertools import product
from pathlib import Path

import attrs
from attrs import evolve, frozen

from zfunc import schedules
from zfunc.cli.parser import EXIT_OK, Command, write_file
from zfunc.cli.simulated_model import SimulatedFlags, simulated_model
from zfunc.cli.terminal import printable
from zfunc.core.explain import explain
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.core.setting_values import BY_DEVICE, schedule_for
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import lower_bound, simulate
from zfunc.core.spec import StepSpec
from zfunc.core.timeline import Timeline
from zfunc.core.verifier import plan_with
from zfunc.errors import Message, about, refuse
from zfunc.options import file_to_write, option, path
from zfunc.schedules import make_schedule
from zfunc.train.run_history import read_recorded_step
from zfunc.train.settings import DRAWN, STEP, check_together, step_flags, step_settings
from zfunc.units import format_bytes
from zfunc.viz.chrome_trace import chrome_trace
from zfunc.viz.compare import table
from zfunc.viz.live import Answers, live_page
from zfunc.viz.timeline_html import page
from zfunc.viz.timeline_svg import svg
from zfunc.viz.timeline_text import text

QUESTIONS = ("State on", "Elements of a bucket", "Schedule")  # that tell the plans of a live page apart
# What a live page may have, and what an operation takes there: of a graph, and of each of its plans.
LIVE_BYTES, OP_BYTES, PLANNED_BYTES = 1_300_000, 170, 12
UNDRAWN = ("compile_segments", "deterministic")  # settings without a flag here
OF_STEP = ("data", "model", "step", "how it runs", "offload", "buffers")  # groups that a run has decided

_picture = partial(option, group="picture", common=True)

DrawnStepFlags = step_flags(
    SimulatedFlags,
    {**DRAWN, "schedule": STEP["schedule"].offering((BY_DEVICE, *schedules.__all__, "all"))},
    without=UNDRAWN,
)


@frozen(kw_only=True)
class DrawSettings(DrawnStepFlags):
    """Settings of `zfunc draw`: the step to draw, by default on hardware with round figures."""

    compare: Path | None = _picture(
        None,
        "folder of a run: the step that it measured, beside what its plan would take on the hardware above; or "
        "the name of a schedule: the step under it, beside that under --schedule, and why one is faster "
        "(default: draw a step that was not run)",
        path,
        "RUN",
    )
    out: Path | None = _picture(
        None,
        "file to write, or to replace: .svg, .html, .json for a Chrome trace, else text; one for each of several "
        "schedules (default: print text; of `compare`: RUN/compare.html)",
        file_to_write(".svg", ".html", ".json", ".txt", ""),
    )

    live: bool = _picture(
        False,
        "write a page that simulates the step by itself: change the machine, choose a schedule, bucket size or "
        "tier, remove a wait and see the race (default of `out`: live.html)",
    )

    def __attrs_post_init__(self) -> None:
        check_together(self)
        if self.live and self.compare is not None:
            refuse(
                "compare",
                f"{self.compare} with `live`, whose page compares its plans",
                "one of them",
                "leave one out",
            )
        if self.live and self.out is not None and self.out.suffix != ".html":
            refuse(
                "out", f"{self.out} with `live`, which is a page", "a name that ends in .html", "name it so"
            )
        if self.compares_schedules and self.schedule == "all":
            other = f"{self.compare} beside one schedule, such as Overlapped"
            refuse("schedule", "all with `compare`", other, "name it, or leave one out")
        if self.compares_schedules and self.out is not None and self.out.suffix == ".html":
            refuse(
                "out",
                f"{self.out}, a page of one plan",
                ".svg, .json or .txt with `compare`",
                "name such a file",
            )
        for f in attrs.fields(DrawSettings) if self.compare and not self.compares_schedules else ():
            if f.metadata["option"].group in OF_STEP and getattr(self, f.name) != f.default:
                own = "it with `compare`, which draws the run's own plan"
                refuse(f.name, own, "one of them", "leave one out")

    @property
    def compares_schedules(self) -> bool:
        """Whether `compare` names a schedule and not the folder of a run."""
        return str(self.compare) in schedules.__all__ and not Path(str(self.compare)).exists()


def run_draw(settings: DrawSettings) -> int:
    """Run `zfunc draw`: print the picture of a step, or write a file."""
    out = settings.out
    if settings.live:
        write_file(out or Path("live.html"), live_step(settings))
        return EXIT_OK
    if settings.compares_schedules:
        other, drawn = draw_simulated_step(settings).values()
        both = tuple(evolve(x.timelines[0], source=x.schedule) for x in (other, drawn))
        steps = {"": evolve(drawn, heading=f"{other.schedule} and {drawn.heading}", timelines=both)}
        told = explain(other.plan, drawn.plan, drawn.hardware)
        print(f"a is {other.schedule}, b is {drawn.schedule}\n{told}")
    elif settings.compare is None:
        steps = draw_simulated_step(settings)
    else:
        step = _compared_step(settings, settings.compare)
        steps = {"": step}
        told = f"predicted for {_hardware_line(step.hardware)}\n{table(*step.timelines, step.plan)}"
        print("\n".join(map(printable, told.splitlines())))
        out = out or settings.compare / "compare.html"
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    suffix = "" if out is None else out.suffix
    pictures = {name: picture(step, suffix, width=max(60, columns)) for name, step in steps.items()}
    if suffix in ("", ".txt"):
        pictures = {"": "\n".join(pictures.values())}
    for name, image in pictures.items():
        if out is None:
            print(image, end="")
        else:
            write_file(out if len(pictures) == 1 else out.with_stem(f"{out.stem}-{name.lower()}"), image)
    return EXIT_OK


# --- the step --------------------------------------------------------------------------------------------


@frozen
class DrawnStep:
    """A step to draw: its plan, the hardware, and timelines, simulated on the hardware and, for a run, measured."""

    heading: str
    plan: Plan
    hardware: Hardware
    timelines: tuple[Timeline, ...]
    schedule: str = ""  # of a step that was not run


class _Job:
    """What `zfunc draw` simulates: the model of its settings, the model's step, and the hardware."""

    def __init__(self, settings: DrawSettings) -> None:
        from zfunc.planner.cost_model import precision_for

        precision = precision_for(settings.profile or ROUND, settings.precision)
        self.hardware = settings.profile.hardware(precision) if settings.profile else ROUND
        self.step = step_settings(settings, precision=precision, schedule="Serial")
        self.step.check_folders()
        self.model = simulated_model(settings)
        self._costs = self.model.cost_model(
            evolve(ROUND, unified=True), settings.batch_size, settings.seq_length
        )
        self.words = f"one step of a {self.model.name}, batch {settings.batch_size} x {settings.seq_length}"

    def graph(self, step: StepSettings) -> Graph:
        """The graph of operations of the model's step with the settings `step`."""
        from zfunc.planner.candidate import operations_of

        return operations_of(self.spec(step))

    def spec(self, step: StepSettings) -> StepSpec:
        """The StepSpec of the model's step with settings `step`, of a step without `commit`, which every
        schedule can plan."""
        return evolve(self._costs.spec(step), commit=False)


def draw_simulated_step(settings: DrawSettings) -> dict[str, DrawnStep]:
    """Simulate the step under the schedule of `settings`, or under every schedule; returns steps by schedule
    name, slowest first. With `compare`, the named schedule's step comes first, that of `settings` last."""
    job = _Job(settings)
    graph, on = job.graph(job.step), job.hardware
    chosen = schedule_for(settings.schedule, on_cpu=on.unified)
    beside = [str(settings.compare)] if settings.compares_schedules else []
    if beside == [chosen]:
        others = ", ".join(x for x in schedules.__all__ if x != chosen)
        refuse("compare", f"{chosen}, which is drawn already", "another", f"one of {others}")
    names = schedules.__all__ if chosen == "all" else [*beside, chosen]
    plans = {name: plan_with(make_schedule(name, on), graph) for name in names}
    steps = {
        name: DrawnStep(f"{name}: {job.words}", plan, on, (simulate(plan, on),), name)
        for name, plan in plans.items()
    }
    slowest_first = sorted(steps.items(), key=lambda item: -item[1].timelines[0].seconds)
    return steps if beside else dict(slowest_first)


def live_step(settings: DrawSettings) -> str:
    """The HTML page that simulates the step of `settings` live. It has plans of other schedules, bucket sizes
    and tiers of the state to switch to, as many as its size allows, and opens with the plan of `settings`."""
    job = _Job(settings)
    largest = max(bucket.numel for bucket in job.spec(job.step).layout.buckets)
    own = min(job.step.bucket_size or largest, largest)
    chosen = schedule_for(settings.schedule, on_cpu=job.hardware.unified)
    names = sorted(schedules.__all__, key=lambda name: name != chosen)
    plans: dict[Answers, Plan] = {}
    graphs: list[Graph] = []
    for bucket, tier in product((own, own // 4, own * 4), (job.step.state_on, "host", "device", "disk")):
        try:
            step = evolve(job.step, bucket_size=bucket, state_on=tier, swap=())  # no drive is opened
            graph = job.graph(step)
        except ValueError:  # settings that exclude each other
            continue
        size = sum(len(g) * (OP_BYTES + len(names) * PLANNED_BYTES) for g in (*graphs, graph))
        if graph in graphs or (graphs and size > LIVE_BYTES):
            continue
        graphs.append(graph)
        for name in names:
            plans[tier, f"{bucket / 1e6:,.4g} million", name] = plan_with(
                make_schedule(name, job.hardware), graph
            )
    return live_page(plans, job.hardware, questions=QUESTIONS, title=f"Live: {job.words}")


def _compared_step(settings: DrawSettings, run: Path) -> DrawnStep:
    profile = settings.profile
    try:
        step = read_recorded_step(run)
        on = profile.hardware(step.precision, step.world) if profile else ROUND
        simulated = simulate(step.plan, on)
    except ValueError as error:
        or_a_schedule = f"{about('compare', error).marked}, or a schedule, {', '.join(schedules.__all__)}"
        raise ValueError(Message(or_a_schedule)) from error
    heading = f"A step of {run}: {step.schedule} in {step.precision}, world {step.world}{step.stage}"
    return DrawnStep(heading, step.plan, on, (simulated, step.timeline))


# --- the picture -----------------------------------------------------------------------------------------


def picture(step: DrawnStep, suffix: str, *, width: int) -> str:
    """A step's picture as the content of a .svg, .html or .json file; for other suffixes text, `width` columns."""
    title = f"{step.heading}, on {step.hardware.name}"
    match suffix:
        case ".svg":
            return svg(step.timelines, plan=step.plan, title=title)
        case ".html":
            return page(step.timelines, plan=step.plan, title=title)
        case ".json":
            return chrome_trace(step.timelines) + "\n"
        case _:
            peaks = peak_memory(step.plan).items()
            memory = ", ".join(f"{format_bytes(p.nbytes)} {tier}" for tier, p in peaks if p.nbytes)
            shortest = lower_bound(step.plan.graph, step.hardware)
            lines = f"{step.heading}\non {_hardware_line(step.hardware)}\n{text(step.timelines, width)}\n"
            return f"{lines}longest chain of dependencies: {shortest:.3g} s; memory at most: {memory}\n"


def _hardware_line(h: Hardware) -> str:
    """The name and the figures of the hardware, in one line."""
    rates = ", ".join(f"{kind} {h.rates[kind] / 1e9:,.6g} GB/s" for kind in ("d2h", "h2d", "host"))
    device = f"{h.flops / 1e12:,.6g} TFLOP/s, device {h.rates['compute'] / 1e9:,.6g} GB/s"
    return f"{h.name}: {device}, {rates}"


COMMAND = Command(
    "draw one step: when each operation runs, on which lane",
    "Nothing is allocated and no GPU is needed. With --compare, two schedules, or the step that a run measured.",
    DrawSettings,
    run_draw,
    """
    # as text, under every schedule
    zfunc draw --schedule all
    # as a page in which you change the machine and the plan
    zfunc draw --live --hardware v100-32gb
    # two schedules in one picture, and why one is faster
    zfunc draw --schedule Overlapped --compare Serial
    # what a run measured, beside what was planned for this machine
    zfunc draw --compare run --hardware machine.toml
    """,
)
