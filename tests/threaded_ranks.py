"""Ranks that are threads of one process: collectives without sockets, for laws that need more than one rank."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar
from unittest import mock

import torch
from attrs import define, field
from torch import Tensor

from zfunc.engine import compile as compiling
from zfunc.engine.program.program import Program
from zfunc.engine.program.specialize import specialize
from zfunc.runtime import stage_ranks
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.stage_ranks import StageRanks

T = TypeVar("T")
PATIENCE = 60.0  # seconds for the other ranks to come


@define(eq=False)
class ThreadedRanks(RankGroup):
    """One of `world` ranks that meet at a barrier. Sums are in the order of the ranks, the same on each."""

    barrier: Any = field(kw_only=True)
    table: list[Any] = field(kw_only=True)
    messages: dict[Any, Any] = field(factory=dict, kw_only=True)  # by sender, receiver and tag

    @classmethod
    def all(cls, world: int) -> list["ThreadedRanks"]:
        """Every rank of a new world."""
        members = tuple(range(world))
        met = {"barrier": threading.Barrier(world, timeout=PATIENCE), "table": [None] * world, "messages": {}}
        return [cls(None, r, world, members=members, **met) for r in members]

    def exchange(self, value: Any) -> list[Any]:
        """What every rank has, by rank."""
        self.table[self.rank] = value
        self.barrier.wait()
        every = list(self.table)
        self.barrier.wait()
        return every

    def leave(self, why: str) -> None:  # noqa: ARG002
        self.barrier.abort()

    def reduce_scatter(self, mine: Tensor, full: Tensor) -> None:
        first, *others = self.exchange(full.clone())
        mine.copy_(sum(others, first).view(self.world, -1)[self.rank])

    def all_gather(self, full: Tensor, mine: Tensor) -> None:
        full.copy_(torch.cat(self.exchange(mine.clone())))

    def all_reduce(self, values: Tensor, *, largest: bool = False) -> None:
        assert not (largest and values.is_floating_point()), "gloo's MAX of floats loses NaN"
        first, *others = every = self.exchange(values.clone())
        values.copy_(torch.stack(every).amax(0) if largest else sum(others, first))

    def sums(self, values: Sequence[float]) -> list[float]:
        return [sum(of_all) for of_all in zip(*self.exchange(list(values)), strict=True)]

    def same(self, number: int) -> bool:
        return len(set(self.exchange(number))) == 1

    def texts(self, text: str) -> list[str]:
        return self.exchange(text)


class ThreadedStage(StageRanks, ThreadedRanks):
    """One of the ranks of a pipeline stage, whose messages are in memory that all have."""

    @classmethod
    def every(cls, jobs: Sequence[ThreadedRanks], pp: int) -> list["ThreadedStage"]:
        """Of each rank of a job the one of its stage."""
        world, found = len(jobs) // pp, list[ThreadedStage]()
        for stage in range(pp):
            barrier, table = threading.Barrier(world, timeout=PATIENCE), [None] * world
            members = tuple(range(stage * world, (stage + 1) * world))
            found += [
                cls(None, r, world, members=members, barrier=barrier, table=table, stage=stage, whole=jobs[n])
                for r, n in enumerate(members)
            ]
        return found

    def _queue(self, sender: int, receiver: int, tag: int) -> Any:
        return self.job.messages.setdefault((sender, receiver, tag), SimpleQueue())  # pyright: ignore

    def send(self, stage: int, tag: int, head: bytes, flat: Tensor) -> None:
        self._queue(self.job.rank, stage * self.world + self.rank, tag).put((head, flat))

    def receive(self, stage: int, tag: int, nbytes: int, *, pinned: bool = False) -> tuple[bytes, Tensor]:
        del pinned  # the sender's memory is handed on
        head, flat = self._queue(stage * self.world + self.rank, self.job.rank, tag).get(timeout=PATIENCE)
        assert flat.numel() == nbytes
        return head, flat

    def from_stage(self, stage: int, values: Tensor) -> Tensor:
        return self.job.exchange(values.to("cpu", copy=True))[stage * self.world]  # pyright: ignore


def programs_of(world: int, make: Callable[[], Program], rows: Any = None, pp: int = 1) -> list[Program]:
    """Of every rank of a new world of `pp` stages, traced for the rows of one if given: two threads must not trace
    at a time."""
    programs: list[Program] = []
    jobs = ThreadedRanks.all(world * pp)
    stages = ThreadedStage.every(jobs, pp)
    for ranks in jobs:
        with (
            mock.patch.object(compiling, "_ranks", lambda _, ranks=ranks: ranks),
            mock.patch.object(stage_ranks.StageRanks, "of_stage", lambda job, _: stages[job.rank]),
        ):
            programs.append(make())
    if rows is not None:
        for program in programs:
            specialize(program, rows)
    return programs


def on_every(ranks: Sequence[Any], work: Callable[..., T], *of_each: Sequence[Any]) -> list[T]:
    """What `work` makes on every rank of its program, or what else stands for it, and its own of `of_each`."""
    # One that fails breaks the barrier of the others, whose errors say nothing.
    # A new thread has MKL's dynamic teams until torch sizes its own, and with them other bits of a product.
    with ThreadPoolExecutor(len(ranks), initializer=torch.set_num_threads, initargs=(1,)) as threads:
        done = [threads.submit(work, *given) for given in zip(ranks, *of_each, strict=True)]
    errors = [error for error in (x.exception() for x in done) if error is not None]
    if errors:
        raise next((x for x in errors if "BrokenBarrier" not in str(x) + type(x).__name__), errors[0])
    return [x.result() for x in done]
