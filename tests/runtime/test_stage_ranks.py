"""The ranks of pipeline stages: the rows that they are given, and the messages between them."""

import math
import pickle
import re
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from threaded_ranks import on_every, programs_of
from torch.utils._pytree import tree_flatten
from torch.utils.data import DistributedSampler
from trained import compiled

import zfunc
from zfunc.engine.program.program import Program
from zfunc.engine.stages.messages import as_message, from_message
from zfunc.engine.stages.move_stages import _arrived
from zfunc.engine.state.state import State
from zfunc.errors import RankError
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.stage_ranks import FIRST, NEVER, SIZES, StageRanks, _Message

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


# --- messages --------------------------------------------------------------------------------------------

BASE = torch.arange(12.0).view(3, 4)
TREE = {
    "views": (BASE, BASE.T, BASE[1:, ::2], torch.ones(1).expand(3, 2)),
    "types": [
        torch.tensor(2**40),
        torch.tensor([True]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(0, 2),
    ],
    "others": [None, True, -3, 0.1, math.inf, "text \ud800", {1: ()}],
}


def test_a_message_brings_the_tree_with_its_values_strides_and_shared_memory() -> None:
    arrived = from_message(*as_message(TREE, 4096))
    leaves, structure = tree_flatten(TREE)
    others, same = tree_flatten(arrived)
    assert structure == same
    for one, other in zip(leaves, others, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(one, other)
        else:
            assert one == other
    arrived["views"][0].zero_()
    assert not arrived["views"][2].any()
    with pytest.raises(
        TypeError, match="got Pair between two pipeline stages, expected tensors, numbers, text"
    ):
        as_message(NamedTuple("Pair", [("x", int)])(1), 0)


def test_what_arrives_is_in_memory_of_its_own() -> None:
    """A mask that later segments pass on would keep a whole message, which no plan counts."""
    mask, large = torch.ones(8, dtype=torch.bool), torch.ones(1 << 16)
    message = from_message(*as_message({"x": large, "mask": mask}, large.nbytes + 512))
    arrived = _arrived(message, torch.device("cpu"))
    assert torch.equal(arrived["mask"], mask)
    assert arrived["mask"].untyped_storage().nbytes() <= 512


HEADS = """[]
{"tensor": 1}
["tensor", "torch.float32", 0, [8], [1]]
["tensor", "torch.float32", -1, [1], [1]]
["tensor", "torch.float32", 0, [1], [-1]]
["tensor", "torch.float32", 0, [4611686018427387904, 4], [1, 1]]
["tensor", "torch.float32", 0, [1e3], [1]]
["tensor", "torch.float32", 99999999999999999999, [1], [1]]
["tensor", "torch.load", 0, [1], [1]]
["tensor", "torch.float32"]
["host", "torch.int64", "x"]
["dict", [[], 1]]
["set", 1]
["tuple", nonsense]
cos\nsystem\n(S'true'\ntR."""


@pytest.mark.parametrize("head", [*HEADS.splitlines(), "[" * 100_000, pickle.dumps(BASE)])
def test_what_is_no_tree_of_tensors_in_the_bytes_that_have_come_is_refused(head: Any) -> None:
    data = head if isinstance(head, bytes) else head.encode()
    with pytest.raises(
        RankError, match="expected tensors, numbers, text and None, in lists, tuples and dicts"
    ):
        from_message(data, torch.zeros(16, dtype=torch.uint8))


@pytest.mark.parametrize("sizes", [(64, 1 << 33), (1 << 33, 512), (-1, 512), (64, 511)])
def test_no_memory_is_taken_for_a_size_that_the_plan_does_not_have(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    job = RankGroup(world=2, members=(0, 1), store=dist.HashStore())
    stage = StageRanks(world=1, members=(0,), store=job.store, stage=0, whole=job)
    came = list[int]()

    def issue(_: Any, what: str, __: Any, parts: Sequence[torch.Tensor], *___: Any) -> Any:
        came.extend(part.numel() for part in parts)
        SIZES.pack_into(parts[0].numpy(), 0, *sizes)
        return SimpleNamespace(what=what, wait=lambda _: None)

    monkeypatch.setattr(StageRanks, "_point_to_point", issue)
    with pytest.raises(
        RankError, match=r"got a message of [\d,]+ bytes with [-\d,]+ of text, expected 512 with"
    ):
        stage.receive(1, 0, 512)
    assert came == [FIRST]
    assert job.detector.failed()


def test_what_was_sent_is_kept_until_it_has_arrived_and_no_longer() -> None:
    arrived, part = threading.Event(), torch.ones(3)
    kept = weakref.ref(part)
    work = SimpleNamespace(wait=lambda _: arrived.wait())
    message = _Message([work], [part], "send to rank 1", NEVER, threading.Event())
    del part
    assert kept() is not None
    arrived.set()
    message.wait()
    until = time.monotonic() + 10
    while kept() is not None and time.monotonic() < until:
        time.sleep(0.001)  # its thread is about to be idle
    assert kept() is None
