"""The ranks of one pipeline stage, and what they share with those of the others.

Ranks of a stage follow one another in the job. They are data parallel: slices and sums of gradients are theirs
alone. What is decided, counted or refused is joined over all stages, on the job's ranks, and so failures are found.
What passes from a stage to another is a message with a tag of its own: its sizes and text in a kilobyte, then its
data as they are. A send does not wait for its receive: what it sends is kept until it has arrived.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from struct import Struct
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.core.display import counted
from zfunc.errors import RankError, refuse
from zfunc.runtime.collectives import SETTLE, RankGroup, timed_out
from zfunc.runtime.failure_detection import LONGEST_TIMEOUT, FailureDetector, Symptom

NEVER = timedelta(seconds=LONGEST_TIMEOUT)
FIRST = 1 << 10  # bytes that a message begins with: its sizes, and its text, mostly all of that
MOST_HEAD = 1 << 20  # bytes of text in a message
SIZES = Struct("<qq")  # bytes of the text, and of the data
_broadcast: Any = dist.broadcast
_new_group: Any = dist.new_group  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def ranks_of_stage(ranks: RankGroup, pp: int) -> RankGroup:
    """The ranks of this rank's pipeline stage, of `pp` stages. Raises ValueError unless `pp` divides the ranks."""
    if ranks.world % pp:
        got = f"{pp} stages for {counted(ranks.world, 'rank')}"
        do = "start as many with torchrun, or pass `devices` for a pipeline in one process"
        refuse("pp", got, "a number that divides them", do)
    return ranks if pp == 1 else StageRanks.of_stage(ranks, pp)


class StageRanks(RankGroup):
    """The data-parallel ranks of one pipeline stage; `job` is the group of the ranks of all stages."""

    @classmethod
    def of_stage(cls, job: RankGroup, pp: int) -> "StageRanks":
        """The ranks of this rank's pipeline stage, one of `pp` stages; all ranks of the stage call it together."""
        world = job.world // pp
        stage, rank = divmod(job.rank, world)
        members = job.members[stage * world : (stage + 1) * world]
        group = _group(job.group or dist.group.WORLD, members) if world > 1 else None
        return cls(group, rank, world, members=members, store=job.store, stage=stage, whole=job)

    @property
    def detector(self) -> FailureDetector:  # noqa: D102
        return self.job.detector

    def leave(self, why: str) -> None:  # noqa: D102
        self.job.leave(why)

    def sums(self, values: Sequence[float]) -> list[float]:  # noqa: D102
        return self.job.sums(values)

    def texts(self, text: str) -> list[str]:  # noqa: D102
        return self.job.texts(text)

    def agree(self, *args: Any, **given: Any) -> None:  # noqa: D102
        self.job.agree(*args, **given)

    def same(self, number: int) -> bool:  # noqa: D102
        return self.world == 1 or super().same(number)

    def _give_up(self, what: str, begun: float, symptom: Symptom, error: Exception | None = None) -> NoReturn:
        try:
            self.job._give_up(what, begun, symptom, error)
        finally:
            self.broken = self.job.broken

    def send(self, stage: int, tag: int, head: bytes, flat: Tensor) -> None:
        """Send the bytes `head` and the host tensor `flat`, as a message numbered `tag`, to pipeline stage
        `stage`: to its rank with this rank's number."""
        begin = (SIZES.pack(len(head), flat.numel()) + head).ljust(FIRST, b"\0")
        begin = torch.frombuffer(bytearray(begin), dtype=torch.uint8)
        self.sent += begin.numel() + flat.numel()
        self._point_to_point("send to", dist.isend, [begin[:FIRST], flat, begin[FIRST:]], stage, tag)

    def receive(self, stage: int, tag: int, nbytes: int, *, pinned: bool = False) -> tuple[bytes, Tensor]:
        """Receive message number `tag` from pipeline stage `stage`, of its rank with this rank's number: the
        bytes `head`, and `nbytes` bytes as a host tensor, `pinned` or not. Raises RankError if no message
        comes, or one of another size, for which no memory is allocated."""
        begin = torch.zeros(FIRST, dtype=torch.uint8, device="cpu")
        message = self._point_to_point("receive from", dist.irecv, [begin], stage, tag)
        self._arrived(message)
        said = begin.numpy().tobytes()
        head, sent = SIZES.unpack_from(said)
        if sent != nbytes or not 0 < head <= MOST_HEAD:
            expected = f"{nbytes:,} with at most {MOST_HEAD:,}"
            why = f"a message of {sent:,} bytes with {head:,} of text, expected {expected}"
            self.leave(f"{message.what} gave {why}")
            raise RankError(
                f"{message.what} on rank {self.job._me}: got {why}: start every rank with the same code, settings "
                "and versions, and equal batches"
            )
        flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        rest = torch.empty(max(0, SIZES.size + head - FIRST), dtype=torch.uint8, device="cpu")
        self._arrived(self._point_to_point("receive from", dist.irecv, [flat, rest], stage, tag))
        return (said[SIZES.size :] + rest.numpy().tobytes())[:head], flat

    def from_stage(self, stage: int, values: Tensor) -> Tensor:
        """Broadcast the host tensor `values` of the first rank of `stage` to all ranks of the job, which call this
        together, each with a tensor of the same size and dtype; returns it."""
        values, first = values.cpu(), self.job.members[stage * self.world]
        issue = partial(_broadcast, values, first, group=self.job.group, async_op=True)
        self.job._wait_for("broadcast", issue)
        return values

    def _point_to_point(
        self, what: str, issue: Callable[..., Any], parts: Sequence[Tensor], stage: int, tag: int
    ) -> "_Message":
        job = self.job
        peer = job.members[stage * self.world + self.rank]
        what = f"{what} rank {peer}"
        limit = NEVER if issue is dist.isend else job.limit  # its receiver may be far behind, and has a limit
        parts = [part for part in parts if part.numel()]
        works = [job._issue(what, partial(issue, x, peer, group=job.group, tag=tag)) for x in parts]
        return _Message(works, parts, what, limit, job.expired)

    def _arrived(self, message: "_Message") -> None:
        self._wait_for(message.what, lambda: message)


class _Message:
    """A message to or from another pipeline stage, in progress; it consists of several transfers. It fails
    after time `limit`, and sets the event `expired`.

    A thread waits for the transfers while callers poll, because a wait of gloo cannot be given up without
    closing all connections.
    """

    def __init__(
        self,
        works: Sequence[Any],
        parts: Sequence[Tensor],
        what: str,
        limit: timedelta,
        expired: threading.Event,
    ) -> None:
        self.what = what
        self._ended, self._error = threading.Event(), None

        def wait() -> None:
            try:
                for work in works:
                    work.wait(limit)  # or gloo takes the one that its connections were made with
            except RuntimeError as error:
                self._error = error
                if timed_out(error):
                    expired.set()
            assert parts  # kept until here
            self._ended.set()

        _Waiter.does(wait)

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, most: timedelta | None = None) -> None:
        if not self._ended.wait(None if most is None else most.total_seconds()):
            raise RuntimeError("the message has not come yet")
        if self._error is not None:
            raise self._error


class _Waiter(threading.Thread):
    """A thread that waits for messages, one at a time; there is one for each message in progress at most."""

    idle: ClassVar[list["_Waiter"]] = []
    all: ClassVar[list["_Waiter"]] = []

    def __init__(self) -> None:
        super().__init__(name="zfunc message", daemon=True)
        self.jobs = SimpleQueue[Callable[[], None] | None]()

    @classmethod
    def does(cls, job: Callable[[], None]) -> None:
        """Run `job` on an idle waiter thread, or on a new one if none is idle."""
        try:
            waiter = cls.idle.pop()
        except IndexError:
            cls.all.append(waiter := cls())
            waiter.start()
        waiter.jobs.put(job)

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job  # or an idle waiter would keep the last message's memory
            self.idle.append(self)


@atexit.register
def _join() -> None:
    """At Python's exit, wait for messages in progress: a thread that returned from gloo later would abort
    Python."""
    until = time.monotonic() + SETTLE
    for waiter in _Waiter.all:
        waiter.jobs.put(None)
    for waiter in _Waiter.all:
        waiter.join(max(0.0, until - time.monotonic()))


@cache
def _group(_: Any, members: tuple[int, ...]) -> Any:
    """The process group of the ranks `members`, cached. The first argument, the job's own group, is a part of
    the key only: another job needs new groups."""
    return _new_group([*members], use_local_synchronization=True)
