"""Write docs/scale.md and its charts: `python docs/make_scale.py`, or `make scale`. Some minutes on two cores.

The invariant: every figure of the page comes out of a step that was simulated for it here; none is typed in.
"""

from pathlib import Path

import torch
from scale_charts import bars, by_world, lines
from scale_prose import conclusions, counted_on, in_short, reflowed, setting
from scale_steps import WORLDS, Case, simulated
from scale_tables import CASES, GLOBAL_ROWS, H100, H200, bought, bounds, networks, room, strong, weak

HERE = Path(__file__).parent
MARK = "<!-- Written by `python docs/make_scale.py`: change that, and run it again. -->"
KINDS = ("compute", "host", "copies", "network", "waiting")


def page() -> str:
    """The whole page."""
    return f"""{MARK}

# Scale on paper

{setting()}

## In short

{in_short()}

## The same work for every rank

Tokens a second and GPU, and the share of what one rank alone reaches.

{weak()}

It grows before it falls, because the update is divided by the ranks, while each rank keeps its work. Inside a node
the ranks share one host, so only copies get shorter; each further node brings a host of its own.

![The share of a step in which a GPU computes](scale-compute.svg)

What the critical path consists of, in percent; parts below 5 are left out. In the picture, *waiting* is the time
until a lane is told that another is done.

{bounds()}

![What bounds a step](scale-bound.svg)

## What a rank needs

{room()}

![Bytes a rank needs](scale-memory.svg)

Parameters stay whole on every device, so the device's need does not shrink. All else is divided by the ranks.

## What schedules and recipes buy

Change of tokens a second against Overlapped, with clipping. In brackets: it does not fit. A delay, compact moments
and no clipping change what is trained, and four micro-batches are a batch four times as large; nothing else changes
a bit. With fp16, as on the V100, the norm is waited for even without clipping. A search stays with a ratio of 1
where another gains nothing.

{bought()}

## What depends on the network's figures

The tables above let the ports of a node carry a collective together, and count a latency for log2(ranks) hops.

{networks()}

The first change is what a collective gets that cannot spread over the node's other ports.{counted_on()} The
other two are rings
whose every hop takes the profile's latency, which is rounded up: the worst case.

## The same batch for all ranks together

{GLOBAL_ROWS:,} sequences of 1,024 tokens a step, 10 B. Speed-up is against 16 ranks.

{strong()}

## What would be built next

{conclusions()}
"""


def charts() -> dict[str, str]:
    """The pictures, by file name."""
    share = {case.name: by_world(WORLDS, lambda n, c=case: simulated(c, n).compute_share) for case in CASES}
    halves = {0: "0", 0.25: "25 %", 0.5: "50 %", 0.75: "75 %", 1: "100 %"}
    gigabytes = {10.0**n: f"{10.0**n:,g} GB" for n in range(-1, 4)}
    return {
        "scale-compute.svg": lines(share, "Share of a step in which a GPU computes", halves),
        "scale-bound.svg": bars(
            {f"Critical path: {c.name}": {n: _bound(c, n) for n in WORLDS} for c in (H100, H200)}, KINDS
        ),
        "scale-memory.svg": lines(_memory(), "Bytes a rank needs", gigabytes, log=True),
    }


def _bound(case: Case, world: int) -> dict[str, float]:
    shares = simulated(case, world).bound
    copies = shares.get("d2h", 0.0) + shares.get("h2d", 0.0)
    return {"copies": copies, **{kind: shares.get(kind, 0.0) for kind in KINDS if kind != "copies"}}


def _memory() -> dict[str, dict[int, float]]:
    series: dict[str, dict[int, float]] = {}
    for case in (H100, H200):
        made = {n: simulated(case, n) for n in WORLDS}
        series[f"device, {case.name}"] = {n: f.memory["device"] / 1e9 for n, f in made.items()}
        host = {n: (f.memory["host"] + f.memory["pinned"]) / 1e9 for n, f in made.items()}
        series[f"host, {case.name}"] = host
    series["room: host"] = {n: f.room["host"] / 1e9 for n, f in made.items()}
    series["room: device, h200"] = {n: f.room["device"] / 1e9 for n, f in made.items()}
    return series


def main() -> None:
    """Write page and charts beside this file."""
    torch.set_num_threads(1)
    for name, picture in charts().items():
        (HERE / name).write_text(picture)
        print(f"written: {name}", flush=True)
    (HERE / "scale.md").write_text(reflowed(page()))
    print("written: scale.md")


if __name__ == "__main__":
    main()
