"""Write docs/serial.svg, docs/overlapped.svg and docs/interleaved.svg: `python docs/make_pictures.py`.

One step of a small model on two ranks, on round-number hardware, under each schedule.
"""

from pathlib import Path

from zfunc import schedules
from zfunc.core.graph import Graph
from zfunc.core.layout import Parameter, make_layout
from zfunc.core.ops import SegmentCost, StepSpec
from zfunc.core.recipes import zero_offload
from zfunc.core.simulator import simulate
from zfunc.core.verifier import verify
from zfunc.viz.draw import svg, text

WIDTH = 2048
BLOCK = 12 * WIDTH * WIDTH
TOKENS = 4096


def make_job() -> StepSpec:
    """Four blocks of a transformer, each a segment and a bucket, on two ranks."""
    layout = make_layout(
        [[Parameter(f"block{s}.weight", (12, WIDTH, WIDTH))] for s in range(4)], bucket_size=BLOCK, world=2
    )
    forward = 2 * BLOCK * TOKENS
    cost = SegmentCost(forward, input_bytes=2 * WIDTH * TOKENS, backward_flops=3 * forward)
    return StepSpec(layout, (cost,) * 4, (True,) * 4, world=2)


def main() -> None:
    """Simulate the step under every schedule and write the pictures beside this file."""
    graph = Graph(tuple(zero_offload(make_job())))
    for schedule in (schedules.Serial(), schedules.Overlapped(), schedules.Interleaved()):
        name = type(schedule).__name__
        plan = verify(schedule(graph))
        timeline = simulate(plan)
        title = f"{name}: one ZeRO-Offload step of four segments on two ranks"
        path = Path(__file__).with_name(f"{name.lower()}.svg")
        path.write_text(svg(timeline, plan=plan, title=title))
        print(f"{path.name}\n{text(timeline)}\n")


if __name__ == "__main__":
    main()
