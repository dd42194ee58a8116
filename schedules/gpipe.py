"""GPipe: every micro-batch forward through all stages, then every one back (Huang et al., 1811.06965)."""

from collections.abc import Sequence

from attrs import field, frozen

from zfunc.core.pipeline import B, F

from .stages import Passes, cut_in_stages, of_segments


@frozen
class GPipe:
    """A stage of consecutive segments on each device; all forwards, then all backwards.

    `cut` are the segments of each stage; without it they are as equal as can be. Each device keeps what all
    micro-batches leave for backward.
    """

    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """The passes of each device."""
        stages = cut_in_stages(segments, devices, self.cut)
        order = ([(way, m, d) for way in (F, B) for m in range(micro_batches)] for d in range(devices))
        return of_segments(order, stages)
