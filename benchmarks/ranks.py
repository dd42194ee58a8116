"""A training step on one rank and on several of this machine, and the bytes each lane of a rank moves.

The same job and the same global batch; every rank gets as many threads as in every other world, so a world of 2
has twice the cores. Worlds take turns, in processes of their own. On CPUs over gloo, which emulates a
reduce-scatter by an all-reduce; on accelerators over their own backend, with one rank a device.

    python -m benchmarks.ranks [--worlds 1,2 --stage 2 --num-layers 6 ... --json FILE_OR_FOLDER]

With `--messages` two ranks pass what a pipeline stage hands to the next, two tensors, to and fro instead: as
zfunc's messages, as torch's `send_object_list`, which pickles them, and as bytes alone, the least there is.

    python -m benchmarks.ranks --messages [--rounds 20]
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import zfunc
from benchmarks.machine import SMALL_GPT, describe, gpt, make_parser, ratios, write
from zfunc.engine.program.specialize import specialize
from zfunc.engine.stages.messages import as_message, from_message
from zfunc.runtime.accelerator import accelerator_type
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.stage_ranks import StageRanks

WARMUP = 2
MESSAGES = (1 << 12, 1 << 20, 1 << 24)  # bytes of a tensor


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train on one rank; returns the seconds of its steps and, by its plan, the bytes on each lane."""
    rank, world = args.rank, args.world
    torch.set_num_threads(args.threads)
    backend, kind = "gloo", accelerator_type()
    if kind is not None:
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if world > 1:
        dist.init_process_group(backend, f"file://{args.store}", rank=rank, world_size=world)
    program = zfunc.compile(
        gpt(args),
        precision=args.precision,
        clip_norm=1.0,
        stage=args.stage,
        schedule=args.schedule,
        bucket_size=1 << 20,
    )
    state = zfunc.init(program, seed=1)
    rows = args.batch_size // world
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(256, (args.batch_size, args.seq_length + 1), generator=generator)
    mine = tokens[rank * rows : (rank + 1) * rows]
    seconds: list[float] = []
    losses: list[float] = []
    sent = 0
    for _ in range(WARMUP + args.turns):
        begun = time.perf_counter()
        state, metrics = zfunc.train_step(program, state, (mine[:, :-1], mine[:, 1:]))
        seconds.append(time.perf_counter() - begun)
        losses.append(metrics.loss)
        sent = metrics.sent_bytes
    moved: Counter[str] = Counter()
    for op in specialize(program, (mine[:, :-1], mine[:, 1:])).plan.graph:
        moved[op.kind] += op.nbytes
    if world > 1:
        dist.destroy_process_group()
    return {"seconds": median(seconds[WARMUP:]), "losses": losses, "sent": sent, "moved": dict(moved)}


def pass_messages(args: argparse.Namespace) -> dict[str, Any]:
    """One of two ranks: by size of a tensor and by kind of message the bytes of a message of two such tensors,
    and the seconds of each time that it was passed to the other rank and back."""
    dist.init_process_group("gloo", f"file://{args.store}", rank=args.rank, world_size=2)
    # Each direction has its tags: gloo may lose a message where a tag is on its way both ways.
    stage, peer, found = StageRanks.of_stage(RankGroup.of(), 2), 1 - args.rank, dict[str, Any]()

    def of(nbytes: int) -> dict[str, tuple[int, Callable[[Any], None], Callable[[], Any]]]:
        """By kind of message its bytes, and how a pytree of two tensors of `nbytes` is sent and received."""
        room = 2 * nbytes
        head, _ = as_message([torch.empty(nbytes // 4)] * 2, room)

        def receive_bytes() -> list[torch.Tensor]:
            dist.recv(flat := torch.empty(room, dtype=torch.uint8), peer, tag=1 + peer)
            return [*flat.view(torch.float32).chunk(2)]

        def receive_pickled() -> list[torch.Tensor]:
            dist.recv_object_list(into := [None], peer)
            return into[0]  # pyright: ignore[reportReturnType]

        return {
            "bytes": (
                room,
                lambda tree: dist.send(torch.cat(tree).view(torch.uint8), peer, tag=1 + args.rank),
                receive_bytes,
            ),
            "pickled": (
                len(pickle.dumps([torch.empty(nbytes // 4) for _ in range(2)])),
                lambda tree: dist.send_object_list([tree], peer),
                receive_pickled,
            ),
            "zfunc": (
                room + len(head),
                lambda tree: stage.send(peer, 3 + args.rank, *as_message(tree, room)),
                lambda: from_message(*stage.receive(peer, 3 + peer, room)),
            ),
        }

    for nbytes in MESSAGES:
        tree = [torch.arange(nbytes // 4, dtype=torch.float32) + x for x in range(2)]
        ways = of(nbytes)
        seconds: dict[str, list[float]] = {kind: [] for kind in ways}
        for _ in range(WARMUP + args.rounds):
            for kind, (_, send, receive) in ways.items():
                begun = time.perf_counter()
                if args.rank:
                    send(receive())
                else:
                    send(tree)
                    back = receive()
                    assert all(map(torch.equal, back, tree))
                seconds[kind].append(time.perf_counter() - begun)
        found[f"{nbytes:,}"] = {
            kind: {"sent": ways[kind][0], "seconds": x[WARMUP:]} for kind, x in seconds.items()
        }
    dist.barrier()
    dist.destroy_process_group()
    return found


def launch(world: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run this benchmark on `world` ranks at once; returns what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        of_all = ("rank", "world", "store", "json", "worlds", "messages")
        settings = {k: v for k, v in vars(args).items() if k not in of_all}
        given = [word for k, v in settings.items() for word in (f"--{k.replace('_', '-')}", str(v))]
        given += ["--messages"] * args.messages
        command = [sys.executable, "-m", "benchmarks.ranks", *given, "--world", str(world)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(r), "--store", f"{folder}/store"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "LOCAL_WORLD_SIZE": str(world), "LOCAL_RANK": str(r)},
            )
            for r in range(world)
        ]
        told = [p.communicate(timeout=600)[0] for p in ranks]
        if any(p.returncode for p in ranks):
            raise SystemExit(f"a rank of {world} failed with {[p.returncode for p in ranks]}")
        return json.loads(told[0].splitlines()[-1])


def compare_messages(args: argparse.Namespace) -> None:
    """Print the bytes of each kind of message, and its round trip over that of a message of plain bytes."""
    found = launch(2, args)
    print(f"{describe()}: a message of two tensors, there and back over gloo")
    print(f"{'a tensor':>10} {'message':>8} {'sent':>10} {'seconds':>8}  (of bytes alone)")
    rows = []
    for nbytes, kinds in found.items():
        for kind, told in kinds.items():
            ratio = ratios(told["seconds"], kinds["bytes"]["seconds"])
            print(f"{nbytes:>10} {kind:>8} {told['sent']:>10,} {ratio:>8.2f}")
            rows.append({"tensor": nbytes, "message": kind, "sent": told["sent"], "of_bytes": ratio})
    write(args.json, "messages", {"rounds": args.rounds, "rows": rows})


def main() -> None:
    p = make_parser(__doc__, **SMALL_GPT)
    p.add_argument("--worlds", default="1,2")
    p.add_argument("--rounds", type=int, default=3, help="how often the worlds take turns")
    p.add_argument("--turns", type=int, default=8, help="steps of a round, without the first two")
    p.add_argument("--threads", type=int, default=1, help="of every rank")
    p.add_argument("--stage", type=int, choices=(1, 2), default=2)
    p.add_argument("--schedule", default="Interleaved")
    p.add_argument("--precision", default="fp32")
    p.add_argument("--messages", action="store_true", help="of pipeline stages, instead of steps")
    for name in ("--world", "--rank"):
        p.add_argument(name, type=int, help=argparse.SUPPRESS)
    p.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.rank is not None:
        print(json.dumps((pass_messages if args.messages else run)(args)))
        return
    if args.messages:
        compare_messages(args)
        return
    worlds = [int(x) for x in args.worlds.split(",")]
    told: dict[int, list[dict[str, Any]]] = {world: [] for world in worlds}
    for _ in range(args.rounds):
        for world in worlds:
            told[world].append(launch(world, args))
    first = worlds[0]
    print(
        f"{describe()}: {args.num_layers} x {args.hidden_size}, batch {args.batch_size}, stage {args.stage}"
    )
    kinds = ("compute", "d2h", "host", "h2d", "network")
    print(
        f"{'world':>5} {'step':>6}  MB a rank moves on its lanes: "
        + " ".join(f"{k:>8}" for k in kinds)
        + "     sent"
    )
    rows = []
    for world, rounds in told.items():
        of_first = median(a["seconds"] / b["seconds"] for a, b in zip(rounds, told[first], strict=True))
        apart = max(abs(a - b) for a, b in zip(rounds[0]["losses"], told[first][0]["losses"], strict=True))
        moved, sent = rounds[0]["moved"], rounds[0]["sent"]
        columns = " ".join(f"{moved.get(k, 0) / 1e6:8.1f}" for k in kinds)
        print(f"{world:>5} {of_first:>6.2f}  {'':>31}{columns} {sent / 1e6:8.1f}")
        rows.append(
            {"world": world, "of_the_first": of_first, "moved": moved, "sent": sent, "losses_apart": apart}
        )
    told_with = {k: v for k, v in vars(args).items() if k not in ("rank", "world", "store")}
    write(args.json, f"ranks-stage{args.stage}", {"arguments": told_with, "rows": rows})


if __name__ == "__main__":
    main()
