"""Looped BFS: breadth first through the stages of each device (Lamy-Poirier, 2211.05953)."""

from collections.abc import Sequence
from functools import partial

from attrs import field, frozen

from zfunc.core.pipeline import B, F
from zfunc.values import whole

from .stages import Passes, cut_in_stages, of_segments


@frozen
class LoopedBFS:
    """Looped BFS: `stages` stages on each device, dealt in turn; all micro-batches pass a stage before the next.

    Weights that are fetched for a stage serve all micro-batches. `cut` has the number of segments of each stage;
    where `cut` is given, its length is the number of stages on all devices, and `stages` is ignored.
    """

    stages: int = field(default=2, converter=partial(whole, "LoopedBFS: stages", least=1))
    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """The passes `(way, micro-batch, segment)` of each device, in the order of looped BFS."""
        order: list[Passes] = []
        stages = len(self.cut) // devices or self.stages
        for d in range(devices):
            own = range(d, stages * devices, devices)
            ways = (F, own), (B, own[::-1])
            order.append([(way, m, k) for way, mine in ways for k in mine for m in range(micro_batches)])
        return of_segments(order, cut_in_stages(segments, stages * devices, self.cut))
