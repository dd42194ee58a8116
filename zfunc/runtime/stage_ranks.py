"""The ranks of one pipeline stage, and what they share with those of the others.

Ranks of a stage follow one another in the job. They are data parallel: slices and sums of gradients are theirs
alone. What is decided, counted or refused is joined over all stages, on the job's ranks, and so failures are found.
A tensor passes from a stage to another as a message with a tag of its own. A send does not wait for its receive:
what it sends is a copy, kept until it has arrived.
"""

import atexit
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from zfunc.core.layout import round_up
from zfunc.core.spec import ALLOCATION
from zfunc.runtime.collectives import SETTLE, RankGroup
from zfunc.runtime.failure_detection import LONGEST_TIMEOUT, FailureDetector, Symptom

NEVER = timedelta(seconds=LONGEST_TIMEOUT)
_broadcast: Any = dist.broadcast
_waiting: WeakSet[threading.Thread] = WeakSet()  # those that wait for messages
_new_group: Any = dist.new_group  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


class StageRanks(RankGroup):
    """The ranks of a pipeline stage; `job` are those of all."""

    @classmethod
    def of_stage(cls, job: RankGroup, pp: int) -> "StageRanks":
        """Those of this rank's stage, of `pp` stages. A collective of the stage's ranks."""
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

    def send(self, stage: int, tag: int, tree: Any) -> None:
        """Send the tensors of `tree`, and what else is in it, to the rank of this number in another stage."""
        head, flat = as_message(tree)
        sizes = torch.tensor([len(head), flat.numel()], device="cpu")
        data = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), flat])
        self.sent += data.numel()
        for part in (sizes, data):
            self._point_to_point("send to", dist.isend, part, stage, tag)

    def receive(self, stage: int, tag: int, device: torch.device) -> Any:
        """What that rank has sent with this tag, on `device`. Raises RankError where it does not come."""
        sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._arrived(self._point_to_point("receive from", dist.irecv, sizes, stage, tag))
        head, nbytes = map(int, sizes)
        data = torch.empty(head + nbytes, dtype=torch.uint8, device="cpu")
        self._arrived(self._point_to_point("receive from", dist.irecv, data, stage, tag))
        return from_message(data[:head].numpy().tobytes(), data[head:].clone(), device)

    def from_stage(self, stage: int, values: Tensor) -> Tensor:
        """`values` of the first rank of a stage, on the host, of one size and type on each rank. A collective of
        the whole job."""
        values, first = values.cpu(), self.job.members[stage * self.world]
        issue = partial(_broadcast, values, first, group=self.job.group, async_op=True)
        self.job._wait_for("broadcast", issue)
        return values

    def _point_to_point(
        self, what: str, issue: Callable[..., Any], part: Tensor, stage: int, tag: int
    ) -> "_Message":
        job = self.job
        peer = job.members[stage * self.world + self.rank]
        what = f"{what} rank {peer}"
        limit = NEVER if issue is dist.isend else job.limit  # its receiver may be far behind, and has a limit
        return _Message(
            job._issue(what, lambda: issue(part, peer, group=job.group, tag=tag)), part, what, limit
        )

    def _arrived(self, message: "_Message") -> None:
        self._wait_for(message.what, lambda: message)


class _Message:
    """A message under way. gloo waits for one only to its end, and closes all connections where that is given up:
    so a thread waits, and this can be waited for piece by piece, as a collective. After `limit` it is given up."""

    def __init__(self, work: Any, part: Tensor, what: str, limit: timedelta) -> None:
        self.what = what
        self._ended, self._error = threading.Event(), None

        def wait() -> None:
            try:
                work.wait(limit)  # that of the job: gloo would take the one its connections were made with
            except RuntimeError as error:
                self._error = error
            assert part is not None  # kept until here
            self._ended.set()

        thread = threading.Thread(target=wait, name=f"zfunc {what}", daemon=True)
        thread.start()
        _waiting.add(thread)

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, most: timedelta | None = None) -> None:
        if not self._ended.wait(None if most is None else most.total_seconds()):
            raise RuntimeError("the message has not come yet")
        if self._error is not None:
            raise self._error


@atexit.register
def _join() -> None:
    """Wait for messages under way. A thread that comes back from gloo while Python ends would abort the process."""
    until = time.monotonic() + SETTLE
    for thread in [*_waiting]:
        thread.join(max(0.0, until - time.monotonic()))


class _Place(NamedTuple):
    """Where a tensor is in a message."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def as_message(tree: Any) -> tuple[bytes, Tensor]:
    """A tree without its tensors, pickled, and these in one host tensor, each dense ones in its strides."""
    parts, end = list[Tensor](), 0

    def place(t: Tensor) -> _Place:
        nonlocal end
        dense = torch.empty_like(t, device="cpu").copy_(t)
        start, end = end, end + round_up(dense.nbytes, ALLOCATION)
        flat = torch.zeros(end - start, dtype=torch.uint8, device="cpu")
        flat[: dense.nbytes].copy_(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8))
        parts.append(flat)
        return _Place(start, dense.dtype, tuple(dense.shape), dense.stride())

    head = pickle.dumps(tree_map_only(Tensor, place, tree))
    return head, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def from_message(head: bytes, flat: Tensor, device: torch.device) -> Any:
    """The tree that `as_message` had, on `device`."""

    def tensor(x: Any) -> Any:
        if not isinstance(x, _Place):
            return x
        start = x.start // x.dtype.itemsize
        return flat.view(x.dtype).as_strided(x.shape, x.stride, start).to(device)

    return tree_map(tensor, pickle.loads(head), is_leaf=lambda x: isinstance(x, _Place))


@cache
def _group(_: Any, members: tuple[int, ...]) -> Any:
    """The process group of these ranks of a job, made once."""
    return _new_group([*members], use_local_synchronization=True)
