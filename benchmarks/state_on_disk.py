"""Optimizer state, parameters and waiting gradients on the disk: how little memory it takes, with the same losses.

A GPT with random weights is trained in a process of its own each time: in memory under `--limit-gib`, which has to
end for want of memory; on the disk under the same limit; and in memory without one, where the losses have to be
those of the disk to the bit. The kernel sets the limit: RLIMIT_DATA, which bounds all private memory that a process
can write to, so whatever holds state, parameters and gradients. Reported are the peak of resident memory during
steps, and during `init`, over what the process had before and what the plan allocates; what the page cache holds of
the files on the disk; and how much of the last step's update has a transfer beside it, as measured.

    python -m benchmarks.state_on_disk
    python -m benchmarks.state_on_disk --num-layers 48 --hidden-size 1600 --num-attention-heads 25 \\
        --vocab-size 50257 --bucket-size 20000000 --limit-gib 5 --in-memory-steps 0
"""

import argparse
import multiprocessing
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import zfunc
from benchmarks.large import GIB, config_of
from benchmarks.machine import write
from benchmarks.streaming import batch_of
from zfunc.core.timeline import Timeline
from zfunc.engine.specialize import specialize
from zfunc.models.gpt import gpt_segments
from zfunc.viz.timeline_svg import svg

TRANSFERS = ("page_in", "page_out")
UPDATE = ("adam",)
PATHS = ("folder", "draw", "json")  # arguments that say where, which a result does not depend on


def train(args: argparse.Namespace, folder: str | None, limit: int | None, steps: int) -> dict[str, Any]:
    """Train in this process, on the disk if there is a `folder`, with at most `limit` bytes of private memory."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    disk = {"state_on": "disk", "params_on": "disk", "grads_on": "disk", "swap": [folder]}
    program = zfunc.compile(
        gpt_segments(config_of(args, tied=True)),
        optimizer=zfunc.AdamW(lr=1e-4, moments=args.moments),
        clip_norm=1.0,
        bucket_size=args.bucket_size,
        device="cpu",
        **(disk if folder is not None else {}),
    )
    memory = specialize(program, batch_of(args, 0)).memory
    before, begun = of_process("VmRSS"), time.monotonic()
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
            drawn = svg(metrics.timeline, plan=metrics.plan, title="One step with its state on the disk")
        if time.monotonic() - begun > 60 * args.minutes:
            break
    peak = of_process("VmHWM")
    if folder is not None and args.draw and drawn:
        Path(args.draw).write_text(drawn)
    return {
        "parameters": program.layout.num_trainable,
        "losses": losses,
        "seconds": seconds,
        "before_bytes": before,
        "planned_bytes": {tier: peak.nbytes for tier, peak in memory.items()},
        "init_peak_bytes": at_init,
        "peak_bytes": peak,
        "page_cache_bytes": cached,
        "update_accompanied_by_transfers": accompanied,
    }


def of_process(name: str) -> int:
    """A figure in bytes that the kernel has of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


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


def share_of_update(timeline: Timeline) -> float:
    """The share of the seconds of the update in which a bucket's state is read or written as well."""
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
    """`train` in a new process: a limit cannot be raised again, and a peak not forgotten."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train, *args).result()


def refusal(args: argparse.Namespace, limit: int) -> str:
    """What a training in memory under the limit ends with."""
    try:
        in_process(args, None, limit, 1)
    except (MemoryError, RuntimeError) as error:  # torch's own allocator raises the second
        return f"{type(error).__name__}: {error}"
    raise SystemExit(f"the training in memory fits in {limit:,} bytes: pass a smaller --limit-gib")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    limit = round(args.limit_gib * GIB)
    print(f"in memory, at most {limit:,} bytes of it")
    refused = refusal(args, limit)
    print(f"  {refused}\non the disk, at most {limit:,} bytes of memory")
    with tempfile.TemporaryDirectory(prefix=".state-on-disk-", dir=args.folder) as folder:
        on_disk = in_process(args, folder, limit, args.steps)
    results: dict[str, Any] = {"limit_bytes": limit, "refused_in_memory": refused, "on_disk": on_disk}
    if args.in_memory_steps:
        print("in memory, without a limit")
        results["in_memory"] = in_process(args, None, None, args.in_memory_steps)
        got, expected = on_disk["losses"], results["in_memory"]["losses"]
        if got[: len(expected)] != expected:
            raise SystemExit(f"losses differ: on the disk {got}, in memory {expected}")
    return results


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--num-layers", type=int, default=12)
    p.add_argument("--hidden-size", type=int, default=1024)
    p.add_argument("--num-attention-heads", type=int, default=8)
    p.add_argument("--seq-length", type=int, default=2)
    p.add_argument("--vocab-size", type=int, default=2048)
    p.add_argument("--batch-size", type=int, default=1)
    p.add_argument("--moments", default="8bit")
    p.add_argument("--bucket-size", type=int, default=5_000_000)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument(
        "--minutes", type=float, default=60.0, help="after which no training begins a further step"
    )
    p.add_argument("--in-memory-steps", type=int, default=10, help="whose losses are compared; 0 for none")
    p.add_argument(
        "--limit-gib", type=float, default=1.0, help="of the memory that a process alone can write to"
    )
    p.add_argument("--folder", type=Path, default=Path(), help="on the drive")
    p.add_argument("--draw", metavar="SVG", help="a picture of the last step on the disk, as measured")
    p.add_argument("--json", help="a file, or a folder for a file named after the hardware and the date")
    args = p.parse_args()
    args.folder = args.folder.absolute()
    r = measure(args)
    own = r["on_disk"]
    room = own["before_bytes"] + sum(n for tier, n in own["planned_bytes"].items() if tier != "disk")
    print(f"{own['parameters']:,} parameters, {own['planned_bytes']['disk']:,} bytes on the disk:")
    print(f"  before and planned: {room:,} bytes of memory")
    for what in ("init_peak_bytes", "peak_bytes"):
        print(f"  {what}: {own[what]:,} resident, {own[what] / room:.3f} of it")
    print(f"  the page cache holds {own['page_cache_bytes']:,} bytes of the files on the disk")
    print(f"  {own['update_accompanied_by_transfers']:.3f} of the update has a transfer beside it")
    if "in_memory" in r:
        whole = r["in_memory"]
        print(
            f"  losses equal to the bit in {len(whole['losses'])} steps; in memory {whole['peak_bytes']:,} bytes"
        )
    arguments = {name: x for name, x in vars(args).items() if name not in PATHS}
    write(args.json, f"state-on-disk-{args.num_layers}x{args.hidden_size}", {"arguments": arguments, **r})


if __name__ == "__main__":
    main()
