"""Does training suffer from the one-step delayed update? The default job, with and without, from the same seeds.

A delayed gradient makes large steps less stable. So two learning rates are compared: the default one, a high one,
and a quarter of it.

    python -m benchmarks.delayed --steps 1500 --seeds 0 --json benchmarks/results
"""

from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import describe, make_parser, write
from benchmarks.training import trained
from zfunc.train.settings import TrainSettings
from zfunc.train.setup import LONGEST_WARMUP

ON_TIME = "on time"
FROM: dict[str, int | None] = {
    ON_TIME: None,
    "delayed from step 1": 1,
    "delayed after warm-up": LONGEST_WARMUP,
}
RATES = (TrainSettings().lr, TrainSettings().lr / 4)


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Final held-out loss of each way, and over that of updates on time with the same rate and seed."""
    final = {(x["lr"], x["update"], x["seed"]): x["held_out"][-1][1] for x in runs}
    seeds = sorted({x["seed"] for x in runs})
    rows = []
    for lr, update in product(RATES, FROM):
        if any((lr, way, seed) not in final for way in (ON_TIME, update) for seed in seeds):
            continue
        values = [final[lr, update, seed] for seed in seeds]
        over = [value / final[lr, ON_TIME, seed] - 1 for value, seed in zip(values, seeds, strict=True)]
        row = {"lr": lr, "update": update, "held_out": values, "mean": fmean(values)}
        rows.append({**row, "over": fmean(over), "each_over": over})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe())
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as cache:
        for seed, lr, update in product(map(int, options.seeds.split(",")), RATES, FROM):
            made = trained(seed, options.steps, Path(cache), lr=lr, delay_from=FROM[update])
            runs.append({"lr": lr, "update": update, **made})
            last = runs[-1]["held_out"][-1][1]
            print(f"seed {seed}, lr {lr:g}, {update}: {last:.4f} bits per byte held out", flush=True)
    rows = table(runs)
    print(f"{'lr':<8}{'updates':<24}{'held-out bits per byte':>28}{'mean':>9}{'over those on time':>20}")
    for row in rows:
        values = " ".join(f"{x:.4f}" for x in row["held_out"])
        mean, over = f"{row['mean']:.4f}", f"{row['over']:+.2%}"
        print(f"{row['lr']:<8g}{row['update']:<24}{values:>28}{mean:>9}{over:>20}")
    write(options.json, "delayed", {"rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
