"""The ranks that train together: which one this is, their collectives, and what they send.

The invariant: every rank issues the same collectives in the same order, because they run the same plan, which
`zfunc.agreement` makes sure of before every step. In a step only the network lane issues them.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from zfunc.errors import RankError

# torch 2.13 renamed them.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@define(eq=False)
class Ranks:
    """`world` ranks, of which this is number `rank`; a world of 1 has no group and sends nothing.

    `sent` counts the bytes this rank has had to send, as the best algorithms for its collectives do:
    (world - 1) / world of a buffer for a reduce-scatter, and as much for an all-gather.
    """

    group: Any = None  # torch.distributed.ProcessGroup
    rank: int = 0
    world: int = 1
    sent: int = 0
    broken: str = ""  # why collectives no longer match those of the others

    @classmethod
    def of(cls, group: Any = None) -> "Ranks":
        """The ranks of `group`; None is the default group, or this process alone if there is none."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def reduce_scatter(self, mine: Tensor, full: Tensor) -> None:
        """`mine`, this rank's slice of `full` [world * mine.numel()], becomes the sum over the ranks."""
        self.sent += (self.world - 1) * mine.nbytes
        _reduce_scatter(mine, full, group=self.group)

    def all_gather(self, full: Tensor, mine: Tensor) -> None:
        """`full` [world * mine.numel()] becomes the slices of all ranks, of which `mine` is this one's."""
        self.sent += (self.world - 1) * mine.nbytes
        _all_gather(full, mine, group=self.group)

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums of these numbers over the ranks, in double; the same bits on each."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def same(self, number: int) -> bool:
        """Whether all ranks pass the same number, below 2^62; the same answer on each."""
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        highest, lowest = extremes.tolist()
        return highest == -lowest

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        if self.world == 1:
            return [text]
        data = text.encode()
        size = torch.zeros(self.world, dtype=torch.int64)
        size[self.rank] = len(data)
        dist.all_reduce(size, group=self.group)
        longest = max(1, int(size.max()))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        full = torch.empty(self.world * longest, dtype=torch.uint8)
        _all_gather(full, mine, group=self.group)
        rows = full.view(self.world, longest)
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, size.tolist(), strict=True)]

    def disagree(self, what: str, digest: str, text: str) -> NoReturn:
        """Raise RankError, which names the ranks whose digest is not the usual one, and the first line apart."""
        digests, texts = self.texts(digest), self.texts(text)
        usual = digests.index(max(set(digests), key=lambda d: (digests.count(d), d == digests[0])))
        apart = [r for r, d in enumerate(digests) if d != digests[usual]]
        lines = zip_longest(*(texts[r].splitlines() for r in (apart[0], usual)), fillvalue="(nothing)")
        number, (theirs, ours) = next((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1])
        raise RankError(
            f"{what}: got another one on rank{'s' if apart[1:] else ''} {', '.join(map(str, apart))} than on rank "
            f"{usual}, expected the same on all. Line {number} is {theirs!r} on rank {apart[0]} and {ours!r} on "
            f"rank {usual}. Start every rank with the same code, settings, seeds and versions, and equal batches"
        )
