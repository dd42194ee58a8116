"""Does training suffer from compact moments? The default job, longer, with each kind and the same seeds.

A run is determined by its settings, so the curves of a seed start from the same weights and read the same batches.
The job is that of `zfunc train`: the sources of Python's standard library as bytes, a GPT of 4 x 128.

    python -m benchmarks.moments --steps 2000 --seeds 0,1,2 --json benchmarks/results
    python -m benchmarks.moments --from benchmarks/results/moments-....json --plot docs/moments.svg
    python -m benchmarks.moments --range     (seconds: what moves far below the largest of a block)
"""

import json
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe, make_parser, write
from benchmarks.training import trained
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import MOMENTS, STATE_FORMATS
from zfunc.optim.adamw import AdamW
from zfunc.optim.formats import unpack_weights
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

ALLOWED = {"16bit": 0.005, "8bit": 0.01}


class Plain:
    """Adam on the host for `n` weights that begin at 0, with moments in the format `moments`."""

    def __init__(self, moments: Any, n: int) -> None:
        self.adam = AdamW(1e-3, moments=moments, weight_decay=0.0)
        kinds = STATE_FORMATS[self.adam.state_format()]
        self.state = {x.name: torch.zeros(x.numel(n), dtype=TORCH_DTYPES[x.dtype]) for x in kinds}

    def step(self, number: int, grad: Any) -> None:
        decision = StepDecision(False, 1.0, number, self.adam.factors(number))
        self.adam.host_update(self.state, torch.from_numpy(grad), decision, group=0)

    @property
    def weights(self) -> Any:
        return unpack_weights(self.state).numpy()


def show_range(steps: int = 300, n: int = 64 * 16) -> None:
    """Print, for elements with gradients 2^-k of the largest in their block: their mean update as a share of
    fp32's, and the error of the update, for 16- and 8-bit moments."""
    rng = np.random.default_rng(0)
    noise, small = 1 + 2 * rng.standard_normal((steps, n)), np.arange(n) % 64 != 0
    print(f"{'below the largest':<20}{'16bit: share':>14}{'error':>8}{'8bit: share':>14}{'error':>8}")
    for octaves in (0, 9, 10, 12, 14, 17, 20, 24, 30):
        scale = np.where(small, 2.0**-octaves, 1.0) * np.exp2(rng.uniform(-0.5, 0.5, n))
        exact, *kept = (Plain(x, n) for x in ("fp32", "16bit", "8bit"))
        for step in range(1, steps + 1):
            for x in (exact, *kept):
                x.step(step, (scale * noise[step - 1]).astype(np.float32))
        true = exact.weights[small].astype(np.float64)
        row = ""
        for x in kept:
            got = x.weights[small].astype(np.float64)
            row += f"{(true @ got) / (true @ true):>14.3f}{np.abs(got - true).mean() / np.abs(true).mean():>8.3f}"
        print(f"{f'2^-{octaves}':<20}{row}")


def show_constant(steps: int = 200, n: int = 64) -> None:
    """Print how far, as a share of fp32's, 16- and 8-bit moments move elements whose constant gradient is
    2^-k of the largest in their block."""
    heads = (f"{f'{x}: mean':>14}{'least':>8}{'most':>8}" for x in ("16bit", "8bit"))
    print(f"{'below the largest':<20}", *heads, sep="")
    for octaves in (0, 4, 9, 12, 14, 20):
        grad = np.where(np.arange(n), 2.0**-octaves, 1.0).astype(np.float32)
        exact, *kept = (Plain(x, n) for x in ("fp32", "16bit", "8bit"))
        for step in range(1, steps + 1):
            for x in (exact, *kept):
                x.step(step, grad)
        shares = [(x.weights / exact.weights)[1:] for x in kept]
        print(
            f"{f'2^-{octaves}':<20}",
            *(f"{x.mean():>14.3f}{x.min():>8.3f}{x.max():>8.3f}" for x in shares),
            sep="",
        )


def run(moments: str, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """Train with `moments` and `seed` for `steps` steps; returns held-out losses by step, and training
    losses."""
    return {"moments": moments, **trained(seed, steps, cache, moments=moments)}


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Table rows by format of moments: final held-out losses by seed, their excess over fp32's, and means."""
    final = {(x["moments"], x["seed"]): x["held_out"][-1][1] for x in runs}
    seeds = sorted(seed for moments, seed in final if moments == "fp32")
    exact = [final["fp32", seed] for seed in seeds]
    rows = []
    for moments in MOMENTS:
        values = [final[moments, seed] for seed in seeds if (moments, seed) in final]
        if values and len(values) == len(seeds):
            each = [a / b - 1 for a, b in zip(values, exact, strict=True)]
            row = {"moments": moments, "held_out": values, "mean": fmean(values), "each_over_fp32": each}
            rows.append({**row, "over_fp32": fmean(each)})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'moments':<8}{'held-out bits per byte':>28}{'mean':>9}{'over fp32':>11}{'allowed':>9}")
    for row in rows:
        values = " ".join(f"{x:.4f}" for x in row["held_out"])
        allowed = f"{ALLOWED[row['moments']]:.1%}" if row["moments"] in ALLOWED else ""
        print(f"{row['moments']:<8}{values:>28}{row['mean']:>9.4f}{row['over_fp32']:>+11.2%}{allowed:>9}")


def plot(runs: list[dict[str, Any]], path: str) -> None:
    """Write a plot to `path`: held-out loss by step, and its excess over fp32 moments of the same seed."""
    from benchmarks.plots import COLORS, figure, save

    fig, (left, right) = figure(2, title="Compact moments on the default job, three seeds")
    exact = {x["seed"]: dict(x["held_out"]) for x in runs if x["moments"] == "fp32"}
    for x in runs:
        steps, values = zip(*x["held_out"], strict=True)
        first = x["seed"] == min(exact)
        label = x["moments"] if first else None
        left.plot(steps, values, color=COLORS[x["moments"]], linewidth=1.2, alpha=0.8, label=label)
        if x["moments"] != "fp32":
            over = [100 * (v / exact[x["seed"]][s] - 1) for s, v in x["held_out"]]
            right.plot(steps, over, color=COLORS[x["moments"]], linewidth=1.2, alpha=0.8, label=label)
    left.set(xlabel="step", ylabel="held-out bits per byte", yscale="log", ylim=(2.1, 8.5))
    left.set_yticks([2, 3, 4, 6, 8], labels=["2", "3", "4", "6", "8"])
    right.axhline(0, color=COLORS["fp32"], linewidth=1)
    right.set(xlabel="step", ylabel="above fp32 moments, %", ylim=(-3, 3))
    for axes in (left, right):
        axes.legend(frameon=False)
    save(fig, path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="comma separated")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument(
        "--from",
        dest="given",
        nargs="+",
        metavar="JSON",
        help="results to show and plot, instead of training",
    )
    parser.add_argument("--plot", metavar="SVG", help="draw the curves; needs matplotlib")
    parser.add_argument("--range", action="store_true", help="no training: the range inside a block")
    options = parser.parse_args()
    if options.range:
        show_range()
        show_constant()
        return
    torch.set_num_threads(options.threads)
    if options.given:  # of the same run in several files the last counts
        kept = (x for path in options.given for x in json.loads(Path(path).read_text())["results"]["runs"])
        runs = list({(x["moments"], x["seed"]): x for x in kept}.values())
    else:
        print(describe())
        runs = []
        with TemporaryDirectory() as cache:
            for seed in map(int, options.seeds.split(",")):
                for moments in options.moments.split(","):
                    runs.append(run(moments, seed, options.steps, Path(cache)))
                    last = runs[-1]["held_out"][-1][1]
                    print(f"seed {seed}, {moments}: {last:.4f} bits per byte held out", flush=True)
    rows = table(runs)
    show(rows)
    if options.json:
        write(options.json, "moments", {"rows": rows, "runs": runs})
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
