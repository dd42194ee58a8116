"""What several GPUs of one machine do, one experiment at a time, beside what is expected; without them over gloo.

    python -m benchmarks.node collectives --ranks 2 --device cuda --json benchmarks/results

Each rank is a process of its own with a device of its own. `collectives`: steps of stage 3. `killed`: a rank that
ends in a gather. `stages`: a pipeline over ranks, and data parallelism. `messages`: between ranks. `devices`:
between two devices of one process. `sweeps`: updates and copies of all ranks at once, and of one alone.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import evolve

import zfunc
from benchmarks.machine import SMALL_GPT, gpt, make_parser, write
from zfunc.core.moves import BETWEEN_DEVICES, MOVES
from zfunc.engine.program.fit_to_memory import measured_rates
from zfunc.engine.stages.stages import STAGES
from zfunc.runtime.accelerator import VENDORS, Vendor, accelerator_type, pick_device
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.stage_ranks import StageRanks

Row = dict[str, Any]
TIED = "DualPipeV"  # has the first and the last segment on one device, which share a weight


def trained(args: argparse.Namespace, steps: int, **settings: Any) -> Row:
    """Train a small GPT, all ranks on the same rows; returns losses, seconds and busy times of lanes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (args.batch_size, args.seq_length + 1), generator=generator)
    given: Row = {
        "precision": "fp32",
        "clip_norm": 1.0,
        "device": args.device,
        "bucket_size": args.bucket_size,
    }
    start = time.perf_counter()
    program = zfunc.compile(gpt(args), **{**given, **settings})
    state, losses, seconds = zfunc.init(program, seed=1), list[float](), list[float]()
    started, metrics = time.perf_counter() - start, None
    for step in range(steps):
        state, metrics = zfunc.train_step(
            program, state, (tokens[:, :-1], tokens[:, 1:]), trace=step == steps - 1
        )
        losses.append(metrics.loss)
        seconds.append(metrics.seconds)
    timeline = metrics.timeline if metrics else None
    busy = {lane: round(timeline.busy(lane), 3) for lane in timeline.lanes} if timeline else {}
    return {
        "start": started,
        "losses": losses[:3],
        "seconds": min(seconds),
        "busy": busy,
        "kept": len(program.ranks.queued),
        "moved": between_devices(timeline),
    }


def between_devices(timeline: Any) -> dict[str, float]:
    """By verb, the shortest seconds of `timeline`'s operations that send from one device to another."""
    verbs = [verb for verb, of in MOVES.items() if of.thing in BETWEEN_DEVICES]
    events = timeline.events if timeline else ()
    found = {verb: [e.seconds for e in events if e.op.startswith(f"{verb}[")] for verb in verbs}
    return {verb: min(seconds) for verb, seconds in found.items() if seconds}


def collectives(args: argparse.Namespace) -> Row:
    """Expected: fewer than 50 collectives kept after all steps; on NVLink the network lane is never behind."""
    found = trained(args, args.turns, stage=3, precision=args.precision)
    assert found["kept"] < 50, found["kept"]
    return found


def killed(args: argparse.Namespace) -> Row:
    """Expected: RankError on the others, which names the rank: 2 to 5 s after it has ended, over sockets, too."""
    begun = 0.0

    def gather(op: Any, mem: Any, step: Any) -> None:
        nonlocal begun
        if op.index[0] == 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = begun if op.index[0] == 1 and begun else time.perf_counter()
        STAGES["gather"](op, mem, step)

    try:
        trained(args, 3, stage=3, stages={"gather": gather})
    except zfunc.errors.RankError as error:
        return {"error": str(error), "seconds": time.perf_counter() - begun}
    return {"error": ""}


def stages(args: argparse.Namespace) -> Row:
    """Expected: a start within 10 s, and the losses of data parallelism to the bit, in fp32."""
    two = trained(args, 3, pp=2, micro_batches=2, order=TIED)
    one = trained(args, 3, micro_batches=2)
    assert two["losses"] == one["losses"], (two["losses"], one["losses"])
    return {"pipeline": two, "data parallel": one}


def messages(args: argparse.Namespace) -> Row:
    """Expected: 60 to 150 ms for one of 64 MB, which passes host memory and gloo."""
    ranks = StageRanks.of_stage(RankGroup.of(), dist.get_world_size())
    nbytes, seconds = args.elements * 4, list[float]()
    for tag in range(3):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            ranks.send(1, tag, b"{}", torch.zeros(nbytes, dtype=torch.uint8))
        elif dist.get_rank() == 1:
            ranks.receive(0, tag, nbytes)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"bytes": nbytes, "seconds": min(seconds)}


def devices(args: argparse.Namespace) -> Row:
    """Expected: 0.2 to 0.3 ms for 64 MB between peers on NVLink, 2.6 ms by way of pinned memory, with equal losses.
    Graphs of a device are refused there, or run."""
    settings: Row = {"devices": 2, "micro_batches": 2, "order": TIED}
    peers = trained(args, 5, **settings)
    kind = args.device.type
    with patch.dict(VENDORS, {kind: evolve(VENDORS.get(kind, Vendor()), peers=None)}):
        pinned = trained(args, 5, **settings)
    assert peers["losses"] == pinned["losses"], (peers["losses"], pinned["losses"])
    try:
        settings |= {"order": "OneFOneB", "params_on": "host"}
        graphs = trained(args, 3, compile_segments="reduce-overhead", **settings)
    except Exception as error:
        graphs = {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"peers": peers, "pinned": pinned, "graphs": graphs}


def sweeps(args: argparse.Namespace) -> Row:
    """Expected: all sweeps together at the memory's rate; copies of all at once at a device's own where each has a
    root port of its own, else at half."""
    found: Row = {}
    for what, those in (("alone", range(1)), ("together", range(dist.get_world_size()))):
        dist.barrier()
        if dist.get_rank() in those:
            found[what] = measured_rates(args.device) if args.device.type != "cpu" else None
        dist.barrier()
    return found


EXPERIMENTS = {x.__name__: x for x in (collectives, killed, stages, messages, devices, sweeps)}


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank's part of a named measurement and print its row, as JSON, on the last line."""
    torch.set_num_threads(1)
    several = args.device != "cpu" and args.experiment != "devices"
    if several:
        torch.accelerator.set_device_index(args.rank)
    args.device = pick_device(f"{args.device}:{args.rank}" if several else args.device)
    backend = "gloo"
    if several:
        backend = f"cpu:gloo,{args.device.type}:{dist.get_default_backend_for_device(args.device.type)}"
    if args.ranks > 1:
        limit = timedelta(seconds=args.limit)
        store = dist.TCPStore("localhost", args.port, args.ranks, is_master=args.rank == 0, timeout=limit)
        dist.init_process_group(backend, store=store, rank=args.rank, world_size=args.ranks, timeout=limit)
    print(json.dumps(EXPERIMENTS[args.experiment](args), default=str), flush=True)
    if args.experiment == "killed":
        os._exit(0)  # the group is broken
    if args.ranks > 1:
        dist.destroy_process_group()


def launched(args: argparse.Namespace) -> list[Row | None]:
    """Start all ranks of a measurement; returns the row of each rank, None if a rank ended without."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    wrapper = ["benchmarks.on_pretend"] if args.device == "pretend" else []
    line = [sys.executable, "-m", *wrapper, "benchmarks.node", *sys.argv[1:], "--port", str(port)]
    of_all = {"LOCAL_WORLD_SIZE": str(args.ranks), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    ranks = [
        subprocess.Popen(
            [*line, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **of_all, "LOCAL_RANK": str(rank)},
        )
        for rank in range(args.ranks)
    ]
    told = [p.communicate()[0].splitlines() for p in ranks]
    return [
        json.loads(lines[-1]) if lines and not p.returncode else None
        for p, lines in zip(ranks, told, strict=True)
    ]


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__, **SMALL_GPT, turns=200, ranks=2, elements=1 << 24, bucket_size=1 << 22)
    p.add_argument("experiment", choices=EXPERIMENTS)
    p.add_argument("--device", default=accelerator_type() or "cpu")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--limit", type=float, default=60.0, help="time-out of the group, in seconds")
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return p


def main() -> None:
    args = parser().parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    if args.experiment == "devices":
        args.ranks = 1
        sys.argv += ["--ranks", "1"]
    expected = " ".join((EXPERIMENTS[args.experiment].__doc__ or "").split())
    rows = launched(args)
    for rank, row in enumerate(rows):
        print(f"rank {rank}: {row}")
    print(expected)
    write(
        args.json,
        f"node-{args.experiment}-{args.ranks}",
        {"arguments": vars(args), "expected": expected, "rows": rows},
    )
    ended = sum(row is None for row in rows)
    if ended != (args.experiment == "killed"):
        raise SystemExit(f"got {ended} of {args.ranks} ranks that ended without a result")


if __name__ == "__main__":
    main()
