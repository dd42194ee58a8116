"""Pictures of a step that was never run: planned from shapes alone, simulated on hardware given in round numbers.

The invariant: no parameter is allocated and no GPU is needed, whatever the size of the model.
"""

import torch
from attrs import evolve, frozen

import zfunc
from zfunc import schedules
from zfunc.draw import chrome_trace, svg, text
from zfunc.gpt import num_parameters
from zfunc.graph import Graph, Kind
from zfunc.hardware import ROUND, Hardware
from zfunc.job import config, segments
from zfunc.memory import memory
from zfunc.plan import Plan
from zfunc.settings import Sketch
from zfunc.simulate import critical_path, simulate
from zfunc.timeline import Timeline
from zfunc.verify import verify


@frozen
class Drawn:
    """A step under one schedule: its plan, the hardware, and when everything would run on it."""

    heading: str
    plan: Plan
    hardware: Hardware
    timeline: Timeline


def drawn(sketch: Sketch) -> dict[str, Drawn]:
    """Plan and simulate the step under the schedule asked for, or under each, slowest first; by name."""
    graph, on = _graph(sketch), hardware(sketch)
    names = schedules.__all__ if sketch.schedule == "all" else [sketch.schedule]
    what = (
        f"one step of a GPT of {sketch.num_layers} x {sketch.hidden_size} "
        f"({num_parameters(config(sketch)):,} parameters), batch {sketch.batch_size} x {sketch.seq_length}"
    )
    plans = {name: verify(getattr(schedules, name)()(graph)) for name in names}
    made = {name: Drawn(f"{name}: {what}", plan, on, simulate(plan, on)) for name, plan in plans.items()}
    return dict(sorted(made.items(), key=lambda item: -item[1].timeline.seconds))


def picture(one: Drawn, form: str, *, width: int) -> str:
    """The picture: "text" of so many columns, "svg", or a "chrome" trace."""
    if form == "svg":
        return svg(one.timeline, plan=one.plan, title=f"{one.heading}, on {one.hardware.name}")
    if form == "chrome":
        return chrome_trace(one.timeline) + "\n"
    peaks = (f"{p.nbytes / 1e9:,.2f} GB {tier}" for tier, p in memory(one.plan).items() if p.nbytes)
    shortest = critical_path(one.plan.graph, one.hardware)
    return "\n".join(
        [
            one.heading,
            f"on {_described(one.hardware)}",
            text(one.timeline, width),
            f"longest chain of dependencies: {shortest:.3g} s; memory at most: {', '.join(peaks)}",
            "",
        ]
    )


def hardware(sketch: Sketch) -> Hardware:
    """Round numbers, but for what the sketch says better."""
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


def _graph(sketch: Sketch) -> Graph:
    shape = sketch.batch_size, sketch.seq_length
    program = zfunc.compile(
        segments(sketch),
        optimizer=zfunc.AdamW(moments=sketch.moments),
        precision="bf16" if sketch.precision == "auto" else sketch.precision,
        clip_norm=sketch.clip or None,
        micro_batches=sketch.micro_batches,
        bucket_size=sketch.bucket_size,
        recompute=sketch.recompute,
        device="cpu",
        example=(torch.empty(shape, dtype=torch.int64, device="meta"),) * 2,
    )
    return program.plan.graph


def _described(h: Hardware) -> str:
    rates = ", ".join(f"{kind} {h.rates[kind] / 1e9:,.6g} GB/s" for kind in ("d2h", "h2d", "host"))
    device = f"{h.flops / 1e12:,.6g} TFLOP/s, device {h.rates['compute'] / 1e9:,.6g} GB/s"
    return f"{h.name}: {device}, {rates}"
