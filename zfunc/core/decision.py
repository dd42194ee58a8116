"""What a step decided about its gradient, before anything is updated with it. No torch here.

The invariant: with the gradient itself this is all an update needs, however much later it is made.
"""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen


@frozen
class StepDecision:
    """What was decided of a gradient: all that an update needs besides.

    `skip` for an overflow; the factor for every gradient (unscale and clip); the update it goes into: its
    `number`, from 1, and the optimizer's `factors` of it. `loss` is the mean loss, for whoever wants to know.
    """

    skip: bool
    grad_scale: float
    number: int
    factors: Mapping[str, Any]
    loss: float = field(default=0.0, eq=False)
