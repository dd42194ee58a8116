"""The tables of docs/scale.md, each a function of nothing that returns Markdown.

The invariant: a cell is a figure of one simulated step, and (in brackets) means that there is no room for it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import evolve
from scale_steps import EVERY_BUCKET, WORLDS, Case, Figures, Network, NormsApart, found, simulated

H100 = Case(50, 4096, 32, "h100", 8)
V100 = evolve(H100, profile="v100-32gb")
GH200 = evolve(H100, profile="gh200")
H200 = Case(80, 8192, 64, "h200", 2)
CASES = (H100, V100, GH200, H200)
FEW = (1, 8, 64, 1024)
COLUMNS = tuple(
    (case, n) for case, worlds in ((H100, FEW), (V100, (16, 1024)), (H200, (8, 1024))) for n in worlds
)
GLOBAL_ROWS = 1024  # of the table of a constant batch
PART = 8  # rows of a micro-batch there, at most

SCHEDULES: dict[str, dict[str, Any]] = {
    "Serial": {"schedule": "Serial"},
    "Interleaved": {"schedule": "Interleaved"},
    "CriticalPath": {"schedule": "CriticalPath"},
    "Search, of schedules": {"schedule": "Search"},
    "squares on a lane of their own": {"schedule": NormsApart()},
    "no clipping, Overlapped": {"clip_norm": None},
    "no clipping, Interleaved": {"clip_norm": None, "schedule": "Interleaved"},
    "no clipping, CriticalPath": {"clip_norm": None, "schedule": "CriticalPath"},
}
RECIPES: dict[str, dict[str, Any]] = {
    "speculative, every bucket": {"speculate": EVERY_BUCKET},
    "delayed": {"delay": True},
    "half of the state on the device": {"offload_ratio": 0.5},
    "8bit moments": {"moments": "8bit"},
    "buckets of 500 M, not 50 M": {"bucket_size": 500_000_000},
    "nothing recomputed": {"recompute": "none"},
}
NETWORKS: dict[str, tuple[Network, dict[str, Any]]] = {
    "a rank's own port alone": ("one port", {}),
    "a latency for every hop": ("every hop", {}),
    "the same, buckets of 500 M": ("every hop", {"bucket_size": 500_000_000}),
}


def weak() -> str:
    """Tokens a second and GPU at constant work for each rank."""

    def cell(case: Case, world: int) -> str:
        now = simulated(case, world)
        return _if_fits(now, f"{now.per_gpu:,.0f} · {now.per_gpu / simulated(case, 1).per_gpu:.0%}")

    return table(["ranks", *(case.name for case in CASES)], _by_world(cell))


def bounds() -> str:
    """What the critical path of each of those steps consists of."""

    def cell(case: Case, world: int) -> str:
        shares = simulated(case, world).bound.items()
        return ", ".join(f"{kind} {100 * share:.0f}" for kind, share in shares if share >= 0.045)

    return table(["ranks", *(case.name for case in CASES)], _by_world(cell))


def _by_world(cell: Callable[[Case, int], str]) -> Iterable[list[str]]:
    for world in WORLDS:
        yield [f"{world:,}", *(cell(case, world) for case in CASES)]


def room() -> str:
    """Time of a step, and what one rank needs of each tier."""
    heads = [
        "",
        "ranks",
        "step, s",
        "tokens/s in all",
        "TFLOP/s a GPU",
        "device, GB",
        "pinned + host, GB",
        "fits",
    ]
    return table(heads, (_needs(case, world) for case in CASES for world in FEW))


def _needs(case: Case, world: int) -> list[str]:
    now = simulated(case, world)
    host = now.memory["host"] + now.memory["pinned"]
    return [
        case.name if world == 1 else "",
        f"{world:,}",
        f"{now.seconds:.2f}",
        f"{now.per_gpu * world:,.0f}",
        f"{now.tflops:.0f}",
        f"{now.memory['device'] / 1e9:.1f} of {now.room['device'] / 1e9:.0f}",
        f"{host / 1e9:.1f} of {now.room['host'] / 1e9:,.0f}",
        "yes" if now.fits else "no",
    ]


def bought() -> str:
    """What each schedule and each recipe buys, in tokens a second against Overlapped, plain with clipping."""
    rows = [["*tokens/s a GPU, Overlapped*", *(f"{simulated(*column).per_gpu:,.0f}" for column in COLUMNS)]]
    for name, changes in (SCHEDULES | RECIPES).items():
        rows.append([name, *(_gain(case, n, simulated(case, n, **changes)) for case, n in COLUMNS)])
    for stage in (2, 1):
        name = f"4 micro-batches, stage {stage}"
        rows.append([name, *(_gain(case, n, four(case, n, stage)) for case, n in COLUMNS)])
    rows.append(["offload ratio auto (the ratio)", *(_with_ratio(case, n) for case, n in COLUMNS)])
    rows.append(["all that a search finds", *(_gain(case, n, found(case, n)[1]) for case, n in COLUMNS)])
    heads = ["", *(f"{case.name}: {n:,}" for case, n in COLUMNS)]
    return table(heads, rows)


def four(case: Case, world: int, stage: int) -> Figures:
    """A step of four micro-batches of the case's rows."""
    return simulated(case, world, rows=4 * case.rows, micro_batches=4, stage=stage)


def _with_ratio(case: Case, world: int) -> str:
    choice, now = found(case, world, ratios_only=True)
    return f"{_gain(case, world, now)} ({choice.offload_ratio:g})"


def _gain(case: Case, world: int, now: Figures) -> str:
    return _if_fits(now, gain(now, simulated(case, world)))


def gain(now: Figures, before: Figures) -> str:
    """How many more tokens a second: "+12 %"."""
    return (
        f"{now.per_gpu / before.per_gpu - 1:+.0%}".replace("-0%", "0%")
        .replace("+0%", "0%")
        .replace("%", " %")
    )


def networks() -> str:
    """What is assumed of the network, and what it changes."""
    columns = [(case, n) for case in (H100, V100, H200) for n in (32, 256, 1024)]
    rows = [["*tokens/s a GPU, as above*", *(f"{simulated(*column).per_gpu:,.0f}" for column in columns)]]
    for name, (network, changes) in NETWORKS.items():
        made = ((simulated(c, n, network, **changes), simulated(c, n)) for c, n in columns)
        rows.append([name, *(_if_fits(now, gain(now, before)) for now, before in made)])
    return table(["", *(f"{case.name}: {n:,}" for case, n in columns)], rows)


def strong() -> str:
    """The same batch for all ranks together."""
    heads = ["ranks", "sequences a rank"]
    for case in (H100, V100):
        heads += [f"{case.name}: step, s", "tokens/s a GPU", "speed-up", "bound by"]
    return table(heads, map(_strong, (16, 64, 128, 256, 512, 1024)))


def _strong(world: int) -> list[str]:
    cells = [f"{world:,}", f"{GLOBAL_ROWS // world}"]
    for case in (H100, V100):
        now, first = (constant_batch(case, n) for n in (world, 16))
        kind, share = next(iter(now.bound.items()))
        cells += [f"{now.seconds:.2f}", f"{now.per_gpu:,.0f}", f"{first.seconds / now.seconds:.1f}"]
        cells += [_if_fits(now, f"{kind} {share:.0%}")]
    return cells


def constant_batch(case: Case, world: int) -> Figures:
    """A step of GLOBAL_ROWS sequences, in micro-batches of PART at most."""
    rows = GLOBAL_ROWS // world
    return simulated(case, world, rows=rows, micro_batches=max(1, rows // PART))


def _if_fits(now: Figures, text: str) -> str:
    return (text if now.fits else f"({text})").replace("%", " %").replace("  %", " %")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, numbers to the right of their columns."""
    ruler = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ruler, *rows))
