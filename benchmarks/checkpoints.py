"""Saving and loading against a plain copy of the same files, and a step that saves against one that does not.

The disk's own speed is that of a plain copy of a checkpoint's files, which the page cache has dropped, into new
ones and fsync: what `cp` and `sync` do. Beside it the two halves: only to write the bytes, from memory into a new
file and fsync, and only to read them, into new memory. All take turns in one run; of each the fastest turn counts,
because on a virtual machine memory that is new to it comes from the host, at a price that hits at random.

    python -m benchmarks.checkpoints [--parameters 64Mi --folder DIR --json FILE_OR_FOLDER --svg FILE]
"""

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import zfunc
from benchmarks.adam import size
from benchmarks.machine import describe, gpt, make_parser, write
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.state import State
from zfunc.runtime.accelerator import accelerator_type
from zfunc.viz.timeline_svg import svg

WIDTH = 2048


class Loss(nn.Module):
    """A last segment with a trivial loss, for a model of which only the size counts."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean of `x`, as the loss; `targets` are not read."""
        return (x.float().mean() - targets.float().mean()).square()


def large(parameters: int, moments: str) -> Program:
    """A program with `parameters` parameters, in linear layers of 4 Mi, and Adam `moments` in that format."""
    with torch.device("meta"):
        layers = [(f"layer{i}", nn.Linear(WIDTH, WIDTH, bias=False)) for i in range(parameters // WIDTH**2)]
    segments = [*(zfunc.segment(n, m) for n, m in layers), zfunc.segment("loss", Loss())]
    optimizer = zfunc.AdamW(moments=moments)  # pyright: ignore[reportArgumentType]
    return zfunc.compile(segments, optimizer=optimizer, precision="bf16", device="cpu", bucket_size=WIDTH**2)


def forget(folder: Path) -> None:
    """Drop the page cache's pages of all files in `folder`, so that the next read comes from the disk."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def only_write(data: list[memoryview], folder: Path) -> None:
    """Write `data` to a new file in `folder` and sync it to the disk."""
    fd = os.open(folder / "written", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for part in data:
        for start in range(0, part.nbytes, 4 << 20):
            os.write(fd, part[start : start + (4 << 20)])
    os.fsync(fd)
    os.close(fd)


def only_read(folder: Path) -> int:
    """Read all files of `folder` into new memory; returns the number of bytes."""
    return sum(len(path.read_bytes()) for path in folder.iterdir())


def copy(source: Path, folder: Path) -> None:
    """Copy the files of `source` to new files in `folder` and sync them to the disk."""
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)
        fd = os.open(folder / path.name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def timed(call: Callable[[], Any], nbytes: int) -> float:
    """Seconds of `call`. Before it, twice the `nbytes` it needs are allocated and freed: on a virtual machine
    the first use of a page is slow."""
    os.sync()
    with mmap.mmap(-1, 2 * nbytes) as pages:
        for start in range(0, 2 * nbytes, mmap.PAGESIZE):
            pages[start] = 1
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def kept(state: State) -> list[torch.Tensor]:
    """The tensors of the State's optimizer state, bucket by bucket."""
    return [x for r, x in state.buffers.memory.items() if r.role == "state"]


def bandwidth(args: argparse.Namespace, moments: str, root: Path) -> dict[str, Any]:
    """Measure the speed of saving and loading a State; returns its ratio to that of a plain copy of the
    files."""
    program = large(args.parameters, moments)
    state = zfunc.init(program)
    data = [memoryview(x.view(torch.uint8).numpy()) for x in kept(state)]  # pyright: ignore
    saved, plain, nbytes = root / "saved", root / "plain", sum(x.nbytes for x in data)
    fastest: dict[str, float] = {}
    for _ in range(args.turns):
        for folder in (saved, plain):
            shutil.rmtree(folder, ignore_errors=True)
        plain.mkdir()
        turn = {"save": timed(lambda: zfunc.save(saved, program, state), nbytes)}
        checkpoint = next(saved.glob("step-*"))
        calls: dict[str, Callable[[], Any]] = {
            "load": lambda: zfunc.load(saved, program),
            "copy": lambda checkpoint=checkpoint: copy(checkpoint, plain),
            "only read": lambda checkpoint=checkpoint: only_read(checkpoint),
            "only write": lambda: only_write(data, plain),
        }
        for name, call in calls.items():
            forget(checkpoint)
            turn[name] = timed(call, nbytes)
        fastest = {name: min(seconds, fastest.get(name, seconds)) for name, seconds in turn.items()}
    for folder in (saved, plain):
        shutil.rmtree(folder)
    speeds = {name: fastest["copy"] / seconds for name, seconds in fastest.items()}
    return {"moments": moments, "bytes": nbytes, "of_a_plain_copys_speed": speeds}


def training(args: argparse.Namespace) -> tuple[Program, State, tuple[torch.Tensor, torch.Tensor]]:
    """A program that trains a GPT, a State and a batch; a step takes as long as steps around a save do."""
    program = zfunc.compile(
        gpt(args), precision="fp32", clip_norm=1.0, device=args.device, bucket_size=1 << 20
    )
    tokens = torch.randint(256, (args.batch_size, args.seq_length + 1))
    return program, zfunc.init(program), (tokens[:, :-1], tokens[:, 1:])


def steps(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measure a step that saves a checkpoint; returns its median seconds over those of the steps around it,
    and the bytes saved; with `--svg` draws such a step."""
    program, state, batch = training(args)
    folder = root / "steps"
    for save in (None, folder):
        state, _ = zfunc.train_step(program, state, batch, save=save)
    found: list[float] = []
    for _ in range(args.turns * 2):
        around: list[float] = []
        seconds = 0.0
        for save in (None, folder, None):
            os.sync()
            state, metrics = zfunc.train_step(program, state, batch, save=save)
            if save is None:
                around.append(metrics.seconds)
            else:
                seconds = metrics.seconds
        found.append(2 * seconds / sum(around))
    saved = sum(x.nbytes for x in kept(state))
    state, metrics = zfunc.train_step(program, state, batch, save=folder, trace=True)
    if args.svg:
        assert metrics.timeline is not None
        model = f"{args.num_layers} x {args.hidden_size} GPT, fp32, clipped"
        title = f"Measured: a step that saves {saved / 1e6:.0f} MB; {model}"
        plan = specialize(program, batch, save=True).plan
        Path(args.svg).write_text(svg(metrics.timeline, plan=plan, title=title))
        print(f"written: {args.svg}")
    return {"of_a_step_that_does_not_save": median(found), "bytes": saved}


def main() -> None:
    p = make_parser(
        __doc__, num_layers=8, hidden_size=384, num_attention_heads=6, seq_length=256, batch_size=8
    )
    p.add_argument("--parameters", type=size, default=64 << 20)
    p.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is measured")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--device", default=accelerator_type() or "cpu")
    p.add_argument("--svg", help="picture of the measured step that saves")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.folder) as root:
        rows = [bandwidth(args, moments, Path(root)) for moments in ("fp32", "8bit")]
        step = steps(args, Path(root))
    print(describe())
    for row in rows:
        speeds = ", ".join(f"{name} {x:.2f}" for name, x in row["of_a_plain_copys_speed"].items())
        print(f"{row['bytes'] / 1e6:8.0f} MB, {row['moments']:5}, over a plain copy's speed: {speeds}")
    print(
        f"a step that saves {step['bytes'] / 1e6:.0f} MB takes {step['of_a_step_that_does_not_save']:.3f} times as "
        "long as one that does not"
    )
    told = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    write(args.json, "checkpoints", {"arguments": told, "rows": rows, "step": step})


if __name__ == "__main__":
    main()
