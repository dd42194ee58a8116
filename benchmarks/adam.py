"""How close is the host update to the memory limit, and how far are the others?

The contenders run in turn inside every repeat, so a noisy machine disturbs all of them alike; a ratio is
the median over repeats of the ratios within one repeat. The yardstick is the skeleton: the bytes of a
step with bf16 gradient and bf16 copy, 28 a parameter, moved in one sweep without arithmetic.

    python -m benchmarks.adam --sizes 1Mi,16Mi --repeats 15 --json adam.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import describe, write
from zfunc.kernel import cpu_adam
from zfunc.sweeps import adam_update_
from zfunc.threads import default_threads

SCALE, LR, DECAY = 0.5, 1e-4, 0.1
Contender = Callable[[], None]


def buffers(n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(n, generator=generator).mul_(1e-3)
    return {
        "master": torch.randn(n, generator=generator),
        "exp_avg": grad * 0.1,
        "exp_avg_sq": grad * grad,
        "grad": grad.bfloat16(),
        "out": torch.empty(n, dtype=torch.bfloat16),
    }


def zfunc_step(n: int, threads: int, moments: float | None = None) -> Contender:
    b = buffers(n)
    if moments is not None:  # rows that no longer get gradients: both moments decay towards denormals
        b["grad"].zero_()
        b["exp_avg"].fill_(moments)
        b["exp_avg_sq"].fill_(moments)

    def run() -> None:
        adam_update_(
            b["master"],
            b["exp_avg"],
            b["exp_avg_sq"],
            b["grad"],
            out=b["out"],
            step=10,
            lr=LR,
            weight_decay=DECAY,
            grad_scale=SCALE,
            threads=threads,
        )

    return run


def skeleton(n: int, threads: int) -> Contender:
    b = buffers(n)
    state = [(b[name].data_ptr(), 4) for name in ("master", "exp_avg", "exp_avg_sq")]
    addresses = [b[name].data_ptr() for name in ("grad", "out")]
    return lambda: cpu_adam.skeleton(state, *addresses, n, threads) if b else None  # b keeps the memory alive


def torch_step(n: int, moments: float | None = None, **kind: bool) -> Contender:
    b = buffers(n)
    b["master"].grad = torch.empty(n)
    optimizer = torch.optim.AdamW([b["master"]], lr=LR, weight_decay=DECAY, **kind)
    if moments is not None:
        b["grad"].zero_()
        b["master"].grad.zero_()
        optimizer.step()
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[b["master"]][name].fill_(moments)

    def run() -> None:
        b["master"].grad.copy_(b["grad"])
        b["master"].grad.mul_(SCALE)
        optimizer.step()
        b["out"].copy_(b["master"])

    return run


def deepspeed_step(n: int) -> Contender | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    b = buffers(n)
    b["master"].grad = torch.empty(n)
    optimizer = DeepSpeedCPUAdam([b["master"]], lr=LR, weight_decay=DECAY, adamw_mode=True)

    def run() -> None:
        b["master"].grad.copy_(b["grad"])
        b["master"].grad.mul_(SCALE)
        optimizer.step()
        b["out"].copy_(b["master"])

    return run


def contenders(n: int, threads: int) -> dict[str, Contender]:
    table: dict[str, Contender | None] = {
        "skeleton": skeleton(n, threads),
        "zfunc": zfunc_step(n, threads),
        "zfunc, decayed moments": zfunc_step(n, threads, moments=1e-40),
        "torch fused": torch_step(n, fused=True),
        "torch fused, decayed moments": torch_step(n, fused=True, moments=1e-40),
        "torch foreach": torch_step(n, foreach=True),
        "torch for-loop": torch_step(n, foreach=False),
        "deepspeed": deepspeed_step(n),
    }
    return {name: run for name, run in table.items() if run is not None}


def measure(table: dict[str, Contender], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for repeat in range(repeats + 2):  # two rounds to touch pages and start threads
        for name, run in table.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(n: int, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    def row(name: str, times: list[float]) -> dict[str, Any]:
        ratios = [own / base for own, base in zip(times, seconds["skeleton"], strict=True)]
        return {
            "elements": n,
            "name": name,
            "times_skeleton": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
        }

    return [row(name, times) for name, times in seconds.items()]


def size(text: str) -> int:
    for suffix, factor in (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1Mi,4Mi,16Mi,64Mi", help="elements, comma separated")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", metavar="PATH", help="a file, or a folder to write machine and results to")
    parser.add_argument("--only", help="comma separated words; contenders without any of them are left out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    kind, results = cpu_adam.instruction_set(), []
    print(f"{describe()}, {options.threads} threads, {kind}")
    print(f"{'elements':>10}  {'contender':<30}{'x skeleton':>12}{'from':>8}{'to':>8}")
    for n in map(size, options.sizes.split(",")):
        table = contenders(n, options.threads)
        if options.only:
            words = ["skeleton", *options.only.split(",")]
            table = {name: run for name, run in table.items() if any(word in name for word in words)}
        for row in summary(n, measure(table, options.repeats)):
            results.append(row)
            low, high = row["spread"]
            print(f"{n:>10}  {row['name']:<30}{row['times_skeleton']:>12.2f}{low:>8.2f}{high:>8.2f}")
    settings = {"threads": options.threads, "repeats": options.repeats, "instruction_set": kind}
    write(options.json, "adam", {**settings, "rows": results})


if __name__ == "__main__":
    main()
