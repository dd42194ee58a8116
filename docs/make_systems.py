"""Write docs/systems.md and its pictures, of the files in examples/systems: `python docs/make_systems.py`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_table import table
from zfunc.schedules import Overlapped

DOCS = Path(__file__).parent
SYSTEMS = DOCS.parent / "examples" / "systems"
sys.path.append(str(SYSTEMS))
import show  # noqa: E402

HEADING = """# Published systems

What eight papers are about, each as a recipe or an order of passes of at most 60 lines on zfunc's public seams
([examples/systems](../examples/systems/README.md)), with its step as zfunc draws it: simulated on hardware in round
numbers, four layers of 50 million parameters, so its shape means something and its seconds do not. Time and memory
are in parts of those of the step beside it, ZeRO-Offload's of that size (of FPDT its own, one operation at a time).
What a system published stands beside what `zfunc plan` says of that very step on a profile of that machine;
[published](published.md) has the facts of each row, by their numbers in brackets.

`python docs/make_systems.py` writes this page; `python examples/systems/show.py NAME` prints one of them.
"""
COLUMNS = [
    "row",
    "system",
    "model",
    "GPUs",
    "batch of a rank",
    "published, tokens/s",
    "planned",
    "planned / published",
]


def section(name: str) -> tuple[str, str]:
    """The section of a system, and its picture as SVG."""
    title, _, text = (ast.get_docstring(ast.parse((SYSTEMS / f"{name}.py").read_text())) or "").partition(
        "\n\n"
    )
    system, _, idea = title.partition(": ")
    plan = Overlapped()(show.graph_of(name)).verify()
    time, device, host = show.compared(name, plan)
    rows = [row[:8] for row in show.published_cells(name)]
    published = table(COLUMNS, rows, "---:") if rows else "No row of published.md is of this system."
    parts = [
        *(f"## {system}", f"{idea[:1].upper()}{idea[1:]}", text),
        f"Time {time:.2f}, device memory {device:.2f}, host memory {host:.2f}: "
        f"[{name}.py](../examples/systems/{name}.py).",
        f"![{title.rstrip('.')}](system-{name}.svg)",
        published,
    ]
    picture = plan.simulate(show.HARDWARE).svg(title=title.rstrip("."))
    return "\n\n".join(parts), picture


def files() -> Iterator[tuple[str, str]]:
    """Name and text of the page and of every picture."""
    made = {name: section(name) for name in show.SYSTEMS}
    yield "systems.md", "\n".join([HEADING, "\n\n".join(text for text, _ in made.values())]) + "\n"
    yield from ((f"system-{name}.svg", picture) for name, (_, picture) in made.items())


def main() -> None:
    """Write what has changed, and print its name."""
    for name, text in files():
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(name)


if __name__ == "__main__":
    main()
