"""The ranks of pipeline stages: the rows that they are given, and the messages between them."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from threaded_ranks import on_every, programs_of
from torch.utils.data import DistributedSampler
from trained import compiled

import zfunc
from zfunc.engine.compile.program import Program
from zfunc.engine.state.state import State
from zfunc.errors import RankError

# --- rows ------------------------------------------------------------------------------------------------

ROWS, BATCH = 8, 2
RIGHT = re.compile(r"DistributedSampler\(data, num_replicas=(\d+), rank=(\d+)\)")


def first_rows(replicas: int, rank: int) -> Any:
    """The first batch of a rank, as a loader with torch's own sampler has it."""
    sampler: Any = DistributedSampler(range(ROWS), replicas, rank)  # type: ignore[arg-type]
    x, y = (torch.cat([t] * ROWS)[:ROWS] for t in compiled("odd sizes")[1](0))
    picked = [*sampler][:BATCH]
    return x[picked] + torch.tensor(picked).view(-1, 1), y[picked]


def refusal(program: Program, state: State, batch: Any) -> str:
    """The error of a step."""
    with pytest.raises(RankError) as error:
        zfunc.train_step(program, state, batch)
    return str(error.value)


@pytest.mark.parametrize("world", [1, 2])
def test_stages_that_get_other_rows_are_told_the_sampler_that_is_right(world: int) -> None:
    ranks = range(2 * world)
    wrong = [first_rows(2 * world, n) for n in ranks]  # what every loop under torchrun has
    right = [first_rows(world, n % world) for n in ranks]
    programs = programs_of(world, lambda: compiled("odd sizes", precision="fp32", pp=2)[0], wrong[0], 2)
    states = on_every(programs, partial(zfunc.init, seed=1))
    for n, text in enumerate(on_every(programs, refusal, states, wrong)):
        assert f"got other rows on rank {world} than on rank 0, expected the same" in text
        said = RIGHT.search(text)
        assert said
        assert all(map(torch.equal, first_rows(*map(int, said.groups())), right[n]))
    states = [x[0] for x in on_every(programs, zfunc.train_step, states, right)]  # nothing was lost
    later = [evolve(state, batches=100) for state in states]
    assert all("got other rows" in text for text in on_every(programs, refusal, later, wrong))
