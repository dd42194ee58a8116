"""Parameters and activations on the host: the bytes over each lane, the time of a step, and how little it needs.

One GPT, once with everything on the device and once with parameters and activations on the host, in alternating
steps. The bytes of the plan are held against the formulae: parameters twice a step, less what slots still hold;
activations once each way; gradients once. With `--memory-gib` the streamed training has so much of an accelerator's
memory, and comes after the other one, which has all. Losses are the same, to the bit, or this fails. With `--hf`
the model is that of a Hugging Face folder, fine-tuned from its weights.

    python -m benchmarks.streaming
    python -m benchmarks.on_pretend benchmarks.streaming --device pretend --memory-gib 1 --turns 2 \\
        --num-layers 21 --hidden-size 2048 --vocab-size 2048 --batch-size 1 --moments 8bit
"""

import argparse
import gc
import resource
from collections import Counter
from typing import Any

import torch

import zfunc
from benchmarks.large import GIB, config_of, limit_memory
from benchmarks.machine import SMALL_GPT, make_parser, ratios, write
from zfunc.core.layout import round_up
from zfunc.core.simulator import simulate
from zfunc.core.spec import ALLOCATION
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.state import State
from zfunc.engine.trace.segment import Segment
from zfunc.models import hf
from zfunc.models.gpt import gpt_segments
from zfunc.planner.profile import load_profile
from zfunc.runtime.accelerator import on_accelerator, peak_bytes, pick_device, reset_peak

STREAMED = {"params_on": "host", "activations_on": "host"}
LANES = ("fetch", "stash", "unstash", "to_host")


def segments_of(args: argparse.Namespace) -> tuple[Segment, ...]:
    """The segments of the GPT in `args`, or of the model in folder `args.hf`, whose sizes go into `args`."""
    if args.hf is None:
        return gpt_segments(config_of(args, tied=args.tied))
    config, segments = hf.load(args.hf)
    args.num_layers, args.hidden_size = config.num_hidden_layers, config.hidden_size
    args.num_attention_heads, args.vocab_size = config.num_attention_heads, config.vocab_size
    args.tied = config.tie_word_embeddings
    return segments


def compiled(args: argparse.Namespace, **settings: Any) -> Program:
    return zfunc.compile(
        segments_of(args),
        optimizer=zfunc.AdamW(lr=1e-4, moments=args.moments),
        precision=args.precision,
        clip_norm=1.0,
        micro_batches=args.micro_batches,
        device=pick_device(args.device),
        **settings,
    )


def batch_of(args: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(args.vocab_size, (args.batch_size, args.seq_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def expected_bytes(program: Program, args: argparse.Namespace) -> dict[str, int]:
    """Bytes that a streamed step should move, by verb, by formula; for blocks that differ from the embedding
    in size by at most a factor of 2, as slots are in classes of size.

    P parameters of 2 or 4 bytes are fetched twice, but for those of the first and last segment and of the blocks
    that are still in slots; the tokens and L boundaries of T x h are stashed; gradients go once, summed in fp32.
    """
    element, layout = program.dtype.itemsize, program.layout
    blocks = [
        sum(layout.buckets[b].numel for b in layout.buckets_of(s)) for s in range(1, args.num_layers + 1)
    ]
    every, micro = layout.numel, args.micro_batches
    held = min(args.num_layers, program.spec.settings.slots)
    tokens = args.batch_size * args.seq_length // micro
    kept = round_up(8 * tokens, ALLOCATION) + args.num_layers * round_up(
        element * args.hidden_size * tokens, ALLOCATION
    )
    return {
        "fetch": element * (every + sum(blocks) - sum(blocks[-held:])),
        "stash": micro * kept,
        "unstash": micro * kept,
        "to_host": (4 if micro > 1 else element) * (every + tied_numel(program)),
    }


def tied_numel(program: Program) -> int:
    """The number of elements whose gradients two segments deliver, because a parameter is tied."""
    return sum(b.numel for b in program.layout.buckets if len(b.deliveries) > 1)


def planned_bytes(program: Program, args: argparse.Namespace) -> dict[str, int]:
    moved: Counter[str] = Counter()
    for op in specialize(program, batch_of(args, 0)).plan.graph:
        moved[op.verb] += op.nbytes
    return {verb: moved[verb] for verb in LANES}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def step(
    program: Program, state: State, args: argparse.Namespace, n: int
) -> tuple[State, float, float, float]:
    """Train step `n`; returns the next State, the loss, wall-clock seconds and CPU seconds of all cores."""
    before = cpu_seconds()
    state, metrics = zfunc.train_step(program, state, batch_of(args, n))
    return state, metrics.loss, metrics.seconds, cpu_seconds() - before


def alternating(args: argparse.Namespace) -> dict[str, Any]:
    """Train with parameters on the device and, in turn, streamed from the host; returns ratios of seconds."""
    programs = [compiled(args), compiled(args, **STREAMED)]
    states = [zfunc.init(p) for p in programs]
    losses: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    for n in range(args.turns + 1):
        for i, program in enumerate(programs):
            states[i], loss, wall, used = step(program, states[i], args, n)
            losses[i].append(loss)
            seconds[i].append(wall)
            cpu[i].append(used)
    result = {
        "losses": losses,
        "seconds_ratio": ratios(seconds[1][1:], seconds[0][1:]),
        "cpu_seconds_ratio": ratios(cpu[1][1:], cpu[0][1:]),
    }
    if args.hardware:
        machine = load_profile(args.hardware).hardware(args.precision)
        plans = [specialize(p, batch_of(args, 0)).plan for p in programs]
        times = [simulate(plan, machine).seconds for plan in plans]
        result["simulated_ratio"] = times[1] / times[0]
    return {**result, "program": programs[1]}


def one_after_the_other(args: argparse.Namespace) -> dict[str, Any]:
    """Train with all on the device, then streamed in `--memory-gib` of it; returns losses and peak bytes."""
    device, losses = pick_device(args.device), list[list[float]]()
    peaks, planned, programs = list[int](), list[int](), list[Program]()
    for settings in ({}, STREAMED):
        if settings:
            limit_memory(device, int(args.memory_gib * GIB))
        program = compiled(args, **settings)
        planned.append(specialize(program, batch_of(args, 0)).memory["device"].nbytes)
        state, seen = zfunc.init(program), list[float]()
        reset_peak(device)
        for n in range(args.turns):
            state, loss, seconds, _ = step(program, state, args, n)
            seen.append(loss)
            print(f"  step {n + 1}: loss {loss:.6f}, {seconds:.0f} s", flush=True)
        losses.append(seen)
        peaks.append(peak_bytes(device))
        programs.append(program)
        del state
        program.cache.staging.clear()
        gc.collect()
    return {"losses": losses, "device_bytes": peaks, "planned_device_bytes": planned, "program": programs[1]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    limited = args.memory_gib is not None
    result = one_after_the_other(args) if limited else alternating(args)
    program: Program = result.pop("program")
    planned, expected = planned_bytes(program, args), expected_bytes(program, args)
    if planned != expected:
        raise SystemExit(f"bytes a step: planned {planned}, the formulae say {expected}")
    if result["losses"][0] != result["losses"][1]:
        raise SystemExit(f"losses differ: {result['losses']}")
    return {"parameters": program.layout.num_trainable, "bytes": planned, **result}


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__, **SMALL_GPT, vocab_size=256, micro_batches=1)
    p.add_argument("--hf", metavar="FOLDER", help="fine-tune this model, instead of a GPT of the sizes below")
    p.add_argument("--tied", action="store_true", help="the output projection is the embedding, as in GPT-2")
    p.add_argument("--moments", default="fp32")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--device", default="cpu")
    p.add_argument("--memory-gib", type=float, help="what the streamed training has of an accelerator")
    p.add_argument("--turns", type=int, default=9)
    p.add_argument("--hardware", metavar="FILE", help="a profile of this machine, to simulate both steps")
    return p


def main() -> None:
    args = parser().parse_args()
    if args.memory_gib is not None and not on_accelerator(pick_device(args.device)):
        raise SystemExit("--memory-gib: got it on a CPU, expected an accelerator: its memory can be limited")
    r = measure(args)
    print(
        f"{r['parameters']:,} parameters; losses are equal to the bit, and bytes a step those of the formulae:"
    )
    print("  " + ", ".join(f"{verb} {nbytes:,}" for verb, nbytes in r["bytes"].items()))
    if args.memory_gib is None:
        print(f"  streamed over not: time {r['seconds_ratio']:.3f}, all cores {r['cpu_seconds_ratio']:.3f}")
        if "simulated_ratio" in r:
            print(f"  simulated {r['simulated_ratio']:.3f}")
    else:
        for name, peak, planned in zip(
            ("on the device", "streamed"), r["device_bytes"], r["planned_device_bytes"], strict=True
        ):
            print(f"  {name}: {peak:,} bytes of the device, planned {planned:,}")
    name = f"streaming-{args.num_layers}x{args.hidden_size}-{args.precision}"
    write(args.json, name, {"arguments": vars(args), **r})


if __name__ == "__main__":
    main()
