"""What a run's evaluations decide: which checkpoint is the best, and whether to stop early.

The loop has them in memory, the run's history in metrics.jsonl; both ask here.
"""

import math
from collections.abc import Sequence

from attrs import frozen


@frozen
class Evaluation:
    """The held-out loss of the state after a step, and the name of the checkpoint that holds this state."""

    step: int
    held_out: float  # inf where it is no finite number
    saved: str = ""  # "" if there is no checkpoint


def best_saved(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation with the least held-out loss among those with a checkpoint; the first of equal ones.

    >>> best_saved([Evaluation(0, 1.0), Evaluation(5, 3.0, "step-5"), Evaluation(10, 4.0, "step-10")]).step
    5
    """
    saved = [x for x in evaluations if x.saved and math.isfinite(x.held_out)]
    return min(saved, key=lambda x: x.held_out, default=None)


def num_without_improvement(evaluations: Sequence[Evaluation], threshold: float = 0.0) -> int:
    """How many of the last evaluations were not lower, by more than `threshold`, than the least loss before them.

    transformers' EarlyStoppingCallback counts in the same way.

    >>> num_without_improvement([Evaluation(n, x) for n, x in enumerate([3.0, 2.0, 2.5, 1.9])], threshold=0.2)
    2
    """
    least, count = math.inf, 0
    for n, x in enumerate(evaluations):
        improved = not n or (x.held_out < least and least - x.held_out > threshold)
        count = 0 if improved else count + 1
        least = min(least, x.held_out)
    return count
