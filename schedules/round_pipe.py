"""RoundPipe, with synchronous updates: stages dealt to the devices in turn, wherever their weights come from.

Forward and backward are cut differently, each into stages of about equal time; the next stage goes to the next
device (github.com/ITcarrot/RoundPipe).
"""

from collections.abc import Sequence

from attrs import field, frozen

from zfunc.core.pipeline import B, F, R

from .stages import Passes, cut_in_stages


@frozen
class RoundPipe:
    """RoundPipe, an order of pipeline passes: the stages of forward, then those of backward, are dealt to the
    devices in turn. A round has one micro-batch for each device.

    `forward` and `backward` have the number of segments of each stage, counted from the first segment. The
    last segment makes forward and backward together in the first stage of backward, so `forward` ends before
    it. Without them each segment is a stage. Segments are recomputed before their gradient arrives. Needs
    params_on="host" and activations_on="host".
    """

    forward: Sequence[int] = field(default=(), converter=tuple[int, ...])
    backward: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> Sequence[Passes]:
        """Each device's passes, as (kind "F", "B" or "R", which recomputes, micro-batch, segment)."""
        there = cut_in_stages(segments - 1, len(self.forward) or segments - 1, self.forward)
        back = cut_in_stages(segments, len(self.backward) or segments, self.backward)
        dealt, order = len(there) + len(back), [list[tuple[str, int, int]]() for _ in range(devices)]
        for n, first in enumerate(range(0, micro_batches, devices)):
            own = range(first, min(first + devices, micro_batches))
            for k, stage in enumerate(there):
                order[(n * dealt + k) % devices] += [(F, m, s) for m in own for s in stage]
            for k, stage in enumerate(reversed(back), len(there)):
                # The last segment goes both ways at once.
                ends = [(F, segments - 1)] if segments - 1 in stage else [(R, s) for s in stage]
                passes = [*ends, *((B, s) for s in reversed(stage))]
                order[(n * dealt + k) % devices] += [(way, m, s) for m in own for way, s in passes]
        return order
