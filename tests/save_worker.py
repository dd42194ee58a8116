"""What each rank of tests/engine/test_saving_ranks.py runs: `python save_worker.py FOLDER [night]`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bad_disks import full_once
from forked import NIGHT, play
from rank_worker import WORLDS, Batch, compiled, each_world, global_batch, groups_of, rows_of
from small_models import flats

import zfunc
from zfunc.checkpoint import durable_files as disk
from zfunc.engine.compile.program import Program
from zfunc.engine.state.state import State
from zfunc.errors import CheckpointError

SETTINGS: dict[str, dict[str, Any]] = {
    "clipped, accumulated": {"model": "pairs", "precision": "fp32", "clip_norm": 0.5, "micro_batches": 3},
    "stage 1, 8 bits": {"model": "odd sizes", "precision": "bf16", "moments": "8bit", "stage": 1},
    "frozen": {"model": "odd sizes", "precision": "fp32", "schedule": "Interleaved"},
}
SAVED_AT, STEPS = 3, 6
BY_NIGHT = "frozen"  # the others have its model and its precision


def go_on(
    program: Program, state: State, data: Any, start: int, stop: int, **more: Any
) -> tuple[State, list[Any]]:
    seen = []
    for i in range(start, stop):
        rows = rows_of(global_batch(data, i), program.ranks.rank, program.ranks.world)
        state, m = zfunc.train_step(program, state, rows, **(more if i == start else {}))
        seen.append((m.loss, m.grad_norm))
    return state, seen


def bits(state: State) -> dict[str, torch.Tensor]:
    return flats(state, "params", "state")


def resume(group: Any, world: int, name: str, out: Path) -> None:
    """Trained through, with a checkpoint on the way; and gone on from that."""
    folder = out / f"{name}-{world}"
    program, data = compiled(group=group, **SETTINGS[name])
    state, _ = go_on(program, zfunc.init(program, seed=1), data, 0, SAVED_AT)
    weights = zfunc.params(program, state)
    state, expected = go_on(program, state, data, SAVED_AT, STEPS, save=folder)
    again, _ = compiled(group=group, **SETTINGS[name])
    resumed, seen = go_on(again, zfunc.load(folder, again), data, SAVED_AT, STEPS)
    same = repr(seen) == repr(expected)
    same &= all(torch.equal(x, bits(state)[k]) for k, x in bits(resumed).items())
    if program.ranks.rank == 0:
        torch.save(weights, out / f"weights-{name}-{world}.pt")
    (out / f"resumed-{name}-{world}-{program.ranks.rank}.json").write_text(json.dumps(same))


def reshard(group: Any, world: int, name: str, out: Path) -> None:
    """Load what every other world saved, and train on."""
    program, data = compiled(group=group, **{**SETTINGS[name], "bucket_size": 900, "stage": 2})
    for other in WORLDS:
        state = zfunc.load(out / f"{name}-{other}", program)
        weights = zfunc.params(program, state)
        _, seen = go_on(program, state, data, SAVED_AT, SAVED_AT + 1)
        if program.ranks.rank == 0:
            torch.save({"weights": weights, "seen": seen}, out / f"{name}-{other}-read-by-{world}.pt")


def fail(out: Path, rank: int) -> None:
    """A disk that is full on rank 1 alone, before the step and in it; then one that is not."""
    program, data = compiled(group=None, **SETTINGS["frozen"])
    state = zfunc.init(program, seed=1)
    messages: list[str] = []
    write_all = disk.write_all
    for at in (1, 2):
        if rank == 1:
            disk.write_all = full_once(write_all, at)
        rows = rows_of(global_batch(data, at), rank, program.ranks.world)
        try:
            state, m = zfunc.train_step(program, state, rows, save=out / "failing")
            messages.append(m.saved.failure if m.saved else "")
        except CheckpointError as error:
            messages.append(str(error))
    disk.write_all = write_all
    state, m = zfunc.train_step(program, state, rows_of(global_batch(data, 3), rank, 4), save=out / "failing")
    left = sorted(x.name for x in (out / "failing").iterdir())
    (out / f"failing-{rank}.json").write_text(
        json.dumps([*messages, m.saved.failure if m.saved else "", left])
    )


def traced() -> Iterator[tuple[Program, Batch]]:
    """What the ranks train, with the shapes it has there."""
    for settings in SETTINGS.values():
        yield from each_world(*compiled(group=None, **settings))


def main(rank: int, world: int, out: Path) -> None:
    groups = groups_of(rank, world, out)
    for name in SETTINGS if NIGHT in sys.argv else [x for x in SETTINGS if x != BY_NIGHT]:
        for act in (resume, reshard):
            for size, group in groups.items():
                if rank < size:
                    act(group, size, name, out)
            dist.barrier()
    fail(out, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    play(main, traced=traced())
