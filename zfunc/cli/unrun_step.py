"""Pictures of a step that was never run: planned from shapes alone, simulated on the hardware asked for.

The invariant: no parameter is allocated and no GPU is needed, whatever the size of the model.
"""

import torch

import zfunc
from zfunc import schedules
from zfunc.cli.draw_settings import DrawSettings
from zfunc.cli.step_pictures import DrawnStep, hardware
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND
from zfunc.core.simulator import simulate
from zfunc.core.verifier import verify
from zfunc.models.gpt import gpt_segments, num_parameters
from zfunc.planner.cost_model import precision_for, resolve_hardware
from zfunc.schedules import make_schedule
from zfunc.train.settings import step_settings
from zfunc.train.setup import gpt_config


def draw_unrun_step(sketch: DrawSettings) -> dict[str, DrawnStep]:
    """Plan and simulate the step under the schedule asked for, or under each, slowest first; by name."""
    precision = precision_for(
        ROUND if sketch.hardware is None else resolve_hardware(sketch.hardware), sketch.precision
    )
    graph, on = _graph(sketch, precision), hardware(sketch, precision)
    names = schedules.__all__ if sketch.schedule == "all" else [sketch.schedule]
    what = (
        f"one step of a GPT of {sketch.num_layers} x {sketch.hidden_size} "
        f"({num_parameters(gpt_config(sketch)):,} parameters), batch {sketch.batch_size} x {sketch.seq_length}"
    )
    plans = {name: verify(make_schedule(name, on)(graph)) for name in names}
    made = {name: DrawnStep(f"{name}: {what}", plan, on, simulate(plan, on)) for name, plan in plans.items()}
    return dict(sorted(made.items(), key=lambda item: -item[1].timeline.seconds))


def _graph(sketch: DrawSettings, precision: str) -> Graph:
    shape = sketch.batch_size, sketch.seq_length
    program = zfunc.compile(
        gpt_segments(gpt_config(sketch)),
        step_settings(sketch, precision=precision, schedule="Serial"),
        device="cpu",
        example=(torch.empty(shape, dtype=torch.int64, device="meta"),) * 2,
    )
    return program.plan.graph
