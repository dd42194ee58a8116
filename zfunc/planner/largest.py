"""The most of something that fits, each count planned anew: sequences of a batch, tokens of a sequence, or equal
layers between a first segment and a last."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from attrs import evolve

from zfunc.core.hardware import Hardware
from zfunc.core.layout import Layout, Parameter, make_layout
from zfunc.core.settings import StepSettings
from zfunc.core.spec import StepSpec
from zfunc.planner.candidate import PlannedStep
from zfunc.planner.steady_state import Estimate

GUESSES = 6  # along a line; then the range is halved
MOST_LAYERS = 400  # that are planned; each adds operations and time


def most_that_fit(step_of: Callable[[int], PlannedStep], most: int) -> int:
    """The largest count from 1 to `most` whose step fits, 0 if not even that of 1 does.

    The step of the result was planned and fits; that of one more was planned and does not, or is not asked for. A
    step is traced anew for each count, so few are tried: memory grows nearly in proportion, and the next count is
    read off the line through two that are known.
    """
    known: dict[int, PlannedStep] = {}

    def fits(count: int) -> bool:
        known[count] = step_of(count)
        return known[count].fits

    if not fits(1):
        return 0
    low, high = 1, most + 1  # fits, and does not
    while high - low > 1:
        if len(known) < 2:
            count = 2
        elif len(known) <= GUESSES:
            count = _guess(known, low, high)
        else:
            count = (low + high) // 2
        low, high = (count, high) if fits(count) else (low, count)
    return low


def _guess(known: dict[int, PlannedStep], low: int, high: int) -> int:
    """The largest count between the two that fits, if memory is on the line through the nearest known steps."""
    other = high if high in known else max(x for x in known if x < low)
    a, b = sorted((low, other))
    step = known[a]

    def too_much(count: int) -> bool:
        growth = {
            tier: (known[b].memory.get(tier, 0) - n) * (count - a) // (b - a)
            for tier, n in step.memory.items()
        }
        return bool(step.hardware.lacking({tier: n + growth[tier] for tier, n in step.memory.items()}))

    return max(low + 1, min(high - 1, low + bisect_left(range(low + 1, high), True, key=too_much)))


def max_layers(
    spec_of: Callable[[StepSettings], StepSpec], settings: StepSettings, hardware: Hardware
) -> int:
    """How many middle segments fit under `settings`; `spec_of` is the spec of a model with one. 0 where not even
    that fits. Raises ValueError if more than MOST_LAYERS fit.
    """
    by_mode = {x: spec_of(evolve(settings, recompute=x)) for x in settings.recompute.split(",")}

    def step_of(count: int) -> PlannedStep:
        specs = {mode: with_layers(spec, count) for mode, spec in by_mode.items()}
        shares = [specs[settings.recompute_of(s, count + 2)] for s in range(count + 2)]
        costs, recompute = (
            [getattr(x, name)[s] for s, x in enumerate(shares)] for name in ("costs", "recompute")
        )
        return Estimate(evolve(shares[0], costs=costs, recompute=recompute), settings, hardware).step

    most = most_that_fit(step_of, MOST_LAYERS)
    if most == MOST_LAYERS:
        raise ValueError(f"max: {most} layers fit, and more are not tried: pass a larger hidden_size")
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


def _with_copies(layout: Layout, count: int, bucket_size: int, world: int) -> Layout:
    """The layout with `count` middle segments, which share no parameter. `estimate` cuts buckets anew."""
    first, middle, last = layout.parameters

    def copies() -> Iterator[list[Parameter]]:
        for n in range(count):
            yield [evolve(p, name=f"{n}:{p.name}") for p in middle]

    return make_layout([first, *copies(), last], bucket_size=bucket_size, world=world)
