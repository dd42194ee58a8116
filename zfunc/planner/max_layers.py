"""The largest model of a family that fits: one whose segments but the first and the last are all alike.

The invariant: what is said to fit was planned in full, and so was one more of those segments, which did not.
"""

import math
from collections.abc import Iterator

from attrs import evolve

from zfunc.core.hardware import Hardware
from zfunc.core.layout import Layout, Parameter, make_layout
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.planner.candidate import simulate_choice

MOST = 400  # middle segments that are planned; each takes operations and time


def max_layers(spec: StepSpec, settings: StepSettings, hardware: Hardware) -> int:
    """How many middle segments fit, under `settings`, if `spec` is of a model with one. 0 if not even that does.

    Raises ValueError if more than MOST do.
    """
    low, high = 0, MOST + 1  # low fits; high does not, or is beyond what is planned
    probe, stride = min(MOST, _guess(spec, settings, hardware)), 1
    while high - low > 1:
        if simulate_choice(with_layers(spec, probe), settings, hardware).fits:
            low, probe = probe, probe + stride
        else:
            high, probe = probe, probe - stride
        stride *= 2
        probe = (low + high) // 2 if low > 0 and high <= MOST else min(MOST, max(1, probe))
    if low == MOST:
        raise ValueError(
            f"--max: got a family of which {MOST} layers and more fit, expected fewer: give a larger --hidden-size"
        )
    return low


def _guess(spec: StepSpec, settings: StepSettings, hardware: Hardware) -> int:
    """By how memory grows from a few segments to a few more: it is nearly a line."""
    few, more = (simulate_choice(with_layers(spec, count), settings, hardware) for count in (4, 8))
    best = float(MOST + 1)
    for tier, there in hardware.memory.items():
        empty = evolve(
            hardware, memory={tier: 1}
        )  # what it lacks is what is needed of it, pinned memory and all
        a, b = (empty.lacking(s.memory).get(tier, 0) for s in (few, more))
        if b > a:
            best = min(best, 4 + (there - a) / (b - a) * 4)
    return max(1, math.floor(best))


def with_layers(spec: StepSpec, count: int) -> StepSpec:
    """`spec`, of a first segment, one in the middle and a last, with `count` of the middle one.

    >>> from zfunc.core.spec import SegmentCost
    >>> parameters = [[Parameter("in.w", (64,))], [Parameter("mid0.w", (64,))], [Parameter("out.w", (64,))]]
    >>> costs = [SegmentCost(flops=n) for n in (1, 2, 3)]
    >>> spec = StepSpec(make_layout(parameters, bucket_size=64), costs, [True] * 3)
    >>> [cost.flops for cost in with_layers(spec, 3).costs], len(with_layers(spec, 3).layout.buckets)
    ([1, 2, 2, 2, 3], 5)
    """
    first, middle, last = spec.costs
    again = spec.recompute
    return evolve(
        spec,
        layout=_longer(spec.layout, count, spec.slot_numel, spec.world),
        costs=(first, *[middle] * count, last),
        recompute=(again[0], *[again[1]] * count, again[2]),
    )


def _longer(layout: Layout, count: int, bucket_size: int, world: int) -> Layout:
    """The layout with `count` of its middle segment, which shares no parameter with others.

    The size of its buckets does not matter: `play_through` lays out anew.
    """
    first, middle, last = layout.parameters

    def copies() -> Iterator[list[Parameter]]:
        for n in range(count):
            yield [evolve(p, name=f"{n}:{p.name}") for p in middle]

    return make_layout([first, *copies(), last], bucket_size=bucket_size, world=world)
