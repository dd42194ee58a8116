"""Digests of many short trainings: losses, weights and moments of today, that a change of the code has to keep.

    python tests/digests.py              # compare with the file, all of it
    python tests/digests.py --write 200  # draw as many trainings, train them, write the file

A training is a model of `small_models` with settings, an optimizer and a number of ranks, as data. Its digest is of
the reprs of its losses and norms, and of the checkpoint that a single rank with its state on the host makes of it:
so where the state was, and how it was cut, is no part of it.

The invariant: products are summed in one order everywhere. torch and its libraries are held to the instructions
that every x86-64 has, in a process of its own; the file names the version of torch that wrote it.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file  # pyright: ignore
from small_models import MODELS, rows_of
from threaded_ranks import on_every, programs_of
from torch import Tensor

import zfunc
from zfunc.engine.program.program import Program
from zfunc.optim.loss_scale import LossScale


def _matrices(_name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


# Read when torch is imported: the same kernels on every machine.
ONE_KERNEL = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
FILE = Path(__file__).parent / "goldens" / "digests.json"
STEPS = 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "AdamW": lambda: zfunc.AdamW(1e-2, weight_decay=0.1, decay=zfunc.matrices_only),
    "AdamW, split": lambda: zfunc.AdamW(1e-2, split_master=True),
    "AdamW, 16 bits": lambda: zfunc.AdamW(1e-2, moments="16bit", weight_decay=0.1),
    "AdamW, 8 bits": lambda: zfunc.AdamW(1e-2, moments="8bit", decay=zfunc.matrices_only),
    "Adam": lambda: zfunc.AdamW(1e-2, decoupled=False, weight_decay=0.1),
    "SGD": lambda: zfunc.SGD(1e-2, weight_decay=0.1),
    "SGD, Nesterov": lambda: zfunc.SGD(1e-2, momentum=0.9, nesterov=True),
    "SGD, 16 bits": lambda: zfunc.SGD(1e-2, momentum=0.9, moments="16bit"),
    "Lion": lambda: zfunc.Lion(1e-3, weight_decay=0.1),
    "Lion, 8 bits": lambda: zfunc.Lion(1e-3, moments="8bit"),
    "Adagrad": lambda: zfunc.Adagrad(1e-2, weight_decay=0.1),
    "Adagrad, 16 bits": lambda: zfunc.Adagrad(1e-2, moments="16bit"),
    "Adafactor": lambda: zfunc.Adafactor(1e-2, weight_decay=0.1),
    "Muon and AdamW": lambda: zfunc.groups((_matrices, zfunc.Muon(1e-2)), zfunc.AdamW(1e-2)),
}
SETTINGS: dict[str, list[Any]] = {
    "precision": ["fp32", "bf16", "fp16"],
    "recompute": ["all", "none", "min-cut"],
    "micro_batches": [1, 2, 3],
    "clip_norm": [None, 0.1],
    "bucket_size": [3000, 70, 700],
    "stage": [2, 1, 3],
    "params_on": ["device", "host", "disk"],
    "activations_on": ["device", "host", "disk"],
    "state_on": ["host", "disk", "device:0.5,host", "device"],
    "grads_on": ["host", "disk"],
    "order": ["by-device", "vertical", 2],
    "ema": [None, 0.9],
    "norms": [False, True],
    "defer": [False, True],
    "schedule": ["Serial", "Overlapped", "SharedCores", "Interleaved"],
}
WORLDS = [1, 1, 2]


def drawn(random: Random) -> dict[str, Any]:
    """A training, of which every second setting is its first, so that few are refused."""
    settings = {name: random.choice([values[0], random.choice(values)]) for name, values in SETTINGS.items()}
    names = {"model": random.choice([*MODELS]), "optimizer": random.choice([*OPTIMIZERS])}
    return {**names, "world": random.choice(WORLDS), "settings": settings}


def digest_of(training: Mapping[str, Any]) -> str:
    """Train it, and say what came of it. Raises ValueError where its settings exclude each other."""
    with TemporaryDirectory() as folder:
        return _digest_in(Path(folder), **training)


def _digest_in(folder: Path, model: str, optimizer: str, world: int, settings: Mapping[str, Any]) -> str:
    given = dict(settings)
    if "disk" in given.values():
        given["swap"] = str(folder / "swap")
        (folder / "swap").mkdir()
    segments, batch = MODELS[model]()

    def make(**settings: Any) -> Program:
        return zfunc.compile(segments, optimizer=OPTIMIZERS[optimizer](), device="cpu", **settings)

    def train(program: Program, rank: int) -> list[tuple[str, str, bool]]:
        scale = LossScale(2.0**7) if given["precision"] == "fp16" else None
        state = zfunc.init(program, seed=0, loss_scale=scale)
        seen: list[tuple[str, str, bool]] = []
        for i in range(STEPS):
            state, m = zfunc.train_step(program, state, rows_of(batch(i), rank, world))
            seen.append((repr(m.loss), repr(m.grad_norm), m.skipped))
        state = zfunc.flush(program, state)
        if given["state_on"] != "disk":
            zfunc.save(folder / "saved", program, state)
        return seen

    programs = programs_of(world, lambda: make(**given), rows_of(batch(0), 0, world))
    seen = on_every(programs, train, range(world))
    del programs
    gc.collect()  # and with the last State, what it has of the swap space
    saved = folder / ("saved" if given["state_on"] != "disk" else "swap")
    one = make(**{name: given[name] for name in ("precision", "ema", "micro_batches", "clip_norm")})
    zfunc.save(folder / "one", one, zfunc.load(saved, one))
    digest = hashlib.blake2b(repr(seen).encode(), digest_size=12)
    for name, kind, content in _tensors(folder / "one"):
        digest.update(f"{name} {kind}".encode())
        digest.update(content)
    return digest.hexdigest()


def _tensors(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, dtype and bytes of everything that is trained or averaged in a checkpoint of one rank."""
    (path,) = folder.glob("*/*.safetensors")
    tensors: dict[str, Tensor] = load_file(path)  # pyright: ignore
    for name in sorted(x for x in tensors if not x.endswith("/frozen")):
        t = tensors[name]
        yield name, str(t.dtype), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(count: int) -> None:
    """Draw `count` trainings that are not refused, and write them with their digests."""
    random, rows = Random(0), list[dict[str, Any]]()
    while len(rows) < count:
        training = drawn(random)
        try:
            rows.append({**training, "digest": digest_of(training)})
        except ValueError as error:
            print("refused:", str(error).splitlines()[0], file=sys.stderr)
            continue
        print(len(rows), rows[-1], file=sys.stderr, flush=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    FILE.write_text(f'{{"torch": {json.dumps(torch.__version__)}, "trainings": [\n{lines}\n]}}\n')


def compare(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each training whose digest is not that of the file."""
    different: list[str] = []
    for n, row in enumerate(rows):
        training = {name: value for name, value in row.items() if name != "digest"}
        if (found := digest_of(training)) != row["digest"]:
            different.append(f"{n}: {training}: got {found}, expected {row['digest']}")
            print(different[-1], flush=True)
    return different


def main() -> int:
    if os.environ.items() & ONE_KERNEL.items() != {*ONE_KERNEL.items()}:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_KERNEL})
    parser = argparse.ArgumentParser(description="Compare trainings with the digests of before.")
    parser.add_argument("--write", type=int, metavar="N", help="draw N trainings and write the file")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compare every Nth only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.write:
        write(args.write)
        return 0
    stored = json.loads(FILE.read_text())
    if stored["torch"] != torch.__version__:
        print(f"written with torch {stored['torch']}, this is {torch.__version__}: not comparable")
        return 0
    rows = stored["trainings"][:: args.every]
    different = compare(rows)
    print(f"{len(rows) - len(different)} of {len(rows)} trainings as in {FILE.name}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
