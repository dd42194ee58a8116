"""A step on a CPU: zfunc against DeepSpeed ZeRO-2 with the optimizer offloaded, clipped, blocks checkpointed.

DeepSpeed runs on its own CPU accelerator. Both train the same model on the same batches in one process and take
turns; the figures are medians of ratios, turn by turn, of time and of processor time. DeepSpeed is no dependency:

    pip install --no-build-isolation deepspeed ninja
    python -m benchmarks.deepspeed [--precision bf16 --num-layers 6 --hidden-size 256 ...] [--json FILE_OR_FOLDER]
"""

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.machine import describe, ratios, write
from benchmarks.step import config_of, measure, parser, with_deepspeed, with_torch, with_zfunc

LEFT_OUT = "DeepSpeed is left out: it is not installed (pip install --no-build-isolation deepspeed ninja)"
ALONE = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}


def main() -> None:
    p = parser()
    p.description = __doc__
    p.set_defaults(precision="bf16", device="cpu", turns=8)
    args = p.parse_args()
    config = config_of(args)
    build = {"torch": partial(with_torch, config, args), "zfunc": partial(with_zfunc, config, args)}
    installed = find_spec("deepspeed") is not None
    if installed:
        os.environ |= {"DS_ACCELERATOR": "cpu", **{k: v for k, v in ALONE.items() if k not in os.environ}}
        threads = torch.get_num_threads()
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        torch.set_num_threads(threads)
        build["DeepSpeed"] = partial(with_deepspeed, config, args)
    trials = measure(args, build)
    rows: list[dict[str, Any]] = []
    print(f"{config}, batch {args.batch_size}, {args.precision}, {describe()}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':12} {'of zfunc':>9} {'cpu time':>9} {'first loss':>11} {'last loss':>10}")
    for name, trial in trials.items():
        if trial.error:
            print(f"{name:12} {trial.error}")
            continue
        row = {
            "name": name,
            "ratio_to_zfunc": ratios(trial.seconds, trials["zfunc"].seconds),
            "cpu_ratio_to_zfunc": ratios(trial.cpu_seconds, trials["zfunc"].cpu_seconds),
            "losses": trial.losses,
        }
        rows.append(row)
        print(
            f"{name:12} {row['ratio_to_zfunc']:9.3f} {row['cpu_ratio_to_zfunc']:9.3f} "
            f"{trial.losses[0]:11.4f} {trial.losses[-1]:10.4f}"
        )
    if not installed:
        print(LEFT_OUT)
    name = f"deepspeed-{args.num_layers}x{args.hidden_size}-{args.precision}"
    write(args.json, name, {"arguments": vars(args), "rows": rows, "deepspeed": installed})


if __name__ == "__main__":
    main()
