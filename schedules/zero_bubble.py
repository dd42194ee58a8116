"""Zero bubble: 1F1B with a split backward, whose gradients of weights fill the waiting (Qi et al., 2401.10241)."""

from collections.abc import Sequence
from functools import partial

from attrs import field, frozen

from zfunc.core.pipeline import F, I, W
from zfunc.values import whole

from .stages import Passes, cut_in_stages, in_rounds, of_segments


@frozen
class ZeroBubble:
    """The order of pipeline passes ZB-H1 (Qi et al., 2401.10241), with as much memory as 1F1B; interleaved if
    devices have several `stages`.

    A device starts with as many forwards as devices follow it, and makes the gradients of weights as many
    backwards later as devices precede it. `cut` has the number of segments of each stage.
    """

    stages: int = field(default=1, converter=partial(whole, "ZeroBubble: stages", least=1))
    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes in ZB-H1's order, as (kind, micro-batch, segment): "F" forward, "I" gradient
        of the input, "W" gradients of weights."""
        stages, order = len(self.cut) // devices or self.stages, list[Passes]()
        for d in range(devices):
            forwards, inputs = (in_rounds(way, d, devices, stages, micro_batches) for way in (F, I))
            weights = [(W, m, k) for _, m, k in inputs]
            ahead = (stages - 1) * min(devices, micro_batches) + devices - 1 - d
            own = [*forwards[:ahead]]
            for i, x in enumerate(inputs):
                own += [*forwards[ahead + i : ahead + i + 1], x, *weights[max(0, i - d) : max(0, i - d + 1)]]
            order.append([*own, *weights[max(0, len(inputs) - d) :]])
        return of_segments(order, cut_in_stages(segments, stages * devices, self.cut))
