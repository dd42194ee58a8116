"""Optimizer state, parameters and waiting gradients on the disk: within the memory that was planned, to the bit.

A GPT with random weights is trained in a process of its own each time: in memory under `--limit-gib`, which has to
end for want of memory; on the disk under the same limit; and in memory without one, where losses and weights have
to be those of the disk to the bit. The kernel sets the limit: RLIMIT_DATA, which bounds all private memory that a
process can write to, so whatever holds state, parameters and gradients.

The peak of resident memory, of `init` and of the steps, has to be within the plan's and what such a process takes
anyway: Python, torch, threads, the plan itself. That is what the same training of as many layers takes beside its
plan where they are narrow, and 1 MiB a lane: smaller blocks stay with the C library when they are freed. Printed as
well: how much of the files the page cache holds, and how much of the last step's update has a transfer beside it.

    python -m benchmarks.state_on_disk
    python -m benchmarks.state_on_disk --num-layers 48 --hidden-size 1600 --num-attention-heads 25 \\
        --vocab-size 50257 --bucket-size 20000000 --limit-gib 3.5
    python -m benchmarks.state_on_disk --num-layers 6 --params-on host --limit-gib 0 --draw docs/disk.svg
"""

import argparse
import hashlib
import multiprocessing
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from attrs import evolve

import zfunc
from benchmarks.apart import of_process
from benchmarks.large import GIB, config_of
from benchmarks.machine import make_parser, write
from benchmarks.streaming import batch_of
from zfunc.core.graph import Tier
from zfunc.core.memory_model import Peak, initial_memory
from zfunc.core.timeline import Timeline
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.state import State
from zfunc.engine.state.weights import parameter_weights
from zfunc.models.gpt import gpt_segments
from zfunc.runtime.host_memory import LEAST_GIVEN_BACK
from zfunc.viz.timeline_svg import svg

TRANSFERS = ("page_in", "page_out", "page_out_all")
UPDATE = ("update",)
PATHS = ("folder", "draw", "json")  # arguments that say where, which a result does not depend on


def train(args: argparse.Namespace, folder: str | None, limit: int | None, steps: int) -> dict[str, Any]:
    """Train in this process, with state on the disk if there is a `folder`, and at most `limit` bytes of
    private memory; returns figures of the training."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    disk = {"state_on": "disk", "params_on": args.params_on, "grads_on": "disk", "swap": [folder]}
    program = zfunc.compile(
        gpt_segments(config_of(args, tied=True)),
        optimizer=zfunc.AdamW(lr=1e-4, moments=args.moments),
        clip_norm=1.0,
        bucket_size=args.bucket_size,
        device="cpu",
        **(disk if folder is not None else {"params_on": "host"}),
    )
    shaped = specialize(program, batch_of(args, 0))
    planned = shaped.memory
    begun = time.monotonic()
    state = zfunc.init(program)
    at_init = of_process("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    losses, seconds, cached = list[float](), list[float](), 0
    accompanied, drawn = 0.0, None
    for n in range(steps):
        state, metrics = zfunc.train_step(program, state, batch_of(args, n), trace=True)
        losses.append(metrics.loss)
        seconds.append(metrics.seconds)
        print(f"  step {n + 1}: loss {metrics.loss:.6f}, {metrics.seconds:.1f} s", flush=True)
        cached = max(cached, in_page_cache(folder)) if folder is not None else 0
        if metrics.timeline is not None:
            accompanied = share_of_update(metrics.timeline)
            drawn = svg(updates(metrics.timeline), title="The updates of a step, its state on the disk")
        if time.monotonic() - begun > 60 * args.minutes:
            break
    peak = of_process("VmHWM")
    if folder is not None and args.draw and drawn:
        Path(args.draw).write_text(drawn)
    return {
        "parameters": program.layout.num_trainable,
        "losses": losses,
        "weights": digest(program, state),
        "seconds": seconds,
        "disk_bytes": planned["disk"].nbytes,
        "lanes": len(shaped.plan.lanes),
        "planned_bytes": {
            "init": max(in_memory(initial_memory(program.spec)), in_memory(planned)),
            "steps": in_memory(planned),
        },
        "peak_bytes": {"init": at_init, "steps": peak},
        "page_cache_bytes": cached,
        "update_accompanied_by_transfers": accompanied,
    }


def in_memory(peaks: Mapping[Tier, Peak]) -> int:
    """The sum of peak bytes over all tiers but the disk: on a CPU they are one memory."""
    return sum(peak.nbytes for tier, peak in peaks.items() if tier != "disk")


def digest(program: Program, state: State) -> str:
    """A hash of the fp32 weights, which after two steps depend on the moments too."""
    weights = parameter_weights(state.buffers, program.layout, program.ranks)  # a bucket at a time
    digests = {name: hashlib.sha256(values.numpy()).hexdigest() for name, values in weights}
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def narrow(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments of a training with as many layers, narrower ones, and about as many buckets."""
    width = 256  # of less, torch has other kernels
    size = args.bucket_size * width**2 // args.hidden_size**2
    changed = {"hidden_size": width, "num_attention_heads": 4, "vocab_size": 256, "bucket_size": size}
    return argparse.Namespace(**{**vars(args), **changed, "draw": None})


def in_page_cache(folder: str) -> int:
    """Bytes that the page cache holds of the files in `folder` that this process has open, unlinked ones too."""
    opened = (Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    ours = [str(path) for path in opened if path.exists() and os.readlink(path).startswith(folder)]
    if not ours:
        raise SystemExit(f"got no open file in {folder}, expected those of the swap space")
    command = ["fincore", "--bytes", "--raw", "--noheadings", "--output", "RES", *ours]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if len(said) != len(ours):
        raise SystemExit(f"fincore: got {len(said)} figures for {len(ours)} files")
    return sum(map(int, said))


def updates(timeline: Timeline) -> Timeline:
    """The part of `timeline` from operation `decide` on, which is then at 0: what touches the state."""
    (start,) = (e.start for e in timeline.events if e.op == "decide")
    later = (evolve(e, start=e.start - start, end=e.end - start) for e in timeline.events if e.start >= start)
    return Timeline(tuple(later), timeline.source)


def share_of_update(timeline: Timeline) -> float:
    """The share of the update's seconds in which a bucket's state is also read from or written to disk."""
    transfers, updates = (busy(timeline, verbs) for verbs in (TRANSFERS, UPDATE))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in updates for b in transfers)
    return both / sum(stop - start for start, stop in updates)


def busy(timeline: Timeline, verbs: Iterable[str]) -> list[tuple[float, float]]:
    """The intervals, in seconds, in which at least one operation of these verbs runs."""
    spans = sorted((e.start, e.end) for e in timeline.events if e.op.partition("[")[0] in verbs)
    merged = list[tuple[float, float]]()
    for start, stop in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def in_process(*args: Any) -> dict[str, Any]:
    """Call `train(*args)` in a new process, as a memory limit cannot be raised again, nor a peak be reset."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train, *args).result()


def refusal(args: argparse.Namespace, limit: int) -> str:
    """The error text with which training in memory fails under `limit` bytes. Exits if it does not."""
    try:
        in_process(args, None, limit, 1)
    except (MemoryError, RuntimeError) as error:  # torch's own allocator raises the second
        return f"{type(error).__name__}: {error}"
    raise SystemExit(f"the training in memory fits in {limit:,} bytes: pass a smaller --limit-gib")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    limit, refused = round(args.limit_gib * GIB) or None, None
    if limit is not None:
        print(f"in memory, at most {limit:,} bytes of it")
        refused = refusal(args, limit)
        print(f"  {refused}")
    print("on the disk, of narrow layers")
    with tempfile.TemporaryDirectory(prefix=".state-on-disk-", dir=args.folder) as folder:
        thin = in_process(narrow(args), folder, limit, args.steps)
    print(f"on the disk, {'no limit' if limit is None else f'at most {limit:,} bytes of memory'}")
    with tempfile.TemporaryDirectory(prefix=".state-on-disk-", dir=args.folder) as folder:
        on_disk = in_process(args, folder, limit, args.steps)
    kept = on_disk["lanes"] * LEAST_GIVEN_BACK
    anyway = {when: peak - thin["planned_bytes"][when] + kept for when, peak in thin["peak_bytes"].items()}
    of_plan = {
        when: peak / (anyway[when] + on_disk["planned_bytes"][when])
        for when, peak in on_disk["peak_bytes"].items()
    }
    results: dict[str, Any] = {
        "limit_bytes": limit,
        "refused_in_memory": refused,
        "anyway_bytes": anyway,
        "peak_of_planned_and_anyway": of_plan,
        "on_disk": on_disk,
    }
    if args.in_memory_steps:
        print("in memory, without a limit")
        results["in_memory"] = in_process(args, None, None, args.in_memory_steps)
    return results


def check(r: dict[str, Any]) -> None:
    """Exit with an error unless losses and weights are equal to the bit, and memory is within the plan."""
    own, whole = r["on_disk"], r.get("in_memory")
    if whole and own["losses"][: len(whole["losses"])] != whole["losses"]:
        raise SystemExit(f"losses differ: on the disk {own['losses']}, in memory {whole['losses']}")
    if whole and len(own["losses"]) == len(whole["losses"]) and own["weights"] != whole["weights"]:
        raise SystemExit(f"weights differ: on the disk {own['weights']}, in memory {whole['weights']}")
    if over := [when for when, ratio in r["peak_of_planned_and_anyway"].items() if ratio > 1]:
        raise SystemExit(f"resident memory in {', '.join(over)}: got more than planned")


def main() -> None:
    p = make_parser(
        __doc__,
        num_layers=12,
        hidden_size=1024,
        num_attention_heads=8,
        seq_length=2,
        vocab_size=2048,
        batch_size=1,
    )
    p.add_argument("--moments", default="8bit")
    p.add_argument("--params-on", default="disk", help="where a state on the disk has its parameters")
    p.add_argument("--bucket-size", type=int, default=5_000_000)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument(
        "--minutes", type=float, default=60.0, help="after which no training begins a further step"
    )
    p.add_argument(
        "--in-memory-steps",
        type=int,
        default=10,
        help="whose losses are compared, and the weights after as many as --steps; 0 for none",
    )
    p.add_argument(
        "--limit-gib",
        type=float,
        default=1.0,
        help="of the memory that a process alone can write to; 0 for no limit",
    )
    p.add_argument("--folder", type=Path, default=Path(), help="on the drive")
    p.add_argument("--draw", metavar="SVG", help="a picture of the last updates on the disk, as measured")
    args = p.parse_args()
    args.folder = args.folder.absolute()
    r = measure(args)
    own = r["on_disk"]
    print(f"{own['parameters']:,} parameters, {own['disk_bytes']:,} bytes on the disk:")
    for when, ratio in r["peak_of_planned_and_anyway"].items():
        peak, planned = own["peak_bytes"][when], own["planned_bytes"][when]
        print(
            f"  {when}: {peak:,} bytes resident, {ratio:.3f} of {planned:,} planned and "
            f"{r['anyway_bytes'][when]:,} anyway"
        )
    print(f"  the page cache holds {own['page_cache_bytes']:,} bytes of the files on the disk")
    print(f"  {own['update_accompanied_by_transfers']:.3f} of the update has a transfer beside it")
    arguments = {name: x for name, x in vars(args).items() if name not in PATHS}
    name = f"state-on-disk-{args.num_layers}x{args.hidden_size}"
    write(args.json, name, {"arguments": arguments, **r})
    check(r)
    if "in_memory" in r:
        whole = r["in_memory"]
        equal = "losses and weights" if len(whole["losses"]) == len(own["losses"]) else "losses"
        print(
            f"  {equal} equal to the bit after {len(whole['losses'])} steps; in memory "
            f"{whole['peak_bytes']['steps']:,} bytes"
        )


if __name__ == "__main__":
    main()
