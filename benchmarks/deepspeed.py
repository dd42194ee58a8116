"""A step on a CPU: zfunc against DeepSpeed ZeRO-2 with the optimizer offloaded, clipped, blocks checkpointed.

DeepSpeed runs on its own CPU accelerator. All train the same model on the same batches and take turns in one
process. Figures are medians of ratios, turn by turn: of time, with the quarter of the turns below and above, and of
processor time. Backward recomputes each block from its input; "zfunc min-cut" also keeps what is cheap to keep,
which DeepSpeed has no setting for. DeepSpeed is no dependency:

    pip install --no-build-isolation deepspeed ninja
    python -m benchmarks.deepspeed [--precision bf16 --num-layers 6 --processes 5 ...] [--json FILE_OR_FOLDER]
"""

import argparse
import math
import os
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.machine import describe, quarters, ratios, write
from benchmarks.step import (
    Contestant,
    config_of,
    deepspeed_alone,
    measure,
    parser,
    with_deepspeed,
    with_torch,
    with_zfunc,
)
from zfunc.models.gpt_config import GPTConfig

LEFT_OUT = "DeepSpeed is left out: it is not installed (pip install --no-build-isolation deepspeed ninja)"


def on_cpu(config: GPTConfig, args: argparse.Namespace) -> Contestant:
    """A step function of DeepSpeed on its CPU accelerator."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed_alone().init_distributed("gloo", verbose=False)
    return with_deepspeed(config, args)


def main() -> None:
    p = parser()
    p.description = __doc__
    p.set_defaults(precision="bf16", device="cpu", turns=8)
    args = p.parse_args()
    config = config_of(args)
    build = {"torch": partial(with_torch, config, args), "zfunc": partial(with_zfunc, config, args)}
    build["zfunc min-cut"] = partial(with_zfunc, config, args, recompute="min-cut")
    installed = find_spec("deepspeed") is not None
    if installed:
        build["DeepSpeed"] = partial(on_cpu, config, args)
    trials = measure(args, build)
    rows, ours = list[dict[str, Any]](), trials["zfunc"]
    print(f"{config}, batch {args.batch_size}, {args.precision}, {describe()}, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'':13} {'of zfunc':>9} {'from':>6} {'to':>6} {'cpu time':>9} {'first loss':>11} {'last loss':>10}"
    )
    for name, trial in trials.items():
        if trial.error:
            print(f"{name:13} {trial.error}")
            rows.append({"name": name, "error": trial.error})
            continue
        row: dict[str, Any] = {"name": name, "losses": trial.losses}
        if not ours.error:
            row |= {
                "ratio_to_zfunc": ratios(trial.seconds, ours.seconds),
                "quarters": quarters(trial.seconds, ours.seconds),
                "cpu_ratio_to_zfunc": ratios(trial.cpu_seconds, ours.cpu_seconds),
            }
        rows.append(row)
        low, high = row.get("quarters", (math.nan, math.nan))
        of_time, of_cpu = (row.get(x, math.nan) for x in ("ratio_to_zfunc", "cpu_ratio_to_zfunc"))
        print(
            f"{name:13} {of_time:9.3f} {low:6.3f} {high:6.3f} {of_cpu:9.3f} "
            f"{trial.losses[0]:11.4f} {trial.losses[-1]:10.4f}"
        )
    if not installed:
        print(LEFT_OUT)
    name = f"deepspeed-{args.num_layers}x{args.hidden_size}-{args.precision}"
    write(args.json, name, {"arguments": vars(args), "rows": rows, "deepspeed": installed})


if __name__ == "__main__":
    main()
