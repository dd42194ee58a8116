"""GPipe: every micro-batch forward through all stages, then every one back (Huang et al., 1811.06965)."""

from collections.abc import Sequence

from attrs import field, frozen

from zfunc.core.pipeline import B, F

from .stages import Passes, cut_in_stages, of_segments


@frozen
class GPipe:
    """GPipe's order: a stage of consecutive segments on each device; all forwards of the step, then all backwards.

    `cut` has the number of segments of each stage; without it, stages are as equal as possible. Each device keeps
    the activations of all micro-batches until backward.
    """

    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes in GPipe's order, as (kind "F" or "B", micro-batch, segment)."""
        stages = cut_in_stages(segments, devices, self.cut)
        order = ([(way, m, d) for way in (F, B) for m in range(micro_batches)] for d in range(devices))
        return of_segments(order, stages)
