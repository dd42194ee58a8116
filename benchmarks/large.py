"""A GPT that fits no card of 32 GB without offload: does its step fit in so much, and take as long as simulated?

The card's memory is limited for this process. By default the model is the tutorial's, of 10 billion parameters,
with 8-bit moments, for a host with 128 GiB. With `--hardware`, a profile that `zfunc calibrate` wrote, the time of
the step is predicted too.

    python -m benchmarks.large --hardware machine.toml --json benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.large --stage 3      # or --pp 2: each rank has all rows
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import zfunc
from benchmarks.machine import make_parser, write
from zfunc.core.simulator import simulate
from zfunc.engine.program.specialize import specialize
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.planner.profile import load_profile
from zfunc.runtime.accelerator import accelerator_type, device_name, peak_bytes, pick_device, reset_peak

GIB = 1 << 30


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Bound the device memory that this process may allocate to `nbytes`."""
    _, total = torch.accelerator.get_memory_info(device)
    torch.get_device_module(device).set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def config_of(args: argparse.Namespace, **more: Any) -> GPTConfig:
    """The GPT that a benchmark's arguments describe, with its own vocabulary."""
    names = ("vocab_size", "seq_length", "num_layers", "hidden_size", "num_attention_heads")
    return GPTConfig(**{name: getattr(args, name) for name in names}, **more)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "stage": args.stage,
        "micro_batches": args.pp,
        "pp": args.pp,
    }
    if args.pp > 1:
        settings["order"] = "DualPipeV"  # the first and the last segment share a weight
    device = pick_device(args.device)
    limit_memory(device, int(args.memory_gib * GIB))
    program = zfunc.compile(
        gpt_segments(config_of(args)),
        optimizer=zfunc.AdamW(lr=1e-5, moments=args.moments),
        precision=args.precision,
        clip_norm=1.0,
        bucket_size=args.bucket_size,
        device=device,
        **settings,
    )
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.seq_length + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    shaped = specialize(program, batch)
    predicted = None
    if args.hardware and not Path(args.hardware).is_file():
        print(f"no profile {args.hardware}: the step is measured, not predicted")
    elif args.hardware:
        predicted = simulate(shaped.plan, load_profile(args.hardware).hardware(args.precision)).seconds
    start = time.perf_counter()
    state = zfunc.init(program)
    result: dict[str, Any] = {
        "parameters": sum(b.numel for b in program.layout.buckets),
        "planned_device_bytes": shaped.memory["device"].nbytes,
        "init_seconds": time.perf_counter() - start,
        "predicted_seconds": predicted,
    }
    reset_peak(device)
    seconds, losses = list[float](), list[float]()
    for _ in range(1 + args.turns):
        state, metrics = zfunc.train_step(program, state, batch)
        seconds.append(metrics.seconds)
        losses.append(metrics.loss)
    return {
        **result,
        "seconds": median(seconds[1:]),
        "first_seconds": seconds[0],
        "losses": losses,
        "device_bytes": peak_bytes(device),
    }


def parser() -> argparse.ArgumentParser:
    p = make_parser(
        __doc__,
        num_layers=50,
        hidden_size=4096,
        num_attention_heads=32,
        seq_length=1024,
        vocab_size=50257,
        batch_size=10,
    )
    p.add_argument("--moments", default="8bit")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--bucket-size", type=int, default=50_000_000)
    p.add_argument("--device", default=accelerator_type())
    p.add_argument("--memory-gib", type=float, default=30.5, help="what a card of 32 GB has free")
    p.add_argument("--stage", type=int, default=2, help="of ZeRO, on several ranks")
    p.add_argument("--pp", type=int, default=1, help="pipeline stages, each on ranks of its own")
    p.add_argument("--turns", type=int, default=3, help="after one that is not counted")
    p.add_argument("--hardware", metavar="FILE", help="a profile of this machine, to predict the step")
    return p


def main() -> None:
    args = parser().parse_args()
    if args.device is None:
        raise SystemExit("got no accelerator, expected one: on a CPU there is no device memory to limit")
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        kind = torch.device(args.device).type
        args.device = f"{kind}:{os.environ['LOCAL_RANK']}"
        dist.init_process_group(f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}")
    torch.manual_seed(0)
    r = measure(args)
    if rank:
        return
    print(
        f"{r['parameters']:,} parameters on {device_name(torch.device(args.device))}: {r['seconds']:.3f} s a step"
        + (f", predicted {r['predicted_seconds']:.3f} s" if r["predicted_seconds"] else "")
        + f"; {r['device_bytes'] / GIB:.2f} GiB of the device, planned {r['planned_device_bytes'] / GIB:.2f}, "
        f"allowed {args.memory_gib:g}"
    )
    write(
        args.json,
        f"large-{args.num_layers}x{args.hidden_size}-{args.precision}-stage{args.stage}-pp{args.pp}"
        if "RANK" in os.environ
        else f"large-{args.num_layers}x{args.hidden_size}-{args.precision}",
        {"arguments": vars(args), **r},
    )


if __name__ == "__main__":
    main()
