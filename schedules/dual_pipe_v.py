"""DualPipeV: DeepSeek's DualPipe (2412.19437) in its V form, with two stages on each device.

The stages go down the devices and up again, so the first device has the first stage and the last. A device makes a
forward of one and a backward of the other in turn, which its lanes may overlap.
"""

from collections import Counter, deque
from collections.abc import Sequence

from attrs import field, frozen

from zfunc.core.pipeline import B, F, I, W

from .stages import Passes, cut_in_stages, of_segments


@frozen
class DualPipeV:
    """DualPipeV's order of passes (github.com/deepseek-ai/DualPipe), also for fewer micro-batches than stages.

    `cut` has the number of segments of each stage; there are two stages on each device.
    """

    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes in DualPipeV's order, as (kind such as "F" or "B", micro-batch, segment)."""
        order = [_passes_of(d, devices, max(micro_batches, 2 * devices)) for d in range(devices)]
        order = [[x for x in own if x[1] < micro_batches] for own in order]
        return of_segments(order, cut_in_stages(segments, 2 * devices, self.cut))


def _passes_of(d: int, devices: int, micro_batches: int) -> Passes:
    down, up, after = d, 2 * devices - 1 - d, devices - 1 - d
    order, pending = list[tuple[str, int, int]](), deque[tuple[str, int, int]]()
    times = Counter[tuple[bool, int]]()

    def add(*passes: tuple[str, int]) -> None:
        for way, stage in passes:
            m = times[way == F, stage]
            times[way == F, stage] += 1
            order.append((way, m, stage))
            pending.extend([(W, m, stage)] if way == I else ())

    def add_weights() -> None:
        order.extend([pending.popleft()] if pending else ())

    add(*[(F, down)] * 2 * after, *[(F, down), (F, up)] * (d + 1))
    for _ in range(after):
        add((I, up))
        add_weights()
        add((F, up))
    add(*[(F, down), (B, up), (F, up), (B, down)] * (micro_batches - 2 * devices + d + 1))
    add(*[(B, up), (F, up), (B, down)] * after)
    for i in range(d + 1):  # from about the half on, gradients of weights wait
        add((I if 2 * i > d else B, up), (I if i >= (d + 1) // 2 else B, down))
    for _ in range(after):
        add_weights()
        add((I, down))
    return [*order, *[*pending][: d + 1]]
