"""Checkpoints of several ranks: resumed to the bit, read by any other world, and refused by all or by none."""

import os
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from forked import global_batch
from small_models import flats, rows_of
from threaded_ranks import on_every, programs_of
from torch import Tensor

import zfunc
from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State
from zfunc.errors import CheckpointError

WORLDS = (1, 2, 4)
SAVED_AT, STEPS = 3, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "clipped, accumulated": {"model": "pairs", "precision": "fp32", "clip_norm": 0.5, "micro_batches": 3},
    "stage 1, 8 bits": {"model": "odd sizes", "precision": "bf16", "moments": "8bit", "stage": 1},
    "frozen": {"model": "odd sizes", "precision": "fp32", "schedule": "Interleaved"},
}


def rows(name: str, i: int, rank: int, world: int) -> Any:
    return rows_of(global_batch(trained.MODELS[SETTINGS[name]["model"]]()[1], i), rank, world)


def programs(name: str, world: int, **more: Any) -> list[Program]:
    settings = {"lr": 1e-3, "bucket_size": 20_000, **SETTINGS[name], **more}
    return programs_of(world, lambda: trained.compiled(**settings)[0], rows(name, 0, 0, world))


def go_on(
    name: str, program: Program, state: State, start: int, stop: int, **more: Any
) -> tuple[State, list[Any]]:
    seen = []
    for i in range(start, stop):
        own = rows(name, i, program.ranks.rank, program.ranks.world)
        state, m = zfunc.train_step(program, state, own, **(more if i == start else {}))
        seen.append((m.loss, m.grad_norm))
    return state, seen


def trained_and_resumed(name: str, world: int, folder: Path) -> dict[str, Tensor]:
    """The weights that were saved on the way, from where a training goes on to the bit on as many ranks."""

    def through(program: Program) -> tuple[dict[str, Tensor], list[Any], dict[str, Tensor]]:
        state, _ = go_on(name, program, zfunc.init(program, seed=1), 0, SAVED_AT)
        weights = zfunc.params(program, state)
        state, seen = go_on(name, program, state, SAVED_AT, STEPS, save=folder)
        return weights, seen, flats(state, "params", "state")

    def resumed(program: Program) -> tuple[list[Any], dict[str, Tensor]]:
        state, seen = go_on(name, program, zfunc.load(folder, program), SAVED_AT, STEPS)
        return seen, flats(state, "params", "state")

    whole = on_every(programs(name, world), through)
    for (_, expected, bits), (seen, got) in zip(whole, on_every(programs(name, world), resumed), strict=True):
        assert repr(seen) == repr(expected)
        assert all(torch.equal(x, bits[k]) for k, x in got.items())
    return whole[0][0]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x == "frozen" else ()) for x in SETTINGS]
)
def test_any_world_goes_on_exactly_and_reads_what_any_other_wrote(name: str, tmp_path: Path) -> None:
    """The weights to the bit; the next step to the rounding of sums in another order; no padding."""

    def read(program: Program, folder: Path) -> tuple[dict[str, Tensor], float]:
        state = zfunc.load(folder, program)
        weights = zfunc.params(program, state)
        return weights, go_on(name, program, state, SAVED_AT, SAVED_AT + 1)[1][0][0]

    readers, sizes = {world: programs(name, world, bucket_size=900, stage=2) for world in WORLDS}, set[int]()
    for writer in WORLDS:
        folder = tmp_path / str(writer)
        weights = trained_and_resumed(name, writer, folder)
        by = {world: on_every(reader, partial(read, folder=folder))[0] for world, reader in readers.items()}
        for got, loss in by.values():
            assert got.keys() == weights.keys()
            assert all(torch.equal(got[k], x) for k, x in weights.items())
            assert loss == pytest.approx(by[1][1], rel=2e-5 if "8 bits" not in name else 2e-3)
        checkpoint = checkpoints.find_checkpoint(folder)
        assert checkpoint is not None
        assert checkpoint.path.name == f"step-{SAVED_AT:08d}"
        assert len(list(checkpoint.path.glob("*.safetensors"))) == writer
        sizes.add(sum(t.nbytes for shard in checkpoint.manifest.shards for t in shard.tensors))
    assert len(sizes) == 1


def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the step and in it; the next one saves."""
    full, write_all = [0], disk.write_all

    def write(fd: int, *rest: Any) -> None:
        if "rank-00001" in os.readlink(f"/proc/self/fd/{fd}") and next(calls) == full[0]:
            raise OSError(28, os.strerror(28))
        write_all(fd, *rest)

    def save(program: Program, state: State) -> tuple[State, str]:
        own = rows("frozen", 0, program.ranks.rank, program.ranks.world)
        try:
            state, m = zfunc.train_step(program, state, own, save=tmp_path)
            return state, m.saved.failure if m.saved else "none"
        except CheckpointError as error:
            return state, str(error)

    monkeypatch.setattr(disk, "write_all", write)
    world = programs("frozen", 4)
    states, said = on_every(world, partial(zfunc.init, seed=1)), list[str]()
    for full[0] in (1, 2, 0):
        calls = count(1)
        states, messages = zip(*on_every(world, save, states), strict=True)
        assert len(set(messages)) == 1
        said.append(messages[0])
    for text in said[:2]:
        assert text.startswith("rank 1: ")
        assert "rank-00001-of-00004.safetensors: got 'No space left on device'" in text
    assert said[2] == ""
    assert sorted(x.name for x in tmp_path.iterdir()) == ["latest", "step-00000001"]
