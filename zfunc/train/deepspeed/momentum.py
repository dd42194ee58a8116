"""Betas that a file asks for: the optimizer's, or with OneCycle betas that go round with the learning rate.

The invariant: each update has, bit by bit, the betas that DeepSpeed 0.19 sets for it. OneCycle does so unless it is
told not to, and then beta2 is 0.99, whatever the optimizer's betas are. Its first update has the lowest beta1,
though the cycle begins with the highest: there the scheduler is first asked after it.
"""

from attrs import frozen

from zfunc.train.deepspeed.rate import PARAMS, schedule
from zfunc.train.deepspeed.schedules import OneCycle
from zfunc.train.deepspeed.values import ResolvedValues

BETA2 = 0.99


@frozen
class OneCycleBetas:
    """beta1 goes down while the learning rate goes up (Smith 2018, section 4), and after the cycle it rises.

    >>> betas = OneCycleBetas(OneCycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=2), 0.5, 1.0)
    >>> [betas(step)[0] for step in (1, 2, 3, 4, 5, 6)]
    [0.5, 0.75, 0.5, 0.75, 1.0, 1.0]
    """

    cycle: OneCycle
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __call__(self, step: int) -> tuple[float, float]:
        """The betas of an update, counted from 1. Where decay has raised beta1 to 1, the update is refused."""
        if step == 1:
            return self.cycle_min_mom, BETA2
        height = self.cycle.height(step)
        if height is None:
            return self.cycle_max_mom * self.cycle.decay(step, self.decay_mom_rate), BETA2
        return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height, BETA2


def betas(values: ResolvedValues) -> tuple[float, float] | OneCycleBetas | None:
    """The betas of a file, or None where it says nothing of them."""
    if cycles(values):
        rate = schedule(values, lr=0.0)  # OneCycle has nothing of the optimizer's
        assert isinstance(rate, OneCycle)
        names = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
        return OneCycleBetas(rate, **{name: values[PARAMS + name] for name in names})
    return values["optimizer.params.betas"] if values.has("optimizer") else None


def cycles(values: ResolvedValues) -> bool:
    """Whether momentum goes round with the learning rate."""
    return values["scheduler.type"] == "OneCycle" and values[f"{PARAMS}cycle_momentum"]
