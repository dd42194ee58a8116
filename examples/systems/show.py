"""Draw a published system's step, time it beside ZeRO-Offload's, and show what was published of the system.

    python examples/systems/show.py                 the table of all systems
    python examples/systems/show.py super_offload   its picture as text, and its rows of docs/published.md
    python examples/systems/show.py fpdt fpdt.svg   its picture as SVG, too

Times are simulated on hardware in round numbers, of a step of four layers of 50 million parameters; `fpdt` is
one layer.
"""

import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

from zfunc.schedules import Overlapped, Serial

import zfunc
from zfunc.core.graph import Graph
from zfunc.core.plan import Plan

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
SYSTEMS = {  # by file, the function in it
    "zero_offload": "zero_offload",
    "delayed_update": "delayed",
    "super_offload": "speculative",
    "staged": "staged",
    "zero_infinity": "zero_infinity",
    "vertical": "vertical",
    "round_pipe": "round_pipe",
    "fpdt": "fpdt",
}
TOKENS = 16_384  # of a micro-batch
RATES = {"compute": 1e12, "network": 2e10, "d2h": 2e10, "h2d": 2e10, "host": 1e11, "read": 6e9, "write": 6e9}
HARDWARE = zfunc.Hardware("in round numbers", flops=100e12, rates=RATES)


def graph_of(name: str) -> Graph:
    """The graph of a system's step: its file has a recipe, an order of passes, or all operations."""
    module = import_module(name)
    function = getattr(module, SYSTEMS[name])
    match next(iter(signature(function).parameters)):
        case "spec":
            return zfunc.step_graph(tokens=TOKENS, recipe=function, **module.SETTINGS)
        case "devices":
            return zfunc.step_graph(8, tokens=TOKENS, order=function, **module.SETTINGS)
        case _:
            return Graph(function())


def beside(name: str) -> Plan:
    """The step that a system is compared with: ZeRO-Offload's of the same size, or the system's own, one by one."""
    if name == "fpdt":
        return Serial()(graph_of(name))
    settings, pipeline = import_module(name).SETTINGS, name == "round_pipe"
    micro_batches = settings.get("micro_batches", 1)
    graph = zfunc.step_graph(8 if pipeline else 4, tokens=TOKENS, clip_norm=1.0, micro_batches=micro_batches)
    return Overlapped()(graph)


def compared(name: str, plan: Plan) -> tuple[float, float, float]:
    """Time, device memory and host memory of a system's plan, in parts of those of the step beside it."""
    other = beside(name)
    bytes_, of_other = plan.peak_bytes(), other.peak_bytes()
    host, of_host = (x.get("host", 0) + x.get("pinned", 0) for x in (bytes_, of_other))
    time = plan.simulate(HARDWARE).seconds / other.simulate(HARDWARE).seconds
    return time, bytes_["device"] / of_other["device"], host / of_host


def published_cells(name: str) -> list[list[str]]:
    """The rows of docs/published.md that a system's file names; the page says why the two figures differ."""
    rows = [x for x in PAGE.read_text().splitlines() if x.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    return [x for x in cells if len(x) > 7 and any(_is(x, row) for row in import_module(name).PUBLISHED)]


def published(name: str) -> str:
    """Those rows as lines."""
    return "\n".join(
        f"{x[0]}  {x[1]}, {x[2]}, {x[3]}: published {x[5]}, planned {x[6]} tokens/s"
        for x in published_cells(name)
    )


def _is(cells: list[str], row: str) -> bool:
    """Whether a row of the page is that of an id such as "Z1", or of an id and a system, "Z4 DeepSpeed ZeRO-2"."""
    number, _, system = row.partition(" ")
    return cells[0] == number and cells[1].startswith(system)


def main(name: str = "", picture: str = "") -> None:
    """Print the table of all systems, or show one."""
    if name and name not in SYSTEMS:
        sys.exit(f"show.py: got {name!r}, expected one of {', '.join(SYSTEMS)}")
    print(f"{'':<15} {'time':>6} {'device':>7} {'host':>7}   of the step beside it")
    for system in [name] if name else SYSTEMS:
        plan = Overlapped()(graph_of(system)).verify()
        print("{:<15} {:6.2f} {:7.2f} {:7.2f}".format(system, *compared(system, plan)))
    if name:
        timeline = plan.simulate(HARDWARE)
        print(f"\n{timeline.text()}\n\n{published(name) or 'docs/published.md has no row of it'}")
        if picture:
            Path(picture).write_text(timeline.svg())


if __name__ == "__main__":
    main(*sys.argv[1:])
