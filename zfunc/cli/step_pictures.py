"""What `zfunc draw` shows: a plan, the hardware, and the step on it; or, for a run, as predicted and as measured.

The invariant: no torch here. What is compared is the plan that ran, simulated on the hardware that is asked for.
"""

from attrs import evolve, frozen

from zfunc.cli.draw_settings import DrawSettings
from zfunc.core.graph import Kind
from zfunc.core.hardware import ROUND, Hardware
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.core.simulator import lower_bound, simulate
from zfunc.core.timeline import Timeline
from zfunc.planner.profile_toml import load_profile
from zfunc.train.history import read_recorded_step
from zfunc.viz.compare import table
from zfunc.viz.draw import chrome_trace, svg, text
from zfunc.viz.timeline_html import page


@frozen
class DrawnStep:
    """A step under one schedule: its plan, the hardware, and when everything would run on it; `measured`, when it
    did."""

    heading: str
    plan: Plan
    hardware: Hardware
    timeline: Timeline
    measured: Timeline | None = None

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Those that are drawn."""
        return (self.timeline, *([] if self.measured is None else [self.measured]))


def compare_run(sketch: DrawSettings) -> DrawnStep:
    """The step that a run measured, beside what its plan would take on the hardware of the sketch."""
    assert sketch.compare is not None
    run = read_recorded_step(sketch.compare)
    how = run.setting
    on = hardware(sketch, how.precision, how.world)
    heading = f"A step of {sketch.compare}: {how.schedule} in {how.precision}, world {how.world}"
    return DrawnStep(heading, run.plan, on, simulate(run.plan, on), run.timeline)


def picture(one: DrawnStep, form: str, *, width: int) -> str:
    """The picture: "text" of so many columns, "svg", "html", or a "chrome" trace."""
    title = f"{one.heading}, on {one.hardware.name}"
    match form:
        case "svg":
            return svg(one.timelines, plan=one.plan, title=title)
        case "html":
            return page(one.timelines, plan=one.plan, title=title)
        case "chrome":
            return chrome_trace(one.timelines) + "\n"
        case _:
            return _in_text(one, width)


def _in_text(one: DrawnStep, width: int) -> str:
    peaks = (f"{p.nbytes / 1e9:,.2f} GB {tier}" for tier, p in peak_memory(one.plan).items() if p.nbytes)
    shortest = lower_bound(one.plan.graph, one.hardware)
    return "\n".join(
        [
            one.heading,
            f"on {hardware_line(one.hardware)}",
            text(one.timelines, width),
            f"longest chain of dependencies: {shortest:.3g} s; memory at most: {', '.join(peaks)}",
            "",
        ]
    )


def comparison_rows(one: DrawnStep) -> str:
    """Predicted and measured, in rows."""
    assert one.measured is not None
    return f"predicted for {hardware_line(one.hardware)}\n{table(one.timeline, one.measured, one.plan)}"


def hardware(sketch: DrawSettings, precision: str, world: int = 1) -> Hardware:
    """That of the profile the sketch names; else round numbers, but for what the sketch says better."""
    if sketch.hardware is not None:
        return load_profile(sketch.hardware).hardware(precision, world)
    rates: dict[Kind, float] = {
        **ROUND.rates,
        "compute": sketch.device_gbs * 1e9,
        "d2h": sketch.d2h_gbs * 1e9,
        "h2d": sketch.h2d_gbs * 1e9,
        "host": sketch.host_gbs * 1e9,
    }
    flops = sketch.compute_tflops * 1e12
    given = evolve(ROUND, name="the figures given", flops=flops, rates=rates)
    return ROUND if (given.flops, given.rates) == (ROUND.flops, ROUND.rates) else given


def hardware_line(h: Hardware) -> str:
    """The hardware's name and figures, in one line."""
    rates = ", ".join(f"{kind} {h.rates[kind] / 1e9:,.6g} GB/s" for kind in ("d2h", "h2d", "host"))
    device = f"{h.flops / 1e12:,.6g} TFLOP/s, device {h.rates['compute'] / 1e9:,.6g} GB/s"
    return f"{h.name}: {device}, {rates}"
