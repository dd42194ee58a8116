"""What each rank of tests/runtime/test_ranks.py runs: `python rank_worker.py FOLDER [night]`."""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trained
from forked import NIGHT, play
from gradient_law import RECIPES as GRADIENTS
from gradient_law import check, program_of
from small_models import MODELS, Batch, rows_of
from torch import Tensor
from zfunc.schedules import make_schedule

import zfunc
from zfunc.engine.compile.program import Program, rescheduled
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.executor import Jitter

STEPS = {"fp32": 12}  # of the first setting; FEWER of the others
FEWER = 6
TIED = {"model": "pairs", "precision": "fp32", "bucket_size": 40}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"model": "odd sizes", "precision": "fp32", "bucket_size": 3000},
    "clipped, accumulated": {**TIED, "clip_norm": 0.5, "micro_batches": 3},
    "stage 1, accumulated": {**TIED, "stage": 1, "micro_batches": 3, "schedule": "Interleaved"},
    "stage 3 on the host": {
        **{**TIED, "clip_norm": 0.5, "micro_batches": 3, "stage": 3, "params_on": "host"},
        **{"activations_on": "host", "defer": True, "ema": 0.9},
    },
    "several optimizers in 16 bits": {
        **{"model": "tied GPT", "precision": "fp32", "stage": 1, "clip_norm": 0.5, "ema": 0.9},
        "optimizer": zfunc.groups(
            ("*.bias", zfunc.SGD(0.1, momentum=0.9, moments="16bit")),
            ("*.ln_*", zfunc.Adagrad(1e-2, moments="16bit")),
            ("block0.*", zfunc.Lion(1e-4, weight_decay=1.0, moments="16bit")),
            ("block1.*", zfunc.Adafactor(1e-2, moments="16bit")),
            zfunc.AdamW(1e-3, weight_decay=0.1, moments="16bit"),
        ),
    },
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partial, deferred": {"offload_ratio": 0.5, "defer": True},
    "stage 3": {"stage": 3},
}
GRADIENT_ROWS = [*product(GRADIENTS, ("fp32",)), *product(("clipped", "stage 1"), ("bf16", "fp16"))]
SCHEDULES = {  # by world; of one rank tests/engine/test_laws.py says that every schedule has the serial bits
    1: ("Overlapped",),
    2: ("Serial", "Overlapped"),
    4: ("Serial", "Overlapped", "Interleaved"),
}
WORLDS = tuple(SCHEDULES)
# The recipes that the largest world runs by day: what they do there is unlike what they do on two ranks.
BY_DAY = ("partial, deferred", "stage 3")
DISAGREE = {  # the line told
    "buckets": "region",
    "rows": "batch of shapes",
    "weights": "weights of checksum",
    "decay of averages": "ema 0.99",
}
ROWS = 12  # of a global batch: a multiple of every world and micro-batch count


def global_batch(data: Any, i: int) -> Any:
    """Twelve rows, from as many of the model's own batches as that takes."""
    parts = [data(i * 100 + k) for k in range(ROWS)]
    flat = [torch.cat([p[k] for p in parts])[:ROWS] for k in range(2)]
    return flat[0], flat[1]


def compiled(model: str, group: Any, **settings: Any) -> tuple[Program, Any]:
    return trained.compiled(model, lr=1e-3, group=group, **{"bucket_size": 20_000, **settings})


def train(
    program: Program, data: Any, *, steps: int, poison: int | None = None, **options: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses, norms, skipped steps, bytes, scales and final parameters of a few steps."""
    state = zfunc.init(program, seed=1, loss_scale=LossScale(scale=2.0**15, window=1000))
    ranks, seen = program.ranks, []
    for i in range(steps):
        inputs, targets = rows_of(global_batch(data, i), ranks.rank, ranks.world)
        if poison == i and ranks.rank == ranks.world - 1 and inputs.is_floating_point():
            inputs = torch.full_like(inputs, 6e4)  # overflows in fp16, on this rank alone
        state, m = zfunc.train_step(program, state, (inputs, targets), **options)
        seen.append((m.loss, m.grad_norm, m.skipped, m.sent_bytes, m.loss_scale))
    final = zfunc.params(program, state)
    if program.spec.ema:
        final |= {f"average of {name}": x for name, x in zfunc.params(program, state, ema=True).items()}
    return seen, final


def compare(group: Any, world: int, out: Path) -> None:
    """Every setting on a world of this size, and what has to be the same to the bit there."""
    rank = dist.get_rank(group)
    for name, settings in SETTINGS.items():
        program, data = compiled(group=group, **settings)
        seen, params = train(program, data, steps=STEPS.get(name, FEWER))
        if rank == 0:
            torch.save({"seen": seen, "params": params}, out / f"{name}-{world}.pt")
            verbs = "reduce_scatter", "gather", "all_gather", "join_measures"
            carries = [op for op in program.plan.graph if op.verb in verbs]
            sizes = {
                "bytes": program.layout.numel * program.dtype.itemsize
                + sum(sum(work.measured) for work in program.spec.update_work),
                "planned": sum(op.nbytes for op in carries),
            }
            (out / f"{name}-{world}.json").write_text(json.dumps(sizes))
    recipes = RECIPES if world < max(WORLDS) or NIGHT in sys.argv else BY_DAY
    for recipe in recipes:
        more = RECIPES[recipe]
        program, data = compiled("odd sizes", group, clip_norm=2.0, bucket_size=600, **more)
        for schedule in SCHEDULES[world]:
            jitter = {} if schedule == "Serial" else {"jitter": Jitter(rank, 1e-3)}
            program = rescheduled(program, make_schedule(schedule))  # what was traced is kept
            seen, params = train(program, data, steps=4, **jitter)
            if rank == 0:
                name = f"bits-{recipe}-{schedule}-{world}"
                torch.save({"seen": seen, "params": params}, out / f"{name}.pt")
                sizes = {"bytes": program.layout.numel * program.dtype.itemsize}
                (out / f"{name}.json").write_text(json.dumps(sizes))
    seen, params = train(*compiled("frozen below", group, precision="fp16"), steps=6, poison=3)
    torch.save({"seen": seen, "params": params}, out / f"overflow-{world}-{rank}.pt")


def gradients(group: Any, out: Path) -> None:
    """What reaches the optimizer on each of these ranks, against autograd's on the batches of all of them."""
    for recipe, precision in GRADIENT_ROWS:
        check(*program_of("pairs", precision, micro_batches=2, group=group, **GRADIENTS[recipe]))
    (out / f"gradients-{dist.get_rank(group)}.json").write_text(json.dumps(GRADIENT_ROWS))


def disagree(what: str, out: Path, rank: int) -> None:
    """Rank 2 does something else than the others: all of them are told, and that it is rank 2."""
    other = rank == 2
    segments, data = MODELS["odd sizes"]()
    bucket_size = 200 if other and what == "buckets" else 3000
    ema = 0.99 if other and what == "decay of averages" else 0.9
    program = zfunc.compile(segments, precision="fp32", device="cpu", bucket_size=bucket_size, ema=ema)
    name = program.layout.spans[-1].name
    changed = {name: torch.ones(program.layout.spans[-1].shape)} if other and what == "weights" else None
    state = zfunc.init(program, seed=1, params=changed)
    inputs, targets = global_batch(data, 0)
    rows = 6 if other and what == "rows" else 3
    try:
        zfunc.train_step(program, state, (inputs[:rows], targets[:rows]))
    except zfunc.errors.RankError as error:
        (out / f"disagree-{what}-{rank}.txt").write_text(str(error))


def each_world(program: Program, data: Any) -> Iterator[tuple[Program, Batch]]:
    """The program with a rank's rows on every world."""
    return ((program, rows_of(global_batch(data, 0), 0, world)) for world in WORLDS)


def traced() -> Iterator[tuple[Program, Batch]]:
    """What the ranks train, with the shapes it has there."""
    others = {"model": "odd sizes"}, {"model": "frozen below", "precision": "fp16"}
    for settings in (*SETTINGS.values(), *others):
        yield from each_world(*compiled(group=None, **settings))
    for recipe, precision in GRADIENT_ROWS:
        program, data = program_of("pairs", precision, micro_batches=2, **GRADIENTS[recipe])
        yield program, rows_of(data(0), 0, 2)


def groups_of(rank: int, world: int, out: Path) -> dict[int, Any]:
    """In one of those processes: a group of the first ranks for each size in WORLDS."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    return {size: dist.new_group(range(size)) for size in WORLDS}


def main(rank: int, world: int, out: Path) -> None:
    groups = groups_of(rank, world, out)
    for size, group in groups.items():
        if rank < size:
            compare(group, size, out)
        if size == 2 and rank < size:
            gradients(group, out)
    dist.barrier()
    for what in DISAGREE:
        disagree(what, out, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    play(main, traced=traced())
