"""Does training suffer from the one-step delayed update? The default job, with and without, from the same seeds.

python -m benchmarks.delayed --steps 1500 --seeds 0,1,2 --json benchmarks/results
"""

import argparse
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import describe, write
from benchmarks.training import trained

FROM: dict[str, int | None] = {"on time": None, "delayed from step 1": 1, "delayed from step 100": 100}


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Final held-out loss of each way, and over that of updates on time with the same seed."""
    final = {(x["update"], x["seed"]): x["held_out"][-1][1] for x in runs}
    seeds = sorted({x["seed"] for x in runs})
    rows = []
    for update in FROM:
        values = [final[update, seed] for seed in seeds]
        over = [value / final["on time", seed] - 1 for value, seed in zip(values, seeds, strict=True)]
        rows.append(
            {"update": update, "held_out": values, "mean": fmean(values), "over": fmean(over), "each": over}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--json", metavar="PATH", help="a file, or a folder to write machine and results to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe())
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as cache:
        for seed in map(int, options.seeds.split(",")):
            for update, delay_from in FROM.items():
                runs.append(
                    {"update": update, **trained(seed, options.steps, Path(cache), delay_from=delay_from)}
                )
                last = runs[-1]["held_out"][-1][1]
                print(f"seed {seed}, {update}: {last:.4f} bits per byte held out", flush=True)
    rows = table(runs)
    print(f"{'updates':<24}{'held-out bits per byte':>28}{'mean':>9}{'over those on time':>20}")
    for row in rows:
        values = " ".join(f"{x:.4f}" for x in row["held_out"])
        print(f"{row['update']:<24}{values:>28}{row['mean']:>9.4f}{row['over']:>+20.2%}")
    write(options.json, "delayed", {"rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
