"""The most of something that fits, each count planned anew: layers, sequences of a batch, tokens of a sequence."""

from bisect import bisect_left
from collections.abc import Callable

from zfunc.planner.candidate import PlannedStep

GUESSES = 6  # along a line; then the range is halved


def most_that_fit(step_of: Callable[[int], PlannedStep], most: int) -> int:
    """The largest count from 1 to `most` whose step fits, 0 if not even that of 1 does.

    The step of the result was planned and fits; that of one more was planned and does not, or is not asked for. A
    step is traced anew for each count, so few are tried: memory grows nearly in proportion, and the next count is
    read off the line through two that are known.
    """
    known: dict[int, PlannedStep] = {}

    def fits(count: int) -> bool:
        known[count] = step_of(count).without_operations()
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
