"""1F1B: after a few forwards each device makes a backward and a forward in turn (PipeDream, 1806.03377), and its
interleaved form with several stages on each device (Megatron, 2104.04473)."""

from collections.abc import Sequence
from functools import partial

from attrs import field, frozen

from zfunc.core.pipeline import B, F
from zfunc.values import whole

from .stages import Passes, cut_in_stages, in_rounds, of_segments


@frozen
class OneFOneB:
    """1F1B, an order of pipeline passes: one stage of consecutive segments per device. A device starts with
    as many forwards as stages follow its own, then alternates forward and backward.

    `cut` has the number of segments of each stage; without it, stages are as equal as possible. No device
    holds activations of more micro-batches than there are stages.
    """

    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes in the order of 1F1B, as (kind "F" or "B", micro-batch, segment)."""
        order: list[Passes] = []
        for d in range(devices):
            forwards, backwards = ([(way, m, d) for m in range(micro_batches)] for way in (F, B))
            order.append(_in_turn(forwards, backwards, ahead=devices - 1 - d))
        return of_segments(order, cut_in_stages(segments, devices, self.cut))


@frozen
class Interleaved1F1B:
    """Interleaved 1F1B: `stages` stages on each device, dealt in turn. Devices wait less for the first
    micro-batch, and copy more activations.

    Micro-batches pass the stages of a device in rounds of one per device, so their number is a multiple of
    the number of devices, or smaller. `cut` has the number of segments of each stage on all devices; if it is
    given, `stages` is ignored.
    """

    stages: int = field(default=2, converter=partial(whole, "Interleaved1F1B: stages", least=1))
    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, devices: int, segments: int, micro_batches: int) -> list[Passes]:
        """Each device's passes in interleaved 1F1B, as (kind "F" or "B", micro-batch, segment)."""
        stages = len(self.cut) // devices or self.stages
        size, order = min(devices, micro_batches), list[Passes]()
        for d in range(devices):
            forwards, backwards = (in_rounds(way, d, devices, stages, micro_batches) for way in (F, B))
            order.append(_in_turn(forwards, backwards, ahead=(stages - 1) * size + 2 * (devices - 1 - d)))
        return of_segments(order, cut_in_stages(segments, stages * devices, self.cut))


def _in_turn(forwards: Passes, backwards: Passes, *, ahead: int) -> Passes:
    """One device's passes: `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    pairs, left = zip(forwards[ahead:], backwards, strict=False), max(0, len(forwards) - ahead)
    return [*forwards[:ahead], *(x for pair in pairs for x in pair), *backwards[left:]]
