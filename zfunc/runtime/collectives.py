"""The ranks that train together: which one this is, their collectives, and what they send.

The invariant: every rank issues the same collectives in the same order. A call that has any begins with `agree`, so
ranks in different calls find out in a collective that all calls have in common. In a step they run the same plan,
which `zfunc.engine.step.agreement` compares, and only the network lane issues collectives.

A collective that a rank does not come to fails on all others with RankError, which names it
(`zfunc.runtime.failure_detection`): about LISTEN seconds after its process has ended or it has said that it leaves,
else when ZFUNC_TIMEOUT is over, or the group's own time-out. Finding them adds SETTLE seconds at most, after a
time-out SETTLE_LATE, and a little if the store fails. A collective of an accelerator's tensors is only issued here;
whoever waits for the device asks `RankGroup.watch`, which notices the same, and aborts the group so that the device
gets free. Outside of a step that is `RankGroup.settle`.
"""

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from zfunc.core.layout import Bucket
from zfunc.errors import Message, OutOfMemory, RankError
from zfunc.runtime.accelerator import on_accelerator, poll
from zfunc.runtime.failure_detection import FailureDetector, StoreLost, Symptom, timeout

log = logging.getLogger("zfunc")

SLICE = 0.5  # seconds in a collective, after which to ask whether another rank has given up
LISTEN = 1.0  # seconds for a rank in a collective to notice that its connections are broken, or that others gave up
SETTLE = 30.0  # seconds for a rank that computes to come and notice; no more than the time-out
SETTLE_LATE = 5.0  # the same, after a time-out: who is in the collective answers within LISTEN
TOGETHER = 0.1  # seconds in which waits of a rank end whose connections one of them has closed

GOT: dict[Symptom, str] = {
    "broken": "a broken connection",
    "late": "a time-out",
    "notified": "word that another rank has given up",
}
MOST_TEXT = 1 << 30  # bytes of a text; a larger size is not valid
LOOK = "See what each rank logged last"
LONGER = f"{LOOK}, give slow ones longer (ZFUNC_TIMEOUT, in seconds)"

# torch 2.13 renamed them.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@define(eq=False)
class RankGroup:
    """The collectives of a group of `world` ranks, of which this process is number `rank`; with `world` 1
    nothing is sent.

    `sent` counts the bytes that this rank has to send in the best algorithms for its collectives: (world - 1)
    / world of the buffer for a reduce-scatter, and as much for an all-gather.
    """

    group: Any = None  # torch.distributed.ProcessGroup
    rank: int = 0
    world: int = 1
    sent: int = 0
    broken: str = ""  # why collectives no longer match those of the others
    members: tuple[int, ...] = (0,)  # number in the job of each rank of the group
    store: Any = None  # torch.distributed.Store of the group
    process: int = field(factory=os.getpid)
    expired: threading.Event = field(factory=threading.Event)  # once a wait of this rank has timed out
    queued: deque[tuple[str, float, Any]] = field(factory=deque)  # what, since when, torch.distributed.Work
    stage: int | None = None  # of a pipeline over ranks (`zfunc.runtime.stage_ranks`)
    whole: "RankGroup | None" = None  # the ranks of all its stages
    several: bool = field(init=False)  # whether more than one rank trains, over all stages
    _watching: threading.Lock = field(factory=threading.Lock)

    @several.default  # pyright: ignore
    def _several(self) -> bool:
        return self.job.world > 1

    @classmethod
    def of(cls, group: Any = None) -> "RankGroup":
        """The ranks of `group`; None is the default group, or this process alone if there is none.

        Where ZFUNC_TIMEOUT is set, the group's collectives have that time-out (seconds) from now on.
        """
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls()
        members = tuple(dist.get_process_group_ranks(group))
        store = getattr(group or dist.group.WORLD, "get_group_store", lambda: None)()
        if store is not None and timeout(default=store.timeout) != store.timeout:
            dist.distributed_c10d._set_pg_timeout(timeout(), group)
            store.set_timeout(timeout())
        return cls(group, dist.get_rank(group), len(members), members=members, store=store)

    @property
    def job(self) -> "RankGroup":
        """The RankGroup of all ranks that train together, over all pipeline stages."""
        return self.whole or self

    @property
    def limit(self) -> timedelta:
        """How long a collective or message of the group may take before it fails."""
        return timeout() if self.store is None else self.store.timeout

    @property
    def detector(self) -> FailureDetector:
        """The FailureDetector that finds the group's missing ranks when a collective has failed."""
        return FailureDetector(self.store, self.rank, self.world)

    def leave(self, why: str) -> None:
        """Tell the other ranks that this rank joins no further collective, so that no rank waits for the time-out.

        Tells nothing where a collective has failed already: this rank is then not the one that left.
        """
        if self.broken or self.world == 1 or self.process != os.getpid():
            return
        self.broken = why
        try:
            self.detector.leave(why)
        except StoreLost as lost:
            log.warning(
                "the other ranks could not be told that this one leaves: %s; they notice by themselves", lost
            )

    def shard(self, bucket: Bucket) -> slice:
        """This rank's elements of `bucket`, relative to the start of the bucket."""
        return slice(*bucket.slice_of(self.rank, self.world))

    def reduce_scatter(self, mine: Tensor, full: Tensor) -> None:
        """Sum `full` [world * mine.numel()] over the ranks, and write this rank's slice of the sum to `mine`.

        `mine` may be a view of `full`, whose other elements are undefined afterwards.
        """
        self.sent += (self.world - 1) * mine.nbytes
        if on_accelerator(full.device):
            self._queue(
                "reduce_scatter", lambda: _reduce_scatter(mine, full, group=self.group, async_op=True)
            )
            return
        # gloo's own is this all-reduce too, of a copy, as a work that cannot be waited for piece by piece.
        self._wait_for("reduce_scatter", lambda: dist.all_reduce(full, group=self.group, async_op=True))
        summed = full.view(self.world, -1)[self.rank]
        if summed.data_ptr() != mine.data_ptr():
            mine.copy_(summed)

    def all_gather(self, full: Tensor, mine: Tensor) -> None:
        """Fill `full` [world * mine.numel()] with the slices of all ranks in order; `mine` is this rank's slice."""
        self.sent += (self.world - 1) * mine.nbytes
        if on_accelerator(full.device):
            self._queue("all_gather", lambda: _all_gather(full, mine, group=self.group, async_op=True))
        else:
            self._wait_for("all_gather", lambda: _all_gather(full, mine, group=self.group, async_op=True))

    def all_reduce(self, values: Tensor) -> None:
        """Replace `values`, a tensor of the same shape on each rank, by its sum over the ranks."""
        if not values.numel():
            return
        self.sent += 2 * (self.world - 1) * values.nbytes // self.world
        if on_accelerator(values.device):
            self._queue("all_reduce", lambda: dist.all_reduce(values, group=self.group, async_op=True))
        else:
            self._all_reduce(values)

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over the ranks of each number in `values`, in float64; the same bits on every rank."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._all_reduce(total)
        return total.tolist()

    def same(self, number: int) -> bool:
        """Whether all ranks pass the same `number`, below 2^62; every rank gets the same answer."""
        extremes = torch.tensor([number, -number], device="cpu")
        self._all_reduce(extremes, dist.ReduceOp.MAX)
        highest, lowest = extremes.tolist()
        return highest == -lowest

    def texts(self, text: str) -> list[str]:
        """The texts that the ranks pass, in the order of the ranks; every rank gets the same list."""
        if self.world == 1:
            return [text]
        data = text.encode(errors="surrogatepass")
        sizes = self._sizes(len(data))
        longest = max(1, *sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        full = torch.empty(self.world * longest, dtype=torch.uint8, device="cpu")
        self._wait_for("all_gather", lambda: _all_gather(full, mine, group=self.group, async_op=True))
        rows = full.view(self.world, longest)
        return [
            row[:n].numpy().tobytes().decode(errors="surrogatepass")
            for row, n in zip(rows, sizes, strict=True)
        ]

    def _sizes(self, size: int) -> list[int]:
        """All-gather the `size` in bytes of each rank's text. RankError if the ranks are in different
        collectives: each also sends the size's complement, which shows that."""
        sizes = torch.zeros(self.world, 2, dtype=torch.int64, device="cpu")
        sizes[self.rank] = torch.tensor([size, ~size], device="cpu")
        self._all_reduce(sizes)
        for rank, (n, complement) in enumerate(sizes.tolist()):
            if complement != ~n or not 0 <= n <= MOST_TEXT:
                why = f"rank {self.members[rank]} sent {n:,}, {complement:,} where the size of a text was expected"
                self.leave(why)
                raise RankError(
                    f"texts on rank {self._me}: {why}: the ranks are in different calls, or something else uses "
                    "their group. Make the same calls of zfunc on every rank, in the same order"
                )
        return [n for n, _ in sizes.tolist()]

    def agree(
        self,
        call: str,
        what: str = "",
        compared: str = "",
        text: Callable[[], str] | None = None,
        *,
        shortage: str = "",
    ) -> None:
        """Raise RankError, on every rank, unless all ranks make the same `call` with the same text
        `compared`.

        Ranks compare a digest, and exchange texts only where it differs: `text()`, by default `compared`.
        `what` names the compared thing in errors. If a rank lacks memory, it passes a description as
        `shortage`, and all ranks raise OutOfMemory.
        """
        if self.world == 1:
            if shortage:
                raise OutOfMemory(Message(shortage))
            return
        if self.broken:
            raise RankError(
                f"{call}: got ranks that are out of step, because {self.broken}; start all of them again"
            )
        digest = hashlib.blake2b(f"{call}\n{compared}\n{shortage}".encode()).hexdigest()
        if not self.same(int(digest[:15], 16)):
            self._same_call(call)
            short = {rank: x for rank, x in zip(self.members, self.texts(shortage), strict=True) if x}
            for rank, said in short.items():
                raise OutOfMemory(Message(shortage or f"rank {rank}: {said}"))
            self.disagree(what, digest, text() if text else compared)
        if shortage:  # the same on all
            raise OutOfMemory(Message(shortage))

    def _same_call(self, call: str) -> None:
        """Raise RankError, which names the call of each rank, unless all ranks are in the same `call`."""
        calls = self.texts(call)
        if len(set(calls)) > 1:
            where = ", ".join(f"rank {n} in {other}" for n, other in zip(self.members, calls, strict=True))
            raise RankError(
                f"{call} on rank {self._me}: got {where}, expected all {self.world} ranks in the same call. "
                f"Nothing was done. All of them have to call {call}, also those that need no result of it"
            )

    def disagree(self, what: str, digest: str, text: str) -> NoReturn:
        """Raise RankError, which says which ranks have another `digest` of the thing called `what`, and shows
        the first line in which their `text` differs."""
        digests, texts = self.texts(digest), self.texts(text)
        usual = digests.index(max(set(digests), key=lambda d: (digests.count(d), d == digests[0])))
        apart = [r for r, d in enumerate(digests) if d != digests[usual]]
        named = [str(self.members[r]) for r in apart]
        other = self.members[usual]
        lines = zip_longest(*(texts[r].splitlines() for r in (apart[0], usual)), fillvalue="(nothing)")
        number, (theirs, ours) = next((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1])
        raise RankError(
            f"{what}: got another one on rank{'s' if apart[1:] else ''} {', '.join(named)} than on rank "
            f"{other}, expected the same on all. Line {number} is {theirs!r} on rank {named[0]} and {ours!r} on "
            f"rank {other}. Start every rank with the same code, settings, seeds and versions, and equal batches"
        )

    def _all_reduce(self, values: Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a small host tensor over the ranks, in place, by `how`, by default to the sum."""
        self._wait_for("all_reduce", lambda: dist.all_reduce(values, how, group=self.group, async_op=True))

    def _wait_for(self, what: str, issue: Callable[[], Any]) -> None:
        """Issue a collective of host tensors and wait for it. Raises RankError if a rank does not join."""
        begun = time.monotonic()
        work = self._issue(what, issue)
        try:
            finished = _wait(work, self.detector)
        except RuntimeError as error:
            self._give_up(what, begun, "late" if timed_out(error) else "broken", error)
        if not finished:
            self._give_up(what, begun, "notified")

    def _queue(self, what: str, issue: Callable[[], Any]) -> None:
        """Queue a collective of tensors on an accelerator on the current stream, by a call of `issue`; from
        now on `watch` looks after it. `what` names it in errors."""
        with self._watching:
            self._forget_completed()
        work = self._issue(what, issue)
        work.wait()  # of the stream, not of the host
        self.queued.append((what, time.monotonic(), work))

    def watch(self) -> bool:
        """Check the group's collectives on the device. Returns whether one is in progress; called repeatedly
        by code that waits for the device.

        Raises RankError where another rank has given up, the time-out has passed or a collective has failed;
        aborts the group first if a collective is in progress.
        """
        if not self._watching.acquire(blocking=False):
            return True  # another lane asks just now
        try:
            return self._watch()
        finally:
            self._watching.release()

    def settle(self) -> None:
        """Wait until the device has finished the group's collectives. Raises RankError if a rank does not
        join, as `watch` does, or after the time-out; a blocking copy queued after them would hang instead."""
        if not poll(self._settled, self.limit.total_seconds(), lambda: self.watch() and False):
            self._abort("late")

    def _settled(self) -> bool:
        with self._watching:
            self._forget_completed()
            return not self.queued

    def _watch(self) -> bool:
        self._forget_completed()
        try:
            if self.store is not None and self.detector.failed():
                self._abort("notified")
        except StoreLost as lost:
            if self.queued:  # else its keeper may have ended, and nobody is waited for
                self._abort("broken", lost)
        if not self.queued:
            return False
        _, begun, _ = self.queued[0]
        if self.store is not None and time.monotonic() - begun > self.limit.total_seconds():
            self._abort("late")
        return True

    def _forget_completed(self) -> None:
        """Let `watch` forget the collectives that have ended on the device; raises a failed one's error."""
        try:
            while self.queued and (work := self.queued[0][2]).is_completed():
                work.wait()  # raises its error, which before torch 2.13 exception() cannot return
                self.queued.popleft()
        except RuntimeError as error:
            self._abort("broken", error)

    def _abort(self, symptom: Symptom, error: Exception | None = None) -> NoReturn:
        under_way = bool(self.queued)
        what, begun, _ = self.queued[0] if under_way else ("a wait for the device", time.monotonic(), None)
        try:
            self._give_up(what, begun, symptom, error)
        finally:
            self.queued.clear()
            if under_way:
                (self.group or dist.group.WORLD).abort()

    def _issue(self, what: str, issue: Callable[[], Any]) -> Any:
        if self.process != os.getpid():
            raise RankError(
                f"{what} on rank {self._me}: got process {os.getpid()}, a fork of the rank's process "
                f"{self.process}, expected that one: its connections are not shared. Make ranks with torchrun"
            )
        if self.broken:
            raise RankError(
                f"{what} on rank {self._me}: got ranks that are out of step, because {self.broken}, expected all "
                f"{self.world}; start all of them again"
            )
        begun = time.monotonic()
        try:
            return issue()
        except dist.DistError as error:
            self._give_up(what, begun, "broken", error)

    def _give_up(self, what: str, begun: float, symptom: Symptom, error: Exception | None = None) -> NoReturn:
        """Raise RankError, from `error`, with the ranks missing in collective `what`, begun at monotonic time
        `begun`. `symptom` is how this rank noticed. All later collectives raise, too."""
        waited = time.monotonic() - begun
        # A wait that times out closes this rank's connections, so that its other waits break: they are late, too.
        if symptom == "broken" and poll(self.expired.is_set, TOGETHER):
            symptom = "late"
        max_wait = SETTLE_LATE if symptom == "late" else min(SETTLE, self.limit.total_seconds())
        late = symptom == "late"
        try:
            absent = self.detector.find_missing(symptom, min_wait=0.0 if late else LISTEN, max_wait=max_wait)
            who, late = absent.text(self.members, self.rank), late or absent.late
        except StoreLost as lost:
            who = f"who is missing cannot be told, because {lost}"
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps it, not rank 0
            if self.store is not None and self._me and not agent:
                who = f"rank 0, which kept the store, is gone or stuck; if others are too cannot be told ({lost})"
        self.broken = f"{who} ({what} failed after {waited:.1f} s)"
        raise RankError(
            f"{what} on rank {self._me}: got {GOT[symptom]} after {waited:.1f} s, expected all {self.world} ranks: "
            f"{who}. {LONGER if late else LOOK}, then start all of them again"
        ) from error

    @property
    def _me(self) -> int:
        return self.members[self.rank]


def timed_out(error: RuntimeError) -> bool:
    """Whether `error`, of a wait of gloo, is a time-out: only the text tells it from a broken connection."""
    return "timed out" in str(error).lower()


def _wait(work: Any, detector: FailureDetector) -> bool:
    """Wait for the collective `work`. Returns False if another rank gave up first; raises its errors."""
    while detector.store is not None:
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=SLICE))
            return True
        except RuntimeError:
            if work.is_completed():
                break  # with an error, or just now
            if time.monotonic() - started < SLICE / 2:
                raise
        try:
            if detector.failed():
                return False
        except StoreLost:
            break
    work.wait()
    return True
