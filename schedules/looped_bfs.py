"""Looped BFS: breadth first through the stages of each device (Lamy-Poirier, 2211.05953)."""

from collections.abc import Sequence
from functools import partial

from attrs import field, frozen

from zfunc.core.pipeline import B, F
from zfunc.values import whole

from .stages import Passes, cut_in_stages, of_segments


@frozen
class LoopedBFS:
    """Looped BFS, an order of pipeline passes: each device has `stages` stages, dealt in turn, and all
    micro-batches pass a stage before the first passes the next.

    Weights fetched for a stage so serve all micro-batches. `cut` has the number of segments of each stage on
    all devices; if it is given, `stages` is ignored.
    """

    stages: int = field(default=2, converter=partial(whole, "LoopedBFS: stages", least=1))
    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes in the order of looped BFS, as (kind "F" or "B", micro-batch, segment)."""
        order: list[Passes] = []
        stages = len(self.cut) // devices or self.stages
        for d in range(devices):
            own = range(d, stages * devices, devices)
            ways = (F, own), (B, own[::-1])
            order.append([(way, m, k) for way, mine in ways for k in mine for m in range(micro_batches)])
        return of_segments(order, cut_in_stages(segments, stages * devices, self.cut))
