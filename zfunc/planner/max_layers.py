"""The largest model of a family that fits: any number of equal middle segments between a first and a last one."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from attrs import evolve

from zfunc.core.hardware import Hardware
from zfunc.core.layout import Layout, Parameter, make_layout
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.planner.steady_state import Estimate

MOST = 400  # middle segments that are planned; each adds operations and time


def max_layers(
    spec_of: Callable[[StepSettings], StepSpec], settings: StepSettings, hardware: Hardware
) -> int:
    """How many middle segments fit under `settings`; `spec_of` is the spec of a model with one. 0 where not even
    that fits.

    The step of as many was planned and fits; that of one more does not. Raises ValueError if more than MOST fit.
    """
    by_mode = {x: spec_of(evolve(settings, recompute=x)) for x in settings.recompute.split(",")}

    def too_many(count: int) -> bool:
        longer = Estimate(_in_shares(by_mode, settings, count), settings, hardware)
        # What is kept, whatever the plan, is enough to know where that does not fit.
        return bool(hardware.lacking(longer.kept)) or not longer.step.fits

    most = bisect_left(range(1, MOST + 1), True, key=too_many)
    if most == MOST:
        raise ValueError(f"--max: {MOST} layers fit, and more are not tried: pass a larger --hidden-size")
    return most


def with_layers(spec: StepSpec, count: int) -> StepSpec:
    """`spec`, of a first segment, a middle one and a last, with `count` middle segments.

    >>> from zfunc.core.spec import SegmentCost
    >>> parameters = [[Parameter("in.w", (64,))], [Parameter("mid0.w", (64,))], [Parameter("out.w", (64,))]]
    >>> costs = [SegmentCost(flops=n) for n in (1, 2, 3)]
    >>> spec = StepSpec(make_layout(parameters, bucket_size=64), costs, [True] * 3)
    >>> [cost.flops for cost in with_layers(spec, 3).costs], len(with_layers(spec, 3).layout.buckets)
    ([1, 2, 2, 2, 3], 5)
    """
    first, middle, last = spec.costs
    return evolve(
        spec,
        layout=_with_copies(spec.layout, count, spec.slot_numel, spec.world),
        costs=(first, *[middle] * count, last),
        recompute=(spec.recompute[0], *[spec.recompute[1]] * count, spec.recompute[2]),
    )


def _in_shares(by_mode: Mapping[str, StepSpec], settings: StepSettings, count: int) -> StepSpec:
    """The spec with `count` middle segments, of which each recomputes what the settings say of its share."""
    specs = {mode: with_layers(spec, count) for mode, spec in by_mode.items()}
    shares = [specs[settings.recompute_of(s, count + 2)] for s in range(count + 2)]
    return evolve(
        shares[0],
        costs=[x.costs[s] for s, x in enumerate(shares)],
        recompute=[x.recompute[s] for s, x in enumerate(shares)],
    )


def _with_copies(layout: Layout, count: int, bucket_size: int, world: int) -> Layout:
    """The layout with `count` middle segments, which share no parameter. `estimate` cuts buckets anew."""
    first, middle, last = layout.parameters

    def copies() -> Iterator[list[Parameter]]:
        for n in range(count):
            yield [evolve(p, name=f"{n}:{p.name}") for p in middle]

    return make_layout([first, *copies(), last], bucket_size=bucket_size, world=world)
